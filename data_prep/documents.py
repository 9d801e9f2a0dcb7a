"""The documents of a corpus: cleaned, counted, without the dropped ones, each in its split."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from data_prep.clean import clean_and_count
from data_prep.faults import Faults
from data_prep.sources import Source
from sharebert.config import DataConfig

CheckStop = Callable[[], None]
"""Raises :class:`sharebert.launch.StopRequested` once a stop is wanted."""


class Document(NamedTuple):
    """One document that is kept."""

    text: str
    is_validation: bool
    sample_key: int
    """A second hash of the text, below 2**64: decides whether the tokenizer's sample holds it."""
    group: int
    """That of its source."""


@dataclass
class DocumentCounts(Faults):
    """What was read, dropped and repaired, filled while the documents pass."""

    by_source: list[int] = field(default_factory=list)
    """Documents read from each source, the dropped ones too."""


class SeenDocuments:
    """A set of 64-bit hashes in 11 to 16 bytes each (a Python set takes about 80).

    Open addressing in an array of 64-bit slots, kept at most three quarters full. That two different
    documents meet in one hash is a matter of 3 in a million for a corpus of ten million documents.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))
        self._count = 0

    def add(self, key: int) -> bool:
        """Whether `key` is new; it is in the set from now on."""
        key = key or 1  # 0 marks a free slot
        slots, size = self._slots, len(self._slots)
        slot = key % size
        while slots[slot]:
            if slots[slot] == key:
                return False
            slot = slot + 1 if slot + 1 < size else 0
        slots[slot] = key
        self._count += 1
        if self._count * 4 > size * 3:
            self._grow()
        return True

    def _grow(self) -> None:
        old, self._count = self._slots, 0
        self._slots = array("Q", bytes(8 * (len(old) * 3 // 2)))
        for key in old:
            if key:
                self.add(key)


def iterate_documents(
    sources: Sequence[Source], config: DataConfig, counts: DocumentCounts, check_stop: CheckStop = lambda: None
) -> Iterator[Document]:
    """The kept documents of all sources in order; `counts` is filled on the way, `check_stop` called before each.

    The split is decided by a hash of the cleaned text alone: it does not move when other documents come or
    go, and equal documents are always on the same side.
    """
    seen = SeenDocuments() if config.deduplicate else None
    validation_below = int(config.validation_fraction * 2**64)
    for source in sources:
        counts.by_source.append(0)
        for raw_text in source.read(counts):
            check_stop()
            counts.by_source[-1] += 1
            text, control_characters, long_words = clean_and_count(raw_text)
            counts.repaired["control_characters"] += control_characters
            counts.repaired["long_words"] += long_words
            if reason := _reason_to_drop(text, config):
                counts.dropped[reason] += 1
                continue
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            key, sample_key = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
            if seen is not None and not seen.add(key):
                counts.dropped["duplicate"] += 1
                continue
            yield Document(text, key < validation_below, sample_key, source.group)


def _reason_to_drop(text: str, config: DataConfig) -> str | None:
    if not text or text.isspace():
        return "empty"
    if len(text) < config.min_characters:
        return "short"
    if config.max_characters is not None and len(text) > config.max_characters:
        return "long"
    return None
