"""Figures against cases computed by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sharebert.finetune.evaluate import predict
from sharebert.finetune.metrics import METRICS, score
from sharebert.finetune.problem import Problem, ScoredSplit
from sharebert.finetune.sequences import SequencesBuilder
from sharebert.update import NonFiniteError


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


# Of label and prediction: 3 true positives, 1 false positive, 2 false negatives, 2 true negatives.
LABELS = array(1, 1, 1, 1, 1, 0, 0, 0)
PREDICTIONS = array(1, 1, 1, 0, 0, 1, 0, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", 5 / 8),
        ("f1", 2 * 3 / (2 * 3 + 1 + 2)),
        ("macro_f1", (6 / 9 + 2 * 2 / (2 * 2 + 2 + 1)) / 2),
        ("mcc", (3 * 2 - 1 * 2) / math.sqrt((3 + 1) * (3 + 2) * (2 + 1) * (2 + 2))),
    ],
)
def test_figures_of_two_classes_are_those_computed_by_hand(name: str, expected: float) -> None:
    assert METRICS[name](LABELS, PREDICTIONS) == pytest.approx(expected)


def test_mcc_of_three_classes_is_gorodkins() -> None:
    # Confusion: rows are labels (3, 2, 1 of each), columns predictions (2, 3, 1); the trace is 4 of 6.
    labels, predictions = array(0, 0, 0, 1, 1, 2), array(0, 0, 1, 1, 1, 2)
    covariance = 5 * 6 - (3 * 2 + 2 * 3 + 1 * 1)
    expected = covariance / math.sqrt((36 - (9 + 4 + 1)) * (36 - (4 + 9 + 1)))
    assert METRICS["mcc"](labels, predictions) == pytest.approx(expected)
    assert METRICS["macro_f1"](labels, predictions) == pytest.approx((4 / 5 + 4 / 5 + 1) / 3)


def test_correlations_are_those_computed_by_hand() -> None:
    labels, predictions = array(1, 2, 3, 4), array(1, 4, 9, 16)
    # Deviations -1.5 -0.5 0.5 1.5 and -6.5 -3.5 1.5 8.5: products sum to 25, squares to 5 and 129.
    assert METRICS["pearson"](labels, predictions) == pytest.approx(25 / math.sqrt(5 * 129))
    assert METRICS["spearman"](labels, predictions) == pytest.approx(1.0)
    # Ties at their mean rank: ranks 1 2 3 4 against 1.5 1.5 3 4.
    assert METRICS["spearman"](labels, array(5, 5, 6, 7)) == pytest.approx(4.5 / math.sqrt(5 * 4.5))


@pytest.mark.parametrize("name", ["mcc", "pearson", "spearman"])
def test_a_constant_prediction_has_no_correlation(name: str) -> None:
    assert METRICS[name](LABELS, np.ones(8)) == 0.0
    assert METRICS[name](np.ones(8), PREDICTIONS) == 0.0


def test_a_class_that_nobody_predicts_has_f1_of_0() -> None:
    assert METRICS["f1"](array(1, 1), array(0, 0)) == 0.0
    assert METRICS["macro_f1"](array(0, 1), array(0, 0)) == pytest.approx((2 / 3 + 0) / 2)


def test_rows_without_a_label_are_never_scored() -> None:
    labels = array(math.nan, *LABELS, math.nan)
    for wrong in (0.0, 1.0):
        assert score(["accuracy"], labels, array(wrong, *PREDICTIONS, wrong)) == {"accuracy": 5 / 8}
    assert score(["accuracy"], array(math.nan), array(1)) == {}


class Echo(torch.nn.Module):
    """Gives the first token of each sequence as its output, NaN for 7."""

    config = SimpleNamespace(pad_token_id=0)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        values = input_ids[:, :1].float()
        return torch.where(values == 7, math.nan, values) * self.weight


def test_outputs_that_are_not_numbers_are_an_error_that_names_the_split() -> None:
    splits = []
    for name, first_tokens in (("good", (1, 2, 3)), ("bad", (1, 7, 3))):
        builder = SequencesBuilder()
        for token in first_tokens:
            builder.add([token, 5], 2)
        splits.append(ScoredSplit(name, True, builder.build()))
    problem = cast(Problem, SimpleNamespace(splits=splits, outputs=lambda output, mask: output))
    good, bad = (split.sequences for split in splits)
    outputs = predict(Echo(), problem, good, 2, lambda: False)
    assert outputs is not None
    assert [output.tolist() for output in outputs] == [[1.0], [2.0], [3.0]]
    with pytest.raises(NonFiniteError, match="split bad: outputs for 1 of 3 sequences are not finite numbers"):
        predict(Echo(), problem, bad, 2, lambda: False)
