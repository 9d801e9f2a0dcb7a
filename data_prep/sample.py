"""A bounded sample of the training documents, for training the tokenizer."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

SAMPLE_CHARACTERS = 100_000_000
"""Upper bound of the sample. A wordpiece vocabulary of 30,000 changes little beyond some 10 million words."""

_HEADER = struct.Struct("<QI")  # sample key, bytes of text


class TextSample:
    """Documents on disk, chosen by their hash so that the choice does not depend on their order.

    All documents are taken until they exceed `limit` characters; then those in the upper half of the hash
    range are given up, for good, and so on. The result is a fixed function of the set of documents up to
    where the halvings fell; disk use stays below `limit` and one document, memory at one document.
    """

    def __init__(self, folder: Path, limit: int = SAMPLE_CHARACTERS) -> None:
        self.num_characters = 0
        self.num_documents = 0
        self._folder = folder
        self._limit = limit
        self._key_below = 2**64
        self._file = self._open()

    def _open(self) -> BinaryIO:
        return cast(BinaryIO, tempfile.TemporaryFile(dir=self._folder))

    def add(self, text: str, key: int) -> None:
        """Offer a document with a hash `key` from 0 below 2**64."""
        if key >= self._key_below:
            return
        self._append(text, key)
        while self.num_characters > self._limit and self.num_documents > 1:
            self._halve()

    def _append(self, text: str, key: int) -> None:
        data = text.encode()
        self._file.write(_HEADER.pack(key, len(data)) + data)
        self.num_characters += len(text)
        self.num_documents += 1

    def _halve(self) -> None:
        old = self._file
        self._key_below //= 2
        self._file = self._open()
        self.num_characters = self.num_documents = 0
        with old:
            for text, key in _read(old):
                if key < self._key_below:
                    self._append(text, key)

    def texts(self) -> Iterator[str]:
        """The sampled documents, in the order in which they came."""
        return (text for text, _ in _read(self._file))

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()


def _read(file: BinaryIO) -> Iterator[tuple[str, int]]:
    file.seek(0)
    while header := file.read(_HEADER.size):
        key, num_bytes = _HEADER.unpack(header)
        yield file.read(num_bytes).decode(), key
