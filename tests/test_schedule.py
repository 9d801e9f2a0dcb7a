"""Learning rates, as pure functions of the step."""

from __future__ import annotations

import math

import pytest

from sharebert.config import OptimConfig
from sharebert.schedule import learning_rate


def rates(schedule: str, **changes: object) -> list[float]:
    config = OptimConfig(lr=1.0, warmup_steps=4, schedule=schedule, **changes)  # type: ignore[arg-type]
    return [learning_rate(step, config, 20) for step in range(21)]


def test_warm_up_is_linear_and_the_first_update_is_not_wasted() -> None:
    assert rates("linear")[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_reaches_zero_after_the_last_update() -> None:
    values = rates("linear")
    assert values[20] == 0.0
    assert values[19] == pytest.approx(1 / 16)
    assert values[12] == pytest.approx(0.5)


def test_cosine_is_half_way_in_the_middle_and_zero_at_the_end() -> None:
    values = rates("cosine")
    assert values[12] == pytest.approx(0.5)
    assert values[8] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert values[20] == pytest.approx(0.0)


def test_constant_stays_at_the_peak() -> None:
    assert set(rates("constant")[4:]) == {1.0}


def test_wsd_is_constant_then_falls_linearly() -> None:
    values = rates("wsd", decay_fraction=0.2)
    assert set(values[4:17]) == {1.0}
    assert values[16:] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(0, OptimConfig(lr=1.0, warmup_steps=0), 10) == 1.0
