"""Peak memory of a training process, measured in one of its own."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from sharebert.allocator import prepare_memory
from sharebert.bench.contestants import OurUpdate, random_corpus
from sharebert.config import TrainConfig
from sharebert.precision import resolve_precision


def measure_peak_memory(config: TrainConfig, vocab_size: int, device: torch.device) -> int:
    """Bytes at the peak of two updates: of the whole process on a CPU, of its tensors on CUDA.

    In a fresh process: what others had at their peak cannot be told apart in this one.

    Args:
        config: resolved, in one phase (:func:`sharebert.bench.contestants.phase_config`), of one process.
        vocab_size: V.
        device: to run on.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:  # its process is no daemon, so it may have data workers
        return pool.submit(run_two_updates, config, vocab_size, device).result()


def run_two_updates(config: TrainConfig, vocab_size: int, device: torch.device) -> int:
    """Train for two updates; the peak in bytes. Runs in the process of :func:`measure_peak_memory`."""
    prepare_memory(device)
    with tempfile.TemporaryDirectory() as folder:
        corpus = random_corpus(Path(folder), vocab_size, 4 * config.global_batch_size * config.data.seq_len)
        ours = OurUpdate(config, corpus, device, resolve_precision(config.engine, device))
        ours.update()
        ours.update()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The largest resident size this process ever had (Linux), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
