"""The tasks of GLUE, from the hub or a local folder, and their submission files.

A submission is a zip of `CoLA.tsv`, `SST-2.tsv`, ..., each with the header `index`, `prediction` and one row for each
row of the test set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sharebert.config import TaskConfig
from sharebert.data.format import DataError
from sharebert.finetune.splits import RawSplit, read_splits
from sharebert.finetune.tables import as_texts, describe_row, plain
from sharebert.finetune.tasks import GLUE, STSB_RANGE, Floats, GlueTask, TextSplit, TextTask

logger = logging.getLogger(__name__)

HUB_PATH = "nyu-mll/glue"
UNLABELLED = -1
"""The label of a row whose label is kept secret."""


def read_glue(config: TaskConfig) -> TextTask:
    """The task `config.name`, with the test set where there is one.

    Raises:
        ConfigError: the dataset is not there.
        DataError: a split, a column, a text is missing, or a label is unknown.
    """
    glue = GLUE[config.name]
    required = ("train", *glue.dev_splits) if glue.trains else glue.test_splits
    found = read_splits(config, HUB_PATH, config.name, required, glue.test_splits if glue.trains else ())

    def split(name: str, position: int, is_test: bool) -> TextSplit:
        raw, suffix = found[name], glue.suffixes[position]
        texts = tuple(as_texts(raw.column(column), raw.source, column) for column in glue.columns)
        labels, order = _labels(raw, glue), _submission_order(raw) if is_test else None
        if order is None:
            return TextSplit(name, texts, labels, suffix)
        texts = tuple([column[row] for row in order] for column in texts)
        return TextSplit(name, texts, labels[order], suffix, glue.submission + suffix.replace("_", "-"))

    test = [(position, name) for position, name in enumerate(glue.test_splits) if name in found]
    return TextTask(
        label_names=glue.label_names,
        metrics=glue.metrics,
        score=(),
        train=split("train", 0, is_test=False) if glue.trains else None,
        dev=tuple(split(name, position, is_test=False) for position, name in enumerate(glue.dev_splits)),
        test=tuple(split(name, position, is_test=True) for position, name in test),
        value_range=None if glue.label_names else STSB_RANGE,
        submits_names=glue.submits_names,
    )


def _submission_order(split: RawSplit) -> NDArray[np.int64] | None:
    """The rows as a submission numbers them: by `idx`, where there is one; None where rows of it are missing.

    Raises:
        DataError: an `idx` is no whole number, or stands twice.
    """
    if "idx" not in split.columns:
        return np.arange(len(next(iter(split.columns.values()))))
    rows: dict[int, int] = {}
    for row, value in enumerate(split.columns["idx"], start=1):
        text = (plain(value) or "").removesuffix(".0")
        if not text.isdecimal():
            raise DataError(f"{describe_row(split.source, row)}: idx {value!r}; expected a whole number from 0")
        if int(text) in rows:
            other = rows[int(text)] + 1
            raise DataError(f"{describe_row(split.source, row)}: idx {text}, which row {other} has; expected it once")
        rows[int(text)] = row - 1
    if missing := [index for index in range(len(rows)) if index not in rows]:
        counts = (max(rows) + 1 - len(rows), max(rows) + 1, missing[0])
        logger.warning("%s: %d of %d idx are missing, the first is %d: no submission file", split.source, *counts)
        return None
    return np.array([rows[index] for index in range(len(rows))], dtype=np.int64)


def _labels(split: RawSplit, glue: GlueTask) -> Floats:
    """(rows,) class numbers in the order of `glue.label_names`, or values; NaN for -1 or no label."""
    if "label" not in split.columns:
        return np.full(len(split.column(glue.columns[0])), math.nan)
    values = split.columns["label"]
    if not glue.label_names:
        return np.array([_value(value, row, split) for row, value in enumerate(values, start=1)])
    order = split.class_names.get("label") or glue.label_names
    numbers = [glue.label_names.index(name) if name in glue.label_names else None for name in order]
    if None in numbers:
        raise DataError(f"{split.source}: labels {', '.join(order)}; expected {', '.join(glue.label_names)}")
    by_value: dict[str, float] = {str(UNLABELLED): math.nan}
    by_value |= {name: float(position) for position, name in enumerate(glue.label_names)}
    by_value |= {str(value): float(number) for value, number in enumerate(numbers) if number is not None}
    return np.array([_class_number(value, by_value, row, split) for row, value in enumerate(values, start=1)])


def _class_number(value: object, by_value: dict[str, float], row: int, split: RawSplit) -> float:
    text = plain(value)
    if text is None:
        return math.nan
    text = text.removesuffix(".0")  # numbers of a column with empty cells, as pandas writes them
    if text not in by_value:
        raise DataError(f"{describe_row(split.source, row)}: label {value!r}; expected one of {', '.join(by_value)}")
    return by_value[text]


def _value(value: object, row: int, split: RawSplit) -> float:
    text = plain(value)
    try:
        number = math.nan if text is None else float(text)
    except ValueError:
        number = math.inf
    if math.isinf(number):
        raise DataError(f"{describe_row(split.source, row)}: label {value!r}; expected a number")
    return math.nan if number == UNLABELLED else number


def submission_file(task: TextTask, predictions: Floats) -> str:
    """The content of a submission file: names or numbers of classes, values with three decimals in their range.

    Args:
        task: of GLUE.
        predictions: (rows,) class numbers or values, in the order of the test set.
    """
    shown: Sequence[object]
    if not task.label_names:
        low, high = task.value_range or (-math.inf, math.inf)
        shown = [f"{min(high, max(low, value)):.3f}" for value in predictions]
    else:
        shown = [task.label_names[int(value)] if task.submits_names else int(value) for value in predictions]
    return "index\tprediction\n" + "".join(f"{index}\t{value}\n" for index, value in enumerate(shown))
