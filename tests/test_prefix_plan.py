"""What a sweep saves by training its shared prefix once follows from the configurations alone."""

from __future__ import annotations

from typing import Any

import pytest

from sharebert.config import TrainConfig, flatten, from_dict, to_dict
from sharebert.prefix_plan import plan_prefixes, prefix_settings, running_order, shared_updates


def config(*, seed: int = 1, max_steps: int = 90, keep_every: int | None = None, **unshare: Any) -> TrainConfig:
    checkpoint = {"every_steps": 4, "keep_every": keep_every}
    values = {"seed": seed, "max_steps": max_steps, "unshare": unshare, "checkpoint": checkpoint}
    return from_dict(TrainConfig, values)


def watching(*, policy: str = "adaptive", **unshare: Any) -> TrainConfig:
    return config(policy=policy, **{"check_every": 10, **unshare})


def test_a_sweep_over_the_unshare_step_trains_the_longest_prefix_once() -> None:
    plan = plan_prefixes([config(step=60), config(step=30), config(step=45)])
    assert (plan.trained, plan.without_cache) == (59, 132)
    assert plan.order == (1, 2, 0)
    assert [(cell.shared, cell.starts_from, cell.trained) for cell in plan.per_cell] == [
        (59, 44, 15),
        (29, 0, 29),
        (44, 29, 15),
    ]


@pytest.mark.parametrize(
    ("other", "saved"),
    [
        (config(step=60), 29),
        (config(fraction=0.5), 29),
        (config(step=30, optimizer_state="reset"), 29),
        (config(policy="always"), 29),
        (config(policy="never"), 0),
        (config(step=60, seed=2), 0),
        (config(step=60, max_steps=91), 0),
        (config(step=60, unit_layers=2), 0),
        (config(step=60, check_every=10), 0),
        (config(step=60, prefix_cache="off"), 0),
    ],
)
def test_only_what_is_equal_up_to_the_unshare_step_is_saved(other: TrainConfig, saved: int) -> None:
    plan = plan_prefixes([other, config(step=30)])
    assert plan.without_cache - plan.trained == saved


def test_runs_that_decide_on_the_way_are_counted_with_the_least_they_share() -> None:
    assert shared_updates(watching(patience=3)) == (30, True)
    assert shared_updates(watching(patience=3, earliest_step=21)) == (50, True)
    assert shared_updates(watching(patience=3, latest_step=26)) == (25, False)
    assert shared_updates(watching(patience=20)) == (90, False)
    assert shared_updates(config(policy="always")) == (90, False)
    assert shared_updates(config(step=1)) == (0, False)
    assert shared_updates(config(step=30, unit_layers=4)) == (0, False)
    plan = plan_prefixes([watching(patience=3), config(step=21, check_every=10), watching(patience=4)])
    assert [cell.starts_from for cell in plan.per_cell] == [20, 0, 20]
    assert [cell.is_open for cell in plan.per_cell] == [True, False, True]


def test_checkpoints_that_a_run_keeps_on_the_way_serve_others() -> None:
    for keep_every, step in ((None, 0), (8, 24), (10, 20)):
        plan = plan_prefixes([watching(patience=3, keep_every=keep_every), config(policy="always", check_every=10)])
        assert [cell.starts_from for cell in plan.per_cell] == [0, step]


def test_cells_run_in_rising_unshare_step_whatever_the_order_typed() -> None:
    typed = [
        config(policy="always"),
        watching(threshold=0.3),
        config(step=60),
        watching(threshold=0.7),
        watching(policy="multi_step", threshold=0.7),
        config(step=30, seed=2),
        config(policy="never"),
        config(step=30, seed=1),
    ]
    assert running_order(typed) == [6, 5, 7, 2, 4, 3, 1, 0]


def test_settings_that_change_no_number_are_not_among_those_of_the_prefix() -> None:
    settings = prefix_settings(config(step=30), but=("data.",))
    assert not {key for key in settings if key.startswith(("data.", "checkpoint.", "logging."))}
    assert {"max_steps", "seed", "unshare.check_every", "unshare.unit_layers", "optim.schedule"} <= settings.keys()
    left_out = flatten(to_dict(config(step=30))).keys() - prefix_settings(config(step=30)).keys()
    kept_out = {key for key in left_out if not key.startswith(("checkpoint.", "logging."))}
    assert kept_out == {
        *("run_name", "output_dir", "max_run_minutes", "evaluation.every_steps"),
        *("data.cache_dir", "data.num_proc", "data.hf_streaming", "engine.num_workers", "engine.group_timeout_minutes"),
        *("unshare.policy", "unshare.step", "unshare.fraction", "unshare.threshold", "unshare.patience"),
        *("unshare.earliest_step", "unshare.latest_step", "unshare.optimizer_state", "unshare.initial"),
        "unshare.prefix_cache",
    }
