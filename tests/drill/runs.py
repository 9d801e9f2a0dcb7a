"""One run of the drill: the same command again and again, a fault each time, until it is finished."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from drill.ending import differences, find_leftovers, read_ending, set_aside, step_of_newest_whole
from drill.faults import DAMAGED, KINDS, STOPPED, Fault, Place, inside, mounted
from drill.processes import LIMIT_SECONDS, Job
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE

MAX_STEPS, SAVE_EVERY = 60, 6
GROUP_TIMEOUT_SECONDS = 9.0
"""So long a rank waits for one that hangs; a busy machine must not reach it by itself."""
VARIANTS = {
    "fixed": ["unshare.step=26", "model.dropout=0.1", "engine.micro_batch_size=2"],
    "workers": ["unshare.fraction=0.6", "engine.num_workers=1", "logging.every_steps=4"],
    "multi_step": [
        *("unshare=multi_step", "unshare.check_every=5", "unshare.threshold=0.998", "unshare.patience=1"),
        *("optim.lr=0.02", "logging.every_steps=3"),
    ],
}
"""Settings of the runs, besides those of :func:`command`."""

WORDS = {
    EXIT_FINISHED: "finished",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "refused",
    EXIT_STOPPED: "stopped and saved",
    EXIT_INTERRUPTED: "interrupted",
}


@dataclass(frozen=True)
class Setting:
    """What is run."""

    text: Path
    variant: str
    processes: int


@dataclass
class Outcome:
    """What became of one run."""

    inflicted: list[Fault] = field(default_factory=list)
    too_late: list[Fault] = field(default_factory=list)
    """The run was finished before their moment came."""
    updates_lost: int = 0
    set_aside: int = 0
    differences: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Bounds that were not kept, starts that failed by themselves."""

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, wrong or left."""
        return not (self.differences or self.leftovers or self.problems)


def command(setting: Setting, place: Place) -> list[str]:
    """The command that is started again and again, after `sharebert`."""
    return [
        *("train", "data=text_files", f"data.files=[{setting.text}]", f"data.cache_dir={place.cache}"),
        *("data.vocab_size=150", "data.seq_len=16", "data.num_proc=1", "model.num_layers=4", "model.hidden_size=32"),
        *("model.num_heads=2", "model.intermediate_size=64", "model.max_position_embeddings=16"),
        *("global_batch_size=8", f"max_steps={MAX_STEPS}", "optim.warmup_steps=5", "evaluation.max_sequences=16"),
        *(f"checkpoint.every_steps={SAVE_EVERY}", "evaluation.every_steps=10", "logging.every_steps=1"),
        *("engine.device=cpu", "engine.precision=fp32", "engine.compile=false"),
        f"engine.group_timeout_minutes={GROUP_TIMEOUT_SECONDS / 60}",
        *(f"output_dir={place.work}/outputs", "run_name=run"),
        *VARIANTS[setting.variant],
    ]


def run_undisturbed(setting: Setting, folder: Path) -> Path:
    """The run that the others are compared with; returns the folder of what it wrote."""
    place = Place(folder, is_tmpfs=False)
    place.work.mkdir(parents=True)
    statuses = Job(command(setting, place), folder, setting.processes, is_forked=True, draws=True).wait()
    if any(statuses):
        raise RuntimeError(f"the undisturbed run ended with {statuses}: {folder}/terminal.txt")
    return place.work


class DisturbedRun:
    """A run and its faults; :meth:`go` carries it out.

    Args:
        setting: what is run.
        folder: where; made anew.
        faults: in the order in which they come.
        say: is told of every fault, when it is over.
    """

    def __init__(self, setting: Setting, folder: Path, faults: list[Fault], say: Callable[[Fault, str], None]) -> None:
        self.setting, self.faults, self._say = setting, list(faults), say
        self.place = Place(folder, any(fault.kind == "full_disk" for fault in faults))
        self.outcome = Outcome()
        self._draw = random.Random(faults[0].seed)
        self._kept = 0

    def go(self, undisturbed: Path) -> Outcome:
        """Start the command until it is finished, and compare with the undisturbed run."""
        outcome, run = self.outcome, self.place.run
        with mounted(self.place.work, self.place.is_tmpfs):
            while not self._start(self._next_faults()):
                if outcome.problems:
                    return outcome
            outcome.too_late += self.faults
            outcome.set_aside = len(set_aside(run))
            outcome.differences = differences(read_ending(undisturbed / "outputs/run"), read_ending(run))
            outcome.leftovers += find_leftovers(self.place.work, undisturbed)
        return outcome

    def _next_faults(self) -> list[Fault]:
        """Those of the next start: one that ends it, perhaps one before that lets it go on."""
        now: list[Fault] = []
        while self.faults and (not now or (len(now) == 1 and KINDS[now[0].kind].goes_on and self._go_together(now[0]))):
            now.append(self.faults.pop(0))
        return now

    def _go_together(self, first: Fault) -> bool:
        second = self.faults[0]
        return first.is_forked and second.is_forked and (inside(first) is None or inside(second) is None)

    def _start(self, faults: list[Fault]) -> bool:
        """Start the command once, inflict the faults, and see what is lost; whether the run is finished."""
        is_forked = all(fault.is_forked for fault in faults)
        job = self._job(is_forked, faults)
        inflicted = [fault for fault in faults if self._inflict(fault, job)]
        statuses = job.wait()
        inflicted = [
            fault for fault in inflicted if (after := KINDS[fault.kind].after) is None or after(self.place, fault)
        ]
        last = inflicted[-1] if inflicted else None
        self.outcome.inflicted += inflicted
        self.outcome.too_late += [fault for fault in faults if fault not in inflicted]
        self._check_end(job, statuses, last)
        lost = self._count_lost(job, last)
        remark = _in_words(statuses)
        if last is not None and (lift := KINDS[last.kind].lift) is not None:
            if last.seed % 2:
                job = self._job(is_forked, [])
                remark += f", again: {_in_words(job.wait())}"
                lost += self._count_lost(job, last)
            lift(self.place)
        is_finished = not any(statuses) and self._kept == MAX_STEPS
        for fault in inflicted:
            goes_on = "" if is_finished else f", goes on from {self._kept}" + (f", {lost} lost" if lost else "")
            self._say(fault, remark + goes_on if fault is last else "goes on")
        if not is_finished and last is None and not any(statuses):
            self.outcome.problems.append(f"a start ended well, but at update {self._kept}")
        return is_finished

    def _job(self, is_forked: bool, faults: list[Fault]) -> Job:
        does_it_itself = {}
        for fault in faults:
            if (told := inside(fault)) is not None:
                ranks = range(self.setting.processes) if fault.rank is None else [fault.rank]
                does_it_itself |= dict.fromkeys(ranks, told)
        draws = self._draw.random() < 0.25
        arguments, processes = command(self.setting, self.place), self.setting.processes
        return Job(arguments, self.place.folder, processes, is_forked=is_forked, draws=draws, faults=does_it_itself)

    def _inflict(self, fault: Fault, job: Job) -> bool:
        """Wait for the moment of the fault; False when the job ended before."""

        def is_due() -> bool:
            if inside(fault) is not None:
                return any(gauge.read("fired") for gauge in job.gauges)
            if not fault.is_forked:
                return time.monotonic() - job.began >= fault.delay
            return job.updates() >= fault.update

        came = job.wait_until(is_due) or (inside(fault) is not None and is_due())
        if not came:
            return False
        if inside(fault) is None and fault.is_forked:
            time.sleep(fault.delay)
        if (act := KINDS[fault.kind].act) is not None:
            try:
                act(self.place, job, fault)
            except (OSError, ProcessLookupError):  # the process is gone, or a tmpfs that cannot be read-only
                return False
        return True

    def _check_end(self, job: Job, statuses: list[int], last: Fault | None) -> None:
        """Note what no fault accounts for."""
        problems, words = self.outcome.problems, _in_words(statuses)
        if time.monotonic() - job.began > LIMIT_SECONDS:
            problems.append(f"a start did not end in {LIMIT_SECONDS:.0f} s ({last})")
        if last is None and any(statuses):
            problems.append(f"a start without a fault {words}")
        elif last is not None and EXIT_USAGE in statuses and KINDS[last.kind].lift is None:
            problems.append(f"{last.kind}: {words}, as if the request were wrong")
        elif last is not None and KINDS[last.kind].goes_on and not set(statuses) <= {EXIT_FINISHED, EXIT_STOPPED}:
            problems.append(f"{last.kind}: {words}, expected it to go on")
        if job.leaves_processes(8.0):
            self.outcome.leftovers.append(f"processes of a start still run 8 s after its end ({last})")

    def _count_lost(self, job: Job, last: Fault | None) -> int:
        """Updates that were done and have to be done again."""
        reached = max(self._kept, job.updates())
        self._kept = step_of_newest_whole(self.place.run)
        lost = max(0, reached - self._kept)
        amounts_to = KINDS[last.kind].amounts_to if last is not None else STOPPED
        bound = {STOPPED: 1, DAMAGED: 2 * SAVE_EVERY}.get(amounts_to, SAVE_EVERY)
        if lost > bound:
            kind = last.kind if last is not None else "no fault"
            self.outcome.problems.append(f"{kind}: {lost} updates lost, expected at most {bound} ({amounts_to})")
        self.outcome.updates_lost += lost
        return lost


def _in_words(statuses: list[int]) -> str:
    """Exit statuses for people, each once."""
    words = []
    for status in statuses:
        if status < 0:
            word = f"died of {signal.Signals(-status).name}"
        else:
            word = WORDS.get(status, f"left at once ({status})")
        words.append(word)
    return " and ".join(dict.fromkeys(words))
