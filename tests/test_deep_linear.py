"""The theory on deep linear networks: gradients, Lemma 1, every bound along its run, stable rates, and the verb."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sharebert.cli import main
from sharebert.config import ConfigError, DeepLinearConfig
from sharebert.deep_linear import bounds, targets
from sharebert.deep_linear.descent import descend, edge_and_fewest_updates, largest_stable, updates_to
from sharebert.deep_linear.experiments import (
    DESCENT_SLACK,
    FLOW_SLACK,
    UNSHARED_LATER,
    FlowRun,
    bound_runs,
    build_targets,
    fitted_exponent,
    flow_run,
    flow_runs,
)
from sharebert.deep_linear.flow import integrate
from sharebert.deep_linear.network import (
    IDENTITY,
    METHODS,
    SHARED,
    ZAS,
    Array,
    Method,
    adjacent_correlations,
    descent_direction,
    identity_start,
    lemma_direction,
    loss_and_gradients,
    loss_rate,
)
from sharebert.gradient_probe import adjacent_correlations as correlations_of_the_probe
from sharebert.launch import EXIT_FINISHED, EXIT_USAGE

SMALL = DeepLinearConfig(dimension=3, num_layers=4, bound_updates=300)
TINY = ["dimension=2", "num_layers=2", "end_time=2", "bound_depths=[2,3]", "bound_updates=20", "depths=[2,3]"]


@pytest.fixture(scope="module")
def flows() -> dict[tuple[str, str], FlowRun]:
    """All runs in continuous time, by target and method."""
    return {(run.target, run.method): run for run in flow_runs(SMALL)}


def random_weights(*shape: int) -> Array:
    return np.random.default_rng(0).normal(size=shape)


# ---------------------------------------------------------------------- the network


def test_gradients_are_those_of_autograd() -> None:
    weights, target = random_weights(5, 3, 3), random_weights(3, 3)
    leaves = torch.tensor(weights, requires_grad=True)
    expected = 0.5 * (torch.linalg.multi_dot(list(leaves.flip(0))) - torch.tensor(target)).square().sum()
    expected.backward()  # type: ignore[no-untyped-call]
    loss, gradients = loss_and_gradients(weights, target)
    assert leaves.grad is not None
    assert float(loss) == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(gradients, leaves.grad.numpy(), rtol=1e-11, atol=1e-12)


def test_networks_side_by_side_are_the_networks_one_by_one() -> None:
    weights, batch = random_weights(4, 2, 3, 3), random_weights(2, 3, 3)
    losses, gradients = loss_and_gradients(weights, batch)
    for number in range(2):
        loss, alone = loss_and_gradients(weights[:, number], batch[number])
        assert losses[number] == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(gradients[:, number], alone, rtol=1e-12)


@pytest.mark.parametrize("alpha", [1.5, 3.0])
@pytest.mark.parametrize("num_layers", [2, 7])
def test_sharing_and_the_identity_start_begin_l_times_as_fast_as_zas(alpha: float, num_layers: int) -> None:
    target = alpha * np.eye(3)
    expected = {SHARED: -2.0 * num_layers, IDENTITY: -2.0 * num_layers, ZAS: -2.0}
    for method, factor in expected.items():
        weights = method.start(num_layers, 3)
        loss, _ = loss_and_gradients(weights, target)
        assert loss_rate(weights, target, method.is_shared) == pytest.approx(factor * float(loss), rel=1e-12)


def test_the_rate_of_the_loss_is_its_slope_along_the_flow() -> None:
    weights, target = random_weights(3, 2, 2), random_weights(2, 2)
    for is_shared in (False, True):
        direction = descent_direction(loss_and_gradients(weights, target)[1], is_shared)
        before, after = (float(loss_and_gradients(weights + step * direction, target)[0]) for step in (1e-6, -1e-6))
        assert loss_rate(weights, target, is_shared) == pytest.approx((after - before) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("target", ["positive definite", "indefinite"])
def test_lemma_1_holds_for_every_layer_along_a_shared_run_on_a_symmetric_target(target: str) -> None:
    phi = build_targets(SMALL)[target]
    networks = descend(identity_start(4, 3)[:, None], phi, np.array([0.02]), num_shared=1)
    for _, (weights, _, gradients) in zip(range(300), networks, strict=False):
        expected = lemma_direction(weights[0, 0], 4, phi)
        for layer in range(4):
            np.testing.assert_allclose(gradients[layer, 0], expected, rtol=0, atol=1e-12)


def test_lemma_1_does_not_hold_on_a_target_that_is_not_symmetric(flows: dict[tuple[str, str], FlowRun]) -> None:
    assert flows["no root", "shared"].lemma_error > 0.1
    assert flows["indefinite", "shared"].lemma_error < 1e-12


def test_correlations_are_those_of_the_probe_and_nan_where_a_gradient_is_zero() -> None:
    gradients = random_weights(4, 3, 3)
    gradients[3] = 0.0
    found = adjacent_correlations(gradients)
    expected = correlations_of_the_probe([[torch.tensor(gradient)] for gradient in gradients])
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)
    assert np.isnan(found[2])


# ---------------------------------------------------------------------- targets


def test_targets_are_what_their_names_say() -> None:
    found = build_targets(SMALL)
    for name in ("positive definite", "indefinite"):
        np.testing.assert_allclose(found[name], found[name].T, atol=1e-12)
    np.testing.assert_allclose(np.linalg.eigvalsh(found["positive definite"]), [0.5, 1.0, 2.0], rtol=1e-12)
    for name in ("indefinite", "no root"):
        np.testing.assert_allclose(np.sort(np.linalg.eigvals(found[name]).real), [-2.0, -0.5, 1.0], rtol=1e-9)
    assert np.abs(found["no root"] - found["no root"].T).max() > 0.1
    assert np.linalg.norm(targets.unit_norm(found["no root"])) == pytest.approx(1.0)


# ---------------------------------------------------------------------- continuous time


def test_the_integrator_follows_closed_solutions() -> None:
    times = np.array([0.0, 0.3, 1.0, 4.0])
    decay = integrate(lambda state: -3.0 * state, np.array([2.0]), times)
    np.testing.assert_allclose(decay[:, 0], 2.0 * np.exp(-3.0 * times), rtol=0, atol=1e-8)
    # Two shared layers of width 1: w' = -w (w^2 - phi), a logistic curve in w^2.
    weights = integrate(lambda state: -state * (state**2 - 4.0), np.array([1.0]), times)
    np.testing.assert_allclose(weights[:, 0] ** 2, 4.0 / (1.0 + 3.0 * np.exp(-8.0 * times)), rtol=1e-8)


def test_a_smaller_tolerance_brings_the_integrator_nearer() -> None:
    errors = [
        abs(integrate(lambda state: -state, np.ones(1), np.array([0.0, 1.0]), tolerance)[-1, 0] - math.exp(-1.0))
        for tolerance in (1e-4, 1e-7, 1e-10)
    ]
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


def test_every_bound_of_continuous_time_holds_along_its_run(flows: dict[tuple[str, str], FlowRun]) -> None:
    bounded = [run for run in flows.values() if run.bound is not None]
    found = {(run.target, run.method) for run in bounded}
    assert found == {("positive definite", "shared"), *((name, ZAS.name) for name in build_targets(SMALL))}
    for run in bounded:
        assert run.closeness <= 1.0 + FLOW_SLACK, (run.target, run.method)


@pytest.mark.parametrize(("smallest", "largest"), [(0.2, 0.9), (1.2, 3.0)])
def test_the_bound_of_sharing_holds_for_small_and_for_large_eigenvalues(smallest: float, largest: float) -> None:
    config = replace(SMALL, dimension=2, smallest_eigenvalue=smallest, largest_eigenvalue=largest, end_time=1.5)
    assert flow_run(config, "positive definite", SHARED).closeness <= 1.0 + FLOW_SLACK


def test_a_bound_a_little_lower_is_seen_to_be_broken(flows: dict[tuple[str, str], FlowRun]) -> None:
    run = flows["positive definite", ZAS.name]
    assert replace(run, bound=bounds.zas_flow_bound(1.05 * run.times)).closeness > 1.0 + FLOW_SLACK


def test_on_symmetric_targets_the_identity_start_takes_the_path_of_sharing(
    flows: dict[tuple[str, str], FlowRun],
) -> None:
    for name in ("positive definite", "indefinite"):
        np.testing.assert_allclose(flows[name, IDENTITY.name].losses, flows[name, SHARED.name].losses, atol=1e-12)
    difference = flows["no root", IDENTITY.name].losses - flows["no root", SHARED.name].losses
    assert np.abs(difference).max() > 1e-3


def test_unsharing_reaches_a_target_without_a_root_which_sharing_never_does(
    flows: dict[tuple[str, str], FlowRun],
) -> None:
    assert flows["no root", SHARED.name].losses[-1] > 1e-3
    assert flows["no root", UNSHARED_LATER].losses[-1] < 1e-2 * flows["no root", SHARED.name].losses[-1]


def test_unsharing_equal_layers_changes_nothing_on_a_symmetric_target(flows: dict[tuple[str, str], FlowRun]) -> None:
    later = flows["indefinite", UNSHARED_LATER]
    assert later.losses[-1] == pytest.approx(flows["indefinite", SHARED.name].losses[-1], rel=1e-6)
    np.testing.assert_allclose(later.correlations, 1.0, rtol=1e-9)
    assert np.nanmin(flows["no root", UNSHARED_LATER].correlations) < 0.95


# ---------------------------------------------------------------------- discrete time


def test_allowed_rates_are_those_of_the_paper() -> None:
    assert bounds.zas_allowed_rate(16, 1.0) == pytest.approx(1 / (4 * 16**3 * 2**6))
    assert bounds.zas_allowed_rate(2, 0.1) == pytest.approx(1 / (144 * 4 * (3 / math.sqrt(2)) ** 4))
    assert bounds.zas_allowed_rate(100, 0.1) == pytest.approx(1 / (4 * 100**3))
    assert bounds.shared_allowed_rate(2, 4, 0.5, 2.0) == pytest.approx(0.25 / (4 * 2 * 4 * 16))
    assert bounds.shared_allowed_rate(3, 9, 1.5, 0.9) == pytest.approx(1 / (4 * 3 * 9))


def test_promised_updates_are_the_first_at_which_the_bound_is_small_enough() -> None:
    zas = bounds.zas_promised_updates(1e-3, 0.01)
    shared = bounds.shared_promised_updates(1e-3, 0.01, 8, 0.5)
    before, after = bounds.zas_descent_bound(np.array([zas - 1.0, zas]), 0.01)
    assert before > 1e-3 >= after
    before, after = bounds.shared_descent_bound(np.array([shared - 1.0, shared]), 0.01, 8, 0.5)
    assert before > 1e-3 >= after


def test_every_bound_of_discrete_time_holds_along_its_run() -> None:
    runs = [*bound_runs(replace(SMALL, bound_depths=[2, 8])), *bound_runs(replace(SMALL, dimension=2, seed=2))]
    assert {run.num_layers for run in runs} == {2, 4, 8, 16}
    for run in runs:
        assert run.closeness <= 1.0 + DESCENT_SLACK, (run.method, run.target, run.num_layers)
        assert run.losses[-1] < 1.0  # it moves
        assert run.method != SHARED.name or run.lemma_error < 1e-12


def test_descent_is_gradient_descent_and_the_mean_for_those_that_share() -> None:
    start, phi = random_weights(3, 2, 2, 2), random_weights(2, 2)
    networks = descend(start, phi, np.array([0.1, 0.2]), num_shared=1)
    _, _, gradients = next(networks)
    before, slopes = start.copy(), gradients.copy()
    weights, _, _ = next(networks)
    np.testing.assert_allclose(weights[:, 0], before[:, 0] - 0.1 * slopes[:, 0].mean(axis=0))
    np.testing.assert_allclose(weights[:, 1], before[:, 1] - 0.2 * slopes[:, 1])
    np.testing.assert_array_equal(start, before)


@pytest.mark.parametrize("guess", [1e-3, 0.3, 50.0])
def test_bisection_finds_the_edge_from_either_side(guess: float) -> None:
    assert 0.37 / 1.01 <= largest_stable(lambda rate: rate <= 0.37, guess) <= 0.37


def test_bisection_says_when_nothing_is_stable() -> None:
    with pytest.raises(ArithmeticError, match="no learning rate from 1 down"):
        largest_stable(lambda rate: False, 1.0)


def test_the_edge_of_one_layer_is_at_two() -> None:
    edge, fewest = edge_and_fewest_updates(1e-6, ZAS, 1, np.eye(2), max_updates=2000)
    assert 1.95 < edge <= 2.0
    assert fewest < 20


@pytest.mark.parametrize("method", [SHARED, IDENTITY], ids=lambda method: method.name)
def test_the_edge_of_equal_layers_is_where_the_curvature_at_the_solution_puts_it(method: Method) -> None:
    alpha, num_layers = 1.01, 4
    edge, _ = edge_and_fewest_updates(1e-6, method, num_layers, alpha * np.eye(2), max_updates=2000)
    assert edge == pytest.approx(2.0 / (num_layers * alpha ** (2 - 2 / num_layers)), rel=0.02)


def test_a_rate_above_the_edge_does_not_arrive_and_a_lower_one_beside_it_does() -> None:
    phi = targets.unit_norm(build_targets(SMALL)["positive definite"])
    for method in METHODS:
        assert updates_to(1e-6, method, 8, phi, np.array([3.0]), 500) is None
        assert updates_to(1e-6, method, 8, phi, np.array([1e-6]), 20) is None
        alone = updates_to(1e-6, method, 8, phi, np.array([0.2]), 500)
        assert alone is not None
        assert updates_to(1e-6, method, 8, phi, np.array([3.0, 0.2]), 500) == alone


def test_the_exponent_of_a_power_is_found() -> None:
    assert fitted_exponent([2, 4, 16], [5 * depth**-1.5 for depth in (2, 4, 16)]) == pytest.approx(-1.5)


# ---------------------------------------------------------------------- the verb


@pytest.fixture
def short_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves of few points: a point costs a step of the integrator."""
    monkeypatch.setattr("sharebert.deep_linear.experiments.RECORDS", 20)


def deep_linear(folder: Path, *settings: str) -> int:
    return main(["deep-linear", f"output_dir={folder}", "run_name=theory", *TINY, *settings])


@pytest.mark.usefixtures("short_curves")
def test_the_verb_writes_table_figures_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert deep_linear(tmp_path) == EXIT_FINISHED
    run = tmp_path / "theory"
    assert sorted(path.name for path in run.iterdir()) == ["curves.png", "depth.png", "results.json", "table.md"]
    table = (run / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert "| exponents" in table
    results = json.loads((run / "results.json").read_text())
    assert all(claim["holds"] for claim in results["claims"])


@pytest.mark.usefixtures("short_curves")
def test_without_matplotlib_the_table_is_written_and_again_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    written = []
    for _ in range(2):
        assert deep_linear(tmp_path) == EXIT_FINISHED
        written.append({path.name: path.read_bytes() for path in (tmp_path / "theory").iterdir()})
    assert written[0] == written[1]
    assert sorted(written[0]) == ["results.json", "table.md"]
    assert "depth.png was not drawn: it needs matplotlib; pip install 'sharebert[plot]'" in capsys.readouterr().err
    assert deep_linear(tmp_path, "seed=7") == EXIT_USAGE
    assert "seed=7: expected 1 as in" in capsys.readouterr().err


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theory").mkdir()
    (tmp_path / "theory/status.json").write_text("{}")
    assert deep_linear(tmp_path) == EXIT_USAGE
    assert "holds something else; expected it empty" in capsys.readouterr().err


@pytest.mark.usefixtures("short_curves")
def test_too_few_updates_for_any_learning_rate_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert deep_linear(tmp_path, "max_updates=2") == EXIT_USAGE
    assert "max_updates=2: expected more; no learning rate from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dimension": 1}, "dimension=1: expected at least 2"),
        ({"num_layers": 5}, "num_layers=5: expected an even number"),
        ({"smallest_eigenvalue": 2.0}, "largest_eigenvalue=2.0: expected a number above smallest_eigenvalue=2.0"),
        ({"unshare_time": 10.0}, "unshare_time=10.0: expected below end_time=10.0"),
        ({"depths": [4]}, "depths=.4.: expected 2 or more rising whole numbers from 2"),
        ({"bound_depths": [4, 2]}, "bound_depths=.4, 2.: expected 1 or more rising whole numbers from 2"),
        ({"epsilon": 1.0}, "epsilon=1.0: expected a number between 0 and 1"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_with_its_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepLinearConfig(**changes)  # type: ignore[arg-type]
