"""Scaled dot-product attention, by the way that is fastest on the device.

Legend: B sequences, H heads, T tokens, Q those that attend, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sharebert.model.dropout import drop, is_eager_cpu


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """softmax(query key^T / sqrt(E)) value, with dropout of the attention probabilities.

    torch's kernel (flash, memory-efficient or cuDNN, as it picks) everywhere but on a CPU. There it takes two to three
    times as long as plain batched products at lengths up to 512, and leaves its fast path when probabilities drop out.
    The plain way keeps the Q x T probabilities of every head for the backward pass.

    Args:
        query: (B, H, Q, E).
        key: (B, H, T, E); value too.
        mask: bool, broadcast to (B, H, Q, T); true where a token may be attended to. No row may be all false.
        dropout: share of the probabilities that is dropped.

    Returns:
        (B, H, Q, E).
    """
    if not is_eager_cpu(query):
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout)
    with torch.autocast("cpu", enabled=False):  # else the softmax's result would be kept in fp32 and cast once more
        B, H, Q, E = query.shape
        T = key.shape[2]
        rows = (query * E**-0.5).reshape(B * H, Q, E)
        scores = torch.bmm(rows, key.reshape(B * H, T, E).transpose(1, 2)).view(B, H, Q, T)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        probabilities = drop(torch.softmax(scores, dim=-1), dropout).view(B * H, Q, T)
        return torch.bmm(probabilities, value.reshape(B * H, T, E)).view(B, H, Q, E)
