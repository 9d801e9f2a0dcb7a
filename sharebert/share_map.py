"""`share_map.png` of a run: layers against updates, the correlation of adjacent units as colour, groups as lines."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sharebert.curves import new_figure, save_figure
from sharebert.metrics import read_metrics

COLOURS = "cividis"  # told apart by colour-blind readers, and in grey


def draw_share_map(run: Path, unit_layers: int, threshold: float) -> None:
    """Draw ``<run>/share_map.png`` from the checks in its `metrics.jsonl`; nothing when there were none.

    Args:
        run: the run folder.
        unit_layers: layers in a unit, for the axis.
        threshold: marked on the colour bar.
    """
    checks = [row for row in read_metrics(run / "metrics.jsonl") if row.get("share/correlations")]
    if not checks or (figure := new_figure("share_map.png", width=11, height=5)) is None:
        return
    axis = figure.subplots()
    paint_share_map(figure, axis, checks, unit_layers, threshold)
    axis.set_title(f"{run.name}: colour lies between the two layers compared; lines part groups that share no weights")
    save_figure(figure, run / "share_map.png")


def paint_share_map(figure: Any, axis: Any, checks: list[dict[str, Any]], unit_layers: int, threshold: float) -> None:
    """The map of one run on an axis of a figure, with its colour bar.

    Args:
        figure: of matplotlib.
        axis: one of its axes.
        checks: rows of `metrics.jsonl` that hold correlations.
        unit_layers: as for :func:`draw_share_map`; so is `threshold`.
    """
    steps = [row["step"] for row in checks]
    values = np.array([[np.nan if v is None else v for v in row["share/correlations"]] for row in checks], dtype=float)
    num_units = values.shape[1] + 1
    mesh = axis.pcolormesh(
        _edges(steps), np.arange(num_units) + 1.0, values.T, cmap=COLOURS, vmin=0.0, vmax=1.0, shading="flat"
    )
    axis.set_facecolor("#DDDDDD")  # where a gradient was zero
    bar = figure.colorbar(mesh, ax=axis, extend="min", label="correlation of adjacent gradients (cosine)")
    bar.ax.axhline(threshold, color="white", linewidth=2)
    _draw_boundaries(axis, checks, steps)
    axis.set_yticks(range(1, num_units + 1), [_layers(unit, unit_layers) for unit in range(num_units)])
    axis.set_ylim(0.9, num_units + 0.1)
    axis.set_ylabel("layer" if unit_layers == 1 else "unit (its layers)")
    axis.set_xlabel("updates")


def _draw_boundaries(axis: Any, checks: list[dict[str, Any]], steps: list[int]) -> None:
    """A line between two units from the check after which they no longer share."""
    since: dict[int, int] = {}
    for row, step in zip(checks, steps, strict=True):
        for (_, stop), _next in pairwise(row["share/groups"]):
            since.setdefault(stop, step)
    end = _edges(steps)[-1]
    for stop, step in since.items():
        axis.plot([step, end], [stop + 0.5, stop + 0.5], color="#D55E00", linewidth=2.5, solid_capstyle="butt")


def _edges(steps: list[int]) -> list[float]:
    """Edges of cells around the steps of the checks."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    middles = [(a + b) / 2 for a, b in pairwise(steps)]
    return [steps[0] - (middles[0] - steps[0]), *middles, steps[-1] + (steps[-1] - middles[-1])]


def _layers(unit: int, unit_layers: int) -> str:
    first = unit * unit_layers + 1
    return str(first) if unit_layers == 1 else f"{first}-{first + unit_layers - 1}"
