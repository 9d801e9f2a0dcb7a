"""Outputs of a model for every sequence of a split, whatever the batch size and the number of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from sharebert import distributed
from sharebert.finetune.problem import Outputs, Problem
from sharebert.finetune.sequences import Sequences
from sharebert.update import NonFiniteError


@torch.no_grad()
def predict(
    model: nn.Module,
    problem: Problem,
    sequences: Sequences,
    batch_size: int,
    should_stop: Callable[[], bool],
) -> Outputs | None:
    """The outputs of all sequences, in their order, on every rank; None when a stop was agreed on.

    In fp32, where a sequence's outputs depend on the others of its batch in the last bits only. Sequences of about
    equal length are batched together; every rank takes part in equally many rounds.

    Args:
        model: not wrapped for DDP: ranks may have a batch less than others.
        problem: says which outputs count.
        sequences: the same on every rank.
        batch_size: sequences in a forward pass on one process.
        should_stop: asked before each forward pass; the same answer on every rank.

    Raises:
        NonFiniteError: on every rank; an output is not a finite number. Figures would still be found for it.
    """
    device = next(model.parameters()).device
    pad_id = int(model.config.pad_token_id or 0)  # type: ignore[union-attr, arg-type]
    longest_first = np.argsort(-sequences.lengths, kind="stable")
    mine = longest_first[distributed.rank() :: distributed.world_size()]
    rounds = -(-len(longest_first) // (distributed.world_size() * batch_size))
    found: dict[int, np.ndarray] = {}
    with _evaluating(model):
        for number in range(rounds):
            if should_stop():
                return None
            rows = mine[number * batch_size : (number + 1) * batch_size]
            if not len(rows):
                continue
            batch = sequences.batch(rows, pad_id, device)
            outputs = problem.outputs(model(**batch), batch["attention_mask"]).cpu().numpy()
            for row, output, length in zip(rows.tolist(), outputs, sequences.lengths[rows], strict=True):
                found[row] = output[:length] if output.ndim > 1 else output
    return _gathered(found, problem, sequences)


def _gathered(found: dict[int, np.ndarray], problem: Problem, sequences: Sequences) -> Outputs:
    """The outputs that the ranks found, in order; refused where they are not finite numbers."""
    for others in distributed.gather(found):
        found |= others
    if broken := sum(not np.isfinite(output).all() for output in found.values()):
        name = next((split.name for split in problem.splits if split.sequences is sequences), "without a name")
        raise NonFiniteError(f"split {name}: outputs for {broken} of {len(found)} sequences are not finite numbers")
    return [found[row] for row in range(len(sequences))]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, as long as it lasts. It draws no random numbers, so training is not disturbed."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
