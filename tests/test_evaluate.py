"""Held-out figures beside what a guess without context reaches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from engine import VOCABULARY, build_trainer, random_store, small_config, windows

from sharebert.config import MaskingConfig
from sharebert.data.loader import MicroBatch, evaluation_batches
from sharebert.evaluate import Evaluator, unigram_floors
from sharebert.precision import Precision


def batch_with(labels: list[int], weights: list[float]) -> MicroBatch:
    shape = (1, len(labels))
    ids = torch.full(shape, 7)
    return MicroBatch(ids, torch.zeros(shape, dtype=torch.int64), torch.tensor([labels]), torch.tensor([weights]), None)


def test_unigram_floors_are_those_of_the_targets() -> None:
    batches = [batch_with([5, 5, 6, 9], [1, 1, 1, 0]), batch_with([7, 0, 0, 0], [1, 0, 0, 0])]
    floors = unigram_floors(batches, 10)
    entropy = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    expected = {"eval/unigram_loss": entropy, "eval/unigram_accuracy": 0.5, "eval/targets": 4.0}
    assert floors == pytest.approx(expected)


def test_nothing_held_out_gives_no_targets() -> None:
    assert not Evaluator([], 10, Precision("fp32", torch.device("cpu"))).has_targets


def test_the_figures_do_not_depend_on_batch_size_or_shards(tmp_path: Path) -> None:
    trainer, _ = build_trainer(small_config(), tmp_path)
    store = random_store(tmp_path / "held_out", 400, seed=3)

    def figures(batch_size: int, world_size: int = 1) -> dict[str, float]:
        batches = [
            batch
            for rank in range(world_size)
            for batch in evaluation_batches(
                store,
                VOCABULARY,
                seq_len=12,
                masking=MaskingConfig(),
                max_sequences=30,
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
            )
        ]
        result = Evaluator(batches, 50, Precision("fp32", torch.device("cpu"))).evaluate(trainer.model)
        assert result is not None
        return result

    assert figures(30) == pytest.approx(figures(7), rel=1e-5)
    assert figures(30) == pytest.approx(figures(30, world_size=3), rel=1e-5)


def test_evaluation_leaves_training_mode_and_random_state_alone(tmp_path: Path) -> None:
    trainer, _ = build_trainer(small_config(model={"dropout": 0.5}), tmp_path)
    trainer.model.train()
    before = torch.get_rng_state()
    first, second = (trainer.evaluator.evaluate(trainer.model) for _ in range(2))
    assert first == second
    assert trainer.model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_can_be_stopped(tmp_path: Path) -> None:
    trainer, _ = build_trainer(small_config(), tmp_path)
    assert trainer.evaluator.evaluate(trainer.model, lambda: True) is None


def test_scores_are_in_full_precision_whatever_training_runs_in(tmp_path: Path) -> None:
    trainer, _ = build_trainer(small_config(engine={"precision": "bf16"}), tmp_path)
    (batch, *_) = next(windows(trainer.config, tmp_path)).micro_batches(8)
    for is_training, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with trainer.precision.autocast():
            logits = trainer.model.train(is_training)(batch.input_ids, batch.positions, batch.attention_mask)
        assert logits.dtype == dtype
