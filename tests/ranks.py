"""Several ranks on this machine, as a launcher starts them, but forked from one process that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from sharebert import pretrain
from sharebert.cli import main

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["ranks", "sharebert.pretrain"])


def run_ranks(
    world_size: int, work: Callable[..., int], *arguments: object, timeout: float = 120.0
) -> tuple[list[int | None], str]:
    """Call ``work(*arguments)``, a function of a module, in each of `world_size` ranks.

    Returns:
        Exit statuses (None: still running after `timeout` seconds, and killed), and what all wrote to standard error.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world_size):
            variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            errors = Path(folder) / str(rank)
            processes.append(_CONTEXT.Process(target=_run, args=(variables, errors, work, arguments)))
            processes[-1].start()
        for process in processes:
            process.join(timeout)
        statuses = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        return statuses, "".join(path.read_text() for path in sorted(Path(folder).iterdir()))


def train_on_ranks(world_size: int, *overrides: str) -> tuple[list[int | None], str]:
    """`sharebert train` on `world_size` ranks."""
    return run_ranks(world_size, train, list(overrides))


def train(overrides: list[str]) -> int:
    """`sharebert train` on one of several ranks, without pictures and the measurement of the machine's peak."""
    pretrain.measure_matmul_peak = lambda device, dtype: 1e12
    pretrain.draw_curves = lambda run: None
    pretrain.draw_share_map = lambda run, unit_layers, threshold: None
    return main(["train", *overrides])


def _run(variables: dict[str, str], errors: Path, work: Callable[..., int], arguments: tuple[object, ...]) -> None:
    os.environ.update(variables)
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    status = work(*arguments)
    sys.stderr.flush()
    os._exit(status)
