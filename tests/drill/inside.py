"""What runs inside a process of the drill: the program itself, with a gauge on it and the fault it was given.

The processes are forked from a server that has imported the program (a start takes no second), or are plain
`python -m sharebert`, which has neither gauge nor fault.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch._dynamo

from sharebert import pretrain, trainer
from sharebert.cli import entry

CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
"""Audit events of operations that change a folder (`open`: when it is for writing)."""


@dataclass(frozen=True)
class Inside:
    """A fault that a process does to itself."""

    action: str
    """`raise`, `hang`, `clock` (at an update) or `signal` (at a file operation)."""
    at: int
    """The update that is under way, or the number of the file operation, both counted from 1."""
    number: int = 0
    """The signal; the seed of the clock's jumps."""


@dataclass(frozen=True)
class Start:
    """One process of one start."""

    arguments: tuple[str, ...]
    """After `sharebert`."""
    environment: dict[str, str]
    terminal: Path
    """Takes standard output and error."""
    gauge: Path
    folder: Path
    """Operations on files below it are counted."""
    draws: bool
    """Whether `curves.png` is drawn, which takes a second."""
    fault: Inside | None


class Gauge:
    """Numbers in a small mapped file: read from outside at any moment, and after a kill."""

    _FIELDS = ("updates", "operations", "fired")

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(self._FIELDS)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def read(self, name: str) -> int:
        """`updates` completed in the run, `operations` of this process, or whether its fault has `fired`."""
        return int(struct.unpack_from("q", self._map, 8 * self._FIELDS.index(name))[0])

    def write(self, name: str, value: int) -> None:
        """Set one of them."""
        struct.pack_into("q", self._map, 8 * self._FIELDS.index(name), value)


class InjectedError(Exception):
    """Raised by a rank that was told to."""


class JumpingClock:
    """Stands for the module `time`: from some update on, hours pass or are given back between two readings."""

    def __init__(self, seed: int) -> None:
        self._draw, self._offset, self.is_on = random.Random(seed), 0.0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def _read(self, now: float) -> float:
        if self.is_on and self._draw.random() < 0.3:
            self._offset = self._draw.choice([-1.0, 1.0]) * self._draw.choice([-now, 0.0, 3600.0, 86_400.0, 1e9])
        return now + self._offset

    def time(self) -> float:
        return self._read(time.time())

    def monotonic(self) -> float:
        return self._read(time.monotonic())

    def perf_counter(self) -> float:
        return self._read(time.perf_counter())


def run(start: Start) -> None:
    """Body of a forked process: what `sharebert ARGUMENTS` does; ends the process."""
    os.setsid()
    descriptor = os.open(start.terminal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(start.environment)
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # the server's would be handed down to the program's workers
    gauge = Gauge(start.gauge)
    _count_operations(start, gauge)
    _watch_updates(start.fault, gauge)
    pretrain.measure_matmul_peak = lambda device, dtype: 1e12
    if not start.draws:
        pretrain.draw_curves = lambda run: None
        pretrain.draw_share_map = lambda run, unit_layers, threshold: None
    sys.argv = ["sharebert", *start.arguments]
    entry()


def _count_operations(start: Start, gauge: Gauge) -> None:
    folder, fault = str(start.folder), start.fault

    def changes_the_folder(event: str, arguments: tuple[Any, ...]) -> bool:
        if event not in CHANGES:
            return False
        if event == "open":
            is_for_writing = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            return bool(is_for_writing) and str(arguments[0]).startswith(folder)
        is_relative_to_descriptor = isinstance(arguments[-1], int) and arguments[-1] >= 0  # as shutil.rmtree does it
        return is_relative_to_descriptor or any(str(argument).startswith(folder) for argument in arguments)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not changes_the_folder(event, arguments):
            return
        number = gauge.read("operations") + 1
        gauge.write("operations", number)
        if fault is not None and fault.action == "signal" and number == fault.at:
            gauge.write("fired", 1)
            os.kill(os.getpid(), fault.number)

    sys.addaudithook(hook)


def _watch_updates(fault: Inside | None, gauge: Gauge) -> None:
    original = trainer.Trainer.train_step
    clock = JumpingClock(fault.number if fault is not None else 0)
    if fault is not None and fault.action == "clock":
        for name, module in list(sys.modules.items()):
            if name.startswith(("sharebert.", "data_prep.")) and getattr(module, "time", None) is time:
                module.time = clock  # type: ignore[attr-defined]

    def train_step(self: trainer.Trainer, window: Any) -> bool:
        if fault is not None and fault.action != "signal" and self.counters.step + 1 >= fault.at:
            gauge.write("fired", 1)
            if fault.action == "raise":
                raise InjectedError(f"update {self.counters.step + 1}")
            if fault.action == "hang":
                while True:
                    time.sleep(60)
            clock.is_on = True
        is_complete = original(self, window)
        if is_complete:
            gauge.write("updates", self.counters.step)
        return is_complete

    trainer.Trainer.train_step = train_step  # type: ignore[method-assign]
