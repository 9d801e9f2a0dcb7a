"""Tokenising, in this process or in several; the result is the same for any number of them.

Worker processes import this module: it must stay light (no torch, no datasets).
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.documents import Document
from data_prep.tokenizer import find_special_ids, load_text_tokenizer, vocabulary_size
from sharebert.data.format import Ids, Int64Array, SpecialIds, token_dtype
from sharebert.launch import leave_signals_to_parent

BATCH_CHARACTERS = 250_000
BATCH_DOCUMENTS = 1_000


@dataclass(frozen=True)
class EncodedBatch:
    """The tokens of some documents, end to end, without special tokens."""

    ids: Ids
    """(sum of lengths,) uint16 or uint32."""
    lengths: Int64Array
    """(documents,) tokens of each; 0 for a text that the normaliser leaves nothing of."""


class TextEncoder:
    """A tokenizer.json, ready to encode batches of text."""

    def __init__(self, tokenizer_path: Path) -> None:
        self._tokenizer = load_text_tokenizer(tokenizer_path)
        self.special_ids: SpecialIds = find_special_ids(self._tokenizer)
        self.vocab_size = vocabulary_size(self._tokenizer)
        self._dtype = np.dtype(token_dtype(self.vocab_size))

    def encode(self, texts: list[str]) -> EncodedBatch:
        """Encode documents without special tokens."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        parts = [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]
        ids = np.concatenate(parts) if parts else np.empty(0, dtype=self._dtype)
        special = self.special_ids
        # A tokenizer that splits at spaces only finds "[MASK]" in its vocabulary as a word: unknown, then.
        ids[np.isin(ids, (special.pad, special.cls, special.sep, special.mask))] = special.unk
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return EncodedBatch(ids, lengths)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents of one group in order, in batches of at most 1,000 and about 250,000 characters (or one long
    document)."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        if batch and document.group != batch[0].group:
            yield batch
            batch, characters = [], 0
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_documents(
    documents: Iterable[Document], tokenizer_path: Path, num_proc: int
) -> Generator[tuple[list[Document], EncodedBatch], None, None]:
    """Batches and their tokens, in order. With one process no other is started.

    At most two batches for each process are under way, so memory is bounded however fast documents come.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes, not threads; and quiet when forked
    if num_proc == 1:
        encoder = TextEncoder(tokenizer_path)
        for batch in batches(documents):
            yield batch, encoder.encode([document.text for document in batch])
        return
    context = multiprocessing.get_context("spawn")  # a forked copy of a process with threads can hang
    pool = ProcessPoolExecutor(num_proc, context, initializer=_start_worker, initargs=(tokenizer_path,))
    try:
        under_way: deque[tuple[list[Document], Future[EncodedBatch]]] = deque()
        for batch in batches(documents):
            under_way.append((batch, pool.submit(_encode_in_worker, [document.text for document in batch])))
            if len(under_way) >= 2 * num_proc:
                first, future = under_way.popleft()
                yield first, future.result()
        for first, future in under_way:
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}


def _start_worker(tokenizer_path: Path) -> None:
    leave_signals_to_parent()  # which ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process is one core's worth
    _worker["encoder"] = TextEncoder(tokenizer_path)


def _encode_in_worker(texts: list[str]) -> EncodedBatch:
    encoder: TextEncoder = _worker["encoder"]
    return encoder.encode(texts)
