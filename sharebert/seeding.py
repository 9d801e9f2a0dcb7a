"""Randomness as a pure function of counters, and the seeds of dropout.

Nothing here keeps a state between calls: order, masks and initial weights are functions of names and
numbers, so a resumed run needs no saved generator, and workers or evaluations cannot disturb a run.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits from whole numbers and names, the same in every process and on every platform.

    Each part is written with its kind and length before hashing, so that ``("ab", "c")`` and ``("a", "bc")``,
    or ``1`` and ``"1"``, differ.
    """
    digest = hashlib.sha256()
    for part in parts:
        text = part if isinstance(part, str) else str(operator.index(part))
        encoded = text.encode()
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(encoded)}:".encode())
        digest.update(encoded)
    return int.from_bytes(digest.digest()[:8], "little") >> 1


_derive_seed_once = functools.lru_cache(maxsize=256)(derive_seed)  # one stream is asked for at every update


def keyed_bits(seed: int, stream: str, *counters: ArrayLike) -> NDArray[np.uint64]:
    """64 random bits for each tuple of counters of the stream named `stream`.

    The key starts from (seed, stream); counter c then replaces the key by the c-th output of SplitMix64
    seeded with it (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number generators").
    A counter costs one pass over the shape it has broadcast to so far: give the small shapes first.

    Args:
        seed: any whole number.
        stream: what the bits are for; streams are independent.
        counters: whole numbers from 0 (arrays of any integer type), broadcast against each other.

    Returns:
        uint64 array of the broadcast shape.
    """
    key = np.uint64(_derive_seed_once(seed, stream))
    bits: NDArray[np.uint64] = np.asarray(key)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant; numpy warns for scalars
        for counter in counters:
            steps = np.asarray(counter).astype(np.uint64)
            bits = _mix(bits + (steps + np.uint64(1)) * _GAMMA)
    return bits


def keyed_uniform(seed: int, stream: str, *counters: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1) from the upper 53 bits of :func:`keyed_bits`; float64 of the broadcast shape."""
    return np.asarray((keyed_bits(seed, stream, *counters) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def _mix(bits: Any) -> NDArray[np.uint64]:
    """The output function of SplitMix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST_FACTOR
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND_FACTOR
    return np.asarray(bits ^ (bits >> np.uint64(31)), dtype=np.uint64)


def seed_dropout(seed: int, update: int, micro_batch: int, rank: int) -> None:
    """Seed torch's global generators (CPU and CUDA), from which dropout draws, for one micro-batch."""
    torch.manual_seed(derive_seed(seed, "dropout", update, micro_batch, rank))


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Give torch's CPU generator, and that of the current CUDA device, back as they were found.

    Only the current device: asking for the state of all of them would open a context (some 500 MB) on each.
    """
    cpu_state = torch.get_rng_state()
    is_on_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda_state = torch.cuda.get_rng_state() if is_on_cuda else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
