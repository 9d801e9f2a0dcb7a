"""The runs of the study, each a `sharebert train` of its own, some at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sharebert.launch import EXIT_FINISHED, EXIT_STOPPED, StopSignals
from sharebert.study.plan import Job

TAIL_LINES = 15
"""Of a failed run's output that are shown."""

POLL_SECONDS = 0.2


@dataclass
class Outcome:
    """What came of the runs."""

    failed: list[Job] = field(default_factory=list)
    is_stopped: bool = False


def run_jobs(jobs: Sequence[Job], num_parallel: int, device: str) -> Outcome:
    """Run all jobs, some at a time; a finished one says so and is over at once. A stop is passed on to the runs."""
    outcome, waiting = Outcome(), list(jobs)
    running: list[tuple[Job, subprocess.Popen[bytes], float]] = []
    with StopSignals(is_announced=True) as stop:
        while (waiting or running) and not outcome.is_stopped:
            while waiting and len(running) < num_parallel:
                job = waiting.pop(0)
                running.append((job, start(job, device), time.monotonic()))
            for entry in list(running):
                job, process, begin = entry
                if process.poll() is not None and stop.received is None:
                    running.remove(entry)
                    _note(job, process.returncode, time.monotonic() - begin, outcome)
            if stop.received is not None:
                outcome.is_stopped = True
            elif running:
                time.sleep(POLL_SECONDS)
        for entry in running:  # at Ctrl-C they have got a signal already; a second one so soon counts as the same
            entry[1].terminate()
        for entry in running:
            entry[1].wait()
    return outcome


def start(job: Job, device: str) -> subprocess.Popen[bytes]:
    """`sharebert train` in a process of its own; its output goes to a file."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sharebert", "train", *job.arguments]
    with job.console.open("wb") as console:
        return subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT, env=environment(device))


def environment(device: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """One thread for each run on CPU: two runs side by side are faster than one after the other on two threads."""
    return {**environ, "OMP_NUM_THREADS": "1"} if device == "cpu" else dict(environ)


def _note(job: Job, status: int, seconds: float, outcome: Outcome) -> None:
    """Say what came of a run."""
    name = f"{time.strftime('%H:%M:%S')}  {job.arm} seed {job.seed}"
    if status == EXIT_FINISHED:
        print(f"{name}: finished ({seconds:,.0f} s)", flush=True)
    elif status == EXIT_STOPPED:
        outcome.is_stopped = True
    else:
        outcome.failed.append(job)
        tail = job.console.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        print(f"{name}: failed with status {status}; {job.console} ends with\n  " + "\n  ".join(tail), flush=True)
