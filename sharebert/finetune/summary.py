"""The table of a fine-tuning sweep: mean and spread over seeds for each rate, and what the dev set chooses.

The paper picks the rate by the dev set. On GLUE it takes the best of four seeds: the best run counts. On SQuAD it gives
the mean of five runs: the rate of the best mean counts. Of equal ones the better mean counts, then the lower rate. Only
rates with all of their seeds are chosen from; where there are none yet, the choice is provisional.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharebert.compose import Cell, Request
from sharebert.config import flatten
from sharebert.config.finetune import SQUAD_TASKS
from sharebert.files import write_atomically
from sharebert.finetune.results import RESULTS_FILE
from sharebert.table import markdown_table

logger = logging.getLogger(__name__)

SCORE = "eval/score"
COMPARED = ("encoder", "random_encoder", "task.")
"""Keys (a trailing dot: groups) whose values are compared with each other; among those of others the best is chosen."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    task: str
    seed: int
    settings: dict[str, Any]
    """The swept keys but for the seed, and their values."""
    figures: dict[str, float]
    made_from: str | None
    """Its encoder and data, by their hashes; None where the results do not say it."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    runs: list[Run]
    num_asked: int
    """How many of them the sweep asks for."""

    @property
    def is_complete(self) -> bool:
        """Whether all of them are finished."""
        return len(self.runs) == self.num_asked

    @property
    def settings(self) -> dict[str, Any]:
        """Common to the runs."""
        return self.runs[0].settings

    @property
    def arm(self) -> tuple[tuple[str, Any], ...]:
        """The part of the settings that is compared rather than chosen."""
        return tuple((key, value) for key, value in self.settings.items() if _is_compared(key))

    @property
    def is_chosen_by_mean(self) -> bool:
        """Whether the paper's rule for the task is the best mean."""
        return self.runs[0].task in SQUAD_TASKS

    @property
    def best(self) -> Run:
        """The run of the highest score."""
        return max(self.runs, key=lambda run: run.figures[SCORE])

    def mean(self, name: str) -> float:
        """Of a figure over the runs."""
        return statistics.fmean(run.figures[name] for run in self.runs)

    def deviation(self, name: str) -> float | None:
        """Sample standard deviation of a figure over the runs; None for a single one."""
        return statistics.stdev(run.figures[name] for run in self.runs) if len(self.runs) > 1 else None


def summarize(request: Request) -> None:
    """Write ``summary.md`` and ``summary.csv`` into the folder of the sweep, and print the first one.

    Where the name of the run is swept, as that of the task is in it, there is one for each folder.
    """
    by_folder: dict[Path, list[Cell]] = {}
    for cell in request.cells:
        by_folder.setdefault(cell.folder.parent, []).append(cell)
    for folder, cells in by_folder.items():
        _summarize(folder, cells)


def _summarize(folder: Path, cells: Sequence[Cell]) -> None:
    settings = _swept_settings(cells)
    runs = _finished_runs(cells, settings)
    if not runs:
        return  # ax without labels: there is nothing to compare
    asked = Counter(json.dumps(kept) for kept in settings)
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(json.dumps(run.settings), []).append(run)
    groups = sorted(
        (Group(members, asked[key]) for key, members in grouped.items()), key=lambda group: json.dumps(group.arm)
    )
    chosen = [choose([group for group in groups if group.arm == arm]) for arm in _arms(groups)]
    text = _markdown(groups, chosen)
    if missing := len(cells) - len(runs):
        text += f"\n{missing} of {len(cells)} runs are not finished and not in the table.\n"
    if any(len(_origins(groups, arm)) > 1 for arm in _arms(groups)):
        warning = "Runs that are compared here were made from different data under the same names (see their"
        text += f"\n{warning} {RESULTS_FILE}): start the older ones over.\n"
    write_atomically(folder / "summary.md", text)
    write_atomically(folder / "summary.csv", _csv(groups, chosen))
    print(text, end="")
    logger.info("summary: %s", folder / "summary.md")


def choose(groups: Sequence[Group]) -> Group:
    """The group that the dev set chooses: of the best mean for SQuAD, else of the best run.

    Of equal ones that of the better mean, then that of the lower rate. Among the complete ones, where there are any:
    a group with fewer runs has fewer chances, and a mean of other seeds.
    """

    def merit(group: Group) -> tuple[float, float, float]:
        mean = group.mean(SCORE)
        return mean if group.is_chosen_by_mean else group.best.figures[SCORE], mean, -group.settings["optim.lr"]

    return max([group for group in groups if group.is_complete] or groups, key=merit)


def _is_compared(key: str) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in COMPARED)


def _arms(groups: Sequence[Group]) -> list[tuple[tuple[str, Any], ...]]:
    return list({json.dumps(group.arm): group.arm for group in groups}.values())


def _origins(groups: Sequence[Group], arm: tuple[tuple[str, Any], ...]) -> set[str]:
    """What the runs of an arm were made from, as far as they say it."""
    return {run.made_from for group in groups if group.arm == arm for run in group.runs if run.made_from is not None}


def _swept_settings(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Of each cell the swept keys but for the seed, and their values."""
    settings = [flatten(cell.values) for cell in cells]
    swept = [key for key in settings[0] if len({json.dumps(values[key]) for values in settings}) > 1]
    keys = [key for key in swept if key not in ("seed", "run_name")]
    keys = ["optim.lr", *keys] if "optim.lr" not in keys else keys
    return [{key: values[key] for key in keys} for values in settings]


def _finished_runs(cells: Sequence[Cell], settings: Sequence[dict[str, Any]]) -> list[Run]:
    runs = []
    for cell, kept in zip(cells, settings, strict=True):
        try:
            results = json.loads((cell.folder / RESULTS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if SCORE in results["figures"]:
            task, seed = cell.values["task"]["name"], cell.values["seed"]
            origin = [results["encoder_sha256"], results["data_sha256"]] if "data_sha256" in results else None
            made_from = None if origin is None else json.dumps(origin, sort_keys=True)
            runs.append(Run(cell.folder, task, seed, kept, results["figures"], made_from))
    return runs


def _figure_names(groups: Sequence[Group]) -> list[str]:
    """The score first, then the figures that all runs have."""
    names = [name for name in groups[0].runs[0].figures if name != SCORE]
    runs = [run for group in groups for run in group.runs]
    is_share = [name for name in names if not name.endswith("_threshold")]  # else no figure from 0 to 1
    return [SCORE, *(name for name in is_share if all(name in run.figures for run in runs))]


def _markdown(groups: Sequence[Group], chosen: Sequence[Group]) -> str:
    names, keys = _figure_names(groups), list(groups[0].settings)
    header = [*keys, "seeds", *(name.removeprefix("eval/") for name in names), "best run", "chosen"]
    rows = []
    for group in groups:
        shown = [_show(group.settings[key]) for key in keys]
        number = str(len(group.runs)) if group.is_complete else f"{len(group.runs)} of {group.num_asked}"
        shown += [number, *(_mean_and_deviation(group, name) for name in names)]
        shown += [f"{_percent(group.best.figures[SCORE])} (seed {group.best.seed})", _mark(group, chosen)]
        rows.append(shown)
    lines = [markdown_table(header, rows), ""]
    lines += ["In percent: mean ± standard deviation over seeds. Chosen by the score on the dev set: of the best run,"]
    lines += ["for SQuAD of the best mean; of rates with all seeds, where there are any.", ""]
    for group in chosen:
        settings = ", ".join(f"{key}={_show(value)}" for key, value in group.settings.items())
        settings = settings if group.is_complete else f"provisional: {settings}"
        if group.is_chosen_by_mean:
            lines.append(f"- {settings}: {_mean_and_deviation(group, SCORE)} over {len(group.runs)} seeds")
        else:
            best = group.best
            lines.append(f"- {settings}, seed={best.seed}: {_percent(best.figures[SCORE])} ({best.folder})")
    return "\n".join(lines) + "\n"


def _csv(groups: Sequence[Group], chosen: Sequence[Group]) -> str:
    """The same as fractions, for programs."""
    names, keys = _figure_names(groups), list(groups[0].settings)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    statistics_of = [f"{name}_{part}" for name in names for part in ("mean", "std")]
    writer.writerow([*keys, "seeds", "seeds_asked", *statistics_of, "best_score", "best_seed", "best_folder", "chosen"])
    for group in groups:
        figures = [value for name in names for value in (group.mean(name), group.deviation(name))]
        best = group.best
        tail = [best.figures[SCORE], best.seed, best.folder, int(group in chosen)]
        writer.writerow([*(group.settings[key] for key in keys), len(group.runs), group.num_asked, *figures, *tail])
    return file.getvalue()


def _mark(group: Group, chosen: Sequence[Group]) -> str:
    if group not in chosen:
        return ""
    return "x" if group.is_complete else "provisional"


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _mean_and_deviation(group: Group, name: str) -> str:
    deviation = group.deviation(name)
    return _percent(group.mean(name)) + ("" if deviation is None else f" ± {_percent(deviation)}")
