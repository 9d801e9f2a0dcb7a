"""`table.md` and `results.json`: each statement of the paper beside what was measured, whether it holds or not."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharebert.config import DeepLinearConfig, to_dict
from sharebert.deep_linear.bounds import RATE_ORDER, UPDATES_ORDER
from sharebert.deep_linear.experiments import (
    ALPHA,
    DESCENT_SLACK,
    FLOW_SLACK,
    UNSHARED_LATER,
    BoundRun,
    DepthSeries,
    FlowRun,
    fitted_exponent,
)
from sharebert.deep_linear.network import IDENTITY, METHODS, SHARED, ZAS

LEMMA_SLACK = 1e-10
"""Rounding, which grows along directions in which a path is unstable (L = 2 on the indefinite target); else 1e-14."""
ROUNDING = 1e-16
"""R / R(0) below this is rounding."""


@dataclass(frozen=True)
class Results:
    """All that was run."""

    config: DeepLinearConfig
    rates: dict[str, float]
    """(dR/dt) / R at t = 0, by method."""
    flows: list[FlowRun]
    bounds: list[BoundRun]
    depth: list[DepthSeries]

    def flow(self, target: str, method: str) -> FlowRun:
        """The run in continuous time of a method on a target."""
        return next(run for run in self.flows if (run.target, run.method) == (target, method))


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and what came of it."""

    statement: str
    where: str
    """Target and setting."""
    paper: str
    measured: str
    holds: bool


def claims(results: Results) -> list[Claim]:
    """Every statement that was checked, with its outcome."""
    return [*_start_claims(results), *_flow_claims(results), *_descent_claims(results)]


def _start_claims(results: Results) -> list[Claim]:
    num_layers = results.config.num_layers
    expected = {SHARED.name: -2.0 * num_layers, ZAS.name: -2.0}
    where = f"Φ = {ALPHA:g} I, L = {num_layers}"
    return [
        Claim(
            f"dR/dt / R at t = 0, {name.removeprefix('unshared, ')}",
            where,
            f"{value:g}",
            f"{results.rates[name]:.6g}",
            math.isclose(results.rates[name], value, rel_tol=1e-12),
        )
        for name, value in expected.items()
    ]


def _flow_claims(results: Results) -> list[Claim]:
    end, num_layers = results.config.end_time, results.config.num_layers
    found = []
    for run in results.flows:
        if run.bound is not None:
            rule = "exp(-2t), ZAS" if run.method == ZAS.name else "exp(-2L min(1, λ²) t), shared"
            where = f"{run.target}, L = {num_layers}, to t = {end:g}"
            holds = run.closeness <= 1.0 + FLOW_SLACK
            found.append(Claim(f"R/R(0) ≤ {rule}", where, f"≤ {run.bound[-1]:.2g}", _small(run.losses[-1]), holds))
        if run.method == SHARED.name and run.target != "no root":  # Lemma 1 is about symmetric targets: see the notes
            found.append(_lemma_claim(f"{run.target}, L = {num_layers}, continuous time", run.lemma_error))
    return found


def _descent_claims(results: Results) -> list[Claim]:
    found = []
    for run in results.bounds:
        rule = "(1 - η/2)^t, ZAS" if run.method == ZAS.name else "exp(-(2L-2) min(λ², 1) η t), shared"
        where = f"{run.target}, L = {run.num_layers}, η = {run.rate:.2g}, to t = {run.updates[-1]:,.0f}"
        holds = run.closeness <= 1.0 + DESCENT_SLACK
        found.append(Claim(f"R/R(0) ≤ {rule}", where, f"≤ {run.bound[-1]:.2g}", _small(run.losses[-1]), holds))
        if run.method == SHARED.name:
            found.append(_lemma_claim(where, run.lemma_error))
    return found


def _lemma_claim(where: str, error: float) -> Claim:
    return Claim("Lemma 1, error / |Φ|, shared", where, "0", f"{error:.1e}", error <= LEMMA_SLACK)


# ---------------------------------------------------------------------- Markdown


def markdown(results: Results) -> str:
    """The whole of `table.md`."""
    config = results.config
    text = [
        "# Deep linear networks: the theory of sharing weights, run",
        "",
        _wrap(
            f"R = ½|W_L ... W_1 - Φ|² in float64, d = {config.dimension}, seed {config.seed}. Targets with eigenvalues "
            f"of size {config.smallest_eigenvalue:g} to {config.largest_eigenvalue:g}: positive definite; indefinite "
            f"(two negative, symmetric); no root (the same eigenvalues, not symmetric: no real W has W^L = Φ "
            "for even L). Statements: arXiv 2110.03848, section 3. λ: the smallest eigenvalue."
        ),
        "",
        "## Statements",
        "",
        *_table(
            ["statement", "target", "paper", "measured", "holds"],
            [
                [claim.statement, claim.where, claim.paper, claim.measured, "yes" if claim.holds else "**no**"]
                for claim in claims(results)
            ],
        ),
        "",
        "Bounds are compared all the way; shown is R/R(0) at the end. With an η, t counts updates.",
        "",
        f"## Continuous time: R/R(0) at t = {config.end_time:g}, L = {config.num_layers}",
        "",
        *_table(*_flow_rows(results)),
        "",
        "## Discrete time against depth (positive definite target, |Φ|_F = 1)",
        "",
        *_table(*_depth_rows(results)),
        "",
        _wrap(
            f"Updates: to R = {config.epsilon:g} R(0). Stable: R falls at every update until there; fewest: over rates "
            "of half the largest stable one and above. Exponents: power of L, least squares over the depths shown; the "
            "paper's orders belong to its bounds and are not asserted."
        ),
        "",
        "## What to keep in mind",
        "",
        *(_wrap(f"- {note}") for note in _notes(results)),
        "",
    ]
    return "\n".join(text)


def _wrap(text: str) -> str:
    """Prose in lines that a terminal holds."""
    return textwrap.fill(text, width=118, subsequent_indent="  " if text.startswith("- ") else "")


def _flow_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(run.target for run in results.flows))
    methods = list(dict.fromkeys(run.method for run in results.flows))
    rows = []
    for method in methods:
        note = f" at t = {results.config.unshare_time:g}" if method == UNSHARED_LATER else ""
        rows.append([method + note, *(_small(results.flow(name, method).losses[-1]) for name in names)])
    return ["method", *names], rows


def _depth_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    depths = results.config.depths
    quantities: list[tuple[str, str, dict[str, int]]] = [
        ("allowed η (formula)", "allowed", RATE_ORDER),
        ("updates promised at it", "promised", UPDATES_ORDER),
        ("largest stable η", "edge", {}),
        ("fewest updates", "fewest", {}),
    ]
    rows = []
    for label, name, orders in quantities:
        for series in results.depth:
            values = getattr(series, name)
            if not values:
                continue
            exponent = f"{fitted_exponent(depths, values):.2f}"
            # What is measured stands beside the order of the bound as well.
            order = (orders or (RATE_ORDER if name == "edge" else UPDATES_ORDER)).get(series.method)
            exponent += "" if order is None else f" (paper {order})"
            cells = [f"{value:,d}" if isinstance(value, int) else f"{value:.2g}" for value in values]
            rows.append([label, series.method, *cells, exponent])
    return ["quantity", "method", *(f"L = {depth}" for depth in depths), "exponents"], rows


def _notes(results: Results) -> list[str]:
    """What qualifies the statements, with the figures of these runs."""
    epsilon = results.config.epsilon
    shared, alone, zas = (results.flow("positive definite", method.name) for method in METHODS)
    difference = float(np.abs(shared.losses - alone.losses).max())
    return [
        f"The factor L comes from the start, not from sharing: dR/dt / R of the unshared identity start is "
        f"{results.rates[IDENTITY.name]:.6g} as well. On a symmetric target its layers get equal gradients "
        f"(Lemma 1), so it takes the path of the shared network: R/R(0) differs by at most {difference:.0e}.",
        f"A bound is not the speed: on the positive definite target R = {epsilon:g} R(0) is reached at "
        f"{_arrival(shared, epsilon)} shared, at {_arrival(zas, epsilon)} with ZAS.",
        *_notes_on_unsharing(results),
        "ZAS at η = 1 is done after one update, at any depth: W_L becomes Φ. `fewest updates` leaves that out: it "
        "looks no higher than the first rate that is not stable.",
    ]


def _notes_on_unsharing(results: Results) -> list[str]:
    stuck, freed = (results.flow("indefinite", name) for name in (SHARED.name, UNSHARED_LATER))
    root = {run.method: run for run in results.flows if run.target == "no root"}
    ends = {name: _small(run.losses[-1]) for name, run in root.items()}
    return [
        f"Lemma 1 needs a symmetric target: on `no root` it is off by {root[SHARED.name].lemma_error:.2g} |Φ|.",
        f"On the indefinite target unsharing alone changes nothing ({_small(freed.losses[-1])} against "
        f"{_small(stuck.losses[-1])}): equal layers go on getting equal gradients, with correlation "
        f"{freed.correlations[-1]:.3f}, and a rule that watches correlations would never unshare.",
        f"On `no root` sharing for ever ends at {ends[SHARED.name]}, sharing until t = "
        f"{results.config.unshare_time:g} at {ends[UNSHARED_LATER]}, never sharing at {ends[IDENTITY.name]} from the "
        f"identity and at {ends[ZAS.name]} from ZAS. While shared, the median correlation of adjacent layers falls to "
        f"{np.nanmin(root[SHARED.name].correlations):.2f}; the paper's rule unshares below 0.5.",
    ]


def _arrival(run: FlowRun, epsilon: float) -> str:
    arrived = run.losses <= epsilon
    return f"t = {run.times[np.argmax(arrived)]:.2f}" if arrived.any() else "no t of this run"


def _small(value: float) -> str:
    return f"below {ROUNDING:g}" if value < ROUNDING else f"{value:.2g}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, padded so that it reads in a terminal as well."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


# ---------------------------------------------------------------------- for programs


def as_json(results: Results) -> dict[str, Any]:
    """`results.json`: settings, claims with their outcome, all curves; NaN as null."""
    return {
        "config": to_dict(results.config),
        "claims": [dataclasses.asdict(claim) for claim in claims(results)],
        "rates": results.rates,
        "flows": [_plain(dataclasses.asdict(run)) for run in results.flows],
        "bounds": [_plain(dataclasses.asdict(run)) for run in results.bounds],
        "depth": [_plain(dataclasses.asdict(series)) for series in results.depth],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
