"""Who this process is among the ranks of a job, and how it is asked to stop.

Knows nothing of torch, so that the command line can refuse a wrong set-up before torch is imported.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, NoReturn

from sharebert.config import ConfigError

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # Ctrl-C before the run began, as a shell says it
EXIT_STOPPED = 75  # EX_TEMPFAIL: run the same command again

ECHO_SECONDS = 2.0
"""A signal so soon after the first is the same request: launchers pass on what the process got as well."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGUSR1)
STOP_SIGNALS_WITH_NCCL = STOP_SIGNALS[:3]
"""NCCL and its network plugins have used SIGUSR1 for themselves: between GPUs it is left alone."""

_STARTED = time.monotonic()  # this module is among the first that are imported
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below the range from which Linux gives ports away


# ---------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Ranks:
    """The place of this process in its job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False
    """Whether a launcher (torchrun, srun) started the process, so that a process group has to be joined."""
    local_world_size: int = 1
    """Processes of the job on this machine."""
    gpu: int = 0
    """Index of the process's GPU among those that it sees."""


def detect_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Ranks from torchrun's environment, else from that of a Slurm step (`srun`) of several tasks, else a lone process.

    A batch script and an interactive shell carry ``SLURM_*`` too, but they are not started by `srun` once a task.

    Raises:
        ConfigError: a variable that has to be a whole number is none.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, local_rank = _number(environ, "RANK"), _number(environ, "LOCAL_RANK")
        size = _number(environ, "WORLD_SIZE")
        return Ranks(rank, local_rank, size, True, _number(environ, "LOCAL_WORLD_SIZE", size), gpu=local_rank)
    if not _is_slurm_task(environ):
        return Ranks()
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    sees_one_gpu = visible != "" and "," not in visible  # --gpus-per-task, --gpu-bind: Slurm shows each task its own
    gpu = 0 if sees_one_gpu else local_rank
    return Ranks(rank, local_rank, _num_slurm_tasks(environ), True, _num_slurm_tasks_here(environ), gpu)


def _number(environ: Mapping[str, str], key: str, default: int = 0) -> int:
    text = environ.get(key, str(default))
    if not text.isdigit():
        raise ConfigError(f"environment variable {key}={text!r}: expected a whole number")
    return int(text)


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    is_step = "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ
    is_shell = "SLURM_PTY_PORT" in environ  # srun --pty
    return is_step and not is_shell and _num_slurm_tasks(environ) > 1


def _num_slurm_tasks(environ: Mapping[str, str]) -> int:
    return _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS", 1)


def _num_slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks of the step on this node, from a list such as ``4(x2),3``."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = _number(environ, "SLURM_NODEID")
    return counts[node] if node < len(counts) else 1


def first_host(node_list: str) -> str:
    """The first name in a Slurm node list.

    >>> first_host("node[001-003,007],gpu5")
    'node001'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def rendezvous(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT of a Slurm step, where they are not set: rank 0's node, a port from job and step.

    The port is another one for every job, so that two jobs on a node do not meet.
    """
    if "RANK" in environ or not _is_slurm_task(environ):
        return {}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    port = _FIRST_PORT + (job + 509 * step) % _NUM_PORTS
    found = {"MASTER_ADDR": first_host(nodes) or "127.0.0.1", "MASTER_PORT": str(port)}
    return {key: value for key, value in found.items() if key not in environ}


def is_restart(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun (`--max-restarts`) or Slurm (requeue) has started this job before."""
    return any(_number(environ, key) > 0 for key in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def usable_cores() -> int:
    """Cores that this process may run on; all of the machine's where the system does not say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(ranks: Ranks, environ: MutableMapping[str, str] = os.environ) -> None:
    """Give each of several ranks its share of the machine's cores, where OMP_NUM_THREADS is not set.

    Call it before torch is imported. A fixed rule, as results depend on the number of threads in the last bit:
    Slurm's ``--cpus-per-task``, else the usable cores divided by the ranks on the machine. A lone process keeps
    torch's own choice, and torchrun itself sets 1.
    """
    if ranks.world_size == 1 or "OMP_NUM_THREADS" in environ:
        return
    cores = usable_cores() // ranks.local_world_size
    if "RANK" not in environ:
        cores = _number(environ, "SLURM_CPUS_PER_TASK", cores)
    environ["OMP_NUM_THREADS"] = str(max(1, cores))


def leave_at_once(status: int) -> NoReturn:
    """End a rank with `status`, its files flushed, without the interpreter's shut-down.

    Threads that the collectives' libraries leave behind can abort that, and a finished rank would count as failed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---------------------------------------------------------------------- being asked to stop


def stop_signals(ranks: Ranks, device_type: str) -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop."""
    return STOP_SIGNALS_WITH_NCCL if ranks.launched and device_type == "cuda" else STOP_SIGNALS


class StopRequested(Exception):
    """Ends work other than training, where a stop was asked for. What was finished is kept."""


class StopSignals:
    """Remembers that a stop was asked for, by a signal or by the end of `max_run_minutes`.

    The first signal is only remembered; one that follows 2 s later or more ends the process at once. Use as a context
    manager around the run, in the main thread. Python calls signal handlers between two of its own instructions: a
    signal that comes while a layer is compiled or a batch is computed is noticed right after.
    """

    last_reason: ClassVar[str | None] = None
    """Why the last run of this process was asked to stop; None: it was not."""

    def __init__(
        self,
        numbers: Sequence[signal.Signals] = STOP_SIGNALS,
        max_run_minutes: float | None = None,
        is_announced: bool = False,
    ) -> None:
        """
        Args:
            numbers: the signals to take.
            max_run_minutes: since the start of the process; None: no limit.
            is_announced: say on the terminal that a signal was understood (rank 0).
        """
        self.received: str | None = None
        """Name of the signal, or the limit."""
        self._numbers = numbers
        self._limit = math.inf if max_run_minutes is None else 60.0 * max_run_minutes
        self._is_announced = is_announced
        self._signalled_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        StopSignals.last_reason = None
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._handle)
            outer = getattr(self._previous[number], "__self__", None)
            if isinstance(outer, StopSignals) and outer._signalled_at is not None:
                self.received, self._signalled_at = outer.received, outer._signalled_at
        return self

    def __exit__(self, *_: object) -> None:
        StopSignals.last_reason = self.received
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def is_wanted(self, seconds_to_leave: float = 0.0) -> bool:
        """Whether to stop now.

        Args:
            seconds_to_leave: what stopping takes, kept free before the end of `max_run_minutes`; at least 30 s are,
                or a twentieth of a limit that is shorter than 10 minutes.
        """
        margin = max(seconds_to_leave, min(30.0, self._limit / 20.0))
        if self.received is None and time.monotonic() - _STARTED + margin >= self._limit:
            self.received = f"max_run_minutes={self._limit / 60.0:g}"
        return self.received is not None

    def check(self) -> None:
        """
        Raises:
            StopRequested: a stop is wanted.
        """
        if self.is_wanted():
            raise StopRequested(self.received)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self._signalled_at is None:
            self._signalled_at = now
            self.received = self.received or name
            if self._is_announced:
                text = f"\n{name}: stopping as soon as it is safe; a second signal ends at once\n"
                with contextlib.suppress(OSError):  # a terminal that is gone
                    os.write(2, text.encode())  # not print: a handler may interrupt the very one that it would need
        elif now - self._signalled_at >= ECHO_SECONDS:
            # Files are only ever renamed into place, so leaving here harms nothing that was saved.
            os._exit(128 + number)


def leave_signals_to_parent() -> None:
    """For worker processes: a job's signals go to all of its processes, but the main one still needs them to stop well.

    SIGTERM cannot simply be ignored: Python ends leftover workers with it and then waits for them, so a main process
    that fails would hang. A thread lets it through when the parent is the sender. Another one ends the worker with a
    parent that was killed: it would wait for work for ever, and, when forked, hold the lock of the run folder.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS, where the handler that was there stays
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before the threads, which inherit it
        threading.Thread(target=_exit_when_parent_says, daemon=True).start()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _exit_when_parent_says() -> None:
    parent = multiprocessing.parent_process()  # not os.getppid(): that can be the server which forks the workers
    while parent is not None:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent.pid:
            os._exit(0)
