"""`curves.png` of a run: loss, accuracy, gradient norm and rate against updates, with the unshare points marked."""

from __future__ import annotations

import importlib.util
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

from sharebert.metrics import read_metrics

logger = logging.getLogger(__name__)

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"


def draw_curves(run: Path) -> None:
    """Draw ``<run>/curves.png`` from its `metrics.jsonl`; says how to get matplotlib where it is missing."""
    rows = read_metrics(run / "metrics.jsonl")
    if (figure := new_figure("curves.png", width=11, height=7)) is None:
        return
    axes = figure.subplots(2, 2, sharex=True)
    _draw_loss(axes[0][0], rows)
    _draw_accuracy(axes[0][1], rows)
    _draw(axes[1][0], rows, "train/grad_norm", BLUE, "gradient norm (before clipping)")
    axes[1][0].set_ylabel("gradient norm")
    axes[1][0].set_ylim(bottom=0)
    _draw(axes[1][1], rows, "train/lr", BLUE, "learning rate")
    axes[1][1].set_ylabel("learning rate")
    for axis in axes.flat:
        _mark_unsharing(axis, rows)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("updates")
    figure.suptitle(run.name)
    save_figure(figure, run / "curves.png")


def new_figure(name: str, width: float, height: float) -> Any:
    """An empty matplotlib figure of so many inches; None, and a line that says why, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("%s was not drawn: it needs matplotlib; pip install 'sharebert[plot]'", name)
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure as a PNG that appears as a whole."""
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)


def _series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


def _draw(axis: Any, rows: list[dict[str, Any]], name: str, color: str, label: str, **style: Any) -> None:
    steps, values = _series(rows, name)
    if steps:
        axis.plot(steps, values, color=color, label=label, **style)


def _draw_loss(axis: Any, rows: list[dict[str, Any]]) -> None:
    _draw(axis, rows, "train/loss", BLUE, "training", linewidth=1, alpha=0.7)
    _draw(axis, rows, "eval/loss", ORANGE, "held out", marker="o", markersize=4)
    _draw(axis, rows, "eval/unigram_loss", GREY, "unigram entropy (no context)", linestyle="--", linewidth=1)
    axis.set_ylabel("masked-LM loss (nats)")


def _draw_accuracy(axis: Any, rows: list[dict[str, Any]]) -> None:
    _draw(axis, rows, "eval/accuracy", ORANGE, "held out", marker="o", markersize=4)
    _draw(axis, rows, "eval/unigram_accuracy", GREY, "most frequent token", linestyle="--", linewidth=1)
    axis.set_ylabel("masked-LM accuracy")
    axis.set_ylim(bottom=0)


def unshare_points(rows: list[dict[str, Any]]) -> list[int]:
    """Updates from which fewer weights are shared than before, in the rows of a `metrics.jsonl`."""
    phased = [row for row in rows if isinstance(row.get("share/unique_parameters"), int)]
    return [
        after["step"]
        for before, after in pairwise(phased)
        if after["share/unique_parameters"] > before["share/unique_parameters"]
    ]


def _mark_unsharing(axis: Any, rows: list[dict[str, Any]]) -> None:
    """A line at each point of unsharing."""
    label = "unsharing"
    for step in unshare_points(rows):
        axis.axvline(step, color=GREEN, linestyle=":", label=label)
        label = "_nolegend_"
