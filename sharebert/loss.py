"""The masked-LM loss: a sum over predicted tokens, and the one divisor that makes it a mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sharebert import distributed

# Shapes: B sequences, K prediction slots each, V vocabulary entries.


def masked_lm_loss_sum(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Summed cross-entropy in nats of the slots whose weight is 1, in fp32.

    Args:
        logits: (B, K, V), any float type.
        labels: (B, K) token ids.
        weights: (B, K); 1 for a predicted token, 0 for a free slot.
    """
    losses = F.cross_entropy(_at_least_fp32(logits).flatten(0, 1), labels.flatten(), reduction="none")  # (B*K,)
    return (losses * weights.flatten()).sum()


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
