import subprocess
import sys

import numpy as np
import pytest
import torch

from sharebert.seeding import derive_seed, keyed_bits, keyed_uniform, preserve_random_state, seed_dropout


def test_a_derived_seed_is_the_same_in_every_process() -> None:
    assert derive_seed(1, "weights", 3) == 5511261088508131048
    code = "from sharebert.seeding import derive_seed; print(derive_seed(1, 'weights', 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == derive_seed(1, "weights", 3)


def test_derived_seeds_fit_63_bits_and_differ_with_kind_and_boundary_of_their_parts() -> None:
    parts = [(1,), ("1",), ("ab", "c"), ("a", "bc"), ("abc",), (1, 2), (12,), (2, 1), (-1,), ()]
    seeds = {derive_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_keyed_bits_are_a_function_of_each_tuple_of_counters_alone() -> None:
    epochs, tokens = np.array([[0], [3], [2**40]]), np.arange(5)
    bits = keyed_bits(7, "x", epochs, tokens)
    assert bits.shape == (3, 5)
    assert bits.dtype == np.uint64
    assert bits[1, 4] == keyed_bits(7, "x", 3, 4)
    assert np.unique(bits).size == bits.size


def test_keyed_bits_depend_on_seed_stream_and_order_of_counters() -> None:
    values = [keyed_bits(1, "x", 2, 3), keyed_bits(2, "x", 2, 3), keyed_bits(1, "y", 2, 3), keyed_bits(1, "x", 3, 2)]
    assert len({int(value) for value in values}) == 4


def test_keyed_bits_never_change_between_versions() -> None:
    assert int(keyed_bits(1, "order", 2, 3)) == 15942809535073765665


def test_keyed_uniform_is_uniform_from_0_up_to_1_and_neighbours_are_uncorrelated() -> None:
    values = keyed_uniform(1, "x", np.arange(300)[:, None], np.arange(300))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts, _ = np.histogram(values, bins=100, range=(0, 1))
    assert ((counts - 900) ** 2 / 900).sum() < 160  # chi-square, 99 degrees of freedom
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.015
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.015


def test_dropout_depends_on_seed_update_micro_batch_and_rank() -> None:
    draws = set()
    for key in [(1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5)]:
        seed_dropout(*key)
        draws.add(torch.rand(1, dtype=torch.float64).item())
    assert len(draws) == 5
    seed_dropout(1, 2, 3, 4)
    assert torch.rand(1, dtype=torch.float64).item() in draws


def test_the_random_state_is_given_back_also_after_an_error() -> None:
    def draw_and_fail() -> None:
        with preserve_random_state():
            torch.rand(3)
            raise KeyError

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)
