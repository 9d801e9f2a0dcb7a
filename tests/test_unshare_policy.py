"""When to unshare, without a model."""

from __future__ import annotations

import json
import random

import pytest
from engine import small_config

from sharebert.sharing import Groups, one_group, single_groups
from sharebert.unshare_policy import UnsharePolicy, build_policy, resolve_unshare_step


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


# ---------------------------------------------------------------------- policies that watch correlations

NAN = float("nan")


def watching(policy: str, num_layers: int = 6, **unshare: object) -> UnsharePolicy:
    """A policy that checks every 10 updates, threshold 0.5, patience 3."""
    values = {"policy": policy, "check_every": 10, **unshare}
    return build_policy(small_config(model={"num_layers": num_layers}, unshare=values))


def groups_after(policy: UnsharePolicy, checks: list[list[float]], start: int = 10) -> list[Groups]:
    """The groups in force after each of a row of checks, 10 updates apart."""
    groups = []
    for number, correlations in enumerate(checks):
        update = start + 10 * number
        assert policy.check_is_due(update)
        policy.observe(update, correlations)
        groups.append(policy.groups_for(update + 1))
    return groups


LOW, HIGH = [0.4] * 5, [0.9] * 5
SHARED, SINGLE = one_group(6), single_groups(6)


def test_checks_fall_on_multiples_of_check_every_only() -> None:
    policy = watching("adaptive")
    assert [update for update in range(1, 41) if policy.check_is_due(update)] == [10, 20, 30, 40]
    assert not any(build_policy(small_config()).check_is_due(update) for update in range(1, 41))


def test_high_correlations_never_unshare() -> None:
    for name in ("adaptive", "multi_step"):
        assert set(groups_after(watching(name), [HIGH] * 20)) == {SHARED}


def test_adaptive_unshares_exactly_at_patience() -> None:
    assert groups_after(watching("adaptive"), [LOW] * 4) == [SHARED, SHARED, SINGLE, SINGLE]
    assert groups_after(watching("adaptive", patience=1), [LOW]) == [SINGLE]


def test_one_recovery_resets_the_row_of_adaptive() -> None:
    assert groups_after(watching("adaptive"), [LOW, LOW, HIGH, LOW, LOW, LOW])[-2:] == [SHARED, SINGLE]


def test_half_is_not_more_than_half() -> None:
    half, more = [0.4, 0.4, 0.9, 0.9], [0.4, 0.4, 0.4, 0.9]
    assert groups_after(watching("adaptive", num_layers=5), [half] * 9)[-1] == one_group(5)
    assert groups_after(watching("adaptive", num_layers=5), [more] * 3)[-1] == single_groups(5)


def test_a_correlation_at_the_threshold_is_not_below_it() -> None:
    assert groups_after(watching("adaptive"), [[0.5] * 5] * 9)[-1] == SHARED
    assert groups_after(watching("multi_step"), [[0.5] * 5] * 9)[-1] == SHARED


def test_absent_correlations_count_as_neither() -> None:
    two_of_three = [0.4, NAN, 0.4, NAN, 0.9]
    assert groups_after(watching("adaptive"), [two_of_three] * 3)[-1] == SINGLE
    nothing = [NAN] * 5
    assert groups_after(watching("adaptive"), [LOW, LOW, nothing, LOW])[2:] == [SHARED, SINGLE]
    gap = [[0.9, 0.4, 0.9, 0.9, 0.9]] * 2 + [[0.9, NAN, 0.9, 0.9, 0.9]] + [[0.9, 0.4, 0.9, 0.9, 0.9]]
    assert groups_after(watching("multi_step"), gap)[2:] == [SHARED, ((0, 2), (2, 6))]


def test_multi_step_splits_at_the_boundary_that_stays_low() -> None:
    low_at_1 = [0.9, 0.3, 0.9, 0.9, 0.9]
    assert groups_after(watching("multi_step"), [low_at_1] * 3) == [SHARED, SHARED, ((0, 2), (2, 6))]


def test_multi_step_counts_each_boundary_for_itself() -> None:
    alternating = [[0.3, 0.9, 0.9, 0.9, 0.9], [0.9, 0.3, 0.9, 0.9, 0.9]] * 5
    assert set(groups_after(watching("multi_step"), alternating)) == {SHARED}


def test_of_two_boundaries_due_at_once_the_least_correlated_splits_and_the_other_follows_at_the_next_check() -> None:
    both = [0.9, 0.4, 0.9, 0.2, 0.9]
    groups = groups_after(watching("multi_step"), [both] * 5)
    assert groups[2] == ((0, 4), (4, 6))
    assert groups[3] == ((0, 2), (2, 4), (4, 6))
    assert groups[4] == groups[3]


def test_two_groups_may_split_at_the_same_check() -> None:
    policy = watching("multi_step")
    middle = [0.9, 0.9, 0.1, 0.9, 0.9]
    ends = [0.1, 0.9, 0.1, 0.9, 0.1]
    assert groups_after(policy, [middle] * 3)[-1] == ((0, 3), (3, 6))
    assert groups_after(policy, [ends] * 3, start=40)[-1] == ((0, 1), (1, 3), (3, 5), (5, 6))


def test_multi_step_ends_with_single_layers() -> None:
    policy = watching("multi_step")
    assert groups_after(policy, [[0.1, 0.2, 0.3, 0.35, 0.4]] * 7)[-1] == SINGLE
    assert groups_after(policy, [HIGH], start=80) == [SINGLE]


def test_no_check_counts_before_the_earliest_step() -> None:
    for name in ("adaptive", "multi_step"):
        groups = groups_after(watching(name, earliest_step=30), [LOW] * 5)
        assert groups[:4] == [SHARED] * 4
        assert groups[4] != SHARED


def test_the_latest_step_unshares_whatever_the_correlations() -> None:
    for name in ("adaptive", "multi_step"):
        policy = watching(name, latest_step=35)
        groups_after(policy, [HIGH] * 3)
        assert policy.groups_for(34) == SHARED
        assert policy.groups_for(35) == SINGLE
        assert "still shared in 1 group(s)" in policy.explain(SHARED)
        assert policy.explain(SINGLE) == ""


def test_units_and_odd_numbers_of_layers() -> None:
    policy = watching("multi_step", num_layers=10, unit_layers=2)
    assert groups_after(policy, [[0.9, 0.1, 0.9, 0.9]] * 3)[-1] == ((0, 2), (2, 5))
    assert groups_after(watching("adaptive", num_layers=3), [[0.4, 0.9]] * 5)[-1] == one_group(3)
    assert groups_after(watching("adaptive", num_layers=2), [[0.4]] * 3)[-1] == single_groups(2)


@pytest.mark.parametrize("policy", ["adaptive", "multi_step", "fixed", "never"])
def test_a_policy_goes_on_from_its_state(policy: str) -> None:
    draw = random.Random(policy)
    trace = [[draw.choice([0.2, 0.45, 0.55, NAN, 0.9]) for _ in range(5)] for _ in range(40)]
    straight = groups_after(watching(policy), trace)
    for cut in (1, 7, 22):
        first, second = watching(policy), watching(policy)
        before = groups_after(first, trace[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + groups_after(second, trace[cut:], start=10 + 10 * cut) == straight


def test_checks_under_the_other_policies_are_only_looked_at() -> None:
    policy = watching("never")
    policy.observe(10, LOW)
    assert policy.groups_for(11) == SINGLE
    assert policy.figures(10)["share/correlations"] == LOW
    assert policy.figures(11) == {}


def test_the_progress_line_says_how_far_a_decision_is() -> None:
    policy = watching("adaptive")
    assert policy.describe_check() == ""
    policy.observe(10, [0.9] * 5)
    assert policy.describe_check() == "5/5 pairs above 0.5, 0/3 checks"
    policy.observe(20, [0.9, 0.1, 0.1, 0.1, NAN])
    assert policy.describe_check() == "1/4 pairs above 0.5, 1/3 checks"
