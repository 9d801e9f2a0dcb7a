"""The settings of `sharebert deep-linear`: the paper's theory, run on deep linear networks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sharebert.config.checks import check, check_positive


@dataclass(frozen=True)
class DeepLinearConfig:
    """Deep linear networks f(x) = W_L ... W_1 x that learn a target matrix, shared and unshared."""

    run_name: str = "deep_linear"
    """Folder of curves and tables below output_dir."""
    output_dir: str = "outputs"
    """Folder that holds the run folders."""
    seed: int = 1
    """Seed of the directions of the targets' eigenvectors."""
    dimension: int = 4
    """Width of every layer, d."""
    smallest_eigenvalue: float = 0.5
    """Of the targets, in size; the eigenvalues between lie in equal ratios."""
    largest_eigenvalue: float = 2.0
    """Of the targets, in size."""
    shear: float = 0.5
    """How far the target that no shared network reaches is from symmetric; 0: its eigenvectors are orthogonal."""
    num_layers: int = 8
    """Layers in continuous time, L; even, so that a shared network cannot reach every target."""
    end_time: float = 10.0
    """Length of the runs in continuous time; a unit of time is 1 / eta updates of a small rate eta."""
    unshare_time: float = 1.0
    """Time of unsharing."""
    bound_depths: list[int] = field(default_factory=lambda: [4, 16])
    """Depths at which the bounds of discrete time are followed at the learning rates they allow."""
    bound_updates: int = 100_000
    """Updates for which they are followed."""
    depths: list[int] = field(default_factory=lambda: [2, 4, 8, 16, 32, 64])
    """Depths at which the largest stable learning rate is looked for."""
    epsilon: float = 1e-6
    """A run has arrived when R <= epsilon R(0)."""
    max_updates: int = 2000
    """A learning rate that has not arrived after so many updates does not count as stable."""

    def __post_init__(self) -> None:
        check_positive("", self, "smallest_eigenvalue", "num_layers", "end_time", "unshare_time", "max_updates")
        check(0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 below 2**63")
        check(self.dimension >= 2, "dimension", self.dimension, "at least 2")
        smallest = self.smallest_eigenvalue
        expected = f"a number above smallest_eigenvalue={smallest}"
        check(smallest < self.largest_eigenvalue < math.inf, "largest_eigenvalue", self.largest_eigenvalue, expected)
        check(0.0 <= self.shear < math.inf, "shear", self.shear, "a number from 0")
        check(self.num_layers % 2 == 0, "num_layers", self.num_layers, "an even number")
        expected = f"below end_time={self.end_time}"
        check(self.unshare_time < self.end_time, "unshare_time", self.unshare_time, expected)
        check(self.bound_updates >= 10, "bound_updates", self.bound_updates, "at least 10")
        check(0.0 < self.epsilon < 1.0, "epsilon", self.epsilon, "a number between 0 and 1")
        for name, least in (("bound_depths", 1), ("depths", 2)):
            depths = getattr(self, name)
            is_rising = sorted(set(depths)) == list(depths) and min(depths, default=2) >= 2
            expected = f"{least} or more rising whole numbers from 2"
            check(is_rising and len(depths) >= least, name, depths, expected)
