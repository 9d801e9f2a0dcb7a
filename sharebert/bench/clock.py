"""Time of the parts of an update, on the host or on CUDA."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

PARTS = ("data", "forward", "backward", "optimizer")


class PartClock:
    """Adds up the seconds of each part of one update. On CUDA by events, so that nothing waits inside the update."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside as part `name`."""
        if self._device.type == "cuda" and name != "data":  # making a batch is work of the host
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            start = time.perf_counter()
            yield
            self._host[name] += time.perf_counter() - start

    def time(self, update: Callable[[], None]) -> dict[str, float]:
        """Run one update; the seconds of each part, and of all of it as `update`."""
        self._host.clear()
        self._events.clear()
        synchronize(self._device)
        start = time.perf_counter()
        update()
        synchronize(self._device)
        seconds = {"update": time.perf_counter() - start, **dict.fromkeys(PARTS, 0.0)}
        for name, value in self._host.items():
            seconds[name] += value
        for name, begin, end in self._events:
            seconds[name] += begin.elapsed_time(end) / 1000
        return seconds


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
