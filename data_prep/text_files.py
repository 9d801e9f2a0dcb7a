"""Files of text: which files a pattern names, and the documents in each.

- `.txt`: documents are separated by blank lines.
- `.jsonl`: one JSON object a line; the document is the string at `text_column`.
- `.parquet`: one document a row of the column `text_column`.

`.txt` and `.jsonl` may be gzipped (`.gz`). A null text is an empty document. Memory holds one document (for
parquet: a thousand rows) at a time.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from sharebert.config import ConfigError, near_match
from sharebert.data.format import DataError

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
_EXPECTED = f"expected {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


def file_format(path: Path) -> str | None:
    """`txt`, `jsonl` or `parquet`, from the file's name; None for any other name."""
    matching = [suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)]
    return matching[0].split(".")[1] if matching else None


def find_files(patterns: Iterable[str], key: str = "data.files") -> list[Path]:
    """The files that paths, folders and globs (`**` included) name: in the order of the patterns, sorted
    within one, each file once.

    Raises:
        ConfigError: a pattern that matches nothing, or a file of an unknown kind; the message names it.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            files = [file for file in _below(path) if file_format(file)]
        elif path.exists():  # also a file whose name holds a character that globs treat as special
            files = [path]
        else:
            matches = sorted(glob.glob(str(path), recursive=True))
            files = [Path(match) for match in matches if Path(match).is_file()]
        if not files:
            raise ConfigError(f"{key}: {pattern!r} matches no file; {_EXPECTED}, a glob of them or a folder")
        for file in files:
            if file_format(file) is None:
                raise ConfigError(f"{key}: {file} is of an unknown kind; {_EXPECTED}")
            found.setdefault(file)
    return list(found)


def _below(folder: Path) -> list[Path]:
    """Files below `folder`, sorted by path; nothing hidden."""
    files = (path for path in folder.rglob("*") if path.is_file())
    visible = (path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(visible)


def read_documents(path: Path, text_column: str) -> Iterator[str]:
    """The documents of one file, in its order, as they stand (see `clean` for the rule that follows).

    Raises:
        DataError: a line or row that cannot be read; the message names file and line, row or byte offset.
    """
    kind = file_format(path)
    if kind == "parquet":
        yield from _read_parquet(path, text_column)
        return
    with _open_binary(path) as file:
        try:
            lines = _decoded_lines(path, file)
            yield from _read_jsonl(path, lines, text_column) if kind == "jsonl" else _read_txt(lines)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip data ({error})") from error


def _open_binary(path: Path) -> BinaryIO:
    if path.name.lower().endswith(".gz"):
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, gzip.open(path, "rb")), buffer_size=1 << 20))
    return open(path, "rb", buffering=1 << 20)


def _decoded_lines(path: Path, file: BinaryIO) -> Iterator[str]:
    """Lines without their line feed. str.splitlines would also split at U+2028 and form feeds."""
    offset = 0
    for line in file:
        start = 3 if offset == 0 and line.startswith(b"\xef\xbb\xbf") else 0  # byte order mark
        try:
            text = line[start:].decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"byte offset {offset + start + error.start:,}" + (" (unpacked)" if path.suffix == ".gz" else "")
            raise DataError(f"{path}: invalid UTF-8 at {where}: byte 0x{line[start + error.start]:02x}") from None
        offset += len(line)
        yield text.removesuffix("\n").removesuffix("\r")


def _read_txt(lines: Iterator[str]) -> Iterator[str]:
    document: list[str] = []
    for line in lines:
        if line.strip(" \t\r\v\f"):
            document.append(line)
        elif document:
            yield "\n".join(document)
            document = []
    if document:
        yield "\n".join(document)


def _read_jsonl(path: Path, lines: Iterator[str], text_column: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON ({error})") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: a JSON {type(record).__name__}, expected an object")
        if text_column not in record:
            keys = ", ".join(record) or "none"
            hint = near_match(text_column, record)
            raise DataError(f"{path}, line {number}: no key {text_column!r}{hint} (data.text_column); keys: {keys}")
        yield text_or_empty(record[text_column], f"{path}, line {number}")


def _read_parquet(path: Path, text_column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_column not in columns:
                hint = near_match(text_column, columns)
                names = ", ".join(columns)
                raise DataError(f"{path}: no column {text_column!r}{hint} (data.text_column); columns: {names}")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_column]):
                for row, value in enumerate(batch.column(0).to_pylist(), start=row + 1):  # noqa: B020
                    yield text_or_empty(value, f"{path}, row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet ({error})") from error


def text_or_empty(value: object, where: str) -> str:
    """`value` if it is a string, "" for null.

    Raises:
        DataError: anything else; the message names `where`.
    """
    if value is None or isinstance(value, str):
        return value or ""
    raise DataError(f"{where}: the text is of type {type(value).__name__}, expected a string")
