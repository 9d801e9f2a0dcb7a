"""Dropout drops the share it should, keeps the mean, and depends on torch's generator alone."""

from __future__ import annotations

import pytest
import torch

from sharebert.model.dropout import Dropout, drop


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_is_right_and_the_mean_stays(dtype: torch.dtype, probability: float) -> None:
    torch.manual_seed(0)
    values = drop(torch.ones(1001, 999, dtype=dtype), probability)
    dropped = float((values == 0).double().mean())
    assert dropped == pytest.approx(probability, abs=0.002)
    kept = values[values != 0].unique()
    assert kept.numel() == 1
    assert float(kept) == pytest.approx(1 / (1 - probability), rel=0.004 if dtype == torch.bfloat16 else 2e-4)


def test_neighbours_are_dropped_independently() -> None:
    torch.manual_seed(1)
    is_dropped = (drop(torch.ones(400_000), 0.5) == 0).double()
    for distance in range(1, 9):  # four neighbours come from one draw
        both = float((is_dropped[:-distance] * is_dropped[distance:]).mean())
        assert both == pytest.approx(0.25, abs=0.004)


def test_the_seed_decides_and_the_gradient_goes_where_values_were_kept() -> None:
    values = torch.randn(7, 5, requires_grad=True)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(drop(values, 0.4))
    assert torch.equal(results[0], results[1])
    (gradient,) = torch.autograd.grad(results[0].sum(), values)
    torch.testing.assert_close(gradient * values, results[0])
    assert not torch.equal(drop(values, 0.4), results[0])


def test_nothing_is_dropped_in_evaluation_or_at_probability_zero() -> None:
    values = torch.randn(3)
    assert Dropout(0.5).eval()(values) is values
    assert Dropout(0.0)(values) is values
