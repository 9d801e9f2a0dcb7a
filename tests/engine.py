"""A trainer over random tokens, without text, tokenizer or files: for tests of the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharebert.config import TrainConfig, from_dict
from sharebert.data.format import TokenStore, TokenStoreWriter
from sharebert.data.loader import Window, build_loader, evaluation_batches
from sharebert.data.masking import Vocabulary
from sharebert.evaluate import Evaluator
from sharebert.launch import StopSignals
from sharebert.metrics import Progress, Recorder
from sharebert.precision import resolve_precision
from sharebert.train_state import build_train_state
from sharebert.trainer import Trainer

VOCABULARY = Vocabulary(vocab_size=50, pad_id=0, cls_id=2, sep_id=3, mask_id=4, unk_id=1)


def small_config(**groups: dict[str, Any]) -> TrainConfig:
    """Six layers of width 16, no dropout, length 12, 8 sequences an update; `groups` go over it."""
    values: dict[str, Any] = {
        "max_steps": 12,
        "global_batch_size": 8,
        "model": {
            "num_layers": 6,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "initializer_range": 0.1,
        },
        "data": {"seq_len": 12},
        "unshare": {"step": 6},
        "optim": {"lr": 1e-2, "warmup_steps": 2},
        "engine": {"device": "cpu", "precision": "fp32", "compile": "false", "micro_batch_size": 8, "num_workers": 0},
        "checkpoint": {"every_steps": None},
        "evaluation": {"every_steps": None},
        "logging": {"every_steps": 1},
    }
    for group, changes in groups.items():
        values[group] = {**values[group], **changes} if isinstance(changes, dict) else changes
    return from_dict(TrainConfig, values)


def random_store(folder: Path, num_tokens: int = 897, seed: int = 0) -> TokenStore:
    """Tokens of a first-order Markov chain, so that there is something to learn.

    In sequences of 12 the last one is shorter and has fewer targets than the others: a loss that is not divided by
    the number of targets shows.
    """
    draw = np.random.default_rng(seed)
    ids = 5 + np.cumsum(draw.choice([1, 2, 7], size=num_tokens)) % 45
    with TokenStoreWriter(folder, VOCABULARY.vocab_size, VOCABULARY.sep_id) as writer:
        for start in range(0, num_tokens, 50):
            writer.append(ids[start : start + 50])
    return TokenStore(folder, VOCABULARY.vocab_size)


class RecordedRows(Recorder):
    """Keeps the rows it is given."""

    def __init__(self) -> None:
        super().__init__([], Progress(0, 1, enabled=False))
        self.rows: list[dict[str, Any]] = []

    def write(self, step: int, values: Any) -> None:
        self.rows.append({"step": step, **values})

    def series(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows if name in row]


def build_trainer(
    config: TrainConfig,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    start: Path | None = None,
    max_sequences: int = 8,
) -> tuple[Trainer, RecordedRows]:
    """A trainer as `pretrain` builds it; its saves gather everything and write nothing."""
    device = torch.device("cpu")
    precision = resolve_precision(config.engine, device)
    state = build_train_state(config, VOCABULARY.vocab_size, device, precision, start)
    state.model.to(dtype)
    batches = evaluation_batches(
        random_store(folder / "validation", 200, seed=1),
        VOCABULARY,
        seq_len=config.data.seq_len,
        masking=config.masking,
        max_sequences=max_sequences,
        batch_size=8,
        rank=0,
        world_size=1,
        cross_document_attention=config.data.cross_document_attention,
    )
    recorder = RecordedRows()
    evaluator = Evaluator(batches, VOCABULARY.vocab_size, precision)

    def save(before_unsharing: bool) -> None:
        state.tensors(), state.state_dict(), state.describe()

    return Trainer(config, state, precision, evaluator, recorder, save, StopSignals(), 1, 1.0), recorder


def windows(config: TrainConfig, folder: Path, first_update: int = 0) -> Iterator[Window]:
    """The windows of `config`'s updates over :func:`random_store`."""
    store = random_store(folder / "train")
    loader = build_loader(
        store,
        VOCABULARY,
        seq_len=config.data.seq_len,
        masking=config.masking,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        rank=0,
        world_size=1,
        first_update=first_update,
        num_updates=config.max_steps,
        num_workers=0,
        pin_memory=False,
        cross_document_attention=config.data.cross_document_attention,
    )
    yield from loader
