"""Figures of arms: finals with their spread, paired differences, updates to a target, mean curves. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sharebert.config import ConfigError, near_match
from sharebert.report.arms import Arm
from sharebert.report.read import Evaluation, Run

Figure = Callable[[Evaluation], float]
"""Picks a figure of an evaluation."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1); of one value the deviation is None."""

    mean: float
    deviation: float | None
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """Of all values that are numbers; None without any."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def final(arm: Arm, figure: Figure) -> Spread | None:
    """Over the arm's complete runs, each at its last evaluation."""
    return spread(figure(run.evaluations[-1]) for run in arm.complete)


def paired_difference(arm: Arm, reference: Arm, figure: Figure) -> Spread | None:
    """Final figure minus that of the reference's run of the same seed, over the seeds that both completed.

    Equal seeds have the same data order and masks, so the spread of the difference is smaller than that of either.
    """
    others = {run.settings.seed: run for run in reference.complete}
    pairs = [(run, others[run.settings.seed]) for run in arm.complete if run.settings.seed in others]
    return spread(figure(run.evaluations[-1]) - figure(other.evaluations[-1]) for run, other in pairs)


def choose_baseline(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """The arm that others are measured against.

    Args:
        arms: all of them.
        name: of an arm or of one of its runs. None: of the arms that never share, that with most updates, then most
            complete runs, then the lowest final loss.

    Returns:
        None where `name` is and no arm never shares.

    Raises:
        ConfigError: no such arm or run.
    """
    if name is not None:
        known = {arm.name: arm for arm in arms} | {run.name: arm for arm in arms for run in arm.runs}
        if name not in known:
            expected = f"the name of an arm or a run with figures: {', '.join(known)}"
            raise ConfigError(f"--baseline={name!r}: expected {expected}{near_match(name, known)}")
        return known[name]
    never = [arm for arm in arms if arm.policy == "never"]

    def rank(arm: Arm) -> tuple[float, ...]:
        loss = final(arm, lambda point: point.loss)
        return (-arm.config.max_steps, -len(arm.complete), math.inf if loss is None else loss.mean)

    return min(never, key=rank, default=None)


def find_twin(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """The arm that never shares and is equal to `arm` in everything else, the number of updates included."""

    def other_settings(arm: Arm) -> dict[str, object]:
        return {key: value for key, value in arm.settings.items() if not key.startswith("unshare.")}

    if arm.policy == "never":
        return None
    never = [other for other in arms if other.policy == "never" and other_settings(other) == other_settings(arm)]
    return max(never, key=lambda other: len(other.complete), default=None)


@dataclass(frozen=True)
class Reached:
    """Where a run first came down to a loss."""

    updates: float
    hours: float


def first_at_or_below(evaluations: Sequence[Evaluation], target: float) -> Reached | None:
    """Where the held-out loss first is at or below `target`; None: nowhere.

    The first evaluation at or below it counts, and between that and the one before, loss and hours are taken to be
    linear in updates.
    """
    if evaluations and evaluations[0].loss <= target:
        return Reached(evaluations[0].step, evaluations[0].hours)
    for before, after in pairwise(evaluations):
        if after.loss <= target:
            part = (before.loss - target) / (before.loss - after.loss)
            hours = before.hours + part * (after.hours - before.hours)
            return Reached(before.step + part * (after.step - before.step), hours)
    return None


@dataclass(frozen=True)
class SpeedUp:
    """How soon the runs of an arm come down to the baseline's final loss."""

    arm: Arm
    updates: Spread | None
    """Over the runs that reach it."""
    hours: Spread | None
    num_runs: int
    """Runs that could: those that are complete, or reached it before."""
    shortfall: Spread | None
    """Where none reaches it: loss of the best evaluation minus the target."""
    updates_ratio: float | None
    """Baseline's updates over the arm's mean; None unless every run reaches the target."""
    hours_ratio: float | None


def speed_up(arm: Arm, baseline: Arm, target: float) -> SpeedUp:
    """Measure `arm` against `target`, the mean of the baseline's final losses."""
    reached = {run.name: first_at_or_below(run.evaluations, target) for run in arm.runs}
    runs = [run for run in arm.runs if run.is_complete or reached[run.name] is not None]
    there = [found for run in runs if (found := reached[run.name]) is not None]
    updates, hours = spread(found.updates for found in there), spread(found.hours for found in there)
    baseline_hours = final(baseline, lambda point: point.hours)
    all_reach = bool(there) and len(there) == len(runs)
    return SpeedUp(
        arm,
        updates,
        hours,
        len(runs),
        None if there else spread(min(point.loss for point in run.evaluations) - target for run in runs),
        baseline.config.max_steps / updates.mean if all_reach and updates and updates.mean else None,
        baseline_hours.mean / hours.mean if all_reach and baseline_hours and hours and hours.mean else None,
    )


@dataclass(frozen=True)
class Curve:
    """A figure of an arm along its runs: mean, lowest and highest over the seeds, at the steps all were evaluated."""

    steps: list[int]
    hours: list[float]
    mean: list[float]
    lowest: list[float]
    highest: list[float]


def mean_curve(runs: Sequence[Run], figure: Figure) -> Curve:
    """Of the runs given; steps at which one of them was not evaluated are left out."""
    by_step = [{point.step: point for point in run.evaluations} for run in runs]
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    values = [[figure(points[step]) for points in by_step] for step in steps]
    hours = [statistics.fmean(points[step].hours for points in by_step) for step in steps]
    return Curve(steps, hours, *([choose(row) for row in values] for choose in (statistics.fmean, min, max)))


def difference_curve(arm: Arm, reference: Arm, figure: Figure) -> Curve:
    """The figure minus the reference's, paired by seed, at the steps that all of these runs were evaluated."""
    runs = arm.complete or arm.runs
    others = {run.settings.seed: run for run in (reference.complete or reference.runs)}
    pairs = [(run, others[run.settings.seed]) for run in runs if run.settings.seed in others]
    by_step = [
        ({p.step: figure(p) for p in run.evaluations}, {p.step: figure(p) for p in other.evaluations})
        for run, other in pairs
    ]
    steps = sorted(set.intersection(*({*a} & {*b} for a, b in by_step))) if by_step else []
    values = [[a[step] - b[step] for a, b in by_step] for step in steps]
    nowhere = [math.nan] * len(steps)
    return Curve(steps, nowhere, *([choose(row) for row in values] for choose in (statistics.fmean, min, max)))
