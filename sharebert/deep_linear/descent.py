"""Gradient descent, that is discrete time, on a batch of networks; and the largest learning rate that is stable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from sharebert.deep_linear.network import Array, Method, descent_direction, loss_and_gradients

FRACTIONS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of the largest stable rate, tried for the fewest updates: at the edge itself the loss hardly falls."""
CLIMB = 1.25
"""From one rate to the next on the way up to the edge."""


def descend(weights: Array, targets: Array, rates: Array, num_shared: int) -> Iterator[tuple[Array, Array, Array]]:
    """Train n networks side by side, without end; yields before each update, so first for the start.

    Args:
        weights: (L, n, d, d); left as they are.
        targets: (n, d, d) or (d, d).
        rates: (n,), the learning rate of each network.
        num_shared: so many of the networks, the first ones, take the mean gradient.

    Yields:
        weights (L, n, d, d), the same array each time; their losses (n,) and gradients (L, n, d, d).
    """
    weights = weights.copy()
    steps = np.asarray(rates)[:, None, None]
    while True:
        losses, gradients = loss_and_gradients(weights, targets)
        yield weights, losses, gradients
        weights[:, :num_shared] -= steps[:num_shared] * descent_direction(gradients[:, :num_shared], is_shared=True)
        weights[:, num_shared:] -= steps[num_shared:] * gradients[:, num_shared:]


def updates_to(
    epsilon: float, method: Method, num_layers: int, target: Array, rates: Array, max_updates: int
) -> int | None:
    """Updates until the first of the networks, one for each rate, has R <= epsilon R(0).

    A network whose R rises at any update is out. None: all are out, or `max_updates` were not enough.
    """
    start = method.start(num_layers, len(target))
    weights = np.repeat(start[:, None], len(rates), axis=1)
    networks = descend(weights, target, rates, len(rates) if method.is_shared else 0)
    _, losses, _ = next(networks)
    goal = epsilon * losses
    falls = np.ones(len(rates), dtype=bool)
    with np.errstate(over="ignore", invalid="ignore"):  # those that are out run on into infinity
        for update in range(1, max_updates + 1):
            before, (_, losses, _) = losses, next(networks)
            falls &= losses <= before
            if (falls & (losses <= goal)).any():
                return update
            if not falls.any():
                return None
    return None


def largest_stable(is_stable: Callable[[float], bool], guess: float, precision: float = 0.01) -> float:
    """The rate at which `is_stable` first turns false, by bisection, to a factor of 1 + `precision`, from below.

    From `guess` it goes down by halves to a stable rate, then up in steps small enough not to leap over the edge:
    beyond it single rates can be stable again, as eta = 1 for ZAS, whose first update then is W_L = Phi.
    """
    low = guess
    while not is_stable(low):
        low /= 2.0
        if low < 1e-12:
            raise ArithmeticError(f"no learning rate from {guess:g} down to {low:g} is stable")
    while is_stable(high := CLIMB * low):
        low = high
    while high > low * (1.0 + precision):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return low


def edge_and_fewest_updates(
    epsilon: float, method: Method, num_layers: int, target: Array, max_updates: int
) -> tuple[float, int]:
    """The largest stable rate of a method, and the fewest updates to R <= epsilon R(0) over :data:`FRACTIONS` of it.

    Stable: R falls at every update until it is there, within `max_updates`.
    """

    def updates(*rates: float) -> int | None:
        return updates_to(epsilon, method, num_layers, target, np.array(rates), max_updates)

    edge = largest_stable(lambda rate: updates(rate) is not None, guess=0.5 / num_layers)
    fewest = updates(*(fraction * edge for fraction in FRACTIONS))
    assert fewest is not None  # the edge itself is stable
    return edge, fewest
