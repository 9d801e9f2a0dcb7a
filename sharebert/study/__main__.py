"""The paired study of `make study`: the same runs with and without sharing, several seeds, then the report.

Every arm trains on the same data in the same order, its rate decayed to zero over its own updates. Each run is a
`sharebert train` of its own, so the study goes on where it stopped when the same command is given again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.text_files import find_files
from sharebert.config import ConfigError
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE
from sharebert.log import set_up_logging
from sharebert.study.plan import EXPERIMENTS, Job, build_jobs, describe_plan, seconds_per_update, study_folder
from sharebert.study.runs import run_jobs


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan, run what is not finished, write the report; returns the exit status."""
    options = parse(arguments)
    set_up_logging(rank=0)
    try:
        jobs = build_jobs(options)
        find_files(options.valid, "--valid")  # now, not after hours
        folder = study_folder(options)
        num_parallel = options.parallel or (1 if options.device == "cuda" else 2)
        print(describe_plan(jobs, folder, num_parallel, seconds_per_update(jobs[0].config)), flush=True)
        if options.dry_run:
            return EXIT_FINISHED
        outcome = run_jobs(jobs, num_parallel, options.device)
        if outcome.is_stopped:
            print("stopped; the same command goes on", flush=True)
            return EXIT_STOPPED
    except ConfigError as error:
        print(f"study: {error}", file=sys.stderr)
        return EXIT_USAGE
    return max(_report(options, jobs, folder), EXIT_FAILED if outcome.failed else EXIT_FINISHED)


def _report(options: argparse.Namespace, jobs: Sequence[Job], folder: Path) -> int:
    """Write `<folder>/report` of all runs there, with the final figures on --valid; returns the exit status."""
    from sharebert.report.run import compare, print_tables, write_report  # these import torch
    from sharebert.study.held_out import evaluate_on_files

    try:
        comparison = compare([folder, *(job.folder for job in jobs)], None)  # also those that left no folder
    except ConfigError as error:
        print(f"study: {error}", file=sys.stderr)
        return EXIT_FAILED
    extra = [evaluate_on_files(comparison, options.valid, options.device)] if options.valid else []
    write_report(comparison, folder / "report", is_named=False, extra=extra)
    print_tables(comparison, folder / "report", extra)
    return EXIT_FINISHED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m sharebert.study", description=__doc__)
    parser.add_argument("--steps", choices=("full", "small"), default="full", help="small: minutes, says nothing")
    parser.add_argument("--device", choices=tuple(EXPERIMENTS), default="cpu", help="which experiment, and where")
    parser.add_argument("--corpus", nargs="+", help="text files or globs (default: documentation of this Python)")
    parser.add_argument(
        "--valid", nargs="+", default=[], help="text files on which the final checkpoints are evaluated besides"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 1 2 3; with --steps small 1 2")
    parser.add_argument("--arms", nargs="+", help="only these (default: all)")
    parser.add_argument(
        "--arm", action="append", default=[], metavar="'NAME: SETTINGS'", help="one more arm; settings as for train"
    )
    parser.add_argument("--arm-file", type=Path, help="such lines, in place of the study's own arms")
    parser.add_argument("--settings", nargs="+", default=[], help="of every run; with another --output, as runs go on")
    parser.add_argument("--output", type=Path, help="default: outputs/study/<experiment>")
    parser.add_argument("--parallel", type=int, help="runs side by side (default: 2 with a thread each, on CUDA 1)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan only")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
