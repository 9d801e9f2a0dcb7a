"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from sharebert.config import OptimConfig


def learning_rate(step: int, config: OptimConfig, max_steps: int) -> float:
    """Rate of the update that follows `step` completed updates.

    Warm-up ends at the peak: update number `warmup_steps` (step = warmup_steps - 1) and the one after it run at
    `lr`. `linear` and `cosine` would reach 0 at step = max_steps, so that no update is wasted on a rate of 0.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.decay_fraction * max_steps))
        return config.lr * min(1.0, max(0, max_steps - step) / decay_steps)
    remaining = (max_steps - step) / max(1, max_steps - config.warmup_steps)
    remaining = min(1.0, max(0.0, remaining))
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1.0 - math.cos(math.pi * remaining))
    return config.lr * remaining
