"""Which sequence is read when: pure functions of the update number, with no table and no state.

Legend: N sequences in the corpus, G sequences in a global batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sharebert.seeding import keyed_bits

_ROUNDS = 6  # Luby and Rackoff (1988) need 4; halves of few bits, in tiny corpora, are mixed better by more


def rank_samples(
    update: int, global_batch_size: int, rank: int, world: int, sample_offset: int = 0
) -> NDArray[np.int64]:
    """Numbers of the samples that `rank` of `world` handles in the 0-based update.

    The update consists of samples update·G ... (update + 1)·G - 1, and sample s goes to rank s mod world.

    Args:
        sample_offset: added to all of them, where earlier updates had another G: the number of samples that they
            consisted of, less G for each. Can be negative.
    """
    first = sample_offset + update * global_batch_size
    offset = (rank - first) % world
    return np.arange(first + offset, first + global_batch_size, world, dtype=np.int64)


def locate(sample_numbers: ArrayLike, num_sequences: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Epoch and position of samples counted over the run: sample s is position s mod N of epoch s div N."""
    epochs, positions = np.divmod(np.asarray(sample_numbers, dtype=np.int64), np.int64(num_sequences))
    return epochs, positions


def permuted_index(seed: int, epoch: ArrayLike, position: ArrayLike, num_sequences: int) -> NDArray[np.int64]:
    """The sequence that stands at `position` of the shuffled `epoch`, computed for each position by itself.

    A Feistel network is a permutation of the numbers below 4**b, the least such power that is at least N.
    Where it leads outside 0 ... N - 1 it is applied again ("cycle walking", Black and Rogaway 2002), which
    makes it a permutation of 0 ... N - 1: fewer than 4 rounds of that on average, a table never.

    Args:
        seed: the run's seed.
        epoch: whole numbers, broadcast against `position` (a batch may span epochs).
        position: numbers from 0 to N - 1.
        num_sequences: N, up to 2**62.

    Raises:
        ValueError: a position outside 0 ... N - 1 (walking from there might never end).
    """
    epochs, positions = np.broadcast_arrays(np.asarray(epoch), np.asarray(position, dtype=np.int64))
    if positions.size and (positions.min() < 0 or positions.max() >= num_sequences):
        raise ValueError(f"positions {positions.min()} to {positions.max()}: expected 0 to {num_sequences - 1}")
    half_bits = max(1, ((num_sequences - 1).bit_length() + 1) // 2)
    walking = np.arange(positions.size)
    epochs = epochs.ravel()
    values = positions.ravel().astype(np.uint64)
    while walking.size:
        values[walking] = _feistel(seed, epochs[walking], values[walking], half_bits)
        walking = walking[values[walking] >= num_sequences]
    return values.astype(np.int64).reshape(positions.shape)


def _feistel(seed: int, epochs: NDArray[Any], values: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    """A keyed permutation of the numbers of 2 x half_bits bits."""
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> shift, values & mask
    for round_number in range(_ROUNDS):
        bits = keyed_bits(seed, "order", round_number, epochs, right)
        left, right = right, left ^ (bits & mask)
    return (left << shift) | right
