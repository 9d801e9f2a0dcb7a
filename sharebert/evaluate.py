"""Held-out masked-LM loss and accuracy, on fixed sequences with fixed masks, beside what a unigram model reaches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from sharebert.data.loader import MicroBatch
from sharebert.distributed import max_count, sum_over_ranks
from sharebert.loss import correct_predictions, masked_lm_loss_sum
from sharebert.model.bert import Bert
from sharebert.precision import Precision
from sharebert.seeding import preserve_random_state


class Evaluator:
    """Evaluates a model on this rank's shard of the held-out sequences; the figures are those of all ranks.

    Args:
        batches: the shard, masked; held in memory (a sequence of 512 tokens takes about 5 KB).
        vocab_size: entries of the vocabulary, for the unigram floor.
    """

    def __init__(self, batches: Sequence[MicroBatch], vocab_size: int, precision: Precision) -> None:
        self._batches = batches
        self._precision = precision
        self._floors = unigram_floors(batches, vocab_size)
        self._rounds = max_count(len(batches))  # every rank asks should_stop so often, with a batch left or not

    @property
    def has_targets(self) -> bool:
        """Whether anything is held out, on any rank."""
        return self._floors["eval/targets"] > 0

    @torch.no_grad()
    def evaluate(self, model: Bert, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Figures named `eval/...`; None when `should_stop` (asked before each batch, on every rank) said so."""
        device = next(model.parameters()).device
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, targets
        was_training = model.training
        model.eval()
        try:
            with preserve_random_state():
                for number in range(self._rounds):
                    if should_stop():
                        return None
                    if number >= len(self._batches):
                        continue
                    batch = self._batches[number].to(device)
                    with self._precision.autocast():
                        logits = model(batch.input_ids, batch.positions, batch.attention_mask, batch.documents)
                    sums[0] += masked_lm_loss_sum(logits, batch.labels, batch.weights)
                    sums[1] += correct_predictions(logits, batch.labels, batch.weights)
                    sums[2] += batch.weights.sum()
                    del logits  # else there are two while the next batch is scored
        finally:
            model.train(was_training)
        loss, correct, targets = sum_over_ranks(sums).tolist()
        mean = loss / max(1.0, targets)
        return {
            "eval/loss": mean,
            "eval/accuracy": correct / max(1.0, targets),
            "eval/perplexity": math.exp(min(mean, 700.0)),
            **self._floors,
        }


def unigram_floors(batches: Sequence[MicroBatch], vocab_size: int) -> dict[str, float]:
    """What the best guess without context reaches on the same targets, over all ranks.

    `eval/unigram_loss` is the entropy of the targets in nats, `eval/unigram_accuracy` the share of the most
    frequent one. A model that does not beat them has not learned to use context.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for batch in batches:
        counts += torch.bincount(batch.labels.flatten(), weights=batch.weights.flatten().double(), minlength=vocab_size)
    counts = sum_over_ranks(counts)
    shares = counts / counts.sum().clamp(min=1.0)
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum()
    return {
        "eval/unigram_loss": float(entropy),
        "eval/unigram_accuracy": float(shares.max()),
        "eval/targets": float(counts.sum()),
    }
