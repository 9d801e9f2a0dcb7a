"""Files of text: which files a pattern names, and the documents in each.

- `.txt`: documents are separated by blank lines, or each line that is not blank is one (`data.txt_documents`).
- `.jsonl`: one JSON object a line; the document is the string at `text_column`.
- `.parquet`: one document a row of the column `text_column`.

Each may be packed (`.gz`, `.zst`); a packed parquet file is unpacked into a temporary file first. A null text is an
empty document. Memory holds one document (for parquet: 64 rows) at a time. A byte that is not UTF-8 or
a line that is not JSON is an error, mended or dropped, as `data.errors` says.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.faults import Faults
from data_prep.packed import PACKINGS, open_seekable, open_unpacked
from sharebert.config import ConfigError, near_match
from sharebert.data.format import DataError

KINDS = ("txt", "jsonl", "parquet")
SUFFIXES = tuple(f".{kind}{packing}" for kind in KINDS for packing in ("", *PACKINGS))
PARQUET_ROWS = 64
"""Held at a time; a row may be a book."""
_EXPECTED = "expected .txt, .jsonl or .parquet, each also with .gz or .zst"


def file_format(path: Path) -> str | None:
    """`txt`, `jsonl.gz` and the like, from the file's name; None for a name that ends otherwise."""
    matching = [suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)]
    return matching[0].removeprefix(".") if matching else None


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


def passed_over(patterns: Iterable[str]) -> list[Path]:
    """Files in the folders among `patterns` that are not read, because they are of another kind."""
    folders = [Path(pattern).expanduser() for pattern in patterns]
    return [file for folder in folders if folder.is_dir() for file in _below(folder) if file_format(file) is None]


def _below(folder: Path) -> list[Path]:
    """Files below `folder`, sorted by path; nothing hidden."""
    files = (path for path in folder.rglob("*") if path.is_file())
    visible = (path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(visible)


def read_documents(
    path: Path, text_column: str, txt_documents: str = "blank_line", faults: Faults | None = None
) -> Iterator[str]:
    """The documents of one file, in its order, as they stand (see `clean` for the rule that follows).

    Args:
        faults: says what is done about a line that cannot be read, and counts; None: strict.

    Raises:
        DataError: a damaged file, or a line or row that cannot be read; the message names file and line, row or
            byte offset.
    """
    kind, faults = (file_format(path) or "").split(".")[0], faults or Faults()
    if kind == "parquet":
        with open_seekable(path) as file:
            yield from _read_parquet(path, file, text_column, faults)
        return
    with open_unpacked(path) as file:
        lines = _decoded_lines(path, file, faults)
        if kind == "jsonl":
            yield from _read_jsonl(path, lines, text_column, faults)
        else:
            yield from _read_txt((line for _, line in lines), txt_documents)


def _decoded_lines(path: Path, file: BinaryIO, faults: Faults) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its line feed). str.splitlines would also split at U+2028 and form feeds."""
    offset, unpacked = 0, " (unpacked)" if path.suffix.lower() in PACKINGS else ""
    for number, line in enumerate(file, start=1):
        start = 3 if offset == 0 and line.startswith(b"\xef\xbb\xbf") else 0  # byte order mark
        text = _decoded(line[start:], f"{path}: invalid UTF-8 at byte offset", offset + start, unpacked, faults)
        offset += len(line)
        if text is not None:
            yield number, text.removesuffix("\n").removesuffix("\r")


def _decoded(data: bytes, what: str, offset: int, note: str, faults: Faults) -> str | None:
    """`data` as text; None where a text that is not UTF-8 is to be dropped."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if faults.are_errors:
            where = f"{what} {offset + error.start:,}{note}: byte 0x{data[error.start]:02x}"
            raise DataError(f"{where}; data.errors=replace or skip would go on") from None
    if faults.policy == "skip":
        faults.dropped["invalid_utf8"] += 1
        return None
    faults.repaired["invalid_utf8"] += 1
    return data.decode("utf-8", errors="replace")  # U+FFFD becomes a space, see `clean`


def _read_txt(lines: Iterator[str], txt_documents: str) -> Iterator[str]:
    document: list[str] = []
    for line in lines:
        is_blank = not line.strip(" \t\r\v\f")
        if not is_blank:
            document.append(line)
        if document and (is_blank or txt_documents == "line"):
            yield "\n".join(document)
            document = []
    if document:
        yield "\n".join(document)


def _read_jsonl(path: Path, lines: Iterator[tuple[int, str]], text_column: str, faults: Faults) -> Iterator[str]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            text = _text_of_line(line, f"{path}, line {number}", text_column)
        except DataError:
            if faults.are_errors:
                raise
            faults.dropped["malformed"] += 1
        else:
            yield text


def _text_of_line(line: str, where: str, text_column: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, expected an object")
    if text_column not in record:
        keys = ", ".join(record) or "none"
        hint = near_match(text_column, record)
        raise DataError(f"{where}: no key {text_column!r}{hint} (data.text_column); keys: {keys}")
    return text_or_empty(record[text_column], where)


def _read_parquet(path: Path, opened: BinaryIO, text_column: str, faults: Faults) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without these two, all of the file's column is fetched at once and stays in memory.
        with pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=2**20) as file:
            columns = file.schema_arrow.names
            if text_column not in columns:
                hint = near_match(text_column, columns)
                names = ", ".join(columns)
                raise DataError(f"{path}: no column {text_column!r}{hint} (data.text_column); columns: {names}")
            row = 0
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_column]):
                for row, value in enumerate(_values(batch.column(0)), start=row + 1):  # noqa: B020
                    where = f"{path}, row {row}"
                    if isinstance(value, bytes):
                        value = _decoded(value, f"{where}: invalid UTF-8 at byte offset", 0, " of the text", faults)
                        if value is None:
                            continue
                    yield text_or_empty(value, where)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
            raise  # of the machine or the disk, not of the file: whoever tries again may go on
        raise DataError(f"{path}: cannot be read as parquet ({error})") from error


def _values(column: Any) -> Iterator[object]:
    """The values; those of a column of strings that are not all UTF-8, which nobody checks on writing, as bytes."""
    import pyarrow

    try:
        yield from column.to_pylist()
    except UnicodeDecodeError:
        yield from column.cast(pyarrow.large_binary()).to_pylist()


def text_or_empty(value: object, where: str) -> str:
    """`value` if it is a string, "" for null.

    Raises:
        DataError: anything else; the message names `where`.
    """
    if value is None or isinstance(value, str):
        return value or ""
    raise DataError(f"{where}: the text is of type {type(value).__name__}, expected a string")
