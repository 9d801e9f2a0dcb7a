"""Tables in files, as columns: TSV, CSV, JSON lines and parquet, each also packed (.gz, .zst).

- `.tsv`: the first line names the columns; a tab ends a field, a line end a row. Quotes mean nothing (so it is with
  GLUE's files, whose texts hold lone quotes).
- `.csv`: the first line names the columns; fields with commas, quotes or line ends stand in double quotes.
- `.jsonl`: one object a line; a key that a row lacks is a value that it lacks (None). A lone surrogate, which only an
  escape of JSON can make, becomes a space, as in the rule of `data_prep.clean`.
- `.parquet`: all columns.

A blank line is a row with an empty text where the table has one column and rows follow; elsewhere it is left out, with
a warning.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.packed import PACKINGS, open_seekable, open_unpacked
from sharebert.data.format import DataError

logger = logging.getLogger(__name__)

Columns = dict[str, list[Any]]
"""Name of each column and its values, row by row; all equally long."""

KINDS = ("tsv", "csv", "jsonl", "parquet")
SUFFIXES = tuple(f".{kind}{packing}" for kind in KINDS for packing in ("", *PACKINGS))
EXPECTED = "expected .tsv, .csv, .jsonl or .parquet, each also with .gz or .zst"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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


def describe_row(source: object, row: int) -> str:
    """Where a row is, for messages; rows are counted from 1."""
    has_header = any(f".{kind}" in Path(str(source)).name.lower() for kind in KINDS[:2])
    return f"{source}, row {row}{' (without the header)' if has_header else ''}"


def plain(value: Any) -> str | None:
    """A cell as text, so that 1, 1.0 and "1" of different formats are the same; None where it is empty or NaN."""
    if isinstance(value, float) and (math.isnan(value) or value.is_integer()):
        value = None if math.isnan(value) else int(value)
    return ("" if value is None else str(value).strip()) or None


def as_texts(values: list[Any], source: object, column: str) -> list[str]:
    """The values of a column that holds texts.

    Raises:
        DataError: one is something else.
    """
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise DataError(f"{describe_row(source, row)}: {value!r} in column {column!r}; expected a text")
    return values


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
    """Number and fields of each line, none of a blank one; so does `_read_csv`."""
    for number, line in enumerate(lines, start=1):
        content = line.rstrip("\r\n")
        yield number, content.split("\t") if content else []


def _read_csv(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    before = csv.field_size_limit(2**31 - 1)  # texts may be long; the limit is of the whole process
    reader = csv.reader(lines, strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error})") from error
    finally:
        csv.field_size_limit(before)


def _with_header(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Columns:
    line, names = next(((number, row) for number, row in rows if row), (0, []))
    if len(set(names)) < len(names):
        raise DataError(f"{path}, line {line}: a column name stands twice among {', '.join(names)}")
    columns: Columns = {name: [] for name in names}
    blank: list[int] = []
    for number, row in rows:
        if not row:
            blank.append(number)
            continue
        if len(names) == 1:  # the blank lines so far are rows, and those that follow keep their numbers
            columns[names[0]] += [""] * len(blank)
            blank.clear()
        if len(row) != len(names):
            raise DataError(f"{path}, line {number}: {len(row)} fields; expected {len(names)}: {', '.join(names)}")
        for name, value in zip(names, row, strict=True):
            columns[name].append(value)
    _warn_of_blank(path, blank)
    return columns


def _warn_of_blank(path: Path, lines: list[int]) -> None:
    if lines:
        logger.warning("%s: %d blank line(s) left out, the first is line %d", path, len(lines), lines[0])


def _read_json(path: Path, lines: Iterable[str]) -> Columns:
    rows: list[dict[str, Any]] = []
    blank: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            blank.append(number)
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object")
        if "\\u" in line:  # written out again, a pair of surrogates is one character
            row = json.loads(_LONE_SURROGATE.sub(" ", json.dumps(row, ensure_ascii=False)))
        rows.append(row)
    _warn_of_blank(path, blank)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
