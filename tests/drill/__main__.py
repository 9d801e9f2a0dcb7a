"""`make fault-drill`: plan the faults, carry them out two runs at a time, and say in one line what came of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from conftest import invented_text

from drill.faults import KINDS, Fault, inside, not_allowed
from drill.processes import start_server
from drill.runs import MAX_STEPS, SAVE_EVERY, VARIANTS, DisturbedRun, Outcome, Setting, run_undisturbed

ROUNDS = 4
"""A fault that comes too late (the run is finished) is tried again in another run, so often."""
PLAIN_SECONDS = 6.0
"""About what a plain start takes, from importing Python's own library to the last update."""


def plan(kinds: list[tuple[str, int]], draw: random.Random, plain_share: float = 0.25) -> list[Fault]:
    """Draw moment, rank and all else of faults of these (kind, processes).

    Args:
        plain_share: of the signals, how many hit a plain `python -m sharebert`, at any time from its start on.
    """
    faults = []
    for kind, processes in kinds:
        is_signal = KINDS[kind].inside == "signal"
        is_sent = is_signal or kind == "second_signal"
        ranks = [None, *range(processes)] if is_sent else list(range(processes))
        is_forked = not is_sent or draw.random() >= plain_share
        update = draw.randrange(SAVE_EVERY + 1 if KINDS[kind].after else 1, MAX_STEPS - 1)
        if draw.random() < 0.3:
            update = max(1, update - update % SAVE_EVERY)  # the save follows
        rank = draw.choice(ranks)
        is_at_operation = is_signal and is_forked and rank != 1 and draw.random() < 0.5  # rank 1 writes no files
        faults.append(
            Fault(
                kind,
                processes,
                rank,
                is_forked,
                update,
                draw.uniform(0.0, 0.03) if is_forked else draw.uniform(0.2, PLAIN_SECONDS),
                draw.randrange(1, 150) if is_at_operation else 0,
                draw.randrange(2**31),
            )
        )
    return faults


def sooner(fault: Fault) -> Fault:
    """A fault that came too late, for another try."""
    return dataclasses.replace(fault, operation=fault.operation // 2, delay=fault.delay / 2)


def group(faults: list[Fault], draw: random.Random) -> list[list[Fault]]:
    """Runs of three to five faults, on the same number of processes, in order of their updates."""
    runs = []
    for processes in sorted({fault.processes for fault in faults}):
        left = [fault for fault in faults if fault.processes == processes]
        draw.shuffle(left)
        while left:
            size = draw.randint(3, 5)
            runs.append(sorted(left[:size], key=lambda fault: fault.update))
            del left[:size]
    draw.shuffle(runs)
    return runs


class Drill:
    """All runs of the drill, in a folder of their own.

    Args:
        seed: of all that is drawn.
        root: scratch folder; what went wrong stays there.
        jobs: runs at a time.
        variants: names of `VARIANTS` to draw from.
        keeps: keep the folders of good runs too.
    """

    def __init__(self, seed: int, root: Path, jobs: int, variants: list[str], keeps: bool = False) -> None:
        self.root, self.jobs, self.variants, self.keeps = root, jobs, variants, keeps
        self.draw = random.Random(seed)
        self.text = root / "stories.txt"
        self.text.write_text(invented_text(300), encoding="utf-8")
        self.outcomes: list[Outcome] = []
        self._undisturbed: dict[tuple[str, int], Path] = {}
        self._lock, self._said, self._total, self._runs = threading.Lock(), 0, 0, 0

    def carry_out(self, faults: list[Fault]) -> list[Fault]:
        """Inflict all faults; returns those that came too late in every round."""
        self._total = len(faults)
        with ThreadPoolExecutor(self.jobs) as pool:
            wanted = [(variant, n) for variant in self.variants for n in sorted({f.processes for f in faults})]
            list(pool.map(self._run_undisturbed, wanted))
            for _ in range(ROUNDS):
                runs = [
                    (number, self._setting(run), run) for number, run in enumerate(group(faults, self.draw), self._runs)
                ]
                self._runs += len(runs)
                outcomes = list(pool.map(self._run_disturbed, runs))
                self.outcomes += outcomes
                faults = [sooner(fault) for outcome in outcomes for fault in outcome.too_late]
                if not faults:
                    break
        return faults

    def _setting(self, run: list[Fault]) -> Setting:
        return Setting(self.text, self.draw.choice(self.variants), run[0].processes)

    def _run_undisturbed(self, key: tuple[str, int]) -> None:
        variant, processes = key
        folder = self.root / f"undisturbed-{variant}-{processes}"
        self._undisturbed[key] = run_undisturbed(Setting(self.text, variant, processes), folder)

    def _run_disturbed(self, numbered: tuple[int, Setting, list[Fault]]) -> Outcome:
        number, setting, faults = numbered
        folder = self.root / f"run-{number:03d}"
        run = DisturbedRun(setting, folder, faults, self._say)
        outcome = run.go(self._undisturbed[setting.variant, setting.processes])
        with self._lock:
            self._close(folder, setting, outcome)
        return outcome

    def _say(self, fault: Fault, what: str) -> None:
        with self._lock:
            self._said += 1
            where = counted(fault.processes, "process")
            say(f"{self._said:4d}/{self._total}  {where:<11}  {fault.kind:<22}  {moment(fault):<36}  {what}")

    def _close(self, folder: Path, setting: Setting, outcome: Outcome) -> None:
        title = f"{folder.name} ({setting.variant}, {counted(setting.processes, 'process')})"
        if outcome.is_good:
            aside = f", {counted(outcome.set_aside, 'damaged checkpoint')} set aside" if outcome.set_aside else ""
            faults = counted(len(outcome.inflicted), "fault")
            say(f"          {title}: equal to the undisturbed run after {faults}{aside}")
            if not self.keeps:
                shutil.rmtree(folder)
            return
        for what in [*outcome.problems, *outcome.leftovers]:
            say(f"  WRONG   {title}: {what}")
        if outcome.differences:
            say(f"  WRONG   {title}: differs in {len(outcome.differences)}: {', '.join(outcome.differences[:4])}")
        say(f"  WRONG   see {folder}/terminal.txt")


def moment(fault: Fault) -> str:
    """When and where a fault comes, for people."""
    rank = "" if fault.processes == 1 else ", all ranks" if fault.rank is None else f", rank {fault.rank}"
    if not fault.is_forked:
        return f"{fault.delay:.1f} s after the start{rank}"
    if fault.operation:
        return f"before file operation {fault.operation}{rank}"
    if inside(fault) is not None:
        return f"in update {fault.update + 1}{rank}"
    return f"{1000 * fault.delay:.0f} ms after update {fault.update}{rank}"


def counted(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def say(line: str) -> None:
    """Progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


def summary(outcomes: list[Outcome], skipped: Counter[str]) -> dict[str, Any]:
    """The closing line."""
    return {
        "faults": sum(len(outcome.inflicted) for outcome in outcomes),
        "equal_to_undisturbed": sum(len(o.inflicted) for o in outcomes if not (o.differences or o.problems)),
        "updates_lost": sum(outcome.updates_lost for outcome in outcomes),
        "leftovers": sum(len(outcome.leftovers) for outcome in outcomes),
        "skipped": dict(skipped),
    }


def main() -> int:
    """Returns the exit status: 0 only if every run ended equal, nothing is left and every bound was kept."""
    parser = argparse.ArgumentParser(prog="make fault-drill", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--each", type=int, default=5, help="faults of each kind, on one process and on two")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="only these")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2], help="only runs on so many processes")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", action="store_true", help="keep the folders of good runs too")
    asked = parser.parse_args()
    logging.getLogger("sharebert").addHandler(logging.NullHandler())
    begin, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="sharebert-drill-"))
    say(f"fault drill with seed {asked.seed} in {root}")
    start_server()
    forbidden, skipped = not_allowed(root), Counter[str]()
    wanted = [(kind, processes) for kind in asked.kinds for processes in asked.processes for _ in range(asked.each)]
    for kind, _ in wanted:
        skipped[kind] += kind in forbidden
    drill = Drill(asked.seed, root, asked.jobs, list(VARIANTS), asked.keep)
    too_late = drill.carry_out(plan([pair for pair in wanted if pair[0] not in forbidden], drill.draw))
    found = summary(drill.outcomes, +skipped)
    for kind, reason in forbidden.items():
        say(f"skipped {kind}: {reason}")
    for fault in too_late:
        say(f"never came: {fault}")
    is_good = all(outcome.is_good for outcome in drill.outcomes) and not too_late
    aside = sum(outcome.set_aside for outcome in drill.outcomes)
    say(f"{time.monotonic() - begin:.0f} s, seed {asked.seed}, {counted(aside, 'damaged checkpoint')} set aside")
    if is_good and not asked.keep:
        shutil.rmtree(root)
    print(json.dumps(found))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
