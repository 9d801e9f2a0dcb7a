"""A task in files of one's own: which columns are texts, which is the label, and what kind of label it is."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from sharebert.config import ConfigError, TaskConfig, near_match
from sharebert.data.format import DataError
from sharebert.finetune.tables import Columns, read_table
from sharebert.finetune.tasks import Floats, TextSplit, TextTask

logger = logging.getLogger(__name__)

LABEL_NAMES = ("label", "labels", "class", "category", "target", "score", "rating", "stars", "y")
TEXT_PAIRS = (
    ("sentence1", "sentence2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question", "answer"),
    ("query", "document"),
)
TEXT_NAMES = ("text", "sentence", "content", "review", "comment", "document", "body", "message", "title")
MOST_CLASSES = 20
"""Whole numbers of more different values than this are a regression, under `task.kind=auto`."""


def read_own_table(config: TaskConfig) -> TextTask:
    """The task in the files `config.train`, `config.dev` and `config.test`.

    Raises:
        ConfigError: a column that is not there, or no rule finds it; the message names the key and the columns.
        DataError: a file that cannot be read, a text or label that is missing, one label only, an unknown label.
    """
    files = {name: Path(value).expanduser() for name in ("train", "dev", "test") if (value := getattr(config, name))}
    tables = {name: read_table(path) for name, path in files.items()}
    label = _label_column(config, tables["train"])
    texts = _text_columns(config, tables["train"], label)
    for name, path in files.items():
        needed = texts if name == "test" else (*texts, label)
        if missing := [column for column in needed if column not in tables[name]]:
            raise DataError(f"{path}: no column {missing[0]!r}; it has {', '.join(tables[name])}")
    values = {
        name: _plain_labels(tables[name].get(label), len(tables[name][texts[0]]), path, name == "test")
        for name, path in files.items()
    }
    train_labels = [value for value in values["train"] if value is not None]
    is_regression = _is_regression(config.kind, train_labels)
    names = () if is_regression else _class_names(train_labels, files["train"], label)
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    what = "regression" if is_regression else f"{len(names)} classes ({shown})"
    logger.info("table: text %s, label %s: %s", " and ".join(map(repr, texts)), repr(label), what)
    splits = {}
    for name, path in files.items():
        rows = tuple(_texts(tables[name][column], path, column) for column in texts)
        splits[name] = TextSplit(name, rows, _numbers(values[name], names, path))
    return TextTask(
        label_names=names,
        metrics=("pearson", "spearman") if is_regression else ("accuracy", "macro_f1", "mcc"),
        score=("pearson", "spearman") if is_regression else ("accuracy",),
        train=splits["train"],
        dev=(splits["dev"],),
        test=(splits["test"],) if "test" in splits else (),
    )


def _label_column(config: TaskConfig, table: Columns) -> str:
    if config.label_column is not None:
        return _existing("task.label_column", config.label_column, table)
    lower = {column.lower(): column for column in reversed(table)}
    for name in LABEL_NAMES:
        if name in lower:
            return lower[name]
    columns = ", ".join(table)
    raise ConfigError(f"task.label_column=None: expected the name of the label's column, one of: {columns}")


def _text_columns(config: TaskConfig, table: Columns, label: str) -> tuple[str, ...]:
    if config.text_columns:
        if label in config.text_columns:
            raise ConfigError(f"task.text_columns={config.text_columns}: {label!r} is the label's column")
        return tuple(_existing("task.text_columns", column, table) for column in config.text_columns)
    lower = {column.lower(): column for column in reversed(table) if column != label}
    for names in (*TEXT_PAIRS, *((name,) for name in TEXT_NAMES)):
        if all(name in lower for name in names):
            return tuple(lower[name] for name in names)
    if len(lower) in (1, 2):  # nothing else is there
        return tuple(column for column in table if column != label)
    columns = ", ".join(column for column in table if column != label)
    raise ConfigError(f"task.text_columns=[]: expected the names of one or two columns of text, among: {columns}")


def _existing(key: str, column: str, table: Columns) -> str:
    if column not in table:
        raise ConfigError(f"{key}={column!r}: no such column{near_match(column, table)}; columns: {', '.join(table)}")
    return column


def _plain_labels(values: list[Any] | None, num_rows: int, path: Path, may_miss: bool) -> list[str | None]:
    """Labels as text, so that 1 and "1" of two kinds of files are the same; None where a test row has none."""
    if values is None:
        return [None] * num_rows
    plain: list[str | None] = []
    for row, value in enumerate(values, start=1):
        if isinstance(value, float) and (math.isnan(value) or value.is_integer()):
            value = None if math.isnan(value) else int(value)
        text = "" if value is None else str(value).strip()
        if not text and not may_miss:
            raise DataError(f"{path}, row {row}: no label")
        plain.append(text or None)
    return plain


def _is_regression(kind: str, labels: list[str]) -> bool:
    numbers = [_number(label) for label in labels]
    if any(number is None for number in numbers):
        if kind == "regression":
            wrong = next(label for label in labels if _number(label) is None)
            raise ConfigError(f"task.kind='regression': expected labels that are numbers, found {wrong!r}")
        return False
    are_whole = all(number is not None and number.is_integer() for number in numbers)
    return kind == "regression" or (kind == "auto" and (not are_whole or len(set(numbers)) > MOST_CLASSES))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _class_names(labels: list[str], path: Path, column: str) -> tuple[str, ...]:
    names = set(labels)
    if len(names) < 2:
        raise DataError(f"{path}: every row has the label {labels[0]!r} in {column!r}; expected at least two classes")
    numbers = {name: _number(name) for name in names}
    if all(number is not None for number in numbers.values()):
        return tuple(sorted(names, key=lambda name: (numbers[name] or 0.0, name)))
    return tuple(sorted(names))


def _numbers(labels: list[str | None], names: tuple[str, ...], path: Path) -> Floats:
    """Class numbers, or the values of a regression; NaN for None."""
    numbers: dict[str | None, float | None] = {None: math.nan, **{name: float(i) for i, name in enumerate(names)}}
    values = []
    for row, label in enumerate(labels, start=1):
        value = numbers.get(label) if names or label is None else _number(label)
        if value is None:
            expected = f"one of the training labels: {', '.join(names)}" if names else "a number"
            raise DataError(f"{path}, row {row}: label {label!r}; expected {expected}")
        values.append(value)
    return np.array(values, dtype=np.float64)


def _texts(values: list[Any], path: Path, column: str) -> list[str]:
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise DataError(f"{path}, row {row}: {value!r} in column {column!r}; expected a text")
    return values
