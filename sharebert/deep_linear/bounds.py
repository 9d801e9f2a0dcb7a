"""The paper's bounds on R and the learning rates they allow (arXiv 2110.03848, section 3), as formulas.

Names: L layers, d the width, eta the learning rate, lambda the eigenvalues of a positive definite target Phi.
"""

from __future__ import annotations

import math

import numpy as np

from sharebert.deep_linear.network import Array

UPDATES_ORDER = {"shared": 1, "unshared, ZAS": 3}
"""Power of L in the number of updates that each method's bound promises at its allowed rate."""
RATE_ORDER = {"shared": -2, "unshared, ZAS": -3}
"""Power of L in the allowed rate."""


def zas_flow_bound(times: Array) -> Array:
    """R(t) / R(0) <= exp(-2t) in continuous time, for any target."""
    return np.exp(-2.0 * times)


def shared_flow_bound(times: Array, num_layers: int, smallest: float) -> Array:
    """R(t) / R(0) <= exp(-2 L min(1, lambda_min^2) t) in continuous time, for a positive definite target."""
    return np.exp(-2.0 * num_layers * min(1.0, smallest**2) * times)


def zas_allowed_rate(num_layers: int, norm: float) -> float:
    """Largest eta: min(1 / (4 L^3 xi^6), 1 / (144 L^2 xi^4)), xi = max(2 |Phi|_F, 3 / sqrt(L), 1)."""
    xi = max(2.0 * norm, 3.0 / math.sqrt(num_layers), 1.0)
    return min(1.0 / (4.0 * num_layers**3 * xi**6), 1.0 / (144.0 * num_layers**2 * xi**4))


def shared_allowed_rate(num_layers: int, dimension: int, smallest: float, largest: float) -> float:
    """Largest eta: min(lambda_min^2, 1) / (4 sqrt(d) L^2 max(lambda_max^4, 1))."""
    return min(smallest**2, 1.0) / (4.0 * math.sqrt(dimension) * num_layers**2 * max(largest**4, 1.0))


def zas_descent_bound(updates: Array, rate: float) -> Array:
    """R / R(0) <= (1 - eta / 2)^t after t updates."""
    return np.exp(updates * math.log1p(-rate / 2.0))


def shared_descent_bound(updates: Array, rate: float, num_layers: int, smallest: float) -> Array:
    """R / R(0) <= exp(-(2L - 2) min(lambda_min^2, 1) eta t) after t updates, for a positive definite target."""
    return np.exp(-(2 * num_layers - 2) * min(smallest**2, 1.0) * rate * updates)


def zas_promised_updates(epsilon: float, rate: float) -> int:
    """Updates after which :func:`zas_descent_bound` is at most `epsilon`."""
    return math.ceil(math.log(epsilon) / math.log1p(-rate / 2.0))


def shared_promised_updates(epsilon: float, rate: float, num_layers: int, smallest: float) -> int:
    """Updates after which :func:`shared_descent_bound` is at most `epsilon`."""
    return math.ceil(-math.log(epsilon) / ((2 * num_layers - 2) * min(smallest**2, 1.0) * rate))
