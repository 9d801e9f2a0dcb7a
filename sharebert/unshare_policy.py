"""When to unshare: pure logic over update numbers, without a model.

A policy answers one question, :meth:`UnsharePolicy.groups_for`: which groups share in update number `update`,
counted from 1. The trainer asks before each update and unshares where the answer differs from what is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from sharebert.config import TrainConfig
from sharebert.sharing import Groups, one_group, single_groups


class UnsharePolicy(ABC):
    """Decides which groups of units share at an update; its state survives a restart."""

    @abstractmethod
    def groups_for(self, update: int) -> Groups:
        """The groups in force during update number `update` (1-based)."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold, as JSON can."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`'s result."""
        if state:
            raise ValueError(f"state {state} for {type(self).__name__}: expected none")


@dataclass(frozen=True)
class NeverShare(UnsharePolicy):
    """An ordinary network."""

    num_units: int

    def groups_for(self, update: int) -> Groups:
        """Every unit by itself."""
        return single_groups(self.num_units)


@dataclass(frozen=True)
class AlwaysShare(UnsharePolicy):
    """ALBERT's cross-layer sharing."""

    num_units: int

    def groups_for(self, update: int) -> Groups:
        """All units in one group."""
        return one_group(self.num_units)


@dataclass(frozen=True)
class FixedStep(UnsharePolicy):
    """SWE-F, Algorithm 1: updates 1 to step - 1 are shared, update `step` is the first unshared one."""

    num_units: int
    step: int

    def groups_for(self, update: int) -> Groups:
        """One group before `step`, single units from it on."""
        return one_group(self.num_units) if update < self.step else single_groups(self.num_units)


def resolve_unshare_step(config: TrainConfig) -> int | None:
    """The update tau at which a `fixed` policy unshares; None for the other policies."""
    unshare = config.unshare
    if unshare.policy != "fixed":
        return None
    return unshare.step if unshare.step is not None else max(1, round(unshare.fraction * config.max_steps))


def build_policy(config: TrainConfig) -> UnsharePolicy:
    """The policy that the configuration names."""
    num_units = config.model.num_layers // config.unshare.unit_layers
    if config.unshare.policy == "never":
        return NeverShare(num_units)
    if config.unshare.policy == "always":
        return AlwaysShare(num_units)
    step = resolve_unshare_step(config)
    assert step is not None
    return FixedStep(num_units, step)
