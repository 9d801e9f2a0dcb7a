"""Dropout that does not wait for the CPU's random numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

LEVELS = 2**16
"""On a CPU a probability is rounded to a multiple of 1 / LEVELS."""


def is_eager_cpu(values: Tensor) -> bool:
    """Whether `values` are computed by torch's CPU kernels one by one, not on CUDA and not by compiled code."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def drop(values: Tensor, probability: float) -> Tensor:
    """Set each element to 0 with this probability, else scale it so that the mean stays.

    Drawn from torch's default generator of the device. On a CPU torch draws one number after the other, about 6 ns
    each; here one draw of 64 bits decides on four elements, about 1 ns each.
    """
    if probability == 0.0:
        return values
    if not is_eager_cpu(values):
        return functional.dropout(values, probability)
    count = values.numel()
    draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    dropped_levels = round(probability * LEVELS)
    is_kept = draws.view(torch.int16)[:count].view(values.shape) >= dropped_levels - LEVELS // 2
    scale = values.new_tensor(LEVELS / (LEVELS - dropped_levels))
    return values * torch.where(is_kept, scale, torch.zeros_like(scale))


class Dropout(nn.Module):
    """:func:`drop` in training, nothing in evaluation."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, hidden: Tensor) -> Tensor:
        return drop(hidden, self.probability) if self.training else hidden
