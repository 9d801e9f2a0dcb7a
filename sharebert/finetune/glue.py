"""The tasks of GLUE, from the hub or a local folder, and their submission files.

A submission is a zip of `CoLA.tsv`, `SST-2.tsv`, ..., each with the header `index`, `prediction` and one row for each
row of the test set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sharebert.config import TaskConfig
from sharebert.data.format import DataError
from sharebert.finetune.splits import RawSplit, read_splits
from sharebert.finetune.tasks import GLUE, STSB_RANGE, Floats, GlueTask, TextSplit, TextTask

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
        suffix = glue.suffixes[position]
        submission = glue.submission + suffix.replace("_", "-") if is_test else ""
        texts = tuple(_texts(found[name], column) for column in glue.columns)
        return TextSplit(name, texts, _labels(found[name], glue), suffix, submission)

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


def _texts(split: RawSplit, column: str) -> list[str]:
    values = split.column(column)
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise DataError(f"{split.source}, row {row}: {value!r} in column {column!r}; expected a text")
    return values


def _labels(split: RawSplit, glue: GlueTask) -> Floats:
    """(rows,) class numbers in the order of `glue.label_names`, or values; NaN for -1 or where there is no label."""
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
    if value is None:
        return math.nan
    if str(value) not in by_value:
        raise DataError(f"{split.source}, row {row}: label {value!r}; expected one of {', '.join(by_value)}")
    return by_value[str(value)]


def _value(value: object, row: int, split: RawSplit) -> float:
    try:
        number = math.nan if value is None else float(str(value))
    except ValueError as error:
        raise DataError(f"{split.source}, row {row}: label {value!r}; expected a number") from error
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
