"""Jobs: the batch script, what is refused, what is carried over, and a real job that is preempted and comes back."""

from __future__ import annotations

import os
import pickle
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from conftest import Train
from test_resume import assert_equal_bits, final_state

from sharebert.cli import main, run_job
from sharebert.compose import Cell
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE, StopSignals
from sharebert.submit import Job, _minutes

CELL = Cell({"checkpoint": {"resume": "never"}, "run_name": "a"}, Path("outputs/a"), ("run_name=a",))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stopped_by(name: str | None) -> Any:
    """A run that ends with status 75 after the signal `name`."""

    def run(verb: str, cell: Cell) -> int:
        with StopSignals() as stop:
            if name is not None:
                os.kill(os.getpid(), signal.Signals[name])
            else:
                stop.received = "max_run_minutes=1"
        return EXIT_STOPPED

    return run


# ---------------------------------------------------------------------- the batch script


def test_a_dry_run_prints_the_batch_script_and_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--time", "1-02:30:00", "--nodes", "2", "--gpus-per-node", "8", "--cpus-per-task", "6", "--mem", "400GB"]
    flags += ["--partition", "gpu", "--slurm", "exclusive", "--slurm", "exclude=node7", "--setup", "module load cuda"]
    assert main(["submit", "--dry-run", *flags, "train", "+experiment=demo"]) == EXIT_FINISHED
    script = capsys.readouterr().out
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    expected = ["time=1590", "nodes=2", "gpus-per-node=8", "ntasks-per-node=8", "cpus-per-task=6", "mem=400GB"]
    expected += ["partition=gpu", "exclusive", "exclude=node7", "requeue", "signal=USR2@120", "job-name=sharebert-demo"]
    assert {f"#SBATCH --{flag}" for flag in expected} <= {*lines}
    assert "--array" not in script
    assert lines.index("module load cuda") < next(i for i, line in enumerate(lines) if line.startswith("srun "))
    command = shlex.split(lines[-2])
    assert command[0] == "srun"
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=6"} <= {*command}
    assert command[command.index("--output") + 1] == f"{here}/outputs/demo/jobs/%j_%t_log.out"
    assert not list(here.iterdir())


def test_a_sweep_is_one_array(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["train", "-m", "+experiment=demo", "unshare.step=40,20,30", "max_steps=64"]
    assert main(["submit", "--dry-run", "--time", "60", "--array-parallelism", "2", *sweep]) == EXIT_FINISHED
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-2%2\n" in script
    assert f"--output {here}/outputs/demo/jobs/%A_%a_%t_log.out" in script


def test_what_is_submitted_on_slurm_is_each_cell(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = here / "bin"
    programs.mkdir()
    for name, text in (("srun", "exit 1"), ("sbatch", "cp $1 submitted.sh; echo Submitted batch job 4711")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    sweep = ["train", "-m", "+experiment=demo", "unshare.step=40,20", "max_steps=64"]
    assert main(["submit", "--time", "60", *sweep]) == EXIT_FINISHED
    assert "#SBATCH --array=0-1%2\n" in (here / "submitted.sh").read_text()
    shown = capsys.readouterr().out
    for number, step in enumerate((20, 40)):  # in the order that shares prefixes
        with (here / f"outputs/demo/jobs/4711_{number}_submitted.pkl").open("rb") as file:
            job: Job = pickle.load(file).function
        assert job.cell.values["unshare"]["step"] == step
        assert job.cell.folder == here / f"outputs/demo/unshare.step-{step}_max_steps-64"
        assert f"log outputs/demo/jobs/4711_{number}_0_log.out" in shown


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("90:30", 91), ("4:00:00", 240), ("1-02", 1560), ("1-02:30", 1590), ("0:00:01", 1)],
)
def test_limits_are_read_as_slurm_reads_them(text: str, minutes: int) -> None:
    assert _minutes(text) == minutes


# ---------------------------------------------------------------------- what is refused

REFUSED = [
    (["train"], "--time: expected the time limit"),
    (["--time", "60", "train"], "--launcher slurm: srun and sbatch are not there; expected"),
    (["--time", "60", "--dry-run", "train", "max_stepz=3"], "max_stepz: no such key (did you mean 'max_steps'?)"),
    (["--time", "60", "--dry-run", "train", "-m", "seed=1,-1"], "seed=-1: expected"),
    (["--time", "60", "--dry-run", "--nodes", "3", "train"], "global_batch_size=64: expected a multiple of the 3"),
    (["--launcher", "local", "--nodes", "2", "train"], "--nodes=2: expected 1 with --launcher local"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_a_wrong_request_is_refused_before_anything_is_submitted(
    arguments: list[str], message: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["submit", *arguments]) == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert not list(here.iterdir())


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["submit", "--launcher", "local", "train"]) == EXIT_USAGE
    assert "pip install 'sharebert[slurm]'" in capsys.readouterr().err


def test_a_local_dry_run_lists_the_jobs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["train", "-m", "seed=1,2", "run_name=a"]
    assert main(["submit", "--launcher", "local", "--dry-run", *sweep]) == EXIT_FINISHED
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(", in ")[1] for line in shown] == ["outputs/a/seed-1", "outputs/a/seed-2"]


# ---------------------------------------------------------------------- the job


def test_a_job_can_be_carried_over_and_the_next_try_goes_on() -> None:
    job = Job(run_job, "train", CELL, {"CUDA_VISIBLE_DEVICES": None})
    copy = pickle.loads(cloudpickle.dumps(job))
    assert copy == job
    again = copy.checkpoint().function
    assert again.cell.values == {"checkpoint": {"resume": "auto"}, "run_name": "a"}
    assert again.run is run_job
    assert CELL.values["checkpoint"]["resume"] == "never"


@pytest.mark.parametrize(
    ("reason", "comes_back"),
    [("SIGUSR2", True), ("SIGUSR1", True), (None, True), ("SIGTERM", False), ("SIGINT", False)],
)
def test_a_job_asks_to_come_back_once_it_has_stopped(reason: str | None, comes_back: bool) -> None:
    asked = []
    before = signal.signal(signal.SIGUSR2, lambda *_: asked.append(1))  # as submitit's handler
    try:
        assert Job(stopped_by(reason), "train", CELL, {})() == EXIT_STOPPED
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(asked) == comes_back


def test_a_job_that_fails_fails_on_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda verb, cell: EXIT_FAILED, "train", CELL, {})
    assert job() == EXIT_FAILED
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    with pytest.raises(RuntimeError, match="sharebert train ended with exit status 1"):
        job()


def test_a_job_sees_the_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(verb: str, cell: Cell) -> int:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return EXIT_FINISHED

    for value in (None, "2,3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as submitit sets it
        Job(
            lambda *_: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")) or 0,
            "train",
            CELL,
            {"CUDA_VISIBLE_DEVICES": value},
        )()
    assert seen == [None, "2,3"]


@pytest.mark.processes
def test_a_local_job_that_is_preempted_comes_back_and_finishes_as_if_undisturbed(
    train: Train,
    small_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Start, preemption after update 7, requeue, end."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'submitit.core._submit' in ' '.join(sys.orig_argv):\n"
        "    from sharebert import pretrain, trainer\n"
        "    pretrain.draw_curves = lambda run: None\n"
        "    cross = trainer.Trainer._cross_boundary\n"
        "    def preempted(self):\n"
        "        if self.counters.step == 7 and self.recorder.progress._begin_step == 0:\n"
        "            os.kill(os.getpid(), signal.SIGUSR2)\n"
        "        return cross(self)\n"
        "    trainer.Trainer._cross_boundary = preempted\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = tmp_path / "outputs/a"
    settings = [f"output_dir={tmp_path}/outputs", "run_name=a", *small_run]
    status = main(["submit", "--launcher", "local", "train", *settings])
    shown = capsys.readouterr()
    assert status == EXIT_FINISHED, shown.out + shown.err
    (log,) = run.glob("jobs/*_log.out")
    assert f"log {os.path.relpath(log, tmp_path)}\n" in shown.out
    assert f"finished: {run}\n" in shown.out
    assert "Requeued job" in log.read_text()
    assert "step-00000007-unshared at step 7 of 12" in log.read_text()
    assert train("run_name=straight") == EXIT_FINISHED
    assert_equal_bits(final_state(tmp_path / "outputs/straight"), final_state(run))
