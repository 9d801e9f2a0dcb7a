"""Files that may be packed with gzip or Zstandard, read as plain bytes; an incomplete file is an error."""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from sharebert.data.format import DataError

PACKINGS = {".gz": "gzip", ".zst": "Zstandard"}
"""Suffixes and what they mean."""

_BLOCK_BYTES = 1 << 18


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """The bytes of `path`, unpacked as its name says. Constant memory, but for windows that the file asks for.

    Raises:
        DataError: damaged or incomplete packed data; the message names the file.
    """
    packing = PACKINGS.get(path.suffix.lower())
    if packing is None:
        with open(path, "rb", buffering=1 << 20) as file:
            yield file
        return
    import zstandard

    with open(path, "rb") as packed:
        raw = gzip.GzipFile(fileobj=packed) if packing == "gzip" else _ZstandardFile(packed)
        try:
            with raw, io.BufferedReader(cast(io.RawIOBase, raw), buffer_size=1 << 20) as file:
                yield cast(BinaryIO, file)
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise DataError(f"{path}: damaged {packing} data ({error})") from error


@contextmanager
def open_seekable(path: Path) -> Iterator[BinaryIO]:
    """As `open_unpacked`, for formats that are not read from start to end: unpacked into a temporary file."""
    with open_unpacked(path) as file:
        if path.suffix.lower() not in PACKINGS:
            yield file
            return
        with tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(file, unpacked, _BLOCK_BYTES)
            unpacked.seek(0)
            yield cast(BinaryIO, unpacked)


class _ZstandardFile(io.RawIOBase):
    """All frames of a file. zstandard's own reader takes a file that was cut for one that ends there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rest = b""
        self._unpacked = b""
        self._frame: Any = None  # None between frames

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            packed = self._rest or self._file.read(_BLOCK_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._unpack(packed)
        size = min(len(buffer), len(self._unpacked))
        buffer[:size] = self._unpacked[:size]
        self._unpacked = self._unpacked[size:]
        return size

    def _unpack(self, packed: bytes) -> None:
        import zstandard

        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._unpacked = self._frame.decompress(packed)
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
