"""Attention on a CPU computes what torch's own kernel computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sharebert.model.attention import attend


def inputs(queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query (2, 3, queries, 8), key and value (2, 3, 5, 8), output gradient."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 3, count, 8) for count in (queries, 5, 5, queries)]
    query, key, value, gradient = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), gradient


@pytest.mark.parametrize("queries", [5, 2])
@pytest.mark.parametrize("is_masked", [False, True])
def test_output_and_gradients_are_those_of_torch(queries: int, is_masked: bool) -> None:
    query, key, value, gradient = inputs(queries)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None, :] if is_masked else None
    found = []
    for function in (attend, functional.scaled_dot_product_attention):
        output = function(query, key, value, mask, 0.0)
        found.append((output, *torch.autograd.grad(output, (query, key, value), gradient)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropped_probabilities_leave_the_mean() -> None:
    query, key, value, _ = inputs(5)
    exact = attend(query, key, value, None, 0.0)
    mean = torch.stack([attend(query, key, value, None, 0.3) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, exact, rtol=0.0, atol=0.05)
