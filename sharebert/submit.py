"""The verb `submit`: another verb as a job that comes back after a preemption, on Slurm or on this machine.

The library submitit writes the batch script, carries the job over, and starts it again. How it fits together: the job
stops as it always does (a signal, or `max_run_minutes`), with everything saved; only then is submitit shown the signal,
which makes it requeue the job; the job then resumes as the same command would.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharebert.compose import Cell, Request, compose
from sharebert.config import ConfigError, TrainConfig, check_world_size, from_dict, to_dict
from sharebert.launch import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_USAGE,
    StopSignals,
    detect_ranks,
    leave_at_once,
)

logger = logging.getLogger(__name__)

RunCell = Callable[[str, Cell], int]
"""Runs one cell of a verb and returns its exit status; a function of a module, so that a job can find it again."""

LOG_FOLDER = "jobs"
MAX_TIMEOUTS = 1000  # how often a job that ran into its time limit is put back into the queue
_LOCAL_MINUTES = 60 * 24 * 365

EXAMPLES = """\
The settings of VERB follow it, as without submit; with -m every cell of the sweep is a job of one array.

  sharebert submit --time 4:00:00 --gpus-per-node 8 --partition gpu train +experiment=bert_base_half
  sharebert submit --time 60 --dry-run train -m +experiment=demo unshare.step=50,100    show the batch script
  sharebert submit --launcher local train +experiment=demo                              here, job after job
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a job runs. submitit pickles it, calls it in every task, and asks for `checkpoint` when it requeues."""

    run: RunCell
    verb: str
    cell: Cell
    environment: Mapping[str, str | None]
    """Variables that the job needs as they were where it was submitted; None: unset."""

    def __call__(self) -> int:
        """Run the cell; its exit status.

        Raises:
            RuntimeError: it failed; on Slurm, where the status of the job has to say so.
        """
        for key, value in self.environment.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
        _export_local_ranks()
        with StopSignals():  # for signals that come before the run has its own
            status = self.run(self.verb, self.cell)
            reason = StopSignals.last_reason
        if status == EXIT_STOPPED and reason not in ("SIGTERM", "SIGINT"):  # those are a person's, or Slurm's own end
            signal.raise_signal(_requeue_signal())
        is_failed = status not in (EXIT_FINISHED, EXIT_STOPPED) and os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
        if detect_ranks().launched:  # once submitit has written down the result
            atexit.register(leave_at_once, EXIT_FAILED if is_failed else EXIT_FINISHED)
        if is_failed:
            raise RuntimeError(f"sharebert {self.verb} ended with exit status {status}")
        return status

    def checkpoint(self) -> Any:
        """What submitit starts when the job comes back: the same, but it goes on where it was told to start over."""
        from submitit.core.utils import DelayedSubmission

        values = self.cell.values
        if values.get("checkpoint", {}).get("resume") == "never":
            values = {**values, "checkpoint": {**values["checkpoint"], "resume": "auto"}}
        return DelayedSubmission(dataclasses.replace(self, cell=dataclasses.replace(self.cell, values=values)))


def _requeue_signal() -> signal.Signals:
    from submitit import JobEnvironment

    return signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]


def _export_local_ranks() -> None:
    """Ranks for several tasks of a local job; those of Slurm are found by :func:`detect_ranks`."""
    if os.environ.get("SUBMITIT_EXECUTOR") == "local" and int(os.environ["SUBMITIT_LOCAL_NTASKS"]) > 1:
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)


# ---------------------------------------------------------------------- the command line


def main(arguments: Sequence[str], verbs: Mapping[str, tuple[str, type]], run: RunCell) -> int:
    """Submit a verb; the exit status: of the submission on Slurm, of the jobs on this machine.

    Args:
        arguments: as typed after `submit`.
        verbs: primary configuration and schema of each verb that Hydra reads and that can be submitted.
        run: runs one cell, in the job.

    Raises:
        ConfigError: the request is wrong, or what it needs is not there.
    """
    options = _parser(verbs).parse_args(arguments)
    _check_installed(options)
    primary, kind = verbs[options.verb]
    request = compose(options.verb, primary, kind, options.settings)
    tasks = options.nodes * _tasks_per_node(options)
    for cell in request.cells:
        config: Any = from_dict(kind, cell.values)
        if isinstance(config, TrainConfig):
            check_world_size(config, tasks)
    if not request.cells:
        return EXIT_FINISHED  # Hydra showed something
    if options.verb == "train" and request.is_multirun:
        waiting = _waiting(request)
        if not waiting:
            print(f"all {len(request.cells)} runs in {request.folder} are finished")
            return EXIT_FINISHED
        request = dataclasses.replace(request, cells=waiting)
    return (_submit_local if options.launcher == "local" else _submit_slurm)(options, request, run)


def _waiting(request: Request) -> list[Cell]:
    """The cells of a sweep as `train -m` runs them: without the finished ones, in the order that shares prefixes."""
    from sharebert.sweep import build_jobs

    waiting = [job for job in build_jobs(request) if job.state != "finished"]
    return [dataclasses.replace(job.cell, values=to_dict(job.config)) for job in waiting]


def _parser(verbs: Mapping[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sharebert submit",
        description="Run a verb as a job that resumes by itself after a preemption or at its time limit.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--launcher", choices=("slurm", "local"), default="slurm", help="where: a Slurm queue, or this machine")
    add("--dry-run", action="store_true", help="print what would be submitted, and stop")
    add("--time", type=_minutes, metavar="LIMIT", help="of a job, as minutes, H:MM:SS or D-HH:MM:SS; Slurm needs it")
    add("--nodes", type=int, default=1, help="machines of a job")
    add("--gpus-per-node", type=int, help="GPUs on each; one task is started for each of them")
    add("--tasks-per-node", type=int, help="processes on each, where that is not the number of GPUs")
    add("--cpus-per-task", type=int, help="cores of each process")
    add("--mem", help="memory of each node, as 64GB")
    for name in ("partition", "account", "qos", "constraint"):
        add(f"--{name}", help="as sbatch has it")
    add("--array-parallelism", type=int, default=256, help="jobs of a sweep that run at once (default %(default)s)")
    add("--signal-delay", type=int, default=120, metavar="SECONDS", help="warning before the limit (%(default)s)")
    add("--setup", action="append", default=[], metavar="COMMAND", help="a line of the batch script before the start")
    add("--slurm", action="append", default=[], metavar="KEY[=VALUE]", help="any other flag of sbatch; repeatable")
    add("verb", choices=sorted(verbs), metavar="VERB", help=f"one of {', '.join(verbs)}")
    add("settings", nargs=argparse.REMAINDER, help="settings of the verb")
    return parser


def _minutes(text: str) -> int:
    """Minutes of a Slurm time: minutes, minutes:seconds, H:MM:SS, D-H, D-HH:MM or D-HH:MM:SS; rounded up.

    >>> _minutes("1-02:30:00")
    1590
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected minutes, H:MM:SS or D-HH:MM:SS")
    parts = [int(part) for part in match.groups()[1:] if part is not None]
    if match[1] is not None or len(parts) == 3:  # hours come first
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*parts, 0)[:2]
    return int(match[1] or 0) * 1440 + hours * 60 + minutes + -(-seconds // 60)


def _check_installed(options: argparse.Namespace) -> None:
    try:
        import submitit
    except ImportError:
        expected = "the package submitit; pip install 'sharebert[slurm]'"
        raise ConfigError(f"sharebert submit: expected {expected}") from None
    if options.launcher == "local":
        if options.nodes > 1:
            raise ConfigError(f"--nodes={options.nodes}: expected 1 with --launcher local")
        return
    if options.time is None:
        raise ConfigError("--time: expected the time limit of the job, as in --time 4:00:00")
    if not options.dry_run and submitit.SlurmExecutor.affinity() < 0:
        expected = "a machine of a Slurm cluster; --launcher local runs the job here, --dry-run shows the batch script"
        raise ConfigError(f"--launcher slurm: srun and sbatch are not there; expected {expected}")


def _tasks_per_node(options: argparse.Namespace) -> int:
    return int(options.tasks_per_node or options.gpus_per_node or 1)


def _job(options: argparse.Namespace, cell: Cell, run: RunCell) -> Job:
    environment: dict[str, str | None] = {}
    if options.launcher == "local" and options.gpus_per_node is None:
        # submitit hides all GPUs from a local job that asked for none, and it would quietly train on the CPU.
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Job(run, options.verb, dataclasses.replace(cell, folder=cell.folder.absolute()), environment)


# ---------------------------------------------------------------------- Slurm


def _submit_slurm(options: argparse.Namespace, request: Request, run: RunCell) -> int:
    from submitit import SlurmExecutor

    class Executor(SlurmExecutor):  # type: ignore[misc]
        @classmethod
        def affinity(cls) -> int:  # looked at before; a dry run needs no srun
            return 1

    folder = request.folder.absolute() / LOG_FOLDER
    executor = Executor(folder, max_num_timeout=MAX_TIMEOUTS)
    executor.update_parameters(**_slurm_parameters(options, request))
    if options.dry_run:
        if len(request.cells) > 1:
            executor.parameters["map_count"] = len(request.cells)
        print(executor._make_submission_file_text(executor._submitit_command_str, ""))
        return EXIT_FINISHED
    jobs = executor.submit_array([_job(options, cell, run) for cell in request.cells])
    for job, cell in zip(jobs, request.cells, strict=True):
        print(f"job {job.job_id}: {cell.folder}, log {_shown(job.paths.stdout)}")
    print("squeue --me shows the queue; each run folder has log.txt and status.json")
    if request.is_multirun and options.verb == "train":
        print("once they are finished, the same command from `train` on prints the table of the sweep")
    return EXIT_FINISHED


def _slurm_parameters(options: argparse.Namespace, request: Request) -> dict[str, Any]:
    """Parameters of submitit's Slurm executor."""
    srun = ["--kill-on-bad-exit=1"]  # else the others would wait for a process that died
    if options.cpus_per_task:  # since 22.05 srun does not take it from the batch script any more
        srun.append(f"--cpus-per-task={options.cpus_per_task}")
    extra: dict[str, Any] = {"requeue": True}
    for item in options.slurm:
        key, _, value = item.lstrip("-").partition("=")
        extra[key] = value or True
    names = ("partition", "account", "qos", "constraint", "time", "nodes", "gpus_per_node", "cpus_per_task", "mem")
    given = {name: value for name in (*names, "setup") if (value := getattr(options, name))}
    return {
        **given,
        "job_name": f"sharebert-{request.cells[0].values.get('run_name') or options.verb}",
        "ntasks_per_node": _tasks_per_node(options),
        "signal_delay_s": options.signal_delay,
        "array_parallelism": options.array_parallelism,
        "stderr_to_stdout": True,
        "srun_args": srun,
        "additional_parameters": extra,
        "wckey": None,
    }


# ---------------------------------------------------------------------- this machine


def _submit_local(options: argparse.Namespace, request: Request, run: RunCell) -> int:
    """Run the jobs one after the other; the highest exit status counts. A stopped job ends the sweep."""
    statuses: list[int] = []
    for number, cell in enumerate(request.cells):
        if options.dry_run:
            print(f"job {number}: {options.verb} {shlex.join(cell.overrides)}, in {cell.folder}")
        elif EXIT_STOPPED not in statuses:
            statuses.append(_run_local(options, cell, run))
    return max(statuses, default=EXIT_FINISHED)


def _run_local(options: argparse.Namespace, cell: Cell, run: RunCell) -> int:
    from submitit import LocalExecutor

    executor = LocalExecutor(cell.folder.absolute() / LOG_FOLDER, max_num_timeout=MAX_TIMEOUTS)
    executor.update_parameters(
        timeout_min=options.time or _LOCAL_MINUTES,
        gpus_per_node=options.gpus_per_node or 0,
        tasks_per_node=_tasks_per_node(options),
        signal_delay_s=options.signal_delay,
        stderr_to_stdout=True,
        setup=options.setup,
    )
    with StopSignals() as stop:
        # Ctrl-C goes to all processes of a terminal. submitit's would kill the job within a second: let them be deaf
        # to it; the job itself hears it once it runs.
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
        job = executor.submit(_job(options, cell, run))
        signal.signal(signal.SIGINT, heard)
        print(f"job {job.job_id}: {cell.folder}, log {_shown(job.paths.stdout)}", flush=True)
        was_told = False
        while not job.done():
            if stop.received and not was_told:
                os.kill(int(job.job_id), signal.SIGTERM)  # submitit hands it on to the job, which saves
                was_told = True
            time.sleep(0.2)
    return _outcome(job, cell)


def _outcome(job: Any, cell: Cell) -> int:
    """The highest exit status of the job's tasks, said on the terminal."""
    try:
        status = int(max(job.results()))
    except Exception as error:  # whatever became of it: the log has it
        print(f"job {job.job_id}: {str(error).splitlines()[0]}", file=sys.stderr)
        status = EXIT_FAILED
    words = {EXIT_FINISHED: "finished", EXIT_STOPPED: "stopped and saved", EXIT_USAGE: "refused"}.get(status, "failed")
    print(f"job {job.job_id}: {words}: {cell.folder}", flush=True)
    return status


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
