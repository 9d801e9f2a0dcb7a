"""Token sequences of one or two texts, and batches of them.

Legend: N sequences, B of a batch, T tokens of its longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.tokenizer import load_text_tokenizer

TEXTS_AT_ONCE = 2048
"""Texts that the tokenizer is given together: it works on them in parallel, and holds its output for all of them."""


@dataclass(frozen=True)
class Sequences:
    """Sequences with their special tokens, end to end."""

    ids: NDArray[np.int32]
    """(tokens,)"""
    starts: NDArray[np.int64]
    """(N + 1,) where each begins; the last one: where all end."""
    seconds: NDArray[np.int64]
    """(N,) position in the sequence at which its second text begins; its length where there is none."""

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) tokens."""
        return np.diff(self.starts)

    def digest(self) -> str:
        """sha256 of all of it, and so of texts, tokenizer and length together."""
        digest = hashlib.sha256()
        for field in fields(self):
            digest.update(getattr(self, field.name).tobytes())
        return digest.hexdigest()

    def batch(self, rows: NDArray[np.int64], pad_id: int, device: torch.device) -> dict[str, Tensor]:
        """These sequences, padded to the longest of them: what a model of Transformers takes, each (B, T), int64."""
        lengths = self.lengths[rows]
        positions = np.arange(int(lengths.max()))  # (T,)
        is_token = positions < lengths[:, None]  # (B, T)
        ids = np.full(is_token.shape, pad_id, dtype=np.int64)
        ids[is_token] = np.concatenate([self.ids[self.starts[row] : self.starts[row + 1]] for row in rows])
        is_second = is_token & (positions >= self.seconds[rows][:, None])
        arrays = {"input_ids": ids, "token_type_ids": is_second, "attention_mask": is_token}
        return {name: torch.from_numpy(array.astype(np.int64)).to(device) for name, array in arrays.items()}


class SequencesBuilder:
    """Collects sequences one by one."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int32]] = []
        self._seconds: list[int] = []

    def add(self, ids: Any, second: int) -> None:
        """Append a sequence: its ids, specials included, and where its second text begins."""
        self._ids.append(np.asarray(ids, dtype=np.int32))
        self._seconds.append(second)

    def build(self) -> Sequences:
        """All of them."""
        starts = np.cumsum([0, *map(len, self._ids)], dtype=np.int64)
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, dtype=np.int32)
        return Sequences(ids, starts, np.array(self._seconds, dtype=np.int64))


def load_tokenizer(file: Path, max_length: int | None) -> Any:
    """The tokenizer of an encoder folder; cuts the longer of two texts first, down to `max_length`.

    A text that spells a special token is text, as in pretraining; those around texts are added all the same.
    """
    tokenizer = load_text_tokenizer(file)
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    return tokenizer


def encode_batches(tokenizer: Any, texts: tuple[list[str], ...], with_specials: bool = True) -> Iterator[Any]:
    """The encoding of each row of one or two columns of texts."""
    rows = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
    for first in range(0, len(rows), TEXTS_AT_ONCE):
        yield from tokenizer.encode_batch(rows[first : first + TEXTS_AT_ONCE], add_special_tokens=with_specials)


def encode(tokenizer: Any, texts: tuple[list[str], ...]) -> Sequences:
    """[CLS] first [SEP], or [CLS] first [SEP] second [SEP], of each row."""
    builder = SequencesBuilder()
    for encoding in encode_batches(tokenizer, texts):
        types = encoding.type_ids
        builder.add(encoding.ids, types.index(1) if 1 in types else len(types))
    return builder.build()
