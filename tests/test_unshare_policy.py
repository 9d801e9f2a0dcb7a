"""When to unshare, without a model."""

from __future__ import annotations

import pytest
from engine import small_config

from sharebert.sharing import one_group, single_groups
from sharebert.unshare_policy import build_policy, resolve_unshare_step


def test_fixed_shares_tau_minus_one_updates() -> None:
    policy = build_policy(small_config(unshare={"step": 5}))
    groups = [policy.groups_for(update) for update in range(1, 9)]
    assert groups == [one_group(6)] * 4 + [single_groups(6)] * 4


def test_tau_of_one_never_shares() -> None:
    assert build_policy(small_config(unshare={"step": 1})).groups_for(1) == single_groups(6)


def test_units_are_what_is_shared() -> None:
    policy = build_policy(small_config(unshare={"step": 5, "unit_layers": 3}))
    assert policy.groups_for(1) == ((0, 2),)
    assert policy.groups_for(5) == ((0, 1), (1, 2))


def test_never_and_always_do_not_change() -> None:
    never = build_policy(small_config(unshare={"policy": "never"}))
    always = build_policy(small_config(unshare={"policy": "always"}))
    assert {never.groups_for(update) for update in (1, 6, 12)} == {single_groups(6)}
    assert {always.groups_for(update) for update in (1, 6, 12)} == {one_group(6)}


@pytest.mark.parametrize(("fraction", "step"), [(0.1, 1), (0.25, 3), (0.5, 6), (1.0, 12), (0.0, 1)])
def test_a_fraction_is_of_max_steps(fraction: float, step: int) -> None:
    assert resolve_unshare_step(small_config(unshare={"step": None, "fraction": fraction})) == step


def test_a_step_wins_over_a_fraction() -> None:
    assert resolve_unshare_step(small_config(unshare={"step": 7, "fraction": 0.1})) == 7
