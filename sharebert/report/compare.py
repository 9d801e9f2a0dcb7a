"""Figures of arms: finals with their spread, paired differences, updates to a target, mean curves. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sharebert.config import ConfigError, near_match
from sharebert.report.arms import Arm, by_preset
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
    """Of all values; None without any, and where one is NaN: the mean of the others would pass for that of all."""
    known = list(values)
    if not known or any(map(math.isnan, known)):
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def final(arm: Arm, figure: Figure) -> Spread | None:
    """Over the arm's complete runs, each at its last evaluation."""
    return spread(figure(run.evaluations[-1]) for run in arm.complete)


def pair_by_seed(runs: Sequence[Run], references: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Each run with the reference's run of the same seed, where there is one.

    Equal seeds have the same data order and masks, so the spread of a difference is smaller than that of either.
    """
    others = {run.settings.seed: run for run in references}
    return [(run, others[run.settings.seed]) for run in runs if run.settings.seed in others]


def paired_difference(arm: Arm, reference: Arm, figure: Figure) -> Spread | None:
    """Final figure minus that of the reference's run of the same seed, over the seeds that both completed."""
    pairs = pair_by_seed(arm.complete, reference.complete)
    return spread(figure(run.evaluations[-1]) - figure(other.evaluations[-1]) for run, other in pairs)


def choose_baseline(arms: Sequence[Arm], name: str | None) -> Arm | None:
    """The arm that others are measured against.

    Args:
        arms: all of them.
        name: of an arm or of one of its runs. None: of the arms that never share, one with a complete run where there
            is one, of those that with most updates, then most complete runs, then the lowest final loss.

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
        final_loss = math.inf if loss is None else loss.mean
        return (not arm.complete, -arm.config.max_steps, -len(arm.complete), final_loss)

    return min(never, key=rank, default=None)


def _without_unsharing(arm: Arm) -> dict[str, object]:
    return {key: value for key, value in arm.settings.items() if not key.startswith("unshare.")}


def find_twin(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """The arm that never shares and is equal to `arm` in everything else, the number of updates included."""
    if arm.policy == "never":
        return None
    own = _without_unsharing(arm)
    never = [other for other in arms if other.policy == "never" and _without_unsharing(other) == own]
    return max(never, key=lambda other: len(other.complete), default=None)


def differing_settings(arm: Arm, other: Arm) -> list[str]:
    """Settings in which two arms differ, but for unsharing and the number of updates."""
    one, two = _without_unsharing(arm), _without_unsharing(other)
    return sorted(by_preset({key for key in one | two if one.get(key) != two.get(key)} - {"max_steps"}))


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
class Goal:
    """What a run is measured against: the final loss of the baseline's run of its seed, and where that came to it."""

    loss: float
    reached: Reached
    is_of_seed: bool
    """Else the mean over the baseline's seeds stands in."""


def find_goal(seed: int, baseline: Arm) -> Goal | None:
    """For the runs of a seed; None: no run of the baseline is complete."""
    goals = {run.settings.seed: _goal_of(run) for run in baseline.complete}
    if seed in goals or not goals:
        return goals.get(seed)
    updates = statistics.fmean(goal.reached.updates for goal in goals.values())
    hours = statistics.fmean(goal.reached.hours for goal in goals.values())
    return Goal(statistics.fmean(goal.loss for goal in goals.values()), Reached(updates, hours), is_of_seed=False)


def _goal_of(run: Run) -> Goal:
    loss = run.evaluations[-1].loss
    reached = first_at_or_below(run.evaluations, loss)
    assert reached is not None  # at its last evaluation, if not before
    return Goal(loss, reached, is_of_seed=True)


@dataclass(frozen=True)
class Race:
    """A complete run and its goal."""

    run: Run
    goal: Goal
    reached: Reached | None

    @property
    def shortfall(self) -> float:
        """Its final loss minus the goal's."""
        return self.run.evaluations[-1].loss - self.goal.loss

    @property
    def updates_ratio(self) -> float:
        """The baseline's updates over the run's; NaN where the run does not get there."""
        return self.goal.reached.updates / self.reached.updates if self.reached and self.reached.updates else math.nan

    @property
    def hours_ratio(self) -> float:
        """The same of hours; NaN also where they are unknown."""
        return self.goal.reached.hours / self.reached.hours if self.reached and self.reached.hours else math.nan


@dataclass(frozen=True)
class SpeedUp:
    """How soon the complete runs of an arm come down to the baseline's final loss."""

    arm: Arm
    races: tuple[Race, ...]
    """By seed."""
    differs_in: list[str]
    """Settings besides unsharing and the number of updates in which the arm is not as the baseline."""

    @property
    def reached(self) -> list[Reached]:
        """Of the runs that get there."""
        return [race.reached for race in self.races if race.reached is not None]

    @property
    def updates(self) -> Spread | None:
        """Until a run gets there, over those that do."""
        return spread(found.updates for found in self.reached)

    @property
    def hours(self) -> Spread | None:
        """The same in hours."""
        return spread(found.hours for found in self.reached)

    @property
    def updates_ratio(self) -> Spread | None:
        """Seed by seed; None unless every complete run gets there. So is `hours_ratio`."""
        return spread(race.updates_ratio for race in self.races)

    @property
    def hours_ratio(self) -> Spread | None:
        """The baseline's hours over the run's."""
        return spread(race.hours_ratio for race in self.races)

    @property
    def shortfall(self) -> Spread | None:
        """Over the runs that do not get there."""
        return spread(race.shortfall for race in self.races if race.reached is None)


def speed_up(arm: Arm, baseline: Arm) -> SpeedUp:
    """Measure the complete runs of `arm`, each against the baseline's run of its seed and by the same rule."""
    goals = [(run, find_goal(run.settings.seed, baseline)) for run in arm.complete]
    races = [Race(run, goal, first_at_or_below(run.evaluations, goal.loss)) for run, goal in goals if goal is not None]
    return SpeedUp(arm, tuple(races), differing_settings(arm, baseline))


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


def difference_curve(pairs: Sequence[tuple[Run, Run]], figure: Figure) -> Curve:
    """The first run's figure minus the second's, at the steps that all of these runs were evaluated."""
    by_step = [
        ({p.step: figure(p) for p in run.evaluations}, {p.step: figure(p) for p in other.evaluations})
        for run, other in pairs
    ]
    steps = sorted(set.intersection(*({*a} & {*b} for a, b in by_step))) if by_step else []
    values = [[a[step] - b[step] for a, b in by_step] for step in steps]
    nowhere = [math.nan] * len(steps)
    return Curve(steps, nowhere, *([choose(row) for row in values] for choose in (statistics.fmean, min, max)))
