"""The loss is a sum over predicted tokens; one divisor makes it a mean."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from sharebert import loss as loss_module
from sharebert.loss import correct_predictions, loss_divisor, masked_lm_loss_sum


def test_free_slots_count_nothing() -> None:
    logits, labels = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    weights = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    used = weights.bool()
    expected = functional.cross_entropy(logits[used], labels[used], reduction="sum")
    torch.testing.assert_close(masked_lm_loss_sum(logits, labels, weights), expected)
    hits = (logits[used].argmax(-1) == labels[used]).sum()
    assert int(correct_predictions(logits, labels, weights)) == int(hits)


def test_the_loss_of_16_bit_logits_is_taken_in_fp32_and_that_of_fp64_in_fp64() -> None:
    logits = torch.randn(1, 2, 5, dtype=torch.float64)
    labels, weights = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)
    assert masked_lm_loss_sum(logits, labels, weights).dtype == torch.float64
    assert masked_lm_loss_sum(logits.bfloat16(), labels, weights).dtype == torch.float32


def test_the_divisor_of_an_empty_window_is_one() -> None:
    assert loss_divisor(0) == 1
    assert loss_divisor(17) == 17


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 2e-3)]
)
def test_the_gradient_is_that_of_torch_in_chunks_of_rows(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_NUMBERS", 2 * 11)  # two rows at a time, and a last one
    logits, labels = torch.randn(1, 5, 11, dtype=dtype), torch.randint(11, (1, 5))
    weights = torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0]])
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    (masked_lm_loss_sum(ours * 1, labels, weights) / 3).backward()
    exact = theirs if dtype == torch.float64 else theirs.float()
    losses = functional.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none")
    ((losses * weights.flatten()).sum() / 3).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.0, atol=tolerance)
    assert not ours.grad[0, 1].any()  # the free slot
