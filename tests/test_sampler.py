import itertools
import math

import numpy as np
import pytest

from sharebert.data.sampler import locate, permuted_index, rank_samples


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_an_epoch_holds_every_sequence_once(num_sequences: int) -> None:
    for epoch in range(3):
        order = permuted_index(1, epoch, np.arange(num_sequences), num_sequences)
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(num_sequences))


def test_the_order_is_computed_per_position_and_epoch() -> None:
    positions, epochs = np.array([9, 0, 500, 9]), np.array([0, 0, 3, 3])
    together = permuted_index(5, epochs, positions, 1000)
    alone = [int(permuted_index(5, e, p, 1000)) for e, p in zip(epochs, positions, strict=True)]
    assert together.tolist() == alone


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    positions = np.arange(1000)
    orders = [permuted_index(seed, epoch, positions, 1000) for seed, epoch in [(1, 0), (1, 1), (2, 0)]]
    for first, second in itertools.combinations(orders, 2):
        assert (first == second).sum() < 10


def test_all_orders_of_a_tiny_corpus_appear_equally_often() -> None:
    epochs = np.repeat(np.arange(3000), 3)
    orders = permuted_index(1, epochs, np.tile(np.arange(3), 3000), 3).reshape(3000, 3)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6
    assert np.abs(counts - 500).max() < 5 * math.sqrt(500)


def test_neighbours_in_an_epoch_are_not_neighbours_in_the_corpus() -> None:
    order = permuted_index(1, 0, np.arange(20_000), 20_000)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert (np.abs(np.diff(order)) == 1).sum() < 12


def test_ten_billion_sequences_need_no_table() -> None:
    num_sequences = 10**10
    positions = np.concatenate([np.arange(50_000), num_sequences - 1 - np.arange(50_000)])
    order = permuted_index(1, 2, positions, num_sequences)
    assert np.unique(order).size == order.size
    assert order.min() >= 0
    assert order.max() < num_sequences
    assert abs(order.mean() / num_sequences - 0.5) < 0.005


def test_a_position_outside_the_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 to 9"):
        permuted_index(1, 0, np.array([10]), 10)


def test_samples_are_located_over_epoch_ends() -> None:
    epochs, positions = locate(np.array([0, 9, 10, 25]), 10)
    assert epochs.tolist() == [0, 0, 1, 2]
    assert positions.tolist() == [0, 9, 0, 5]


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize(("global_batch_size", "world"), [(8, 1), (8, 4), (7, 3), (2, 5)])
def test_ranks_divide_each_update_by_sample_number(global_batch_size: int, world: int, offset: int) -> None:
    for update in range(4):
        shares = [rank_samples(update, global_batch_size, rank, world, offset) for rank in range(world)]
        for rank, share in enumerate(shares):
            assert (share % world == rank).all()
        expected = offset + np.arange(update * global_batch_size, (update + 1) * global_batch_size)
        assert np.array_equal(np.sort(np.concatenate(shares)), expected)
