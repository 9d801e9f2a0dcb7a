"""Tables in files, as columns: TSV, CSV, JSON lines and parquet, each also packed (.gz, .zst).

- `.tsv`: the first line names the columns; a tab ends a field, a line end a row. Quotes mean nothing (so it is with
  GLUE's files, whose texts hold lone quotes).
- `.csv`: the first line names the columns; fields with commas, quotes or line ends stand in double quotes.
- `.jsonl`: one object a line, all with the keys of the first one.
- `.parquet`: all columns.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.packed import PACKINGS, open_seekable, open_unpacked
from sharebert.data.format import DataError

Columns = dict[str, list[Any]]
"""Name of each column and its values, row by row; all equally long."""

KINDS = ("tsv", "csv", "jsonl", "parquet")
SUFFIXES = tuple(f".{kind}{packing}" for kind in KINDS for packing in ("", *PACKINGS))
EXPECTED = "expected .tsv, .csv, .jsonl or .parquet, each also with .gz or .zst"


def read_table(path: Path) -> Columns:
    """The columns of a file.

    Raises:
        DataError: no such file, of another kind, damaged, without rows, or with rows of unequal length; the message
            names the file and, where there is one, the line.
    """
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise DataError(f"{path}: a file of an unknown kind; {EXPECTED}")
    kind = suffix.split(".")[1]
    try:
        columns = _read_parquet(path) if kind == "parquet" else _read_lines(path, kind)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason}); expected a {kind} file in UTF-8") from error
    if not columns or not next(iter(columns.values())):
        raise DataError(f"{path}: no rows; expected {'a line of column names and ' if kind in KINDS[:2] else ''}rows")
    return columns


def _read_parquet(path: Path) -> Columns:
    import pyarrow
    import pyarrow.parquet

    try:
        with open_seekable(path) as file:
            table = pyarrow.parquet.read_table(file)
            return {name: table.column(name).to_pylist() for name in table.column_names}
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: damaged parquet ({error})") from error


def _read_lines(path: Path, kind: str) -> Columns:
    with open_unpacked(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n" if kind != "csv" else "")
        if kind == "jsonl":
            return _read_json(path, lines)
        rows = _read_csv(path, lines) if kind == "csv" else _read_tsv(lines)
        return _with_header(path, rows)


def _read_tsv(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, start=1):
        if content := line.rstrip("\r\n"):
            yield number, content.split("\t")


def _read_csv(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    before = csv.field_size_limit(2**31 - 1)  # texts may be long; the limit is of the whole process
    reader = csv.reader(lines, strict=True)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    finally:
        csv.field_size_limit(before)


def _with_header(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Columns:
    _, names = next(rows, (0, []))
    if len(set(names)) < len(names):
        raise DataError(f"{path}, line 1: a column name stands twice among {', '.join(names)}")
    columns: Columns = {name: [] for name in names}
    for number, row in rows:
        if len(row) != len(names):
            raise DataError(f"{path}, line {number}: {len(row)} fields; expected {len(names)}: {', '.join(names)}")
        for name, value in zip(names, row, strict=True):
            columns[name].append(value)
    return columns


def _read_json(path: Path, lines: Iterable[str]) -> Columns:
    columns: Columns = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict) or (columns and not columns.keys() <= row.keys()):
            wanted = f" with the keys {', '.join(columns)}" if columns else ""
            raise DataError(f"{path}, line {number}: expected an object{wanted}")
        if not columns:
            columns = {name: [] for name in row}
        for name, values in columns.items():
            values.append(row[name])
    return columns
