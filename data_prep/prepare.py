"""Preparation, in plain order: plan, lock, sample, tokenizer, tokens, meta.json, rename."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from data_prep.cache import CorpusPlan, open_planned, plan_corpus
from data_prep.documents import Document, DocumentCounts, iterate_documents
from data_prep.encode import EncodedBatch, TextEncoder, encode_documents
from data_prep.sample import TextSample
from data_prep.sources import Source, open_files
from data_prep.tokenizer import load_given_tokenizer, train_tokenizer
from sharebert.config import ConfigError, DataConfig
from sharebert.data.format import (
    DataError,
    PreparedCorpus,
    TokenStore,
    TokenStoreWriter,
    sha256_of_file,
    write_meta,
)

logger = logging.getLogger(__name__)

_POOL_PAYS_BYTES = 16_000_000  # below that, starting processes takes longer than they save


def prepare_corpus(config: DataConfig, progress: bool = False) -> PreparedCorpus:
    """The prepared corpus that `config` describes, made now unless it is there.

    Safe to call from several processes at once: one does the work, the others wait for it.

    Args:
        progress: show progress bars.

    Raises:
        ConfigError: a setting that names something which is not there or does not fit.
        DataError: text that cannot be read, or too little of it.
    """
    plan = plan_corpus(config)
    if (corpus := open_planned(plan)) is not None:
        logger.info("corpus: %s is prepared", plan.folder)
        return corpus
    try:
        plan.folder.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{plan.folder}.lock").touch()
    except OSError as error:
        came = f"data.cache_dir={config.cache_dir}" if config.cache_dir else f"cache folder {plan.folder.parent}"
        expected = "a folder that can be written; set data.cache_dir or SHAREBERT_CACHE"
        raise ConfigError(f"{came}: {error.strerror}, expected {expected}") from error
    lock = FileLock(f"{plan.folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("corpus: waiting for another process that prepares %s", plan.folder)
        lock.acquire()
    try:
        return open_planned(plan) or _build(plan, config, progress)
    finally:
        lock.release()


def _build(plan: CorpusPlan, config: DataConfig, progress: bool) -> PreparedCorpus:
    """Prepare in a folder beside the final one and rename it at the end; holds the lock."""
    started = time.monotonic()
    logger.info("corpus: preparing %s from %s", plan.folder, _names(plan.sources))
    partial = plan.folder.with_name(f"{plan.folder.name}.partial")
    for leftover in (partial, plan.folder):  # of a killed process; damaged (see open_planned)
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        num_documents = _write_tokenizer(plan, config, partial, progress)
        meta = _write_tokens(plan, config, partial, num_documents, progress)
        encoder = TextEncoder(partial / "tokenizer.json")
        write_meta(partial / "meta.json", meta, encoder.special_ids)
        os.replace(partial, plan.folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _log_summary(meta, config, time.monotonic() - started)
    return PreparedCorpus.open(plan.folder)


def _names(sources: Sequence[Source]) -> str:
    shown = ", ".join(source.name for source in sources[:3])
    return shown if len(sources) <= 3 else f"{shown} and {len(sources) - 3:,} more"


def _write_tokenizer(plan: CorpusPlan, config: DataConfig, folder: Path, progress: bool) -> int | None:
    """Write tokenizer.json; returns how many documents there are, if that had to be found out."""
    if config.tokenizer is not None:
        given = load_given_tokenizer(Path(config.tokenizer).expanduser(), config.lowercase)
        given.save(str(folder / "tokenizer.json"))
        return None
    counts, num_documents = DocumentCounts(), 0
    with closing(TextSample(folder)) as sample:
        documents = iterate_documents(plan.sources, config, counts)
        for document in _bar(documents, "reading", None, progress):
            num_documents += 1
            if not document.is_validation:  # the vocabulary must not know the held-out text either
                sample.add(document.text, document.sample_key)
        if not sample.num_documents:
            raise _too_little_text(plan, config, counts, num_documents)
        tokenizer = train_tokenizer(sample.texts, config.vocab_size, config.lowercase)
        logger.info("tokenizer: trained on %s characters of text", f"{sample.num_characters:,}")
    if (size := tokenizer.get_vocab_size()) < config.vocab_size:
        message = "tokenizer: the text supports %s wordpieces, data.vocab_size=%s asked for more"
        logger.warning(message, f"{size:,}", config.vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    return num_documents


def _bar(items: Iterable[Document], what: str, total: int | None, progress: bool) -> Iterator[Document]:
    yield from tqdm(items, desc=what, total=total, unit=" documents", unit_scale=True, disable=not progress)


def _write_tokens(
    plan: CorpusPlan, config: DataConfig, folder: Path, num_documents: int | None, progress: bool
) -> dict[str, Any]:
    """Write both token stores; returns the content of meta.json."""
    encoder = TextEncoder(folder / "tokenizer.json")
    sep_id, counts, unknown_tokens = encoder.special_ids.sep, DocumentCounts(), 0
    documents = _bar(iterate_documents(plan.sources, config, counts), "tokenising", num_documents, progress)
    with (
        TokenStoreWriter(folder / "train", encoder.vocab_size, sep_id) as train,
        TokenStoreWriter(folder / "validation", encoder.vocab_size, sep_id) as validation,
        closing(encode_documents(documents, folder / "tokenizer.json", _num_proc(plan, config))) as encoded,
    ):
        for batch, tokens in encoded:
            is_validation = np.array([document.is_validation for document in batch])
            _append(train, tokens, ~is_validation)
            _append(validation, tokens, is_validation)
            counts.empty += int((tokens.lengths == 0).sum())
            unknown_tokens += tokens.unknown_tokens
    kept = train.num_documents + validation.num_documents
    nothing_held_out = config.validation_fraction > 0 and not validation.num_documents
    if not train.num_documents or nothing_held_out:
        raise _too_little_text(plan, config, counts, kept)
    splits = {"train": train.summary(), "validation": validation.summary()}
    return {
        "key": plan.key,
        "documents": kept,
        "tokens": splits["train"]["tokens"] + splits["validation"]["tokens"],
        "unknown_tokens": unknown_tokens,
        "dropped": {"empty": counts.empty, "duplicate": counts.duplicate},
        "splits": splits,
        "sources": _source_entries(plan.sources, counts),
        "options": plan.options,
        "tokenizer_sha256": sha256_of_file(folder / "tokenizer.json"),
        "vocab_size": encoder.vocab_size,
        "library_versions": _library_versions(),
    }


def _num_proc(plan: CorpusPlan, config: DataConfig) -> int:
    """As asked for; else the usable cores, or 1 for a corpus too small to be worth starting processes."""
    if config.num_proc is not None:
        return config.num_proc
    is_small = sum(source.num_bytes for source in plan.sources) < _POOL_PAYS_BYTES
    return 1 if is_small else len(os.sched_getaffinity(0))


def _append(writer: TokenStoreWriter, tokens: EncodedBatch, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Append the chosen documents (documents,) that have tokens."""
    chosen = chosen & (tokens.lengths > 0)
    if chosen.any():
        writer.append_documents(tokens.ids[np.repeat(chosen, tokens.lengths)], tokens.lengths[chosen])


def _too_little_text(plan: CorpusPlan, config: DataConfig, counts: DocumentCounts, kept: int) -> DataError:
    read, names = sum(counts.by_source), _names(plan.sources)
    if not kept:
        dropped = f"{counts.empty} empty, {counts.duplicate} duplicate"
        return DataError(f"{names}: no document with text among {read} ({dropped}), expected at least one")
    fraction = f"data.validation_fraction={config.validation_fraction}"
    return DataError(
        f"{names}: {kept} documents at {fraction} leave none for training or none held out, expected at least one "
        "in each; give more documents, change the fraction, or set it to 0 to hold nothing out"
    )


def _source_entries(sources: Sequence[Source], counts: DocumentCounts) -> list[dict[str, Any]]:
    pairs = zip(sources, counts.by_source, strict=True)
    return [
        {
            "name": source.name,
            "kind": source.kind,
            "sha256": source.sha256,
            "bytes": source.num_bytes,
            "documents": read,
        }
        for source, read in pairs
    ]


def _library_versions() -> dict[str, str]:
    names = ("tokenizers", "datasets", "pyarrow", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _log_summary(meta: dict[str, Any], config: DataConfig, seconds: float) -> None:
    train, validation = meta["splits"]["train"], meta["splits"]["validation"]
    message = "corpus: %s documents (%s held out), %s tokens (%s held out), %.3f%% unknown, dropped %s, %.1f s"
    dropped = f"{meta['dropped']['empty']:,} empty and {meta['dropped']['duplicate']:,} duplicate"
    documents, held_out = f"{train['documents'] + validation['documents']:,}", f"{validation['documents']:,}"
    unknown_percent = 100 * meta["unknown_tokens"] / meta["tokens"]
    logger.info(
        message,
        documents,
        held_out,
        f"{meta['tokens']:,}",
        f"{validation['tokens']:,}",
        unknown_percent,
        dropped,
        seconds,
    )


def tokenize_files(files: Sequence[str], text_column: str, tokenizer_path: Path, folder: Path) -> TokenStore:
    """Tokenise any files with the tokenizer of a checkpoint into a token store at `folder`, in this process.

    Raises:
        ConfigError: a pattern in `files` that matches nothing.
        DataError: text that cannot be read, or no text at all.
    """
    sources = open_files(files, text_column, "--files")
    config = DataConfig(source="text_files", files=list(files), text_column=text_column, validation_fraction=0.0)
    encoder, counts = TextEncoder(tokenizer_path), DocumentCounts()
    with TokenStoreWriter(folder, encoder.vocab_size, encoder.special_ids.sep) as writer:
        documents = iterate_documents(sources, config, counts)
        for _, tokens in encode_documents(documents, tokenizer_path, num_proc=1):
            _append(writer, tokens, np.ones(len(tokens.lengths), dtype=np.bool_))
    if not writer.num_documents:
        raise DataError(f"{_names(sources)}: no document with text, expected at least one")
    return TokenStore(folder, encoder.vocab_size)
