"""`curves.png` (continuous time) and `depth.png` (discrete time)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sharebert.curves import BLUE, GREEN, GREY, ORANGE, new_figure, save_figure
from sharebert.deep_linear.bounds import RATE_ORDER, UPDATES_ORDER
from sharebert.deep_linear.experiments import UNSHARED_LATER, fitted_exponent
from sharebert.deep_linear.network import IDENTITY, SHARED, ZAS
from sharebert.deep_linear.table import Results

PURPLE = "#CC79A7"  # also of Okabe and Ito's palette
STYLES: dict[str, dict[str, Any]] = {
    SHARED.name: {"color": BLUE, "linewidth": 2.8},
    UNSHARED_LATER: {"color": PURPLE, "linewidth": 2.2},
    # Thin and dashed: on symmetric targets it lies exactly on the shared curve.
    IDENTITY.name: {"color": ORANGE, "linewidth": 1.6, "linestyle": (0, (4, 3)), "zorder": 3},
    ZAS.name: {"color": GREEN, "linewidth": 2.0},
}
MARKERS = {SHARED.name: "o", IDENTITY.name: "x", ZAS.name: "s"}
FLOOR = 1e-12


def draw_curves(results: Results, path: Path) -> None:
    """R(t) of every method on the three targets with the bounds, and the correlation of the layers' gradients."""
    if (figure := new_figure(path.name, width=12, height=8.6)) is None:
        return
    axes = figure.subplots(2, 2)
    config = results.config
    titles = {
        "positive definite": "Positive definite target",
        "indefinite": "Indefinite, symmetric target: equal layers stay equal",
        "no root": "Target without a real root: no shared network reaches it",
    }
    for axis, (target, title) in zip(axes.flat, titles.items(), strict=False):
        _draw_target(axis, results, target)
        axis.set_title(title, fontsize=11)
    _draw_correlations(axes[1][1], results)
    for axis in axes.flat:
        _tidy(axis)
        axis.set_xlabel("time t (learning rate times updates)")
        axis.set_xlim(0, config.end_time)
    named = {
        label: handle
        for axis in (axes[1][0], axes[0][0])
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    figure.suptitle(f"Deep linear networks in continuous time: L = {config.num_layers} layers, d = {config.dimension}")
    save_figure(figure, path)


def _draw_target(axis: Any, results: Results, target: str) -> None:
    for run in (run for run in results.flows if run.target == target):
        if target == "positive definite" and run.method == UNSHARED_LATER:
            continue  # one more line on the same path
        axis.plot(run.times, run.losses, label=run.method, **STYLES[run.method])
        if run.bound is not None:
            rule = "exp(-2t)" if run.method == ZAS.name else "exp(-2L min(1, λ²) t)"
            color = STYLES[run.method]["color"]
            label = f"bound {rule}, {run.method.removeprefix('unshared, ')}"
            axis.plot(run.times, run.bound, color=color, linestyle=":", linewidth=1.5, label=label)
    if target != "positive definite":
        _mark_unsharing(axis, results)
    axis.set_yscale("log")
    axis.set_ylim(FLOOR, 3.0)
    axis.set_ylabel("loss R(t) / R(0)")


def _draw_correlations(axis: Any, results: Results) -> None:
    """Of the target without a root: on the symmetric ones all gradients are parallel for ever."""
    lowest = 0.0
    for run in (run for run in results.flows if run.target == "no root"):
        # Where nothing is left to learn the gradients are rounding.
        values = np.where(run.losses > FLOOR, run.correlations, np.nan)
        axis.plot(run.times, values, **STYLES[run.method])
        lowest = min(lowest, float(np.nanmin(values)))
    axis.axhline(0.5, color=GREY, linewidth=1)
    axis.annotate(
        "threshold 0.5", (results.config.end_time, 0.5), xytext=(-4, 4), textcoords="offset points", ha="right"
    )
    _mark_unsharing(axis, results)
    axis.set_ylim(lowest - 0.05 if lowest < 0 else 0.0, 1.05)
    axis.set_ylabel("median cosine of adjacent layers' gradients")
    axis.set_title("The same target: correlation of the layers' gradients", fontsize=11)


def _mark_unsharing(axis: Any, results: Results) -> None:
    axis.axvline(results.config.unshare_time, color=PURPLE, linewidth=1, linestyle="-.", label="unsharing")


def draw_depth(results: Results, path: Path) -> None:
    """The bounds at the allowed learning rates; these rates, the stable ones and updates to epsilon against L."""
    if (figure := new_figure(path.name, width=12, height=10)) is None:
        return
    (bounds, rates), (promised, fewest) = figure.subplots(2, 2)
    arrival = f"updates to R = {results.config.epsilon:g} R(0)"
    _draw_bounds(bounds, results)
    _draw_against_depth(rates, results, "edge", "largest stable")
    _draw_against_depth(rates, results, "allowed", "allowed", RATE_ORDER)
    rates.set_ylabel("learning rate η")
    rates.set_title("Largest stable η, and η allowed by the theory (formula)", fontsize=11)
    _draw_against_depth(promised, results, "promised", "promised", UPDATES_ORDER)
    promised.set_ylabel(arrival)
    promised.set_title("Promised by the bound at the allowed η (formula)", fontsize=11)
    _draw_against_depth(fewest, results, "fewest", "fewest")
    fewest.set_ylabel(arrival)
    fewest.set_title("Measured: the fewest at stable η", fontsize=11)
    for formatted in (fewest.yaxis.set_major_formatter, fewest.yaxis.set_minor_formatter):
        formatted(lambda value, _: f"{value:g}")  # not as powers of ten: it spans one or two of them
    for axis in (bounds, rates, promised, fewest):
        _tidy(axis)
        axis.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    figure.suptitle(f"Discrete time, positive definite target with |Φ| = 1, d = {results.config.dimension}")
    save_figure(figure, path)


def _draw_bounds(axis: Any, results: Results) -> None:
    deepest = results.config.bound_depths[-1]
    runs = [run for run in results.bounds if (run.num_layers, run.target) == (deepest, "positive definite")]
    for run in runs:
        color = STYLES[run.method]["color"]
        axis.plot(run.updates, run.losses, label=f"{run.method}, η = {run.rate:.1e}", **STYLES[run.method])
        axis.plot(run.updates, run.bound, color=color, linestyle=":", linewidth=1.5, label="its bound")
    axis.set_yscale("log")
    axis.set_xlabel("updates")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xticks(np.linspace(0, results.config.bound_updates, 5))
    axis.set_ylabel("loss R / R(0)")
    axis.set_title(f"At the largest allowed η, L = {deepest}", fontsize=11)


def _draw_against_depth(
    axis: Any, results: Results, quantity: str, label: str, orders: dict[str, int] | None = None
) -> None:
    """A quantity of each method that has it, with its exponent; with `orders` it is a formula, dotted."""
    depths = results.config.depths
    for series in results.depth:
        if not (values := getattr(series, quantity)):
            continue
        style = {**STYLES[series.method], "marker": MARKERS[series.method]}
        name = f"{label}, {series.method.removeprefix('unshared, ')}: $L^{{{fitted_exponent(depths, values):.2f}}}$"
        if orders is not None:
            style = {"color": style["color"], "linestyle": ":", "linewidth": 1.5}
            name += f" (paper: $L^{{{orders[series.method]}}}$)"
        axis.plot(depths, values, label=name, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(depths, [str(depth) for depth in depths])
    axis.set_xlabel("layers L")


def _tidy(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
