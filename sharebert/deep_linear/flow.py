"""Gradient flow, that is continuous time: Dormand and Prince's method of order 5, step size by its error of order 4."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from sharebert.deep_linear.network import Array

# Butcher's table; the last row is the solution of order 5, whose slope is the first one of the next step.
STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
"""Solution of order 5 minus that of order 4."""


def integrate(slope: Callable[[Array], Array], start: Array, times: Array, tolerance: float = 1e-10) -> Array:
    """States at `times` of dx/dt = slope(x), x = `start` at the first of them.

    Args:
        slope: same shape as the state.
        start: state at times[0].
        times: (n,), rising.
        tolerance: of a step, absolute, in every entry; a step with a larger error is taken again, smaller.

    Returns:
        (n, *start.shape)
    """
    states = [start]
    state, first, step = start, slope(start), 1e-3
    for now, end in pairwise(times):
        time = now
        while time < end:
            length = min(step, end - time)
            proposed, last, error = _step(slope, state, first, length)
            ratio = error / tolerance
            if ratio <= 1.0:
                state, first = proposed, last
                time = end if length == end - time else time + length
            # A step cut short by `end` says nothing against the longer one.
            growth = min(5.0, 0.9 * max(ratio, 1e-10) ** -0.2)
            step = max(step, length * growth) if ratio <= 1.0 else length * max(0.2, growth)
        states.append(state)
    return np.stack(states)


def _step(slope: Callable[[Array], Array], state: Array, first: Array, length: float) -> tuple[Array, Array, float]:
    """The state after one step, the slope there, and the largest error of an entry."""
    slopes = [first]
    for weights in STAGES:
        proposed = state + length * _combine(weights, slopes)
        slopes.append(slope(proposed))
    return proposed, slopes[-1], float(np.abs(length * _combine(ERROR, slopes)).max())


def _combine(weights: tuple[float, ...], slopes: list[Array]) -> Array:
    return np.tensordot(weights, np.stack(slopes), axes=1)
