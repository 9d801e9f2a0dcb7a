"""The processes of one start of the command: one, or two that meet over gloo; a launcher in small."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drill.inside import Gauge, Inside, Start, run
from sharebert.metrics import read_metrics

PEER_SECONDS = 3.0
"""So long the others get to end by themselves after one has failed; then SIGTERM, and after as long again SIGKILL."""
LIMIT_SECONDS = 180.0
"""A start that takes longer counts as hung."""

_TESTS = Path(__file__).resolve().parents[1]


def start_server() -> None:
    """Start the process that all forked ones come from; it imports the program once. Call it before any thread."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS.parent), str(_TESTS), os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drill.inside", "matplotlib.backends.backend_agg", "matplotlib.figure"])


class Job:
    """One start of the command on `processes` processes.

    Args:
        arguments: after `sharebert`.
        folder: holds the run, the cache and, in `terminal.txt` and `gauge-*`, what the drill needs.
        is_forked: from the server, with gauges; else plain `python -m sharebert`.
        faults: by rank, what a forked process does to itself.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        processes: int,
        *,
        is_forked: bool,
        draws: bool = False,
        faults: dict[int, Inside] | None = None,
    ) -> None:
        self.is_forked, self.folder, self.began = is_forked, folder, time.monotonic()
        self._metrics_before = _stamp(folder)
        self.gauges = []
        environment = {"OMP_NUM_THREADS": "1"}
        if processes > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(processes)}
        self._processes: list[Any] = []
        for rank in range(processes):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
            variables = environment | (place if processes > 1 else {})
            gauge = folder / f"gauge-{rank}"
            gauge.unlink(missing_ok=True)
            self.gauges.append(Gauge(gauge))
            begin = self._fork if is_forked else self._spawn
            fault = (faults or {}).get(rank)
            start = Start(tuple(arguments), variables, folder / "terminal.txt", gauge, folder / "work", draws, fault)
            self._processes.append(begin(start))

    @staticmethod
    def _fork(start: Start) -> Any:
        process = multiprocessing.get_context("forkserver").Process(target=run, args=(start,))
        process.start()
        return process

    @staticmethod
    def _spawn(start: Start) -> Any:
        command = [sys.executable, "-m", "sharebert", *start.arguments]
        with start.terminal.open("a") as terminal:
            return subprocess.Popen(
                command, stdout=terminal, stderr=terminal, env=os.environ | start.environment, start_new_session=True
            )

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [process.pid for process in self._processes]

    def statuses(self) -> list[int | None]:
        """Exit status by rank, a signal as its negative number; None where it runs."""
        return [process.exitcode if self.is_forked else process.poll() for process in self._processes]

    def has_ended(self) -> bool:
        """Whether any process has."""
        return any(status is not None for status in self.statuses())

    def wait_until(self, is_due: Callable[[], bool]) -> bool:
        """Wait for a moment; False when the job, or a part of it, ended before."""
        while not is_due():
            if self.has_ended() or time.monotonic() - self.began > LIMIT_SECONDS:
                return False
            time.sleep(0.0005)
        return not self.has_ended()

    def send(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all."""
        for index, pid in enumerate(self.pids):
            if rank in (None, index) and self.statuses()[index] is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def wait(self) -> list[int]:
        """Wait for the end of all, as a launcher: when one has failed the others are ended. Exit statuses by rank."""
        failed_at = None
        while None in self.statuses():
            time.sleep(0.005)
            now = time.monotonic()
            if failed_at is None and any(self.statuses()):
                failed_at, escalation = now, [signal.SIGTERM, signal.SIGKILL]
            elif failed_at is None and now - self.began > LIMIT_SECONDS:
                failed_at, escalation = now, [signal.SIGKILL]
            elif failed_at is not None and escalation and now - failed_at > PEER_SECONDS:
                self.send(escalation.pop(0))
                failed_at = now
        return [status for status in self.statuses() if status is not None]

    def updates(self) -> int:
        """Updates completed in the run, by what this start did; 0 where it completed none."""
        if self.is_forked:
            return max(gauge.read("updates") for gauge in self.gauges)
        if _stamp(self.folder) == self._metrics_before:
            return 0
        return max((row["step"] for row in read_metrics(_metrics(self.folder))), default=0)

    def leaves_processes(self, seconds: float) -> bool:
        """Whether anything that the job started still runs after so long."""
        end = time.monotonic() + seconds
        while any(_group_exists(pid) for pid in self.pids):
            if time.monotonic() > end:
                return True
            time.sleep(0.05)
        return False


def _metrics(folder: Path) -> Path:
    return folder / "work/outputs/run/metrics.jsonl"


def _stamp(folder: Path) -> int:
    return _metrics(folder).stat().st_mtime_ns if _metrics(folder).exists() else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _group_exists(group: int) -> bool:
    """Whether a process of the group runs; one that ended and was not waited for does not count."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, found = file.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                return True
    return False
