"""A task in files of one's own: which columns are texts, which is the label, and what kind of label it is."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from sharebert.config import ConfigError, TaskConfig, near_match
from sharebert.data.format import DataError
from sharebert.finetune.tables import Columns, as_texts, describe_row, plain, read_table
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
NO_TEXTS = ("id", "idx", "index", "guid")
"""Columns of these names, and of numbers only, are not taken for texts because nothing else is there."""
MISSING = ("na", "n/a", "nan", "null", "none")
"""Among numbers, and in any case, these are no labels; among words they are words."""
MOST_CLASSES = 20
"""Whole numbers of more different values may be classes or values: `task.kind` has to say which."""


def read_own_table(config: TaskConfig) -> TextTask:
    """The task in the files `config.train`, `config.dev` and `config.test`.

    Raises:
        ConfigError: a column or a kind that is not there, or no rule finds it; the message names the key.
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
    labels, is_regression = _labels(config.kind, files, tables, label)
    names = () if is_regression else _class_names(labels["train"], files["train"], label)
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    what = "regression" if is_regression else f"{len(names)} classes ({shown})"
    logger.info("table: text %s, label %s: %s", " and ".join(map(repr, texts)), repr(label), what)
    splits = {}
    for name, path in files.items():
        rows = tuple(as_texts(tables[name][column], path, column) for column in texts)
        known = _without_placeholders(labels[name], names, path) if name == "test" else labels[name]
        splits[name] = TextSplit(name, rows, _numbers(known, names, path))
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
    others = [column for column in table if column != label]
    found = tuple(column for column in others if not _is_no_text(column, table[column]))
    if len(others) in (1, 2) and found:  # nothing else is there
        return found
    columns = ", ".join(others)
    raise ConfigError(f"task.text_columns=[]: expected the names of one or two columns of text, among: {columns}")


def _existing(key: str, column: str, table: Columns) -> str:
    if column not in table:
        raise ConfigError(f"{key}={column!r}: no such column{near_match(column, table)}; columns: {', '.join(table)}")
    return column


def _is_no_text(column: str, values: list[Any]) -> bool:
    cells = [cell for value in values if (cell := plain(value)) is not None]
    return column.lower() in NO_TEXTS or (bool(cells) and all(_number(cell) is not None for cell in cells))


def _labels(
    kind: str, files: dict[str, Path], tables: dict[str, Columns], column: str
) -> tuple[dict[str, list[str | None]], bool]:
    """The labels of each file as text, None where a test row has none; and whether they are those of a regression."""
    found = {
        name: [plain(value) for value in table.get(column) or [None] * len(next(iter(table.values())))]
        for name, table in tables.items()
    }
    are_numbers = _are_numbers(kind, found["train"], files["train"])
    if are_numbers:
        found = {name: [None if _is_missing(value) else value for value in values] for name, values in found.items()}
    for name in ("train", "dev"):
        if None in found[name]:
            row = found[name].index(None)
            where = describe_row(files[name], row + 1)
            raise DataError(f"{where}: no label in {column!r}, found {tables[name][column][row]!r}; expected one")
    return found, are_numbers and _is_regression(kind, column, found["train"])


def _is_missing(label: str | None) -> bool:
    return label is None or label.lower() in MISSING


def _are_numbers(kind: str, labels: list[str | None], path: Path) -> bool:
    """Whether the labels are numbers, but for those that are missing.

    Raises:
        ConfigError: some are numbers and some words, and `kind` does not say that they are classes.
    """
    has_numbers = any(_number(label) is not None for label in labels if label is not None)
    for row, label in enumerate(labels, start=1):
        if label is None or _is_missing(label) or _number(label) is not None:
            continue
        where = describe_row(path, row)
        if kind == "regression":
            raise ConfigError(f"task.kind='regression': expected labels that are numbers, found {label!r} ({where})")
        if kind == "auto" and has_numbers:
            raise ConfigError(
                f"task.kind='auto': {where}: label {label!r}, while others are numbers; "
                "expected task.kind=classification, or numbers only and task.kind=regression"
            )
        return False
    return has_numbers or kind == "regression"


def _is_regression(kind: str, column: str, labels: list[str | None]) -> bool:
    """Of labels that are numbers."""
    if kind != "auto":
        return kind == "regression"
    numbers = {float(label) for label in labels if label is not None}
    are_whole = all(number.is_integer() for number in numbers)
    if are_whole and len(numbers) > MOST_CLASSES:
        found = f"{len(numbers)} different whole numbers in {column!r}"
        raise ConfigError(f"task.kind='auto': {found}; expected task.kind=classification or task.kind=regression")
    return not are_whole


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _class_names(labels: list[str | None], path: Path, column: str) -> tuple[str, ...]:
    names = {label for label in labels if label is not None}
    if len(names) < 2:
        raise DataError(f"{path}: every row has the label {labels[0]!r} in {column!r}; expected at least two classes")
    for name in names:
        if "\t" in name or len(name.splitlines()) > 1:  # they stand in tables of predictions
            where = describe_row(path, labels.index(name) + 1)
            raise DataError(f"{where}: label {name!r}; expected one without tabs and line ends")
    numbers = {name: _number(name) for name in names}
    if all(number is not None for number in numbers.values()):
        return tuple(sorted(names, key=lambda name: (numbers[name] or 0.0, name)))
    return tuple(sorted(names))


def _without_placeholders(labels: list[str | None], names: tuple[str, ...], path: Path) -> list[str | None]:
    """The labels; None for all where each is -1, as in the test sets of GLUE, and no class is called so."""
    given = {_number(label) for label in labels if label is not None}
    if given != {-1.0} or -1.0 in map(_number, names):
        return labels
    logger.info("%s: every label is -1, which counts as none: nothing is scored", path)
    return [None] * len(labels)


def _numbers(labels: list[str | None], names: tuple[str, ...], path: Path) -> Floats:
    """Class numbers, or the values of a regression; NaN for None."""
    numbers: dict[str | None, float | None] = {None: math.nan, **{name: float(i) for i, name in enumerate(names)}}
    values = []
    for row, label in enumerate(labels, start=1):
        value = numbers.get(label) if names or label is None else _number(label)
        if value is None:
            expected = f"one of the training labels: {', '.join(names)}" if names else "a number"
            raise DataError(f"{describe_row(path, row)}: label {label!r}; expected {expected}")
        values.append(value)
    return np.array(values, dtype=np.float64)
