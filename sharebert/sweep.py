"""The runs of `train -m`, one after the other, and the table of what came of them.

Runs come in rising unshare step, so that each starts from the shared prefix that those before it have trained. What
is finished is passed over, what fails is named at the end, and the table is written anew around every run.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sharebert.checkpoint import CheckpointError, list_checkpoints, read_meta
from sharebert.compose import Cell, Request
from sharebert.config import ConfigError, TrainConfig, from_dict
from sharebert.files import write_atomically
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE
from sharebert.metrics import read_metrics
from sharebert.prefix_plan import running_order, shared_updates
from sharebert.resolve import resolve
from sharebert.run_folder import RunFolder, configuration_differences
from sharebert.table import markdown_table

logger = logging.getLogger(__name__)

Guard = Callable[[Callable[[], int]], int]
"""Runs one job; an error is shown and becomes an exit status."""

PREFIX_FOLDER = "prefix-cache"
STATES = {
    EXIT_FINISHED: "finished",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "refused",
    EXIT_STOPPED: "stopped",
    EXIT_INTERRUPTED: "stopped",
}
EXPLANATION = (
    "Loss and accuracy are those of the held-out text: `loss` and `accuracy` after the last update, `best` over the "
    "whole run. `hours` are those of all updates of a run, the shared ones that it did not train itself (`saved`) "
    "included."
)


@dataclass
class Job:
    """One run of a sweep."""

    cell: Cell
    config: TrainConfig | None
    """None where the settings are refused."""
    state: str = "waiting"
    """`waiting`, `running`, `finished`, `failed`, `refused`, `stopped`, or `interrupted`: killed, as it seems."""
    error: str = ""
    """The first error, on one line."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What its folder says, under the names of the columns."""

    def read(self) -> None:
        """Read the figures from the run folder."""
        if self.config is not None:
            self.figures = _read_figures(self.cell.folder, self.config)


def run_sweep(request: Request, run: Callable[[TrainConfig, Path], int], guarded: Guard) -> int:
    """Run the jobs of a sweep that are not finished; returns the highest exit status.

    Args:
        request: with at least one cell.
        run: pretrains in a run folder; returns the exit status.
        guarded: turns an error into one.
    """
    jobs = build_jobs(request)
    if any(job.config is not None and job.config.debug.deterministic for job in jobs):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once in a process: at the first product
    statuses: list[int] = []
    for number, job in enumerate(jobs, start=1):
        if {EXIT_STOPPED, EXIT_INTERRUPTED} & {*statuses}:
            break  # whoever stopped a job stopped the sweep; the same command goes on with it
        if job.state == "finished":
            logger.info("%s is finished (%d updates): nothing to do", job.cell.folder, job.figures["steps"])
            continue
        logger.info("run %d of %d: %s", number, len(jobs), job.cell.folder)
        job.state, job.error = "running", ""
        _write_table(request.folder, jobs)
        statuses.append(guarded(lambda job=job: _attempt(job, run)))  # type: ignore[misc]
        job.state = STATES.get(statuses[-1], "failed")
        job.error = "" if job.state == "stopped" else job.error
        job.read()
    _write_table(request.folder, jobs)
    print("\n".join([_table(jobs), *_failures(jobs)]), flush=True)
    if saving := _saving(jobs):
        logger.info(saving)
    logger.info("table: %s", request.folder / "sweep.md")
    return max(statuses, default=EXIT_FINISHED)


def build_jobs(request: Request) -> list[Job]:
    """The jobs in the order in which they run; of several, those that name no prefix cache get the sweep's own."""
    refused: list[Job] = []
    accepted: list[tuple[Cell, TrainConfig]] = []
    for cell in request.cells:
        try:
            config = from_dict(TrainConfig, cell.values)
        except ConfigError as error:
            refused.append(Job(cell, None, "refused", _one_line(error)))
            continue
        if config.unshare.prefix_cache is None and len(request.cells) > 1:
            unshare = dataclasses.replace(config.unshare, prefix_cache=str(request.folder / PREFIX_FOLDER))
            config = dataclasses.replace(config, unshare=unshare)
        accepted.append((cell, config))
    jobs = [Job(*accepted[index]) for index in running_order([config for _, config in accepted])]
    for job in jobs:
        _find_state(job)
    return refused + jobs


def _find_state(job: Job) -> None:
    """What an earlier try left: without opening the run, and without reading its tensors."""
    assert job.config is not None
    status = RunFolder(job.cell.folder).read_status()
    state = status.get("state", "waiting")
    job.read()
    if state == "failed":
        job.error = status.get("reason", "")
    if state == "finished" and not _is_complete(job.config, job.cell.folder):
        state = "waiting"
    job.state = "interrupted" if state == "running" else state


def _is_complete(config: TrainConfig, folder: Path) -> bool:
    """Whether the run that is finished there is the one that `config` asks for."""
    entries = list_checkpoints(folder / "checkpoints")
    if not entries or config.checkpoint.resume != "auto":
        return False
    try:
        meta = read_meta(entries[-1].path)
        # On the run's own device, which the machine that asks, a login node for one, need not have.
        resolved, _ = resolve(config, torch.device(meta["config"]["engine"]["device"]), meta)
    except (CheckpointError, ConfigError):
        return False  # the run itself will say it
    return meta["step"] >= config.max_steps and not configuration_differences(meta["config"], resolved)


def _attempt(job: Job, run: Callable[[TrainConfig, Path], int]) -> int:
    try:
        return run(job.config or from_dict(TrainConfig, job.cell.values), job.cell.folder)
    except Exception as error:
        job.error = _one_line(error)
        raise


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


# ---------------------------------------------------------------------- the table


def _read_figures(folder: Path, config: TrainConfig) -> dict[str, Any]:
    """Columns of the table from a run folder; a figure that is not there yet is left out."""
    run = RunFolder(folder)
    status, rows = run.read_status(), read_metrics(run.metrics)
    entries = list_checkpoints(run.checkpoints)
    evaluations = [row for row in rows if "eval/loss" in row]
    seconds = [row["perf/training_seconds"] for row in rows if "perf/training_seconds" in row]
    steps = max(status.get("step", 0), entries[-1].step if entries else 0)  # a killed run wrote no last status
    figures: dict[str, Any] = {"steps": steps, "max_steps": config.max_steps}
    if evaluations and status.get("state") == "finished":
        figures |= {name: evaluations[-1][f"eval/{name}"] for name in ("loss", "accuracy")}
    if evaluations:
        figures["best_loss"] = min(row["eval/loss"] for row in evaluations)
        figures["best_accuracy"] = max(row["eval/accuracy"] for row in evaluations)
    if seconds:
        figures["hours"] = seconds[-1] / 3600
    try:
        meta = read_meta(entries[-1].path) if entries else {}
    except CheckpointError:
        meta = {}
    unshared_at = meta.get("unshared_at") or []
    shared, is_open = shared_updates(config)
    if unshared_at:
        figures["unshare_step"] = " ".join(map(str, unshared_at))
    elif config.unshare.policy == "fixed":
        figures["unshare_step"] = str(shared + 1)
    at_most = unshared_at[0] - 1 if unshared_at else (config.max_steps if is_open else shared)
    figures["shared"] = min(at_most, steps)
    figures["saved"] = (meta.get("prefix_from") or {"step": 0})["step"]
    return figures


def swept_settings(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Of each cell, the settings on the command line that are not the same in all cells."""
    settings = [dict(item.lstrip("+~").partition("=")[::2] for item in cell.overrides) for cell in cells]
    keys = dict.fromkeys(key for values in settings for key in values)
    varying = [key for key in keys if len({values.get(key) for values in settings}) > 1]
    return [{key: values.get(key, "") for key in varying} for values in settings]


def _write_table(folder: Path, jobs: Sequence[Job]) -> None:
    """`sweep.csv` and `sweep.md`; a full disk shows in the runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "sweep.csv", _csv(folder, jobs))
        parts = [f"# {folder.name}", EXPLANATION, _table(jobs), *_failures(jobs), _saving(jobs)]
        write_atomically(folder / "sweep.md", "\n\n".join(part for part in parts if part) + "\n")
    except OSError as error:
        logger.warning("%s: the table could not be written (%s)", folder, error)


def _csv(folder: Path, jobs: Sequence[Job]) -> str:
    figures = ("steps", "max_steps", "unshare_step", "loss", "best_loss", "accuracy", "best_accuracy", "hours")
    swept = swept_settings([job.cell for job in jobs])
    rows = [
        {
            "cell": os.path.relpath(job.cell.folder, folder),
            "state": job.state,
            **values,
            **{name: job.figures.get(name, "") for name in (*figures, "shared", "saved")},
            "error": job.error,
        }
        for job, values in zip(jobs, swept, strict=True)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _table(jobs: Sequence[Job]) -> str:
    """The table for people: what is swept names the run."""
    swept = swept_settings([job.cell for job in jobs])
    header = (*swept[0], "state", "steps", "unshare step", "loss", "best", "accuracy", "best", "hours", "saved")
    return markdown_table(header, [[*values.values(), *_shown(job)] for job, values in zip(jobs, swept, strict=True)])


def _shown(job: Job) -> list[str]:
    figures = job.figures
    steps = f"{figures['steps']}/{figures['max_steps']}" if figures else ""
    formats = {"loss": ".4f", "best_loss": ".4f", "accuracy": ".4f", "best_accuracy": ".4f", "hours": ".2f"}
    numbers = [format(figures[name], code) if name in figures else "" for name, code in formats.items()]
    saved = str(figures["saved"]) if figures.get("shared") else ""
    return [job.state, steps, figures.get("unshare_step", ""), *numbers, saved]


def _failures(jobs: Sequence[Job]) -> list[str]:
    return [f"{job.state}: {job.cell.folder}: {job.error}" for job in jobs if job.error]


def _saving(jobs: Sequence[Job]) -> str:
    """What the shared prefixes saved so far; empty where it is nothing."""
    shared, saved = (sum(job.figures.get(name, 0) for job in jobs) for name in ("shared", "saved"))
    return f"{shared - saved} shared updates trained, not {shared}" if saved else ""
