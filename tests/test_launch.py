"""Ranks from the environment, and stop signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sharebert.config import ConfigError
from sharebert.launch import Ranks, StopSignals, detect_ranks


def test_a_plain_process_is_alone() -> None:
    assert detect_ranks({}) == Ranks(0, 0, 1, launched=False)


def test_torchrun_and_slurm_are_recognised() -> None:
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    assert detect_ranks(torchrun) == Ranks(3, 1, 4, launched=True)
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "MASTER_ADDR": "node1"}
    assert detect_ranks(slurm) == Ranks(5, 1, 8, launched=True)


def test_a_shell_inside_a_slurm_allocation_is_alone() -> None:
    assert detect_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == Ranks()
    assert detect_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "MASTER_ADDR": "x"}) == Ranks()


def test_a_rank_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE='two': expected a whole number"):
        detect_ranks({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "two"})


def test_the_first_signal_is_remembered_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.received == "SIGUSR2"
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_signal_later_than_an_echo_ends_the_process_at_once() -> None:
    script = (
        "import os, signal\n"
        "import sharebert.launch\n"
        "from sharebert.launch import StopSignals\n"
        "with StopSignals():\n"
        "    for _ in range(3):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here', flush=True)\n"
        "    sharebert.launch.ECHO_SECONDS = 0.0\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('not any more', flush=True)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout == "still here\n"
    assert result.returncode == 128 + signal.SIGTERM
