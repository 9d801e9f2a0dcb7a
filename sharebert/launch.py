"""Who this process is among the ranks of a job, and how it is asked to stop.

Knows nothing of torch, so that the command line can refuse a wrong set-up before torch is imported.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from sharebert.config import ConfigError

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # Ctrl-C outside the training loop, as a shell says it
EXIT_STOPPED = 75  # EX_TEMPFAIL: run the same command again

ECHO_SECONDS = 2.0
"""A signal so soon after the first is the same request: launchers pass on what the process got as well."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


@dataclass(frozen=True)
class Ranks:
    """The place of this process in its job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False
    """Whether a launcher (torchrun, srun) started the process, so that a process group has to be joined."""


def detect_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Ranks from torchrun's environment, else from Slurm's, else a lone process.

    Slurm's batch script and interactive shells carry ``SLURM_*`` too: only a job step of several tasks
    that was given a rendezvous address (``MASTER_ADDR``) counts.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "RANK" in environ and "WORLD_SIZE" in environ:
        source = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    elif int(environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environ and "MASTER_ADDR" in environ:
        source = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    else:
        return Ranks()
    values = {}
    for name, key in zip(names, source, strict=True):
        text = environ.get(key, "0")
        if not text.isdigit():
            raise ConfigError(f"environment variable {key}={text!r}: expected a whole number")
        values[name] = int(text)
    return Ranks(values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"], launched=True)


class StopSignals:
    """Remembers the first stop signal instead of dying of it; one that follows 2 s later or more ends the process.

    Use as a context manager around the training loop, in the main thread.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None and now - self._received_at < ECHO_SECONDS:
            return
        if self.received is not None:
            # Files are only ever renamed into place, so leaving here harms nothing that was saved.
            os._exit(128 + number)
        self.received, self._received_at = signal.Signals(number).name, now
