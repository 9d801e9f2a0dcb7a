"""The verb `report`: any set of run folders as one page with tables and plots."""

from __future__ import annotations

import argparse
import csv
import io
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharebert.config import ConfigError
from sharebert.files import write_atomically
from sharebert.launch import EXIT_FINISHED
from sharebert.provenance import command_line
from sharebert.report import content, draw
from sharebert.report.arms import group_into_arms
from sharebert.report.compare import Spread, choose_baseline, final, pair_by_seed
from sharebert.report.content import Comparison, accuracy_of, hours_of, loss_of
from sharebert.report.page import Section, as_html, as_markdown
from sharebert.report.read import find_run_folders, read_runs
from sharebert.report.similarity import LayerSimilarity, similarity_of_arm, similarity_table
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
    """Write `index.html`, `report.md`, the CSV files and the pictures to `folder`.

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
        reason = error.strerror or error
        raise ConfigError(f"--output={folder}: cannot be made ({reason}); expected a folder") from error
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
    _write_csv(folder / "arms.csv", _arms_csv(comparison))
    _write_csv(folder / "runs.csv", _runs_csv(comparison))
    _write_csv(folder / "curves.csv", _curves_csv(comparison))
    _write_csv(folder / "speed_up.csv", _speed_up_csv(comparison))
    _write_csv(folder / "differences.csv", _differences_csv(comparison))


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
        "updates: mean and range over the seeds as a band; thin lines are runs that are not complete, or whose "
        "counterpart is not. Triangles mark unsharing. Below zero is better."
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
                "thick line, their range as a band; triangles mark unsharing. Thin lines are runs that are not "
                "complete: no part of a mean. The first fifth of the longest run may lie outside; triangles that do "
                "are set at the edge."
            )
            sections.append(Section(title, [], None, picture, caption))
    return sections


def _weights(comparison: Comparison, folder: Path) -> list[Section]:
    """Similarity of the layers' weights, mean over the seeds of each arm."""
    found: list[tuple[str, LayerSimilarity]] = []
    text = [
        "From each complete run's last checkpoint, over the weight matrices of a layer as one vector, norms and biases "
        "left out; mean over the seeds (how many, where not all could be compared). Distance: size of the difference "
        "over the root mean square of both sizes; 0 for equal layers, 1.41 for unrelated ones."
    ]
    for arm in comparison.arms:
        title, similarity, note = similarity_of_arm(arm)
        if similarity is not None:
            found.append((title, similarity))
        if note:
            text.append(f"{arm.name}: {note}.")
    if not found:
        return []
    picture = folder / "similarity.png"
    is_drawn = draw.draw_similarity(found, picture)
    caption = "Cosine between the weights of every two layers at the end."
    table = similarity_table(found)
    return [Section("Similarity of layers", text, table, picture if is_drawn else None, caption)]


def _share_maps(comparison: Comparison, folder: Path) -> list[Section]:
    """One map for each arm that made checks: that of its first complete run, else of its first."""
    chosen = [(arm, next((run for run in (*arm.complete, *arm.runs) if run.checks), None)) for arm in comparison.arms]
    runs = [
        (f"{arm.name}, seed {run.settings.seed}{'' if run.is_complete else ' (not complete)'}", run)
        for arm, run in chosen
        if run is not None
    ]
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
    """Finals and speed-up of every arm."""
    figures = {"loss": loss_of, "accuracy_percent": accuracy_of, "hours": hours_of}
    measured = ("updates_to_target", "hours_to_target", "updates_ratio", "hours_ratio", "short_by")
    head = ["arm", "is_baseline", "runs", "complete_runs", "updates", "tokens", "flops"]
    head += [f"{name}_{part}" for name in (*figures, *measured) for part in ("mean", "deviation")]
    speed_ups = {item.arm.name: item for item in comparison.speed_ups()}
    rows: list[list[Any]] = [[*head, "runs_that_reach_it", "differs_in"]]
    for arm in comparison.arms:
        run, updates = arm.runs[0], arm.config.max_steps
        row = [arm.name, int(arm is comparison.baseline), len(arm.runs), len(arm.complete), updates]
        row += [updates * run.tokens_per_update, updates * run.flops_per_update]
        item = speed_ups.get(arm.name)
        spreads = [final(arm, figure_of) for figure_of in figures.values()]
        if item is not None:
            spreads += [item.updates, item.hours, item.updates_ratio, item.hours_ratio, item.shortfall]
        row += [part for found in spreads for part in _parts(found)]
        row += [None] * (len(head) - len(row))
        rows.append([*row, *((None, None) if item is None else (len(item.reached), " ".join(item.differs_in)))])
    return rows


def _parts(found: Spread | None) -> tuple[float | None, float | None]:
    return (None, None) if found is None else (found.mean, found.deviation)


def _runs_csv(comparison: Comparison) -> list[list[Any]]:
    """Every folder that was asked for; where it is no run with figures, these are empty."""
    head = ["run", "state", "is_complete", "arm", "seed", "step", "unshared_at", "loss", "accuracy_percent", "hours"]
    arms = {run.name: arm.name for arm in comparison.arms for run in arm.runs}
    rows: list[list[Any]] = [[*head, "updates_to_target", "hours_to_target", "note"]]
    for run in comparison.runs:
        seed = None if run.config is None else run.config.seed
        points = " ".join(map(str, run.unshare_points))
        last = run.evaluations[-1] if run.evaluations else None
        figures = [None] * 3 if last is None else [last.loss, accuracy_of(last), last.hours]
        reached = comparison.reached(run) if run.name in arms else None
        effort = [None, None] if reached is None else [reached.updates, reached.hours]
        first = [run.name, run.state, int(run.is_complete), arms.get(run.name), seed, run.step, points]
        rows.append([*first, *figures, *effort, run.note])
    return rows


def _speed_up_csv(comparison: Comparison) -> list[list[Any]]:
    """A row for each complete run of the arms that are measured."""
    head = ["arm", "run", "seed", "target", "target_is_of_this_seed", "updates", "hours", "baseline_updates"]
    rows: list[list[Any]] = [[*head, "baseline_hours", "updates_ratio", "hours_ratio", "short_by"]]
    for item in comparison.speed_ups():
        for race in item.races:
            goal, reached = race.goal, race.reached
            row = [item.arm.name, race.run.name, race.run.settings.seed, goal.loss, int(goal.is_of_seed)]
            row += [None, None] if reached is None else [reached.updates, reached.hours]
            row += [goal.reached.updates, goal.reached.hours, race.updates_ratio, race.hours_ratio]
            rows.append([*row, race.shortfall if reached is None else None])
    return rows


def _differences_csv(comparison: Comparison) -> list[list[Any]]:
    """Final figures minus those of the run of the same seed, a row for each pair of complete runs."""
    rows: list[list[Any]] = [["arm", "minus", "seed", "run", "minus_run", "loss", "accuracy_points"]]
    for arm in comparison.arms:
        for reference in comparison.references(arm):
            for run, other in pair_by_seed(arm.complete, reference.complete):
                last, its = run.evaluations[-1], other.evaluations[-1]
                names = [arm.name, reference.name, run.settings.seed, run.name, other.name]
                rows.append([*names, last.loss - its.loss, accuracy_of(last) - accuracy_of(its)])
    return rows


def _curves_csv(comparison: Comparison) -> list[list[Any]]:
    """A row for each evaluation."""
    rows: list[list[Any]] = [["arm", "run", "seed", "step", "tokens", "hours", "flops", "loss", "accuracy"]]
    for arm in comparison.arms:
        for run in arm.runs:
            for p in run.evaluations:
                effort = [p.step, p.step * run.tokens_per_update, p.hours, p.step * run.flops_per_update]
                rows.append([arm.name, run.name, run.settings.seed, *effort, p.loss, p.accuracy])
    return rows


def _write_csv(path: Path, rows: list[list[Any]]) -> None:
    """What is not known is left empty."""
    text = io.StringIO()
    known = ([None if isinstance(cell, float) and math.isnan(cell) else cell for cell in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(known)
    write_atomically(path, text.getvalue())
