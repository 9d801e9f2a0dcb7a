"""The figures of a report, one PNG each: mean of an arm as a line, the range of its seeds as a band."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sharebert.curves import GREY, new_figure, save_figure
from sharebert.report.arms import Arm
from sharebert.report.compare import Curve, Figure, difference_curve, find_twin, mean_curve, pair_by_seed
from sharebert.report.read import Run
from sharebert.report.similarity import LayerSimilarity
from sharebert.share_map import COLOURS, paint_share_map

# Okabe and Ito's palette without its yellow, which is lost on white; then the same colours again, dashed.
PALETTE = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
WIDTH = 11
SHOWN_FROM = 0.2
"""Share of the longest run whose losses do not count for the range of the axis: at first they fall from ln V."""

UNRELATED = 0.05
"""Layers that never shared have a cosine about 0; the colours are spread over what lies above."""


@dataclass(frozen=True)
class Axis:
    """What a curve is drawn against."""

    label: str
    of: Callable[[Arm, Curve], list[float]]
    prefix_units: bool = False
    """Write 1,500,000 as 1.5 M."""


AGAINST = (
    Axis("updates", lambda arm, curve: list(map(float, curve.steps))),
    Axis("tokens", lambda arm, curve: [float(step * arm.runs[0].tokens_per_update) for step in curve.steps], True),
    Axis("measured hours", lambda arm, curve: curve.hours),
    Axis(
        "floating-point operations", lambda arm, curve: [float(s * arm.runs[0].flops_per_update) for s in curve.steps]
    ),
)


@dataclass(frozen=True)
class Line:
    """The mean of complete runs of an arm, or one run that does not count in it."""

    arm: Arm
    runs: tuple[Run, ...]
    curve: Curve
    is_complete: bool


def styles(arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each arm, by name."""
    rounds = [(color, dash) for dash in DASHES for color in PALETTE]
    return {
        arm.name: {"color": color, "linestyle": dash}
        for arm, (color, dash) in zip(arms, rounds * (1 + len(arms) // len(rounds)), strict=False)
    }


def draw_curves_of_arms(arms: Sequence[Arm], path: Path, figure_of: Figure, label: str, target: float | None) -> bool:
    """A figure against updates, tokens, hours and operations, four panels; whether it was drawn.

    Args:
        arms: one line each.
        path: of the PNG.
        figure_of: loss or accuracy.
        label: of the vertical axis.
        target: a level to mark: the baseline's final figure.
    """
    if (figure := new_figure(path.name, WIDTH, 7.6 + _legend_height(arms))) is None:
        return False
    panels = figure.subplots(2, 2, sharey=True)
    panels[0][0].set_ylim(*_range(arms, figure_of))
    style, lines = styles(arms), [line for arm in arms for line in _lines(arm, figure_of)]
    for axis, against in zip(panels.flat, AGAINST, strict=True):
        _draw_lines(axis, lines, against, style)
        if target is not None:
            axis.axhline(target, color=GREY, linewidth=1, linestyle=":", label="baseline's final mean")
        _finish(axis, against.label)
        if against.prefix_units:
            axis.xaxis.set_major_formatter(_prefixes())
    for axis in panels[:, 0]:
        axis.set_ylabel(label)
    _legend_below(figure, panels[0][0])
    save_figure(figure, path)
    return True


def _lines(arm: Arm, figure_of: Figure) -> list[Line]:
    """The mean of the complete runs, then each other run."""
    mean = [Line(arm, arm.complete, mean_curve(arm.complete, figure_of), is_complete=True)] if arm.complete else []
    others = [run for run in arm.runs if not run.is_complete]
    return mean + [Line(arm, (run,), mean_curve([run], figure_of), is_complete=False) for run in others]


def _draw_lines(axis: Any, lines: Sequence[Line], against: Axis, style: dict[str, dict[str, Any]]) -> None:
    """Means thick, with the range of the runs as a band; what is not complete thin; points of unsharing on all."""
    labelled = set()
    for line in lines:
        name, places = line.arm.name, against.of(line.arm, line.curve)
        label = "_nolegend_" if name in labelled else _label(name, line.is_complete)
        labelled.add(name)
        width, alpha = (1.8, 1.0) if line.is_complete else (0.8, 0.8)
        axis.plot(places, line.curve.mean, label=label, linewidth=width, alpha=alpha, **style[name])
        color = style[name]["color"]
        axis.fill_between(places, line.curve.lowest, line.curve.highest, color=color, alpha=0.18, linewidth=0)
        _draw_marks(axis, line, places, color)


def _draw_marks(axis: Any, line: Line, places: list[float], color: str) -> None:
    """Each point of unsharing of each run, on the curve; at the edge where that lies outside."""
    (lowest, highest), steps = axis.get_ylim(), line.curve.steps
    margin = 0.02 * (highest - lowest)
    form = (
        {"markersize": 7, "zorder": 6} if line.is_complete else {"markersize": 5, "zorder": 5, "markeredgewidth": 0.4}
    )
    for step in sorted({step for run in line.runs for step in run.unshare_points}):
        if steps and steps[0] <= step <= steps[-1]:
            x, y = np.interp(step, steps, places), np.interp(step, steps, line.curve.mean)
            inside = min(max(y, lowest + margin), highest - margin)
            axis.plot([x], [inside], "v", color=color, markeredgecolor="white", **form)


def _range(arms: Sequence[Arm], figure_of: Figure) -> tuple[float, float]:
    """Of the vertical axis: all values but those of the first updates."""
    begin = SHOWN_FROM * max(run.evaluations[-1].step for arm in arms for run in arm.runs)
    points = [point for arm in arms for run in arm.runs for point in run.evaluations]
    return _with_margin([figure_of(point) for point in points if point.step >= begin])


def _with_margin(values: list[float]) -> tuple[float, float]:
    margin = 0.05 * (max(values) - min(values)) or 0.01
    return min(values) - margin, max(values) + margin


def draw_finals(arms: Sequence[Arm], baseline: Arm | None, path: Path) -> bool:
    """Final loss and accuracy: a dot for each seed, a bar for the mean; whether it was drawn."""
    style, arms = styles(arms), [arm for arm in arms if arm.complete]
    if not arms or (figure := new_figure(path.name, WIDTH, 1.6 + 0.42 * len(arms))) is None:
        return False
    panels = figure.subplots(1, 2, sharey=True)
    figures: list[tuple[Figure, str]] = [
        (lambda point: point.loss, "final held-out loss (nats), lower is better"),
        (lambda point: 100 * point.accuracy, "final masked-LM accuracy (%), higher is better"),
    ]
    for axis, (figure_of, label) in zip(panels, figures, strict=True):
        for place, arm in enumerate(arms):
            values = [figure_of(run.evaluations[-1]) for run in arm.complete]
            color = style[arm.name]["color"]
            axis.plot(values, [place] * len(values), "o", color=color, markersize=6, alpha=0.65, markeredgewidth=0)
            axis.plot([np.mean(values)] * 2, [place - 0.28, place + 0.28], color=color, linewidth=2.5)
            if baseline is not None and arm.name == baseline.name:
                axis.axvline(np.mean(values), color=GREY, linewidth=1, linestyle=":", zorder=0)
        _finish(axis, label)
    panels[0].set_yticks(range(len(arms)), [arm.name for arm in arms])
    panels[0].set_ylim(len(arms) - 0.5, -0.5)
    save_figure(figure, path)
    return True


def draw_differences(arms: Sequence[Arm], path: Path) -> bool:
    """Loss minus that of the equal run that never shares, along the updates; whether it was drawn."""
    lines = [line for arm in arms if (twin := find_twin(arm, arms)) for line in _difference_lines(arm, twin)]
    height = _legend_height({line.arm.name: line.arm for line in lines}.values())
    if not lines or (figure := new_figure(path.name, WIDTH, 4.2 + height)) is None:
        return False
    begin, shown = SHOWN_FROM * max(line.curve.steps[-1] for line in lines), [0.0]
    for curve in (line.curve for line in lines):
        first = bisect_left(curve.steps, begin)
        shown += curve.lowest[first:] + curve.highest[first:]
    axis = figure.subplots()
    axis.set_ylim(*_with_margin(shown))
    _draw_lines(axis, lines, AGAINST[0], styles(arms))
    axis.axhline(0, color=GREY, linewidth=1)
    axis.set_ylabel("loss minus that of the run of the same seed\nthat never shares, for as many updates (nats)")
    _finish(axis, AGAINST[0].label)
    _legend_below(figure, axis)
    save_figure(figure, path)
    return True


def _difference_lines(arm: Arm, twin: Arm) -> list[Line]:
    """The mean over the pairs of runs that are both complete, then each other pair."""
    pairs = pair_by_seed(arm.runs, twin.runs)
    complete = [pair for pair in pairs if all(run.is_complete for run in pair)]
    groups = [(complete, True)] if complete else []
    groups += [([pair], False) for pair in pairs if pair not in complete]
    lines = [
        Line(arm, tuple(run for run, _ in group), difference_curve(group, lambda point: point.loss), is_complete)
        for group, is_complete in groups
    ]
    return [line for line in lines if len(line.curve.steps) > 1]


def draw_similarity(found: Sequence[tuple[str, LayerSimilarity]], path: Path) -> bool:
    """Cosine between the weights of every two layers, a panel for each arm; whether it was drawn."""
    rows, columns = _grid(len(found), 3)
    if not found or (figure := new_figure(path.name, WIDTH, 0.6 + 3.6 * rows)) is None:
        return False
    panels = figure.subplots(rows, columns, squeeze=False)
    lowest = min((float(low) for _, item in found if (low := item.cosine.min()) > UNRELATED), default=0.0)
    for axis, (name, item) in zip(panels.flat, found, strict=False):
        count = item.num_layers
        image = axis.imshow(item.cosine, cmap=COLOURS, vmin=min(lowest, 0.99), vmax=1.0, origin="lower")
        ticks = range(0, count, max(1, math.ceil(count / 12)))
        axis.set_xticks(ticks, [str(tick + 1) for tick in ticks])
        axis.set_yticks(ticks, [str(tick + 1) for tick in ticks])
        axis.set_title(name, fontsize=10, wrap=True)
        axis.set_xlabel("layer")
    for axis in panels[:, 0]:
        axis.set_ylabel("layer")
    for axis in panels.flat[len(found) :]:
        axis.remove()
    figure.colorbar(
        image, ax=list(panels.flat[: len(found)]), label="cosine between the layers' weights", shrink=0.8, extend="min"
    )
    save_figure(figure, path)
    return True


def draw_share_maps(runs: Sequence[tuple[str, Run]], path: Path) -> bool:
    """The share map of each run given, one below the other; whether it was drawn."""
    if not runs or (figure := new_figure(path.name, WIDTH, 0.4 + 3.4 * len(runs))) is None:
        return False
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    for axis, (title, run) in zip(panels, runs, strict=True):
        unshare = run.settings.unshare
        paint_share_map(figure, axis, list(run.checks), unshare.unit_layers, unshare.threshold)
        axis.set_title(title, fontsize=10)
    save_figure(figure, path)
    return True


def _grid(count: int, columns: int) -> tuple[int, int]:
    return math.ceil(count / columns), min(count, columns)


def _finish(axis: Any, label: str) -> None:
    axis.set_xlabel(label)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _prefixes() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter()


def _legend_below(figure: Any, axis: Any) -> None:
    """One legend for all panels, under them, in columns that long names fit into."""
    handles, labels = axis.get_legend_handles_labels()
    marker = axis.plot([], [], marker="v", color=GREY, linestyle="none", label="unsharing")[0]
    figure.legend(
        [*handles, marker],
        [*labels, "unsharing"],
        loc="outside lower center",
        ncols=_legend_columns(labels),
        frameon=False,
    )


def _legend_columns(labels: Sequence[str]) -> int:
    longest = max(map(len, labels))
    return 3 if longest < 40 else 2 if longest < 60 else 1


def _legend_height(arms: Collection[Arm]) -> float:
    """Inches that a legend of these arms takes, with two lines for what else is in it."""
    labels = [_label(arm.name, bool(arm.complete)) for arm in arms]
    return 0.25 * math.ceil((len(labels) + 2) / _legend_columns(labels)) if labels else 0.0


def _label(name: str, is_complete: bool) -> str:
    return name if is_complete else f"{name} (not complete)"
