"""The folder of one run: who owns it, what state the run is in, and whether this configuration may go on in it."""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from sharebert.checkpoint import (
    CheckpointError,
    find_newest_good,
    free_name,
    list_checkpoints,
    read_meta,
    remove_leftovers,
    verify,
)
from sharebert.config import ConfigError, RunConfig, TrainConfig, flatten, to_dict
from sharebert.files import write_atomically
from sharebert.launch import StopRequested
from sharebert.log import note_in_log_file

logger = logging.getLogger(__name__)

OF_A_RUN = (
    *("checkpoints", "config.yaml", "status.json", "metrics.jsonl", "log.txt"),
    *("curves.png", "share_map.png", "tensorboard", "wandb"),
    *("model", "predictions", "submission", "results.json"),
)
"""What a run leaves in its folder."""

MAY_DIFFER = (
    "run_name",
    "output_dir",
    "max_run_minutes",
    "data.files",  # the content hash of the prepared text is compared instead
    "data.hf_path",
    "data.hf_revision",
    "data.hf_streaming",
    "data.tokenizer",
    "data.cache_dir",
    "data.num_proc",
    "engine.device",
    "engine.micro_batch_size",
    "engine.num_workers",
    "engine.compile",
    "engine.activation_checkpointing",
    "engine.group_timeout_minutes",
    "unshare.fraction",  # unshare.step holds what it comes to
    "unshare.prefix_cache",
    "checkpoint.",
    "evaluation.",
    "logging.",
    "debug.",
)
"""Keys (a trailing dot: whole groups) in which a resumed run may differ from the run that began."""


class RunFolder:
    """``<output_dir>/<run_name>``, made and locked by rank 0 for as long as the job runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self._lock: FileLock | None = None

    def open(self, replace: bool) -> None:
        """Make the folder, hold its lock, and clear what a killed save left in it.

        Args:
            replace: start over; what an earlier run left there is moved aside, not lost.

        Raises:
            ConfigError: another process is running in it, or it cannot be made.
        """
        try:
            self._lock_folder()
            remove_leftovers(self.checkpoints)
            is_finished = self.read_status().get("state") == "finished"  # fine-tuned, without checkpoints
            if replace and (is_finished or list_checkpoints(self.checkpoints)):
                self._move_aside()
        except Timeout as error:
            message = f"run folder {self.path}: another process is running in it; expected it free, or another run_name"
            raise ConfigError(message) from error
        except OSError as error:
            raise ConfigError(f"run folder {self.path}: cannot be written ({error.strerror or error})") from error

    def _move_aside(self) -> None:
        """Move what a run leaves into a folder of its own; jobs of a sweep below this folder stay."""
        target = free_name(self.path, "replaced")
        target.mkdir()
        for name in OF_A_RUN:
            if (self.path / name).exists():
                (self.path / name).rename(target / name)
        logger.warning("moved the run that was in %s to %s", self.path, target)

    def _lock_folder(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path / ".lock")
        self._lock.acquire(blocking=False)

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def write_config(self, config: RunConfig) -> None:
        """`config.yaml`: everything resolved, so that it says what was run."""
        write_atomically(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(to_dict(config))))

    def write_status(self, state: str, step: int, reason: str = "") -> None:
        """`status.json`: running, finished, stopped or failed; the step; the reason."""
        status = {"state": state, "step": step, "reason": reason}
        write_atomically(self.path / "status.json", json.dumps(status) + "\n")

    def write_failure(self, error: BaseException, step: int) -> None:
        """The same for an error; says nothing where the disk is full, so that the first error is heard of."""
        with contextlib.suppress(OSError):
            self.write_status("failed", step, f"{type(error).__name__}: {error}")

    def read_status(self) -> dict[str, Any]:
        """What :meth:`write_status` wrote last; empty before."""
        try:
            status = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}


def status_on_error(run: RunFolder) -> Callable[..., None]:
    """Whatever ends the run early is in `status.json`, for programs, and in `log.txt`."""

    def exit_(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            return
        status = run.read_status()
        if isinstance(error, StopRequested):
            run.write_status("stopped", status.get("step", 0), str(error))
            return
        if status.get("state") != "failed":  # else with the step, by whoever knew it
            run.write_failure(error, status.get("step", 0))
        note_in_log_file("".join(traceback.format_exception(error)))

    return exit_


def find_start(run: RunFolder, resume: str) -> Path | None:
    """The checkpoint to go on from, or None to start at step 0.

    The newest good checkpoint of the run folder; for a path, that checkpoint unless the folder already went on
    from it.

    Raises:
        ConfigError: `resume` names a checkpoint that is not there or is damaged, or an older one of this very
            folder: going back would leave two histories in it.
    """
    newest = find_newest_good(run.checkpoints)
    if resume in ("auto", "never"):
        return newest
    chosen = Path(resume).expanduser().resolve()
    try:
        step = verify(chosen)["step"]
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume={resume!r}: expected a whole checkpoint ({error})") from error
    if newest is not None and chosen.parent == run.checkpoints.resolve() and read_meta(newest)["step"] > step:
        expected = f"its newest checkpoint, {newest.name} (or auto), or another run_name to go on from there again"
        raise ConfigError(f"checkpoint.resume={resume!r}: the run folder is past it; expected {expected}")
    return newest if newest is not None and read_meta(newest)["step"] >= step else chosen


def configuration_differences(saved: Mapping[str, Any], current: RunConfig) -> list[str]:
    """Lines ``key: saved -> current`` for every key in which a resumed run must not differ.

    A key that the saved configuration lacks came with a later version, which behaves as before at its default.
    """
    before, now = {**flatten(to_dict(type(current)())), **flatten(saved)}, flatten(to_dict(current))
    names = (*MAY_DIFFER, "global_batch_size") if now.get("checkpoint.accept_other_batch") else MAY_DIFFER
    differences = []
    for key in sorted({*before, *now}):
        may_differ = any(key.startswith(name) if name.endswith(".") else key == name for name in names)
        if not may_differ and before.get(key) != now.get(key):
            differences.append(f"{key}: {before.get(key)} -> {now.get(key)}")
    return differences


def refuse_other_configuration(saved: Mapping[str, Any], current: RunConfig, run: Path) -> None:
    """Refuse to continue a run under settings that would make it another run.

    Raises:
        ConfigError: with one line for each differing key.
    """
    differences = configuration_differences(saved, current)
    is_pretraining = isinstance(current, TrainConfig)
    is_other_batch = is_pretraining and any(line.startswith("global_batch_size: ") for line in differences)
    if differences:
        raise ConfigError(
            f"run folder {run} holds a run of another configuration (saved -> now):\n  "
            + "\n  ".join(differences)
            + "\nexpected the same values; or choose another run_name, or checkpoint.resume=never to start over"
            + ("; or checkpoint.accept_other_batch=true" if is_other_batch else "")
        )


def refuse_other_data(before: Mapping[str, str | None], now: Mapping[str, str], run: Path) -> None:
    """Refuse to go on with a run, or to call it finished, under other data than it began with.

    Args:
        before: hashes by the name of the part; None: it was not there.
        now: the same today.
        run: the run folder.

    Raises:
        ConfigError: naming the first part that differs, or is gone.
    """
    for part, expected in before.items():
        if now.get(part) != expected:
            came = f"sha256 {now[part][:12]}" if part in now else "none there"
            raise ConfigError(
                f"run folder {run}: the data is not what the run began with ({part}: {came}, expected "
                f"{expected[:12] if expected else 'none'}); choose another run_name, or checkpoint.resume=never to "
                "start over"
            )
