"""The masked-LM loss: a sum over predicted tokens, and the one divisor that makes it a mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sharebert import distributed

# Shapes: B sequences, K prediction slots each, V vocabulary entries.


CHUNK_NUMBERS = 2**22
"""Logits that are looked at together in fp32: 16 MiB."""


class _WeightedCrossEntropy(torch.autograd.Function):
    """Sum over rows of weight x cross-entropy, in fp32 (fp64 for fp64), from logits of any float type.

    Keeps the logits as they came and one number a row. torch's own way holds three more tensors of their size in fp32
    at its peak, 2 GiB for 64 sequences of 512 tokens. The gradient is written over the logits, which nobody reads
    again: one backward pass only.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """From logits (N, V), labels (N,) and weights (N,) to a number."""
        losses, log_sums = [], []
        for chunk, chunk_labels in zip(_chunks(logits, logits), _chunks(labels, logits), strict=True):
            exact = _at_least_fp32(chunk)
            log_sum = exact.logsumexp(1)
            losses.append(log_sum - exact.gather(1, chunk_labels.unsqueeze(1)).squeeze(1))
            log_sums.append(log_sum)
        ctx.save_for_backward(logits, labels, weights, torch.cat(log_sums))
        return (torch.cat(losses) * weights).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """weight x (softmax - 1 at the label), of every row, times the gradient of the sum."""
        logits, labels, weights, log_sums = ctx.saved_tensors
        factors = weights.to(log_sums.dtype) * gradient  # a lone number does not make fp32 into fp64
        rows = (_chunks(values, logits) for values in (logits, labels, factors, log_sums))
        for chunk, chunk_labels, factor, log_sum in zip(*rows, strict=True):
            softmax = _at_least_fp32(chunk).sub(log_sum.unsqueeze(1)).exp_()
            softmax.scatter_add_(1, chunk_labels.unsqueeze(1), softmax.new_full((len(chunk), 1), -1.0))
            chunk.copy_(softmax.mul_(factor.unsqueeze(1)))
        return logits, None, None


def _chunks(values: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Rows of `values`, as many at a time as have about CHUNK_NUMBERS logits."""
    chunks: tuple[Tensor, ...] = values.split(max(1, CHUNK_NUMBERS // logits.shape[1]))  # type: ignore[no-untyped-call]
    return chunks


def masked_lm_loss_sum(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Summed cross-entropy in nats of the slots whose weight is 1, in fp32.

    Args:
        logits: (B, K, V), any float type; the backward pass overwrites them.
        labels: (B, K) token ids.
        weights: (B, K); 1 for a predicted token, 0 for a free slot.
    """
    rows = (logits.flatten(0, 1), labels.flatten(), weights.flatten())
    return _WeightedCrossEntropy.apply(*rows)  # type: ignore[no-any-return, no-untyped-call]


def correct_predictions(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Number of predicted tokens whose likeliest entry is the label."""
    return ((logits.argmax(-1) == labels) * weights).sum()


def loss_divisor(predicted_tokens: int) -> int:
    """Predicted tokens of one update over all ranks, from the `predicted_tokens` of this rank's window.

    Known on the host before the first micro-batch, since it has to be applied before backward (fp16 would
    overflow on a sum). Costs one all-reduce of 8 bytes over gloo.
    """
    return max(1, distributed.sum_count(predicted_tokens))


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
