"""The runs: what happens at the start, in continuous time, at the allowed learning rates, and against depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sharebert.config import ConfigError, DeepLinearConfig
from sharebert.deep_linear import bounds, targets
from sharebert.deep_linear.descent import descend, edge_and_fewest_updates
from sharebert.deep_linear.flow import integrate
from sharebert.deep_linear.network import (
    METHODS,
    SHARED,
    ZAS,
    Array,
    Method,
    adjacent_correlations,
    descent_direction,
    lemma_direction,
    loss_and_gradients,
    loss_rate,
)

ALPHA = 2.0
"""The target at which dR/dt is measured at the start is ALPHA times the identity."""
UNSHARED_LATER = "shared, then unshared"
RECORDS = 200
"""Points of a curve."""
FLOW_FLOOR, FLOW_SLACK = 1e-12, 1e-6
"""A bound is compared while it is above this part of R(0), with this relative slack: the error of the integrator."""
DESCENT_SLACK = 1e-10
"""Rounding of 10^5 updates, relative."""


@dataclass(frozen=True)
class FlowRun:
    """One network in continuous time."""

    target: str
    """`positive definite`, `indefinite` or `no root`."""
    method: str
    """Name of the method, or :data:`UNSHARED_LATER`."""
    times: Array
    losses: Array
    """R(t) / R(0), as long as `times`."""
    correlations: Array
    """Median cosine of adjacent layers' gradients, as long as `times`; NaN where all pairs have a zero gradient."""
    bound: Array | None
    """The paper's bound on `losses`; None where it states none."""
    lemma_error: float
    """Largest |gradient of a layer - Lemma 1|_F / |Phi|_F on the way; of the shared method, else NaN."""

    @property
    def closeness(self) -> float:
        """Largest R / bound; at most 1 where the bound holds."""
        assert self.bound is not None
        compared = self.bound >= FLOW_FLOOR
        return float((self.losses[compared] / self.bound[compared]).max())


@dataclass(frozen=True)
class BoundRun:
    """One network in discrete time, at the largest learning rate that its bound allows."""

    target: str
    method: str
    num_layers: int
    rate: float
    closeness: float
    """Largest R / bound over all updates."""
    lemma_error: float
    """As in :class:`FlowRun`."""
    updates: Array
    """Where the curves are kept."""
    losses: Array
    """R / R(0) there."""
    bound: Array
    """The paper's bound there."""


@dataclass(frozen=True)
class DepthSeries:
    """One method against depth."""

    method: str
    allowed: list[float]
    """The paper's allowed learning rate, by formula; empty where it states none."""
    promised: list[int]
    """Updates to epsilon that the bound promises at this rate."""
    edge: list[float]
    """The largest stable learning rate, by bisection."""
    fewest: list[int]
    """The fewest updates to epsilon found at or below it."""


def build_targets(config: DeepLinearConfig) -> dict[str, Array]:
    """The three targets, by name."""
    spectrum = (config.dimension, config.smallest_eigenvalue, config.largest_eigenvalue)
    return {
        "positive definite": targets.positive_definite(*spectrum, config.seed),
        "indefinite": targets.indefinite(*spectrum, config.seed),
        "no root": targets.without_root(*spectrum, config.shear, config.seed),
    }


def start_rates(config: DeepLinearConfig) -> dict[str, float]:
    """(dR/dt) / R at t = 0 of each method, at the target ALPHA times the identity."""
    target = ALPHA * np.eye(config.dimension)
    rates = {}
    for method in METHODS:
        weights = method.start(config.num_layers, config.dimension)
        loss, _ = loss_and_gradients(weights, target)
        rates[method.name] = loss_rate(weights, target, method.is_shared) / float(loss)
    return rates


# ---------------------------------------------------------------------- continuous time


def flow_runs(config: DeepLinearConfig) -> list[FlowRun]:
    """Every method on every target, and sharing, then unsharing."""
    runs = []
    for name in build_targets(config):
        runs += [flow_run(config, name, method) for method in METHODS]
        runs.append(flow_run(config, name, SHARED, config.unshare_time))
    return runs


def flow_run(config: DeepLinearConfig, name: str, method: Method, unshare_time: float | None = None) -> FlowRun:
    """A method on the target of that name; with `unshare_time` the layers go their own ways from then on."""
    target = build_targets(config)[name]
    times = np.linspace(0.0, config.end_time, RECORDS + 1)
    start = method.start(config.num_layers, config.dimension)
    if unshare_time is None:
        label = method.name
        states = integrate(_slope(target, method.is_shared), start, times)
    else:
        label = UNSHARED_LATER
        times = np.union1d(times, [unshare_time])
        first = int(np.searchsorted(times, unshare_time))
        shared = integrate(_slope(target, True), start, times[: first + 1])
        states = np.concatenate([shared[:-1], integrate(_slope(target, False), shared[-1], times[first:])])
    losses, correlations, errors = _measure(states, target)
    lemma_error = max(errors) if label == SHARED.name else float("nan")
    return FlowRun(
        name, label, times, losses / losses[0], correlations, _bound(config, name, label, times), lemma_error
    )


def _slope(target: Array, is_shared: bool) -> Callable[[Array], Array]:
    def slope(weights: Array) -> Array:
        _, gradients = loss_and_gradients(weights, target)
        return -np.broadcast_to(descent_direction(gradients, is_shared), weights.shape)

    return slope


def _measure(states: Array, target: Array) -> tuple[Array, Array, list[float]]:
    """R, the median correlation of adjacent layers, and the distance from Lemma 1 of each state (n, L, d, d)."""
    losses, correlations, errors = [], [], []
    for weights in states:
        loss, gradients = loss_and_gradients(weights, target)
        losses.append(float(loss))
        pairs = adjacent_correlations(gradients)
        pairs = pairs[~np.isnan(pairs)]
        correlations.append(float(np.median(pairs)) if len(pairs) else float("nan"))
        errors.append(_lemma_error(weights[0], gradients, target))
    return np.array(losses), np.array(correlations), errors


def _lemma_error(weight: Array, gradients: Array, target: Array) -> float:
    differences = gradients - lemma_direction(weight, len(gradients), target)
    return float(np.linalg.norm(differences, axis=(-2, -1)).max() / np.linalg.norm(target))


def _bound(config: DeepLinearConfig, target: str, method: str, times: Array) -> Array | None:
    if method == ZAS.name:
        return bounds.zas_flow_bound(times)
    if method == SHARED.name and target == "positive definite":
        return bounds.shared_flow_bound(times, config.num_layers, config.smallest_eigenvalue)
    return None


# ---------------------------------------------------------------------- discrete time, |Phi|_F = 1


def bound_runs(config: DeepLinearConfig) -> list[BoundRun]:
    """The bounds of discrete time followed over their first updates: shared, and ZAS on two targets."""
    named = {name: targets.unit_norm(target) for name, target in build_targets(config).items()}
    networks = [(SHARED, "positive definite"), (ZAS, "positive definite"), (ZAS, "no root")]
    runs = []
    for num_layers in config.bound_depths:
        rates = [_allowed_rate(method, num_layers, named["positive definite"]) for method, _ in networks]
        batch = np.stack([named[name] for _, name in networks])
        losses, lemma_error = _follow(networks, num_layers, batch, np.array(rates), config.bound_updates)
        updates = np.arange(config.bound_updates + 1.0)
        kept = np.unique(np.linspace(0, config.bound_updates, RECORDS + 1).astype(int))
        for (method, name), rate, run in zip(networks, rates, losses.T, strict=True):
            if method is SHARED:
                smallest = float(np.linalg.eigvalsh(named[name])[0])
                bound = bounds.shared_descent_bound(updates, rate, num_layers, smallest)
            else:
                bound = bounds.zas_descent_bound(updates, rate)
            error = lemma_error if method is SHARED else float("nan")
            closeness = float((run / bound).max())
            runs.append(
                BoundRun(name, method.name, num_layers, rate, closeness, error, updates[kept], run[kept], bound[kept])
            )
    return runs


def _follow(
    networks: list[tuple[Method, str]], num_layers: int, batch: Array, rates: Array, num_updates: int
) -> tuple[Array, float]:
    """R / R(0) before the first and after each update (updates + 1, n), and network 0's distance from Lemma 1.

    Lemma 1 is measured at a thousand updates: it says something about a single one.
    """
    dimension = batch.shape[-1]
    weights = np.stack([method.start(num_layers, dimension) for method, _ in networks], axis=1)
    losses = np.empty((num_updates + 1, len(networks)))
    every, error = max(1, num_updates // 1000), 0.0
    states = descend(weights, batch, rates, num_shared=1)
    for update in range(num_updates + 1):
        current, now, gradients = next(states)
        losses[update] = now
        if update % every == 0:
            error = max(error, _lemma_error(current[0, 0], gradients[:, 0], batch[0]))
    return losses / losses[0], error


def _allowed_rate(method: Method, num_layers: int, target: Array) -> float:
    if method is ZAS:
        return bounds.zas_allowed_rate(num_layers, float(np.linalg.norm(target)))
    values = np.linalg.eigvalsh(target)
    return bounds.shared_allowed_rate(num_layers, len(target), float(values[0]), float(values[-1]))


def depth_series(config: DeepLinearConfig) -> list[DepthSeries]:
    """Allowed and stable learning rates, and updates to epsilon, of each method on the positive definite target.

    Raises:
        ConfigError: `max_updates` is too small for any rate.
    """
    target = targets.unit_norm(build_targets(config)["positive definite"])
    smallest = float(np.linalg.eigvalsh(target)[0])
    series = []
    for method in METHODS:
        try:
            found = [
                edge_and_fewest_updates(config.epsilon, method, num_layers, target, config.max_updates)
                for num_layers in config.depths
            ]
        except ArithmeticError as error:
            message = f"max_updates={config.max_updates}: expected more; {error} ({method.name})"
            raise ConfigError(message) from error
        allowed: list[float] = []
        promised: list[int] = []
        if method in (SHARED, ZAS):
            allowed = [_allowed_rate(method, num_layers, target) for num_layers in config.depths]
            for num_layers, rate in zip(config.depths, allowed, strict=True):
                promised.append(
                    bounds.zas_promised_updates(config.epsilon, rate)
                    if method is ZAS
                    else bounds.shared_promised_updates(config.epsilon, rate, num_layers, smallest)
                )
        edge, fewest = [rate for rate, _ in found], [updates for _, updates in found]
        series.append(DepthSeries(method.name, allowed, promised, edge, fewest))
    return series


def fitted_exponent(depths: list[int], values: list[float]) -> float:
    """The power of L that fits the values best, least squares in logarithms."""
    slope, _ = np.polyfit(np.log(depths), np.log(values), 1)
    return float(slope)
