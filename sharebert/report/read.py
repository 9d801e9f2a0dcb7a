"""What a run folder holds: settings, state and held-out figures, whatever state the run is in."""

from __future__ import annotations

import contextlib
import math
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from sharebert.checkpoint import CheckpointError, list_checkpoints, read_meta
from sharebert.config import ConfigError, TrainConfig, from_dict
from sharebert.curves import unshare_points
from sharebert.data.masking import num_slots
from sharebert.files import short_names
from sharebert.flops import flops_per_update
from sharebert.metrics import read_metrics
from sharebert.run_folder import OF_A_RUN, RunFolder

MAX_DEPTH = 3
"""Levels of folders that are searched for runs: a whole disk is never meant."""

MARKS = ("config.yaml", "status.json", "metrics.jsonl")
"""One of these makes a folder a run folder."""

STATES = ("finished", "running", "stopped", "failed", "damaged", "missing", "no run", "set aside")
"""The first four as in `status.json`; `set aside` is an earlier try that `checkpoint.resume=never` moved."""


NOT_OURS = "config.yaml is not that of a pretraining run"


@dataclass(frozen=True)
class Evaluation:
    """Held-out figures at a step."""

    step: int
    loss: float
    accuracy: float
    hours: float
    """Hours in updates up to here, without evaluation and saving; NaN where the run did not say."""


@dataclass(frozen=True)
class Run:
    """One run folder."""

    name: str
    path: Path
    state: str
    """One of `STATES`."""
    note: str = ""
    """What a reader has to know about the state."""
    step: int = 0
    """The newest step there is a figure of."""
    config: TrainConfig | None = None
    evaluations: tuple[Evaluation, ...] = ()
    """By step."""
    unshare_points: tuple[int, ...] = ()
    """Updates from which fewer weights are shared."""
    checks: tuple[dict[str, Any], ...] = ()
    """Rows of `metrics.jsonl` that hold correlations."""
    vocab_size: int = 0
    """Of the newest checkpoint, else `data.vocab_size`, which a trained vocabulary may fall short of."""
    commit: str = ""
    """Of the code that wrote the newest checkpoint."""
    held_out: tuple[float, ...] = field(default=(), repr=False)
    """Number of held-out targets and their unigram entropy: equal where the same tokens were predicted."""

    @property
    def is_readable(self) -> bool:
        """Whether there is anything to compare."""
        return self.config is not None and bool(self.evaluations) and self.state != "set aside"

    @property
    def is_complete(self) -> bool:
        """Whether it is finished, and was evaluated after its last update."""
        is_finished = self.is_readable and self.state == "finished"
        return is_finished and self.evaluations[-1].step == self.settings.max_steps

    @property
    def settings(self) -> TrainConfig:
        """The configuration of a readable run."""
        assert self.config is not None
        return self.config

    @property
    def tokens_per_update(self) -> int:
        """Tokens in an update, those that are not predicted included."""
        return self.settings.global_batch_size * self.settings.data.seq_len

    @property
    def flops_per_update(self) -> int:
        """The model's floating-point operations in an update."""
        settings = self.settings
        slots = num_slots(settings.data.seq_len, settings.masking.probability)
        batch = settings.global_batch_size
        return flops_per_update(settings.model, settings.data.seq_len, slots, self.vocab_size, batch)


def find_run_folders(paths: Iterable[Path]) -> list[Path]:
    """Run folders among and below `paths`, each once; a path without any is kept, to be named as such.

    A pattern that no shell has replaced is taken as one.
    """
    found: dict[Path, Path] = {}
    matches = [
        [path] if path.exists() else [Path(name) for name in sorted(glob(str(path)))] or [path] for path in paths
    ]
    for path in chain.from_iterable(matches):
        for folder in _below(path, MAX_DEPTH) or [path]:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _below(path: Path, depth: int) -> list[Path]:
    if not path.is_dir():
        return []
    found = [path] if any((path / name).exists() for name in MARKS) else []
    try:
        children = sorted(path.iterdir()) if depth else []
    except OSError:  # a folder that may not be read
        children = []
    for child in children:
        if child.is_dir() and not child.is_symlink() and not child.name.startswith(".") and child.name not in OF_A_RUN:
            found += _below(child, depth - 1)
    return found


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read every folder; what cannot be read is in the run's state and note, never an error."""
    names = short_names(folders)
    return [_read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read_run(path: Path, name: str) -> Run:
    if not path.is_dir():
        missing, note = not path.exists(), "no such folder" if not path.exists() else "a file, not a folder"
        return Run(name, path, "missing" if missing else "no run", note)
    if not any((path / mark).exists() for mark in MARKS):
        return Run(name, path, "no run", f"none of {', '.join(MARKS)} in it")
    notes: list[str] = []
    config = _read_config(path, notes)
    rows = _read_rows(path, notes)
    evaluations, step = _evaluations(rows), max((row["step"] for row in rows), default=0)
    meta = _newest_meta(path)
    state = ("no run" if NOT_OURS in notes else "damaged") if notes else _read_state(path, notes)
    if config is not None and not notes and not evaluations:
        notes.append("no held-out figures yet")
    if state == "finished" and config is not None and step < config.max_steps:
        state = "damaged"
        notes.append(f"status.json says finished, metrics.jsonl ends at step {step:,} of {config.max_steps:,}")
    if re.search(r"\.replaced-\d+(/|$)", path.resolve().as_posix()):
        state, notes = "set aside", ["an earlier try, moved by checkpoint.resume=never; not compared"]
    return Run(
        name=name,
        path=path,
        state=state,
        note="; ".join(notes),
        step=step,
        config=config,
        evaluations=evaluations,
        unshare_points=tuple(sorted({*unshare_points(rows), *meta.get("unshared_at", ())})),
        checks=tuple(row for row in rows if row.get("share/correlations")),
        vocab_size=meta.get("vocab_size", config.data.vocab_size if config is not None else 0),
        commit=meta.get("git_commit") or "",
        held_out=_held_out(rows),
    )


def _read_config(path: Path, notes: list[str]) -> TrainConfig | None:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    except FileNotFoundError:
        may_be_early = RunFolder(path).read_status().get("state") in ("failed", "running", "stopped")
        if not may_be_early or (path / "metrics.jsonl").exists():  # else it got no further than preparing its data
            notes.append("no config.yaml")
        return None
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        notes.append(f"config.yaml cannot be read ({type(error).__name__})")
        return None
    if not isinstance(values, dict) or not {"model", "unshare", "max_steps"} <= set(values):
        notes.append(NOT_OURS)
        return None
    try:
        return from_dict(TrainConfig, {str(key): value for key, value in values.items()})
    except (ConfigError, TypeError, AttributeError) as error:
        notes.append(f"config.yaml: {error}")
        return None


def _read_rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        rows = read_metrics(path / "metrics.jsonl")
    except (OSError, ValueError) as error:
        notes.append(f"metrics.jsonl cannot be read ({type(error).__name__})")
        return []
    return [row for row in rows if type(row["step"]) is int]


def _read_state(path: Path, notes: list[str]) -> str:
    """`status.json`'s state, and in `notes` its reason."""
    status = RunFolder(path).read_status()
    state = status.get("state")
    if state not in STATES:
        notes.append("no readable status.json")
        return "damaged"
    if state == "running":
        notes.append(_last_sign_of_life(path))
    elif status.get("reason"):
        notes.append(str(status["reason"]).splitlines()[0])
    return str(state)


def _last_sign_of_life(path: Path) -> str:
    """A killed run says "running" for ever: how old its last figure is tells."""
    try:
        minutes = (time.time() - (path / "metrics.jsonl").stat().st_mtime) / 60
    except OSError:
        return "no figures yet"
    age = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
    return f"last figure {age} ago"


def _number(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _evaluations(rows: list[dict[str, Any]]) -> tuple[Evaluation, ...]:
    clock = [(0, 0.0)]
    for row in rows:
        seconds = _number(row, "perf/training_seconds")
        if math.isfinite(seconds) and row["step"] > clock[-1][0]:
            clock.append((row["step"], seconds))
    found = {}
    for row in rows:
        loss, accuracy = _number(row, "eval/loss"), _number(row, "eval/accuracy")
        if math.isfinite(loss) and math.isfinite(accuracy):
            found[row["step"]] = Evaluation(row["step"], loss, accuracy, seconds_at(row["step"], clock) / 3600)
    return tuple(found[step] for step in sorted(found))


def seconds_at(step: float, clock: Sequence[tuple[float, float]]) -> float:
    """Seconds at `step`, linear between the entries (step, seconds) of `clock`, which ascend; NaN beyond them."""
    place = bisect_left(clock, step, key=lambda entry: entry[0])
    if place == len(clock):
        return math.nan
    if place == 0:
        return clock[0][1] if step == clock[0][0] else math.nan
    (begin, before), (end, after) = clock[place - 1], clock[place]
    return before + (after - before) * (step - begin) / (end - begin)


def _held_out(rows: list[dict[str, Any]]) -> tuple[float, ...]:
    for row in reversed(rows):
        figures = (_number(row, "eval/targets"), round(_number(row, "eval/unigram_loss"), 6))
        if all(map(math.isfinite, figures)):
            return figures
    return ()


def _newest_meta(path: Path) -> dict[str, Any]:
    """`meta.json` of the newest checkpoint; empty without a readable one."""
    for entry in list_checkpoints(path / "checkpoints")[-1:]:
        with contextlib.suppress(CheckpointError):
            return read_meta(entry.path)
    return {}
