"""Preparation, in plain order: plan, lock, sample, tokenizer, tokens, meta.json, rename."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from data_prep.cache import CorpusPlan, open_planned, plan_corpus
from data_prep.documents import CheckStop, Document, DocumentCounts, iterate_documents
from data_prep.encode import TextEncoder, encode_documents
from data_prep.hf_dataset import UnreachableError
from data_prep.sample import TextSample
from data_prep.sources import open_files
from data_prep.summary import library_versions, log_summary, meta_content, shown_names, too_little_text
from data_prep.token_files import JOURNAL, TokenFiles, append_chosen
from data_prep.tokenizer import load_given_tokenizer, load_text_tokenizer, train_tokenizer
from sharebert.config import ConfigError, DataConfig
from sharebert.data.format import DataError, PreparedCorpus, TokenStore, TokenStoreWriter, write_meta
from sharebert.files import sha256_of_file, sync
from sharebert.launch import StopRequested, usable_cores

logger = logging.getLogger(__name__)

_POOL_PAYS_BYTES = 16_000_000  # below that, starting processes takes longer than they save
_TOLERATED_SHORTFALL = 0.05  # of data.vocab_size
_LOOK_SECONDS = 0.5  # between two looks whether a stop is wanted, while another process prepares


def prepare_corpus(config: DataConfig, progress: bool = False, check_stop: CheckStop = lambda: None) -> PreparedCorpus:
    """The prepared corpus that `config` describes, made now unless it is there.

    Safe to call from several processes at once: one does the work, the others wait for it.

    Args:
        progress: show progress bars.
        check_stop: called before each document.

    Raises:
        ConfigError: a setting that names something which is not there or does not fit.
        DataError: text that cannot be read, or too little of it.
        StopRequested: by `check_stop`; what is tokenised is kept.
    """
    plan = plan_corpus(config)
    check_stop()
    if (corpus := open_planned(plan)) is not None:
        logger.info("corpus: %s is prepared", plan.folder)
        return corpus
    try:
        plan.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(plan, check_stop)
    except OSError as error:
        came = f"data.cache_dir={config.cache_dir}" if config.cache_dir else f"cache folder {plan.folder.parent}"
        expected = "a folder that can be written; set data.cache_dir or SHAREBERT_CACHE"
        raise ConfigError(f"{came}: {error.strerror or error}, expected {expected}") from error
    with lock:
        return open_planned(plan) or _build(plan, config, progress, check_stop)


def _lock(plan: CorpusPlan, check_stop: CheckStop) -> AbstractContextManager[object]:
    """The lock of the corpus, acquired; a context that lets go of it."""
    lock, is_free = FileLock(f"{plan.folder}.lock"), True
    while True:
        try:
            return lock.acquire(timeout=0 if is_free else _LOOK_SECONDS)
        except Timeout:
            if is_free:
                logger.info("corpus: waiting for another process that prepares %s", plan.folder)
            is_free = False
            check_stop()


def _build(plan: CorpusPlan, config: DataConfig, progress: bool, check_stop: CheckStop) -> PreparedCorpus:
    """Prepare in a folder beside the final one and rename it at the end; holds the lock.

    What a killed process left there is used; only text or settings that do not fit take it away.
    """
    started = time.monotonic()
    logger.info("corpus: preparing %s from %s", plan.folder, shown_names(plan.sources))
    shutil.rmtree(plan.folder, ignore_errors=True)  # damaged, see open_planned
    partial = plan.folder.with_name(f"{plan.folder.name}.partial")
    partial.mkdir(exist_ok=True)
    try:
        _write_tokenizer(plan, config, partial, progress, check_stop)
        encoder = TextEncoder(partial / "tokenizer.json")
        meta = _write_tokens(plan, config, partial, encoder, progress, check_stop)
        write_meta(partial / "meta.json", meta, encoder.special_ids)
    except UnreachableError:
        raise
    except (ConfigError, DataError):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    (partial / JOURNAL).unlink()
    os.replace(partial, plan.folder)
    log_summary(meta, time.monotonic() - started)
    return PreparedCorpus.open(plan.folder)


def _write_tokenizer(plan: CorpusPlan, config: DataConfig, folder: Path, progress: bool, check_stop: CheckStop) -> None:
    """Write tokenizer.json: the given one, the one trained before on the same text, or a new one."""
    path = folder / "tokenizer.json"
    if config.tokenizer is not None:
        load_given_tokenizer(Path(config.tokenizer).expanduser(), config.lowercase).save(str(path))
        return
    assert plan.tokenizer_path is not None, "plan_corpus names it when none is given"
    if plan.tokenizer_path.is_file():
        try:
            load_text_tokenizer(plan.tokenizer_path)
        except DataError as error:
            logger.warning("the trained tokenizer is damaged and will be trained again: %s", error)
        else:
            logger.info("tokenizer: %s is trained", plan.tokenizer_path)
            shutil.copyfile(plan.tokenizer_path, path)
            return
    _train_tokenizer(plan, config, folder, progress, check_stop).save(str(path))
    kept = Path(shutil.copyfile(path, folder / "tokenizer.new"))  # whoever comes after a kill here writes it again
    sync(kept)
    os.replace(kept, plan.tokenizer_path)


def _train_tokenizer(plan: CorpusPlan, config: DataConfig, folder: Path, progress: bool, check_stop: CheckStop) -> Any:
    counts, num_documents = DocumentCounts(config.errors), 0
    with closing(TextSample(folder)) as sample:
        documents = iterate_documents(plan.sources, config, counts, check_stop)
        for document in _bar(documents, "reading", 0, progress):
            num_documents += 1
            if not document.is_validation:  # the vocabulary must not know the held-out text either
                sample.add(document.text, document.sample_key)
        if not sample.num_documents:
            raise too_little_text(plan.sources, config, counts, num_documents)
        tokenizer = train_tokenizer(sample.texts, config.vocab_size, config.lowercase)
        logger.info("tokenizer: trained on %s characters of text", f"{sample.num_characters:,}")
    _check_vocabulary(tokenizer.get_vocab_size(), config.vocab_size)
    return tokenizer


def _check_vocabulary(found: int, wanted: int) -> None:
    """A few wordpieces less than asked for are a warning; more than that, and the setting does not fit the text."""
    if found < wanted * (1 - _TOLERATED_SHORTFALL):
        expected = f"expected at most {found:,}, the wordpieces that occur twice and more; give more text or set that"
        raise DataError(f"data.vocab_size={wanted}: larger than the text supports, {expected}")
    if found < wanted:
        message = "tokenizer: the text supports %s wordpieces, data.vocab_size=%s asked for more"
        logger.warning(message, f"{found:,}", wanted)


def _bar(items: Iterable[Document], what: str, done: int, progress: bool) -> Iterator[Document]:
    yield from tqdm(items, desc=what, initial=done, unit=" documents", unit_scale=True, disable=not progress)


def _write_tokens(
    plan: CorpusPlan, config: DataConfig, folder: Path, encoder: TextEncoder, progress: bool, check_stop: CheckStop
) -> dict[str, Any]:
    """Write both token stores, going on where a killed process was; returns the content of meta.json."""
    counts, tokenizer_sha256 = DocumentCounts(config.errors), sha256_of_file(folder / "tokenizer.json")
    identity = {"key": plan.key, "tokenizer": tokenizer_sha256, "libraries": library_versions()}
    with TokenFiles(folder, encoder, config.repeats, identity) as files:
        if done := files.progress.documents_done:
            logger.info("corpus: going on after %s documents that are tokenised", f"{done:,}")
        documents = iterate_documents(plan.sources, config, counts, check_stop)  # from the first one, for the counts
        shown = _bar(islice(documents, done, None), "tokenising", done, progress)
        try:
            with closing(encode_documents(shown, folder / "tokenizer.json", _num_proc(plan, config))) as encoded:
                for batch, tokens in encoded:
                    files.append(batch, tokens)
        except StopRequested:
            files.checkpoint()
            raise
        except BrokenProcessPool:
            check_stop()  # a stop signal that goes to all processes ends workers that have just been started
            raise
        files.finish()
    meta = meta_content(plan, config, counts, files)
    train, validation = meta["splits"]["train"]["documents"], meta["splits"]["validation"]["documents"]
    if not train or (config.validation_fraction > 0 and not validation):
        raise too_little_text(plan.sources, config, counts, meta["documents"])
    return {**meta, "tokenizer_sha256": tokenizer_sha256, "vocab_size": encoder.vocab_size}


def _num_proc(plan: CorpusPlan, config: DataConfig) -> int:
    """As asked for; else the usable cores, or 1 for a corpus too small to be worth starting processes."""
    if config.num_proc is not None:
        return config.num_proc
    sizes = [source.num_bytes for source in plan.sources]
    is_small = all(sizes) and sum(sizes) < _POOL_PAYS_BYTES
    return 1 if is_small else usable_cores()


def tokenize_files(config: DataConfig, tokenizer_path: Path, folder: Path) -> TokenStore:
    """Tokenise any files with the tokenizer of a checkpoint into a token store at `folder`, in this process.

    Args:
        config: of the source text_files; its `files`, `text_column` and `txt_documents` count.
        tokenizer_path: a tokenizer.json.
        folder: of the store.

    Raises:
        ConfigError: a pattern in `files` that matches nothing.
        DataError: text that cannot be read, or no text at all.
    """
    sources = open_files(config.files, config, "--files")
    encoder, counts = TextEncoder(tokenizer_path), DocumentCounts()
    with TokenStoreWriter(folder, encoder.vocab_size, encoder.special_ids.sep) as writer:
        documents = iterate_documents(sources, config, counts)
        for _, tokens in encode_documents(documents, tokenizer_path, num_proc=1):
            append_chosen(writer, tokens, np.ones(len(tokens.lengths), dtype=np.bool_))
    if not writer.num_documents:
        raise DataError(f"{shown_names(sources)}: no document with text, expected at least one")
    return TokenStore(folder, encoder.vocab_size)
