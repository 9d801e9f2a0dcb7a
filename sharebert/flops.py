"""Floating-point operations of a model and the rate this machine reaches on a plain matrix product."""

from __future__ import annotations

import time

import torch

from sharebert.config import ModelConfig


def forward_flops_per_sequence(model: ModelConfig, seq_len: int, predictions: int, vocab_size: int) -> int:
    """Multiply-adds, counted as two operations, of the matrix products of one forward pass over one sequence.

    Sharing weights does not change it. With Q tokens that attend to T: 2 D^2 multiply-adds for each of the T (keys and
    values), 2 D^2 + 2 D F for each of the Q (query, output, feed-forward), 2 Q T D for scores and mixing. Q is T, and
    in the last layer, of which only the prediction slots are computed, their number K. In the head D^2 + D V for each
    slot.
    """
    width, inner = model.hidden_size, model.intermediate_size

    def layer(queries: int) -> int:
        projections = 2 * width * width * (seq_len + queries)
        return projections + 2 * width * inner * queries + 2 * queries * seq_len * width

    head = predictions * (width * width + width * vocab_size)
    return 2 * ((model.num_layers - 1) * layer(seq_len) + layer(predictions) + head)


def flops_per_update(
    model: ModelConfig, seq_len: int, predictions: int, vocab_size: int, global_batch_size: int
) -> int:
    """Model operations of one update: forward, and twice that for backward. Recomputation is not counted."""
    return 3 * global_batch_size * forward_flops_per_sequence(model, seq_len, predictions, vocab_size)


MATMUL_SIZE = {"cpu": 2048, "cuda": 4096}
"""Rows and columns of the matrices whose product is measured."""


def measure_matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Operations per second of the best of several products of square matrices, tried for about `seconds`.

    On a CPU fp16 is measured as fp32: such a product takes most of a minute there. On CUDA 20 products are timed
    together: starting one and waiting for it would take as long as the product itself.
    """
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32
    size, together = MATMUL_SIZE[device.type], 20 if device.type == "cuda" else 1
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best, begin = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        for _ in range(together):
            torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) / together)
    return 2 * size**3 / best
