"""Which folder a corpus is prepared in: a name made from the content of all that it depends on.

Sequence length, masking and seeds are not part of it: training at another length needs no new preparation.
A trained tokenizer has a name of its own, from what it depends on: it is kept when only the number of repeats
changes. It is trained anew when the held-out share changes: the vocabulary must not know held-out text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.clean import TEXT_RULE_VERSION
from data_prep.sources import Source, open_sources
from sharebert.config import ConfigError, DataConfig
from sharebert.data.format import FORMAT_VERSION, DataError, PreparedCorpus
from sharebert.files import sha256_of_file

logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """$SHAREBERT_CACHE, else $XDG_CACHE_HOME/sharebert, else ~/.cache/sharebert."""
    if folder := os.environ.get("SHAREBERT_CACHE"):
        return Path(folder).expanduser()
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder).expanduser() / "sharebert"
    return Path.home() / ".cache" / "sharebert"


@dataclass(frozen=True)
class CorpusPlan:
    """What will be, or was, prepared, and where."""

    folder: Path
    key: str
    """sha256 over the hashes of the sources and the options."""
    sources: list[Source]
    options: dict[str, Any]
    """The options that the result depends on."""
    tokenizer_path: Path | None
    """Where the trained tokenizer is kept; None with a given one."""


def plan_corpus(config: DataConfig) -> CorpusPlan:
    """Find and hash the sources and name the folder; reads no document.

    Raises:
        ConfigError: a source or tokenizer that is not there.
    """
    tokenizer = _tokenizer_options(config)
    text_options = _text_options(config)
    repeats = list(config.repeats) if any(number > 1 for number in config.repeats) else []
    options = {**text_options, "repeats": repeats, "tokenizer": tokenizer}
    sources = open_sources(config)
    key = _key(sources, options)
    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
    tokenizer_path = None
    if config.tokenizer is None:
        tokenizer_path = cache_dir / f"tokenizer-{_key(sources, {**text_options, **tokenizer})[:16]}.json"
    return CorpusPlan(cache_dir / f"{config.source}-{key[:16]}", key, sources, options, tokenizer_path)


def _text_options(config: DataConfig) -> dict[str, Any]:
    """Those that decide which documents there are, and in which split."""
    options: dict[str, Any] = {
        "validation_fraction": config.validation_fraction,
        "deduplicate": config.deduplicate,
        "min_characters": config.min_characters,
        "max_characters": config.max_characters,
    }
    if config.source != "python_docs":
        options |= {"text_column": config.text_column}
        options |= {"txt_documents": config.txt_documents, "errors": config.errors}
    if config.source == "hf_dataset":
        options |= {"hf_name": config.hf_name, "hf_split": config.hf_split}
    return options


def _key(sources: Sequence[Source], options: Mapping[str, Any]) -> str:
    content = {
        "format_version": FORMAT_VERSION,
        "text_rule_version": TEXT_RULE_VERSION,
        "sources": [(source.kind, source.sha256) for source in sources],
        "groups": [source.group for source in sources] if options.get("repeats") else [],
        "options": options,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _tokenizer_options(config: DataConfig) -> dict[str, Any]:
    if config.tokenizer is None:
        return {"trained": "wordpiece", "vocab_size": config.vocab_size, "lowercase": config.lowercase}
    path = Path(config.tokenizer).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.tokenizer={config.tokenizer!r}: no such file; expected a tokenizer.json or vocab.txt")
    given = {"given_sha256": sha256_of_file(path)}
    return given | {"lowercase": config.lowercase} if path.suffix == ".txt" else given


def open_planned(plan: CorpusPlan) -> PreparedCorpus | None:
    """The corpus of `plan`, or None when it is not there or damaged."""
    if not plan.folder.exists():
        return None
    try:
        return PreparedCorpus.open(plan.folder)
    except DataError as error:
        logger.warning("the prepared corpus is damaged and will be prepared again: %s", error)
        return None
