"""What a finished run has come to: whether it equals another one bit for bit, and what it left lying about."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from sharebert.checkpoint import (
    CheckpointError,
    list_checkpoints,
    load_tensors,
    load_training_state,
    read_meta,
    verify,
)
from sharebert.config import flatten
from sharebert.metrics import read_metrics

PICTURES = {"curves.png", "share_map.png"}
SET_ASIDE = re.compile(r"step-\d+-[a-z-]+\.damaged-\d+")
OF_A_PLACE = ("output_dir", "data.cache_dir", "data.files")
META = (
    "step",
    "phase",
    "layer_groups",
    "policy_state",
    "samples_seen",
    "evaluation",
    "corpus",
    "parameters",
    "world_size",
)


def read_ending(run: Path) -> dict[str, Any]:
    """Every weight and optimizer tensor, counter and figure of a run, but times and places, under names for people."""
    newest = list_checkpoints(run / "checkpoints")[-1].path
    meta, state = read_meta(newest), load_training_state(newest)
    found: dict[str, Any] = {f"weight {name}": tensor for name, tensor in load_tensors(newest).items()}
    for name, values in state["optimizer"].items():
        found |= {f"optimizer {name} {key}": value for key, value in values.items()}
    found |= {f"counter {name}": value for name, value in state["counters"].items() if name != "training_seconds"}
    found |= {f"meta {name}": meta[name] for name in META}
    found |= {f"setting {key}": v for key, v in flatten(meta["config"]).items() if key not in OF_A_PLACE}
    for number, row in enumerate(read_metrics(run / "metrics.jsonl")):
        found[f"row {number}"] = {key: value for key, value in row.items() if not key.startswith("perf/")}
    found["status"] = json.loads((run / "status.json").read_text(encoding="utf-8"))
    found["latest"] = (run / "checkpoints/latest").resolve().name
    return found


def step_of_newest_whole(run: Path) -> int:
    """Step that the run can go on from; 0 where it starts over."""
    for entry in reversed(list_checkpoints(run / "checkpoints")):
        with contextlib.suppress(CheckpointError):
            verify(entry.path)
            return entry.step
    return 0


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names under which two endings differ in any bit."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if name not in one or name not in other or not _is_equal(one[name], other[name])]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def set_aside(run: Path) -> list[str]:
    """Damaged checkpoints that the program moved aside."""
    return [path.name for path in (run / "checkpoints").iterdir() if SET_ASIDE.fullmatch(path.name)]


def find_leftovers(work: Path, undisturbed: Path) -> list[str]:
    """What is in `work` and not where the undisturbed run worked, what is missing there, and locks still held."""
    run = work / "outputs/run"
    found = [f"{name} is left" for name in sorted(_names(work) - _names(undisturbed) - PICTURES)]
    missing = sorted(_names(undisturbed / "outputs") - _names(work / "outputs") - PICTURES)  # `cache` may be deleted
    found += [f"outputs/{name} is missing" for name in missing]
    checkpoints = run / "checkpoints"
    ours = {entry.path.name for entry in list_checkpoints(checkpoints)} | {"latest", *set_aside(run)}
    found += [f"checkpoints/{path.name} is left" for path in checkpoints.iterdir() if path.name not in ours]
    for entry in list_checkpoints(checkpoints):
        try:
            meta = verify(entry.path)
        except CheckpointError as error:
            found.append(str(error))
        else:
            extra = {path.name for path in entry.path.iterdir()} - {*meta["files"], "meta.json"}
            found += [f"checkpoints/{entry.path.name}/{name} is left" for name in extra]
    for lock in work.rglob("*.lock"):
        try:
            with FileLock(lock, timeout=0):
                pass
        except Timeout:
            found.append(f"{lock.name} is held by somebody")
    return found


def _names(work: Path) -> set[str]:
    """Files and folders below `work`, without what is in `checkpoints`; pictures by their name alone."""
    found = set()
    for path in work.rglob("*"):
        parts = path.relative_to(work).parts
        if "checkpoints" not in parts[:-1]:
            found.add(path.name if path.name in PICTURES else "/".join(parts))
    return found
