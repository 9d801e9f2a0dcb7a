"""What people and programs are told about a prepared corpus: meta.json and the closing lines of the log."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
from collections.abc import Sequence
from typing import Any

from data_prep.cache import CorpusPlan
from data_prep.documents import DocumentCounts
from data_prep.faults import DROPPED, REPAIRED, in_words
from data_prep.sources import Source
from data_prep.text_files import passed_over
from data_prep.token_files import TokenFiles
from sharebert.config import DataConfig
from sharebert.data.format import DataError

logger = logging.getLogger(__name__)


def meta_content(plan: CorpusPlan, config: DataConfig, counts: DocumentCounts, files: TokenFiles) -> dict[str, Any]:
    """The counts and options in meta.json; documents and tokens with their repeats, as they are in the files."""
    splits = {split: writer.summary() for split, writer in files.writers.items()}
    counts.dropped["empty"] += files.progress.empty
    return {
        "key": plan.key,
        "documents": sum(split["documents"] for split in splits.values()),
        "tokens": sum(split["tokens"] for split in splits.values()),
        "unknown_tokens": sum(files.progress.unknown_tokens.values()),
        "dropped": counts.dropped,
        "repaired": counts.repaired,
        "skipped": [{"name": str(path), "reason": "unknown kind of file"} for path in passed_over(config.files)],
        "splits": splits,
        "sources": _source_entries(plan.sources, counts, config),
        "options": plan.options,
        "library_versions": library_versions(),
    }


def _source_entries(sources: Sequence[Source], counts: DocumentCounts, config: DataConfig) -> list[dict[str, Any]]:
    pairs = zip(sources, counts.by_source, strict=True)
    return [
        {
            "name": source.name,
            "kind": source.kind,
            "sha256": source.sha256,
            "bytes": source.num_bytes,
            "documents": read,
            "repeats": config.repeats[source.group] if config.repeats else 1,
        }
        for source, read in pairs
    ]


def library_versions() -> dict[str, str]:
    """Of Python and the libraries that the result could depend on."""
    names = ("tokenizers", "datasets", "pyarrow", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def shown_names(sources: Sequence[Source]) -> str:
    """The first three and the number of the others."""
    shown = ", ".join(source.name for source in sources[:3])
    return shown if len(sources) <= 3 else f"{shown} and {len(sources) - 3:,} more"


def log_summary(meta: dict[str, Any], seconds: float) -> None:
    """The closing lines: how much there is, what is missing of the raw text and why."""
    train, validation = meta["splits"]["train"], meta["splits"]["validation"]
    logger.info(
        "corpus: %s documents (%s held out), %s tokens (%s held out), %.3f%% unknown, %.1f s",
        f"{train['documents'] + validation['documents']:,}",
        f"{validation['documents']:,}",
        f"{meta['tokens']:,}",
        f"{validation['tokens']:,}",
        100 * meta["unknown_tokens"] / meta["tokens"],
        seconds,
    )
    logger.info("corpus: dropped %s", in_words(meta["dropped"], DROPPED))
    logger.info("corpus: repaired %s", in_words(meta["repaired"], REPAIRED))
    if skipped := meta["skipped"]:
        names = ", ".join(entry["name"] for entry in skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        logger.info("corpus: skipped %s files of an unknown kind (%s)", f"{len(skipped):,}", names)
    if silent := [source["name"] for source in meta["sources"] if not source["documents"]]:
        logger.info("corpus: no document in %s", ", ".join(silent[:3]) + (", ..." if len(silent) > 3 else ""))


def too_little_text(sources: Sequence[Source], config: DataConfig, counts: DocumentCounts, kept: int) -> DataError:
    """The error that says why nothing is left for training or none held out."""
    read, names = sum(counts.by_source), shown_names(sources)
    if not kept:
        dropped = in_words(counts.dropped, DROPPED)
        return DataError(f"{names}: no document with text among {read} (dropped: {dropped}), expected at least one")
    fraction = f"data.validation_fraction={config.validation_fraction}"
    return DataError(
        f"{names}: {kept} documents at {fraction} leave none for training or none held out, expected at least one "
        "in each; give more documents, change the fraction, or set it to 0 to hold nothing out"
    )
