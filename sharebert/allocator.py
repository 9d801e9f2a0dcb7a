"""How a process gets memory and gives it back."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let glibc keep large freed blocks for the next update; returns whether it does.

    By default it gives them back to the kernel, which clears them page by page when they are asked for again: on a CPU
    about 100,000 page faults, 5% of the time, in each update of a BERT-base. The peak stays, but the process holds it
    from then on. Cannot be undone. Does nothing with another C library, or where the user chose an allocator.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, LARGEST_INT))


def prepare_memory(device: torch.device) -> None:
    """Before a run: keep what is freed on a CPU, and give back what an earlier run of this process had on a GPU.

    Not after that run: the error that ended it would still hold its tensors.
    """
    if device.type == "cpu":
        keep_freed_memory()
    else:
        gc.collect()  # trainer and updater know each other
        torch.cuda.empty_cache()
