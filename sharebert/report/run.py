"""The verb `report`: any set of run folders as one page with tables and plots."""

from __future__ import annotations

import argparse
import csv
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharebert.config import ConfigError
from sharebert.files import write_atomically
from sharebert.launch import EXIT_FINISHED
from sharebert.provenance import command_line
from sharebert.report import content, draw
from sharebert.report.arms import group_into_arms
from sharebert.report.compare import choose_baseline, final
from sharebert.report.content import Comparison, accuracy_of, hours_of, loss_of
from sharebert.report.page import Section, as_html, as_markdown
from sharebert.report.read import find_run_folders, read_runs
from sharebert.report.similarity import LayerSimilarity, mean_similarity, read_similarity
from sharebert.table import markdown_table

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Parse the flags, write the report and print its main table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sharebert report", description="Compare runs: one page with tables and plots, as HTML, Markdown and CSV."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders that hold them, such as a sweep's"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="where to write index.html and the rest"
    )
    parser.add_argument(
        "--baseline", metavar="NAME", help="run or arm to measure against (default: unshare=never with most updates)"
    )
    options = parser.parse_args(arguments)
    comparison = compare(options.runs, options.baseline)
    write_report(comparison, options.output, is_named=options.baseline is not None)
    print_tables(comparison, options.output)
    return EXIT_FINISHED


def compare(paths: Sequence[Path], baseline: str | None) -> Comparison:
    """Read the runs, group them and choose the baseline.

    Raises:
        ConfigError: no run has held-out figures, or there is no such baseline; the message names each run's state.
    """
    runs = read_runs(find_run_folders(paths))
    arms, remarks = group_into_arms(runs)
    if not arms:
        states = "\n  ".join(f"{run.name}: {run.state}{run.note and f' ({run.note})'}" for run in runs)
        raise ConfigError(f"nothing to compare; expected a run with held-out figures in its metrics.jsonl:\n  {states}")
    for run in runs:
        if run.state not in ("finished", "set aside"):
            logger.warning("%s: %s%s", run.name, run.state, run.note and f" ({run.note})")
    return Comparison(runs, arms, choose_baseline(arms, baseline), remarks)


def write_report(comparison: Comparison, folder: Path, is_named: bool, extra: Sequence[Section] = ()) -> None:
    """Write `index.html`, `report.md`, three CSV files and the pictures to `folder`.

    Args:
        comparison: what is reported.
        folder: made when it is not there.
        is_named: whether the baseline was asked for by name.
        extra: sections that follow the final figures.

    Raises:
        ConfigError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output={folder}: cannot be made ({error.strerror}); expected a folder") from error
    sections = [
        content.summary(comparison, is_named),
        _finals(comparison, folder),
        *extra,
        content.speed_ups(comparison),
        *_differences(comparison, folder),
        *_curves(comparison, folder),
        *_weights(comparison, folder),
        *_share_maps(comparison, folder),
        content.recipe(comparison),
        Section("All runs", [f"Made by: {command_line()}"], content.all_runs(comparison)),
    ]
    title = f"Comparison of {content.count(len(comparison.arms), 'arm')}"
    write_atomically(folder / "report.md", as_markdown(title, sections))
    write_atomically(folder / "index.html", as_html(title, sections))
    for name, table in (("arms", _arms_csv(comparison)), ("curves", _curves_csv(comparison))):
        _write_csv(folder / f"{name}.csv", table)
    runs = content.all_runs(comparison)
    _write_csv(folder / "runs.csv", [runs.head, *runs.rows])


def print_tables(comparison: Comparison, folder: Path, extra: Sequence[Section] = ()) -> None:
    """The main tables on the terminal, and where the rest was written."""
    tables = [content.finals(comparison), *(section.table for section in extra), content.speed_ups(comparison).table]
    for table in tables:
        if table is not None:
            print(markdown_table(table.head, table.rows), end="\n\n")
    print(f"wrote {folder / 'index.html'}")


def _finals(comparison: Comparison, folder: Path) -> Section:
    picture = folder / "finals.png"
    is_drawn = draw.draw_finals(comparison.arms, comparison.baseline, picture)
    caption = "Final figures: a dot for each seed, a bar for the mean, a dotted line at the baseline's mean."
    return Section("Final figures", [], content.finals(comparison), picture if is_drawn else None, caption)


def _differences(comparison: Comparison, folder: Path) -> list[Section]:
    section = content.differences(comparison)
    if section is None:
        return []
    picture = folder / "differences.png"
    is_drawn = draw.draw_differences(comparison.arms, picture)
    caption = (
        "Held-out loss minus that of the run with the same seed and number of updates that never shares, along the "
        "updates: mean and range over the seeds. Below zero is better."
    )
    return [Section(section.title, section.text, section.table, picture if is_drawn else None, caption)]


def _curves(comparison: Comparison, folder: Path) -> list[Section]:
    baseline, sections = comparison.baseline, []
    for title, figure_of, label in (
        ("Loss", loss_of, "held-out masked-LM loss (nats)"),
        ("Accuracy", accuracy_of, "held-out masked-LM accuracy (%)"),
    ):
        picture = folder / f"{title.lower()}.png"
        target = None if baseline is None else final(baseline, figure_of)
        level = None if target is None else target.mean
        if draw.draw_curves_of_arms(comparison.arms, picture, figure_of, label, level):
            caption = (
                f"{title} against updates, tokens, measured hours and floating-point operations: mean over seeds as a "
                "line, their range as a band; triangles mark unsharing; thin lines are runs that are not complete. The "
                "first fifth of the longest run may lie outside."
            )
            sections.append(Section(title, [], None, picture, caption))
    return sections


def _weights(comparison: Comparison, folder: Path) -> list[Section]:
    """Similarity of the layers' weights, mean over the seeds of each arm."""
    found: list[tuple[str, LayerSimilarity]] = []
    text = [
        "From each complete run's last checkpoint, over the weight matrices of a layer as one vector, norms and biases "
        "left out; mean over seeds. Distance: size of the difference over the root mean square of both sizes; 0 for "
        "equal layers, 1.41 for unrelated ones."
    ]
    for arm in comparison.arms:
        read = [read_similarity(run) for run in arm.complete]
        measured = [item for item in read if isinstance(item, LayerSimilarity)]
        if measured:
            found.append((arm.name, mean_similarity(measured)))
        elif read:
            text.append(f"{arm.name}: {read[0]}.")
    if not found:
        return []
    picture = folder / "similarity.png"
    is_drawn = draw.draw_similarity(found, picture)
    caption = "Cosine between the weights of every two layers at the end."
    table = content.similarity_table(found)
    return [Section("Similarity of layers", text, table, picture if is_drawn else None, caption)]


def _share_maps(comparison: Comparison, folder: Path) -> list[Section]:
    """One map for each arm that made checks: that of its first run."""
    chosen = [(arm, next((run for run in arm.runs if run.checks), None)) for arm in comparison.arms]
    runs = [(f"{arm.name}, seed {run.settings.seed}", run) for arm, run in chosen if run is not None]
    picture = folder / "share_maps.png"
    if not draw.draw_share_maps(runs, picture):
        return []
    caption = (
        "Correlation of the gradients of adjacent layers at the checks of one run of each arm. Colour lies between the "
        "two layers compared; lines part groups that share no weights; the white mark is the threshold."
    )
    return [Section("Share maps", [], None, picture, caption)]


# ---------------------------------------------------------------------- numbers for programs


def _arms_csv(comparison: Comparison) -> list[list[Any]]:
    figures = {"loss": loss_of, "accuracy_percent": accuracy_of, "hours": hours_of}
    head = ["arm", "is_baseline", "runs", "complete_runs", "updates", "tokens", "flops"]
    head += [f"{name}_{part}" for name in figures for part in ("mean", "deviation")]
    head += ["updates_to_target", "hours_to_target", "runs_that_reach_it", "updates_ratio", "hours_ratio"]
    speed_ups = {item.arm.name: item for item in comparison.speed_ups()}
    rows: list[list[Any]] = [head]
    for arm in comparison.arms:
        run, updates = arm.runs[0], arm.config.max_steps
        row = [arm.name, int(arm is comparison.baseline), len(arm.runs), len(arm.complete), updates]
        row += [updates * run.tokens_per_update, updates * run.flops_per_update]
        for figure_of in figures.values():
            spread = final(arm, figure_of)
            row += [None, None] if spread is None else [spread.mean, spread.deviation]
        item = speed_ups.get(arm.name)
        if item is not None:
            reached = (item.updates, item.hours)
            row += [None if part is None else part.mean for part in reached]
            row += [item.updates.count if item.updates else 0, item.updates_ratio, item.hours_ratio]
        rows.append(row + [None] * (len(head) - len(row)))
    return rows


def _curves_csv(comparison: Comparison) -> list[list[Any]]:
    rows: list[list[Any]] = [["arm", "run", "seed", "step", "tokens", "hours", "flops", "loss", "accuracy"]]
    for arm in comparison.arms:
        for run in arm.runs:
            for p in run.evaluations:
                effort = [p.step, p.step * run.tokens_per_update, p.hours, p.step * run.flops_per_update]
                rows.append([arm.name, run.name, run.settings.seed, *effort, p.loss, p.accuracy])
    return rows


def _write_csv(path: Path, rows: list[list[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(path, text.getvalue())
