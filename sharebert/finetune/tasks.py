"""What a task of one or two texts is, whatever its rows come from; and the tasks of GLUE.

The class numbers of a task follow `TextTask.label_names`; where a dataset lists its labels in another order, rows
are brought to this one by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PAIR_LABELS = ("entailment", "not_entailment")
MNLI_LABELS = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class TextSplit:
    """The rows of one split."""

    name: str
    """As the dataset calls it; for tables `train`, `dev` and `test`."""
    texts: tuple[list[str], ...]
    """One or two texts of each row."""
    labels: Floats
    """(rows,) class numbers, or values to predict; NaN where a row has none."""
    suffix: str = ""
    """Goes after the names of its figures: `_m` and `_mm` for MNLI's two dev sets."""
    submission: str = ""
    """Name of its file in a GLUE submission, without `.tsv`; empty: not part of one."""


@dataclass(frozen=True)
class TextTask:
    """A classification or a regression of one or two texts, with its rows."""

    label_names: tuple[str, ...]
    """Class names in the order of the class numbers; empty: a regression."""
    metrics: tuple[str, ...]
    score: tuple[str, ...]
    """Figures whose mean is the run's score."""
    train: TextSplit | None
    """None: a task that only predicts."""
    dev: tuple[TextSplit, ...] = ()
    test: tuple[TextSplit, ...] = ()
    value_range: tuple[float, float] | None = None
    """Of a regression: what a submission may hold."""
    submits_names: bool = False
    """A submission holds the names of classes, rather than their numbers."""


@dataclass(frozen=True)
class GlueTask:
    """How a task of GLUE looks on the hub (`nyu-mll/glue`) and in a submission."""

    columns: tuple[str, ...]
    label_names: tuple[str, ...]
    metrics: tuple[str, ...]
    submission: str
    """Name of the file of predictions for the split `test`."""
    dev_splits: tuple[str, ...] = ("validation",)
    test_splits: tuple[str, ...] = ("test",)
    suffixes: tuple[str, ...] = ("",)
    """Of the splits' figures and files, in the order of the splits."""
    submits_names: bool = False
    trains: bool = True


_PAIR = ("sentence1", "sentence2")
GLUE: dict[str, GlueTask] = {
    "cola": GlueTask(("sentence",), ("unacceptable", "acceptable"), ("mcc",), "CoLA"),
    "sst2": GlueTask(("sentence",), ("negative", "positive"), ("accuracy",), "SST-2"),
    "mrpc": GlueTask(_PAIR, ("not_equivalent", "equivalent"), ("f1", "accuracy"), "MRPC"),
    "stsb": GlueTask(_PAIR, (), ("pearson", "spearman"), "STS-B"),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate"), ("f1", "accuracy"), "QQP"),
    "mnli": GlueTask(
        ("premise", "hypothesis"),
        MNLI_LABELS,
        ("accuracy",),
        "MNLI",
        dev_splits=("validation_matched", "validation_mismatched"),
        test_splits=("test_matched", "test_mismatched"),
        suffixes=("_m", "_mm"),
        submits_names=True,
    ),
    "qnli": GlueTask(("question", "sentence"), PAIR_LABELS, ("accuracy",), "QNLI", submits_names=True),
    "rte": GlueTask(_PAIR, PAIR_LABELS, ("accuracy",), "RTE", submits_names=True),
    "wnli": GlueTask(_PAIR, PAIR_LABELS[::-1], ("accuracy",), "WNLI"),
    "ax": GlueTask(("premise", "hypothesis"), MNLI_LABELS, ("mcc",), "AX", (), submits_names=True, trains=False),
}
"""By `task.name`. `mcc` is the correlation that the paper's table gives for CoLA and AX."""
STSB_RANGE = (0.0, 5.0)
