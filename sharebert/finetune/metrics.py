"""Figures of classification and regression, by name, from 0 to 1 (correlations from -1 to 1).

Legend: N scored rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def accuracy(labels: Floats, predictions: Floats) -> float:
    """Share of equal values."""
    return float(np.mean(labels == predictions))


def f1(labels: Floats, predictions: Floats) -> float:
    """F1 of class 1; 0 where it neither occurs nor is predicted."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0))


def macro_f1(labels: Floats, predictions: Floats) -> float:
    """Mean of the classes' F1, over the classes that occur or are predicted."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="macro", zero_division=0))


def mcc(labels: Floats, predictions: Floats) -> float:
    """Matthews' correlation, for two or more classes; 0 where all labels or all predictions are equal."""
    if len(np.unique(labels)) < 2 or len(np.unique(predictions)) < 2:
        return 0.0
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(labels: Floats, predictions: Floats) -> float:
    """Pearson's correlation; 0 where either side is constant."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, labels, predictions)


def spearman(labels: Floats, predictions: Floats) -> float:
    """Spearman's rank correlation, ties at their mean rank; 0 where either side is constant."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, labels, predictions)


def _correlation(function: Callable[..., tuple[float, float]], labels: Floats, predictions: Floats) -> float:
    if len(np.unique(labels)) < 2 or len(np.unique(predictions)) < 2:
        return 0.0
    return float(function(labels, predictions)[0])


METRICS: dict[str, Callable[[Floats, Floats], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "mcc": mcc,
    "pearson": pearson,
    "spearman": spearman,
}


def score(names: Sequence[str], labels: Floats, predictions: Floats) -> dict[str, float]:
    """The figures of these names, over the rows that have a label.

    Args:
        names: keys of `METRICS`.
        labels: (rows,) class numbers or values; NaN where a row has none, which is never scored.
        predictions: (rows,), likewise; finite numbers, which `evaluate.predict` sees to.

    Returns:
        Empty where no row has a label.
    """
    is_labelled = ~np.isnan(labels)
    if not is_labelled.any():
        return {}
    return {name: METRICS[name](labels[is_labelled], predictions[is_labelled]) for name in names}
