"""The kinds of faults: how each is inflicted, what it may cost, and whether this machine allows it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drill.inside import Inside
from drill.processes import Job
from sharebert.checkpoint import list_checkpoints
from sharebert.launch import ECHO_SECONDS, STOP_SIGNALS

STOPPED, KILLED, DAMAGED = "a graceful stop", "a crash", "a crash and a damaged checkpoint"
"""What a fault amounts to: at most 1 update lost, one save interval, two."""


@dataclass(frozen=True)
class Fault:
    """One fault, planned."""

    kind: str
    processes: int
    rank: int | None
    """Whom it hits; None: all."""
    is_forked: bool
    update: int
    """It comes when so many updates of the run are completed, ..."""
    delay: float
    """... and so many seconds later; without `is_forked` only that, since the start."""
    operation: int
    """For signals, where not 0: before this operation on a file instead."""
    seed: int
    """Of what else is drawn."""


@dataclass(frozen=True)
class Place:
    """Where a run of the drill lives."""

    folder: Path
    is_tmpfs: bool

    @property
    def work(self) -> Path:
        """All that the program writes."""
        return self.folder / "work"

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.work / "outputs/run"

    @property
    def cache(self) -> Path:
        """Prepared data."""
        return self.work / "cache"


Act = Callable[[Place, Job, Fault], None]
After = Callable[[Place, Fault], bool]


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    amounts_to: str
    inside: str = ""
    """Name of what the process does to itself, see :class:`drill.inside.Inside`; empty: `act` comes from outside."""
    act: Act | None = None
    """Inflicts it, or follows it up."""
    after: After | None = None
    """Comes when the processes have ended; whether it could be done."""
    lift: Callable[[Place], None] | None = None
    """Ends a state of the machine; half of the time the command is started once before that."""
    goes_on: bool = False
    """Whether the processes go on."""


# ---------------------------------------------------------------------- signals


def _signal(number: signal.Signals) -> Kind:
    def act(place: Place, job: Job, fault: Fault) -> None:
        if not fault.operation:
            job.send(number, fault.rank)

    return Kind(STOPPED if number in STOP_SIGNALS else KILLED, "signal", act)


def signal_number(kind: str) -> int:
    """Number of the signal that a kind is named after."""
    return int(signal.Signals[kind])


def _two_signals(place: Place, job: Job, fault: Fault) -> None:
    draw = random.Random(fault.seed)
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2]
    job.send(draw.choice(numbers), fault.rank)
    time.sleep(draw.uniform(0.0, 0.03))
    job.send(draw.choice([*numbers, signal.SIGKILL]), fault.rank)


# ---------------------------------------------------------------------- the machine


def _fill_disk(place: Place, job: Job, fault: Fault) -> None:
    state = os.statvfs(place.work)
    room = random.Random(fault.seed).choice([0, 20_000, 100_000, 300_000])
    size = max(0, state.f_bavail * state.f_frsize - room)
    with (place.work / "filler").open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(1, size))


def _empty_disk(place: Place) -> None:
    (place.work / "filler").unlink(missing_ok=True)


def _limit_file_size(place: Place, job: Job, fault: Fault) -> None:
    limit = random.Random(fault.seed).choice([0, 3_000, 50_000, 150_000])
    _, hard = resource.prlimit(job.pids[0], resource.RLIMIT_FSIZE)
    resource.prlimit(job.pids[0], resource.RLIMIT_FSIZE, (limit, hard))


def _make_read_only(place: Place, job: Job, fault: Fault) -> None:
    for folder in (place.run / "checkpoints", place.run):
        if folder.is_dir():
            set_read_only(folder, True)


def _make_writable(place: Place) -> None:
    for folder in (place.run, place.run / "checkpoints"):
        if folder.is_dir():
            set_read_only(folder, False)


def set_read_only(folder: Path, is_on: bool) -> None:
    """Let no file be made or removed in `folder`, also by root, whom permissions do not stop."""
    if os.geteuid() != 0:
        folder.chmod(0o555 if is_on else 0o755)
        return
    get_flags, set_flags, immutable = 0x80086601, 0x40086602, 0x10  # linux/fs.h
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(descriptor, get_flags, bytes(ctypes.sizeof(ctypes.c_long))))
        fcntl.ioctl(descriptor, set_flags, struct.pack("l", flags | immutable if is_on else flags & ~immutable))
    finally:
        os.close(descriptor)


def _delete_data(place: Place, job: Job, fault: Fault) -> None:
    shutil.rmtree(place.cache, ignore_errors=True)


# ---------------------------------------------------------------------- ranks and checkpoints


def _is_frozen(fault: Fault) -> bool:
    """Half of those who hang cannot even notice a signal."""
    return fault.seed % 2 == 1


def _hang(place: Place, job: Job, fault: Fault) -> None:
    """A lone process is ended by whoever looks after it; of several, the others notice it by themselves."""
    if _is_frozen(fault):
        job.send(signal.SIGSTOP, fault.rank)
    if len(job.pids) == 1:
        job.send(signal.SIGKILL if _is_frozen(fault) else signal.SIGTERM)
        time.sleep(ECHO_SECONDS + 0.1)
        job.send(signal.SIGTERM)


def _stop_somehow(place: Place, job: Job, fault: Fault) -> None:
    job.send(random.Random(fault.seed).choice([signal.SIGTERM, signal.SIGKILL]))


def _damage(truncates: bool) -> After:
    def after(place: Place, fault: Fault) -> bool:
        draw, found = random.Random(fault.seed), list_checkpoints(place.run / "checkpoints")
        if not found:
            return False
        file = draw.choice(sorted(found[-1].path.iterdir()))
        data = bytearray(file.read_bytes())
        if truncates:
            data = data[: draw.randrange(len(data))]
        else:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        return True

    return after


KINDS = {
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGINT": _signal(signal.SIGINT),
    "SIGUSR1": _signal(signal.SIGUSR1),
    "SIGUSR2": _signal(signal.SIGUSR2),
    "SIGKILL": _signal(signal.SIGKILL),
    "second_signal": Kind(KILLED, act=_two_signals),
    "full_disk": Kind(KILLED, act=_fill_disk, lift=_empty_disk),
    "file_size_limit": Kind(KILLED, act=_limit_file_size),
    "read_only_run_folder": Kind(KILLED, act=_make_read_only, lift=_make_writable),
    "truncated_checkpoint": Kind(DAMAGED, act=_stop_somehow, after=_damage(truncates=True)),
    "bit_flipped_checkpoint": Kind(DAMAGED, act=_stop_somehow, after=_damage(truncates=False)),
    "rank_raises": Kind(KILLED, "raise"),
    "rank_hangs": Kind(KILLED, "hang", act=_hang),
    "token_store_deleted": Kind(STOPPED, act=_delete_data, goes_on=True),
    "clock_jumps": Kind(STOPPED, "clock", goes_on=True),
}


def inside(fault: Fault) -> Inside | None:
    """What a process is told to do to itself, if the fault comes from inside."""
    action = KINDS[fault.kind].inside
    if action == "signal":
        return Inside(action, fault.operation, signal_number(fault.kind)) if fault.operation else None
    if not action or (action == "hang" and _is_frozen(fault)):
        return None
    return Inside(action, fault.update + 1, fault.seed)


# ---------------------------------------------------------------------- what the machine allows


@contextlib.contextmanager
def mounted(folder: Path, is_wanted: bool, megabytes: int = 8) -> Iterator[None]:
    """Mount a small tmpfs at `folder` meanwhile.

    Raises:
        subprocess.CalledProcessError: not allowed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not is_wanted:
        yield
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "sharebert-drill", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def not_allowed(scratch: Path) -> dict[str, str]:
    """Kinds that this machine does not allow, and why."""
    found = {}
    try:
        with mounted(scratch / "mount", is_wanted=True):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        found["full_disk"] = f"a tmpfs cannot be mounted ({error})"
    try:
        set_read_only(scratch, True)
        set_read_only(scratch, False)
    except OSError as error:
        found["read_only_run_folder"] = f"a folder cannot be made read-only ({error})"
    if not hasattr(resource, "prlimit"):
        found["file_size_limit"] = "no prlimit"
    return found
