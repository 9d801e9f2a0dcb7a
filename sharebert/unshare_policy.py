"""When to unshare: pure logic over update numbers and gradient correlations, without a model.

A policy answers one question, :meth:`UnsharePolicy.groups_for`: which groups share in update number `update`,
counted from 1. The trainer asks before each update and unshares where the answer differs from what is. At a check
the trainer measures the correlation of every pair of adjacent units and hands it to :meth:`UnsharePolicy.observe`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sharebert.config import TrainConfig, UnshareConfig
from sharebert.sharing import Groups, one_group, single_groups


@dataclass(frozen=True)
class Check:
    """Correlations of adjacent units, measured in one update."""

    update: int
    correlations: list[float | None]
    """One for each pair of adjacent units; None where a gradient was zero."""


class UnsharePolicy:
    """Never, always or at a fixed update; and what the policies that watch correlations have in common.

    Checks change nothing here: under these policies they are a diagnostic.
    """

    def __init__(self, num_units: int, config: UnshareConfig, unshare_step: int | None = None) -> None:
        self.num_units = num_units
        self.config = config
        self.unshare_step = unshare_step
        self.last_check: Check | None = None

    def groups_for(self, update: int) -> Groups:
        """The groups in force during update number `update` (1-based)."""
        if self.config.policy == "never" or (self.unshare_step is not None and update >= self.unshare_step):
            return single_groups(self.num_units)
        return one_group(self.num_units)

    def check_is_due(self, update: int) -> bool:
        """Whether correlations are measured in this update."""
        every = self.config.check_every
        return every is not None and self.num_units > 1 and update % every == 0

    def observe(self, update: int, correlations: Sequence[float]) -> None:
        """Take in the correlations measured in `update`; NaN stands for an absent one."""
        absent_as_none = [None if math.isnan(value) else value for value in correlations]
        self.last_check = Check(update, absent_as_none)
        self._decide(self.last_check)

    def _decide(self, check: Check) -> None:
        """Change the groups of later updates."""

    def figures(self, step: int) -> dict[str, Any]:
        """Figures of the check in update `step`, for `metrics.jsonl`; empty when there was none."""
        check = self.last_check
        if check is None or check.update != step:
            return {}
        measured = [value for value in check.correlations if value is not None]
        values: dict[str, Any] = {
            "share/correlations": check.correlations,
            "share/groups": [list(group) for group in self.groups_for(step + 1)],
            "share/pairs_below_threshold": sum(value < self.config.threshold for value in measured),
        }
        if measured:
            values["share/correlation_mean"] = sum(measured) / len(measured)
            values["share/correlation_min"] = min(measured)
        return values

    def describe_check(self) -> str:
        """The last check in a few words, for the progress line; empty before the first."""
        if self.last_check is None:
            return ""
        measured = [value for value in self.last_check.correlations if value is not None]
        above = sum(value >= self.config.threshold for value in measured)
        return f"{above}/{len(measured)} pairs above {self.config.threshold:g}"

    def explain(self, groups: Groups) -> str:
        """Why layers share in `groups` at the end of a run; empty where nothing is to be explained."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold, as JSON can."""
        return {"last_check": None if self.last_check is None else asdict(self.last_check)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`'s result."""
        check = state["last_check"]
        self.last_check = None if check is None else Check(**check)


class WatchingPolicy(UnsharePolicy):
    """Base of the policies that decide by correlations: holds the groups decided on so far."""

    def __init__(self, num_units: int, config: UnshareConfig) -> None:
        super().__init__(num_units, config)
        self.groups = one_group(num_units)

    def groups_for(self, update: int) -> Groups:
        """The groups decided on; single units from `latest_step` on."""
        latest = self.config.latest_step
        return single_groups(self.num_units) if latest is not None and update >= latest else self.groups

    def _counts(self, check: Check) -> bool:
        """Whether a check may lead to a decision."""
        return check.update >= self.config.earliest_step and len(self.groups) < self.num_units

    def explain(self, groups: Groups) -> str:
        """The last correlations, where something still shares."""
        if len(groups) == self.num_units:
            return ""
        if self.last_check is None:
            every = self.config.check_every
            return f"still shared in {len(groups)} group(s): no check so far (unshare.check_every={every})"
        shown = " ".join("-" if value is None else f"{value:.2f}" for value in self.last_check.correlations)
        return (
            f"still shared in {len(groups)} group(s): at the last check (update {self.last_check.update}) "
            f"{self.describe_check()}; correlations of adjacent units: {shown}"
        )

    def state_dict(self) -> dict[str, Any]:
        """As the base class, and the groups."""
        return {**super().state_dict(), "groups": [list(group) for group in self.groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`'s result."""
        super().load_state_dict(state)
        self.groups = tuple((first, stop) for first, stop in state["groups"])


class AdaptivePolicy(WatchingPolicy):
    """SWE-A: unshare all when more than half of the pairs are below the threshold at `patience` checks in a row."""

    def __init__(self, num_units: int, config: UnshareConfig) -> None:
        super().__init__(num_units, config)
        self.checks_in_a_row = 0

    def _decide(self, check: Check) -> None:
        measured = [value for value in check.correlations if value is not None]
        if not self._counts(check) or not measured:
            return
        below = sum(value < self.config.threshold for value in measured)
        self.checks_in_a_row = self.checks_in_a_row + 1 if below > len(measured) / 2 else 0
        if self.checks_in_a_row >= self.config.patience:
            self.groups = single_groups(self.num_units)

    def describe_check(self) -> str:
        """Pairs above the threshold, and how far the row has come."""
        text = super().describe_check()
        return f"{text}, {self.checks_in_a_row}/{self.config.patience} checks" if text else ""

    def state_dict(self) -> dict[str, Any]:
        """As the base class, and the row."""
        return {**super().state_dict(), "checks_in_a_row": self.checks_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`'s result."""
        super().load_state_dict(state)
        self.checks_in_a_row = int(state["checks_in_a_row"])


class MultiStepPolicy(WatchingPolicy):
    """SWE-M, Algorithm 2: split a group between two units whose correlation stays below the threshold.

    Every boundary inside a group has a counter of its own checks in a row. At a check each group splits at most
    once, at the least correlated of the boundaries that are due; the counters of the others go on.
    """

    def __init__(self, num_units: int, config: UnshareConfig) -> None:
        super().__init__(num_units, config)
        self.rows = [0] * (num_units - 1)
        """For the boundary between units i and i + 1, checks in a row below the threshold."""

    def _decide(self, check: Check) -> None:
        if not self._counts(check):
            return
        for boundary, value in enumerate(check.correlations):
            if value is not None:
                self.rows[boundary] = self.rows[boundary] + 1 if value < self.config.threshold else 0
        groups: list[tuple[int, int]] = []
        for first, stop in self.groups:
            due = [
                (value, boundary)
                for boundary in range(first, stop - 1)
                if (value := check.correlations[boundary]) is not None and self.rows[boundary] >= self.config.patience
            ]
            cut = min(due)[1] + 1 if due else stop
            groups += [(first, cut)] if cut == stop else [(first, cut), (cut, stop)]
        self.groups = tuple(groups)

    def describe_check(self) -> str:
        """Pairs above the threshold, the longest row of a boundary still shared over, and the number of groups."""
        text = super().describe_check()
        if not text:
            return ""
        assert self.last_check is not None
        groups = self.groups_for(self.last_check.update + 1)
        inside = [boundary for first, stop in groups for boundary in range(first, stop - 1)]
        longest = max((self.rows[boundary] for boundary in inside), default=0)
        return f"{text}, {longest}/{self.config.patience} checks, {len(groups)} groups"

    def state_dict(self) -> dict[str, Any]:
        """As the base class, and the rows."""
        return {**super().state_dict(), "rows": list(self.rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`'s result."""
        super().load_state_dict(state)
        self.rows = [int(row) for row in state["rows"]]


def describe_least_checks(patience: int, check_every: int, earliest_step: int) -> str:
    """What a decision by correlations takes at the least, for a run that is too short for it."""
    checks = f"{patience} checks in a row" if patience > 1 else "a check"
    after = f", none before update {earliest_step:,}" if earliest_step else ""
    return f"{checks}, one every {check_every:,} updates{after}, and then an update"


def resolve_unshare_step(config: TrainConfig) -> int | None:
    """The update tau at which a `fixed` policy unshares; None for the other policies."""
    unshare = config.unshare
    if unshare.policy != "fixed":
        return None
    return unshare.step if unshare.step is not None else max(1, round(unshare.fraction * config.max_steps))


def build_policy(config: TrainConfig) -> UnsharePolicy:
    """The policy that the configuration names."""
    num_units = config.model.num_layers // config.unshare.unit_layers
    if config.unshare.policy == "adaptive":
        return AdaptivePolicy(num_units, config.unshare)
    if config.unshare.policy == "multi_step":
        return MultiStepPolicy(num_units, config.unshare)
    return UnsharePolicy(num_units, config.unshare, resolve_unshare_step(config))
