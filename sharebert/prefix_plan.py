"""Which runs of a sweep have a shared prefix in common, in which order they run, and what that saves.

Pure logic over configurations: two runs that differ only in when they first unshare are equal up to there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sharebert.config import TrainConfig, flatten, to_dict
from sharebert.unshare_policy import resolve_unshare_step

OFF = "off"
"""`unshare.prefix_cache` of a run that neither starts from a prefix nor leaves one."""

NOT_IN_PREFIX = (
    *("run_name", "output_dir", "max_run_minutes", "checkpoint.", "evaluation.every_steps", "logging."),
    *("data.cache_dir", "data.num_proc", "data.hf_streaming", "engine.num_workers", "engine.group_timeout_minutes"),
    *("unshare.policy", "unshare.step", "unshare.fraction", "unshare.threshold", "unshare.patience"),
    *("unshare.earliest_step", "unshare.latest_step", "unshare.optimizer_state", "unshare.initial"),
    "unshare.prefix_cache",
)
"""Keys (a trailing dot: whole groups) that change no number before the first unsharing. `unshare.check_every` is not
among them: a check step rounds differently on some machines. Nor is `evaluation.max_sequences`: the figures of the
prefix become the run's own."""


def prefix_settings(config: TrainConfig, but: Sequence[str] = ()) -> dict[str, Any]:
    """The settings that runs with the same shared prefix have in common, flat; without :data:`NOT_IN_PREFIX` and `but`.

    max_steps is one of them: the learning rate depends on it.
    """
    left_out = (*NOT_IN_PREFIX, *but)
    return {
        key: value
        for key, value in flatten(to_dict(config)).items()
        if not any(key.startswith(name) if name.endswith(".") else key == name for name in left_out)
    }


@dataclass(frozen=True)
class PlannedCell:
    """The shared phase of one run of a sweep."""

    shared: int
    """Updates before its first unsharing."""
    starts_from: int
    """How many of them an earlier run of the sweep has trained; 0: none."""
    is_open: bool
    """Whether the run decides on the way when to unshare: `shared` is then the least it can be."""

    @property
    def trained(self) -> int:
        """Shared updates that this run trains itself."""
        return self.shared - self.starts_from


@dataclass(frozen=True)
class PrefixPlan:
    """Which shared updates a sweep trains; where a cell is open, the least."""

    per_cell: tuple[PlannedCell, ...]
    """In the order of the configurations given."""
    order: tuple[int, ...]
    """Indexes of the configurations in the order in which they run."""

    @property
    def trained(self) -> int:
        """Shared updates that are trained."""
        return sum(cell.trained for cell in self.per_cell)

    @property
    def without_cache(self) -> int:
        """Shared updates that would be trained if every run trained its own."""
        return sum(cell.shared for cell in self.per_cell)


def plan_prefixes(configs: Sequence[TrainConfig]) -> PrefixPlan:
    """What the sweep over `configs` trains of the shared phases, and in which order; from the settings alone."""
    order = running_order(configs)
    left: dict[str, set[int]] = {}  # steps of the checkpoints that runs with the same prefix have left so far
    cells: dict[int, PlannedCell] = {}
    for index in order:
        config = configs[index]
        shared, is_open = shared_updates(config)
        steps = left.setdefault(repr(sorted(prefix_settings(config).items())), set())
        usable = [step for step in steps if step <= shared and config.unshare.prefix_cache != OFF]
        cells[index] = PlannedCell(shared, max(usable, default=0), is_open)
        if config.unshare.prefix_cache != OFF:
            steps.update(_steps_left(config, shared, is_open))
    return PrefixPlan(tuple(cells[index] for index in range(len(configs))), tuple(order))


def _steps_left(config: TrainConfig, shared: int, is_open: bool) -> set[int]:
    """Steps of the shared checkpoints that a run keeps."""
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every
    on_the_way = range(math.lcm(every, kept), shared + 1, math.lcm(every, kept)) if every and kept else ()
    return {*on_the_way, *(() if is_open else (shared,))}


def shared_updates(config: TrainConfig) -> tuple[int, bool]:
    """Updates before the first unsharing, and whether that is only the least: where correlations decide."""
    unshare = config.unshare
    if unshare.policy == "never" or config.model.num_layers == unshare.unit_layers:
        return 0, False
    if (step := resolve_unshare_step(config)) is not None:
        return step - 1, False
    if unshare.policy == "always" or unshare.check_every is None:
        return config.max_steps, False
    # The earliest decision is taken in the patience-th check that counts, and carried out in the update after it.
    first = max(1, -(-unshare.earliest_step // unshare.check_every))
    decided = (first + unshare.patience - 1) * unshare.check_every
    latest = config.max_steps if unshare.latest_step is None else unshare.latest_step - 1
    return min(decided, latest, config.max_steps), decided < min(latest, config.max_steps)


def running_order(configs: Sequence[TrainConfig]) -> list[int]:
    """Indexes of `configs` in rising unshare step, so that every run finds the prefix that it continues.

    Runs that watch correlations come after those that unshare at a fixed update, the more easily moved first: each
    leaves a checkpoint before its split, which those that split later start from. Whoever shares to the end is last.
    Equal ones stay in the order given.
    """

    def place(index: int) -> tuple[float, ...]:
        config, unshare = configs[index], configs[index].unshare
        if unshare.policy == "never":
            return (0.0, 1.0)
        if (step := resolve_unshare_step(config)) is not None:
            return (0.0, float(step))
        if unshare.policy == "always":
            return (2.0,)
        is_adaptive = unshare.policy == "adaptive"  # waits for half of the pairs, multi_step for one
        return (1.0, -unshare.threshold, unshare.patience, unshare.earliest_step, is_adaptive)

    return sorted(range(len(configs)), key=place)
