"""Ranks, rendezvous and threads from the environment, and how a process is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sharebert import launch
from sharebert.config import ConfigError
from sharebert.launch import (
    STOP_SIGNALS,
    STOP_SIGNALS_WITH_NCCL,
    Ranks,
    StopRequested,
    StopSignals,
    detect_ranks,
    first_host,
    is_restart,
    rendezvous,
    set_threads,
    stop_signals,
)

# ---------------------------------------------------------------------- ranks

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "node[1-2]"}
SRUN_TASK = {
    **BATCH_SCRIPT,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_plain_process_is_alone() -> None:
    assert detect_ranks({}) == Ranks(0, 0, 1, launched=False, local_world_size=1, gpu=0)


def test_torchrun_is_recognised_also_inside_a_slurm_step() -> None:
    expected = Ranks(3, 1, 4, launched=True, local_world_size=2, gpu=1)
    assert detect_ranks(TORCHRUN) == expected
    assert detect_ranks({**SRUN_TASK, **TORCHRUN}) == expected


def test_a_task_of_srun_is_a_rank() -> None:
    assert detect_ranks(SRUN_TASK) == Ranks(5, 1, 7, launched=True, local_world_size=3, gpu=1)


@pytest.mark.parametrize(("visible", "gpu"), [("0,1,2,3", 1), ("2", 0), ("GPU-8f1", 0), ("", 1)])
def test_a_task_that_slurm_shows_one_gpu_takes_that(visible: str, gpu: int) -> None:
    assert detect_ranks({**SRUN_TASK, "CUDA_VISIBLE_DEVICES": visible}).gpu == gpu


@pytest.mark.parametrize(
    "environ",
    [
        BATCH_SCRIPT,  # a batch script that runs `python -m sharebert` without srun
        {**BATCH_SCRIPT, "MASTER_ADDR": "node1"},
        {**SRUN_TASK, "SLURM_PTY_PORT": "41000"},  # a shell: srun -n 7 --pty bash
        {**SRUN_TASK, "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["batch script", "with an address", "shell", "one task"],
)
def test_a_process_that_srun_did_not_start_once_a_task_is_alone(environ: dict[str, str]) -> None:
    assert detect_ranks(environ) == Ranks()
    assert rendezvous(environ) == {}


def test_a_rank_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE='two': expected a whole number"):
        detect_ranks({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu5", "gpu5"),
        ("node[001-003,007],gpu5", "node001"),
        ("node[007,009-011]-ib,gpu5", "node007-ib"),
        ("gpu5,node[001-003]", "gpu5"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list_is_found(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_slurm_step_meets_at_its_first_node_and_a_port_of_its_own() -> None:
    found = rendezvous(SRUN_TASK)
    assert found == {"MASTER_ADDR": "node1", "MASTER_PORT": str(20_000 + 4711)}
    others = [{"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712", "SLURM_STEP_ID": "1"}]
    ports = {rendezvous({**SRUN_TASK, **other})["MASTER_PORT"] for other in others}
    assert len({found["MASTER_PORT"], *ports}) == 4
    large = rendezvous({**SRUN_TASK, "SLURM_JOB_ID": "98765432"})
    assert 20_000 <= int(large["MASTER_PORT"]) < 32_000


def test_an_address_that_is_set_stays() -> None:
    assert rendezvous({**SRUN_TASK, "MASTER_ADDR": "mine", "MASTER_PORT": "1"}) == {}
    assert rendezvous(TORCHRUN) == {}


def test_restarts_of_torchrun_and_slurm_are_seen() -> None:
    assert not is_restart({"TORCHELASTIC_RESTART_COUNT": "0"})
    assert is_restart({"TORCHELASTIC_RESTART_COUNT": "1"})
    assert is_restart({"SLURM_RESTART_COUNT": "2"})


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, None),
        (SRUN_TASK, "4"),  # 12 cores, 3 tasks on the node
        ({**SRUN_TASK, "SLURM_CPUS_PER_TASK": "7"}, "7"),
        ({**SRUN_TASK, "OMP_NUM_THREADS": "2"}, "2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "6"),
        ({"RANK": "0", "WORLD_SIZE": "40"}, "1"),
    ],
)
def test_ranks_of_a_machine_divide_its_cores(
    environ: dict[str, str], threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    environ = dict(environ)
    set_threads(detect_ranks(environ), environ)
    assert environ.get("OMP_NUM_THREADS") == threads


# ---------------------------------------------------------------------- being asked to stop


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Statuses with which the process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(launch.os, "_exit", statuses.append)
    return statuses


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_remembered_and_handlers_come_back(number: signal.Signals, exits: list[int]) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.is_wanted()
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.received == number.name
        with pytest.raises(StopRequested, match=number.name):
            stop.check()
    assert signal.getsignal(number) is before
    assert StopSignals.last_reason == number.name
    assert exits == []


def test_signals_that_follow_at_once_are_echoes_and_later_ones_end_the_process(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with StopSignals() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.received == "SIGTERM"
        assert exits == []
        monkeypatch.setattr(launch, "ECHO_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert exits == [128 + signal.SIGTERM]


def test_between_gpus_sigusr1_is_left_to_nccl() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals(STOP_SIGNALS_WITH_NCCL):
        assert signal.getsignal(signal.SIGUSR1) is before
        assert signal.getsignal(signal.SIGUSR2) is not before


def test_the_time_limit_counts_from_the_start_of_the_process_and_leaves_time_to_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_STARTED", time.monotonic() - 55 * 60)
    assert not StopSignals(max_run_minutes=60).is_wanted()
    assert StopSignals(max_run_minutes=60).is_wanted(seconds_to_leave=5 * 60 + 1)
    stop = StopSignals(max_run_minutes=55.4)  # 24 s are left, less than half a minute
    assert stop.is_wanted()
    assert stop.received == "max_run_minutes=55.4"
    assert not StopSignals().is_wanted(seconds_to_leave=1e9)


def test_a_signal_after_the_time_limit_is_a_first_signal(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ECHO_SECONDS", 0.0)
    with StopSignals(max_run_minutes=1e-9) as stop:
        assert stop.is_wanted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert exits == []
        assert stop.received == "max_run_minutes=1e-09"


def test_a_signal_that_came_before_the_run_had_its_own_handlers_is_kept() -> None:
    with StopSignals():
        os.kill(os.getpid(), signal.SIGUSR2)
        with StopSignals() as inner:
            assert inner.received == "SIGUSR2"


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_ends_with_a_parent_that_was_killed(method: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, os, signal, time\n"
        "from sharebert.launch import leave_signals_to_parent\n"
        "def work(connection):\n"
        "    leave_signals_to_parent()\n"
        "    connection.send('begun')\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    ours, theirs = context.Pipe()\n"
        "    context.Process(target=work, args=(theirs,)).start()\n"
        "    ours.recv()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The worker holds the pipe of standard output: `run` returns when it has ended, too.
    result = subprocess.run([sys.executable, script], capture_output=True, timeout=30, check=False)
    assert result.returncode == -signal.SIGKILL


def test_sigusr1_is_left_alone_between_gpus_only() -> None:
    alone, rank = Ranks(), Ranks(rank=1, world_size=2, launched=True)
    assert stop_signals(rank, "cuda") == STOP_SIGNALS_WITH_NCCL
    assert stop_signals(alone, "cuda") == stop_signals(rank, "cpu") == STOP_SIGNALS
