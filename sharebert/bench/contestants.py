"""What is timed: our update while layers share, our update after, and the same work done by Transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sharebert.bench.clock import PartClock
from sharebert.config import TrainConfig
from sharebert.data.format import TokenStore, TokenStoreWriter
from sharebert.data.loader import Window, build_loader
from sharebert.data.masking import Vocabulary
from sharebert.distributed import rank, world_size
from sharebert.optim import decay_groups
from sharebert.precision import Precision, resolve_precision
from sharebert.train_state import build_train_state
from sharebert.update import Updater

NUM_UPDATES = 10_000
"""More than a bench runs."""


class Contestant(Protocol):
    """Carries out one update whenever it is asked to."""

    def time_update(self) -> dict[str, float]:
        """Seconds of the parts of one update on the next window, and of all of it as `update`."""


def phase_config(config: TrainConfig, phase: str, sequences: int) -> TrainConfig:
    """`config` with updates of `sequences` on each process, kept in one phase: `shared` or `unshared`."""
    assert config.engine.micro_batch_size is not None, "resolve() sets it"
    engine = dataclasses.replace(config.engine, micro_batch_size=min(config.engine.micro_batch_size, sequences))
    policy = {"shared": "always", "unshared": "never"}[phase]
    unshare = dataclasses.replace(config.unshare, policy=policy, step=None, check_every=None)
    batch = sequences * world_size()
    return dataclasses.replace(
        config, engine=engine, unshare=unshare, global_batch_size=batch, max_steps=NUM_UPDATES, init_from=None
    )


def random_corpus(folder: Path, vocab_size: int, num_tokens: int) -> tuple[TokenStore, Vocabulary]:
    """Random tokens as a prepared corpus, four of five beginning a word: as much work to mask as text is."""
    draw = np.random.default_rng(0)
    vocabulary = Vocabulary(
        vocab_size, pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4, starts_word=draw.random(vocab_size) < 0.8
    )
    ids = draw.integers(5, vocab_size, num_tokens)
    with TokenStoreWriter(folder, vocab_size, vocabulary.sep_id) as writer:
        for start in range(0, num_tokens, 500):
            writer.append(ids[start : start + 500])
    return TokenStore(folder, vocab_size), vocabulary


class OurUpdate:
    """The update of `sharebert train`, on windows of the real loader."""

    def __init__(
        self, config: TrainConfig, corpus: tuple[TokenStore, Vocabulary], device: torch.device, precision: Precision
    ) -> None:
        self.clock = PartClock(device)
        self.state = build_train_state(config, corpus[1].vocab_size, device, precision, None)
        self.updater = Updater(config, self.state, precision, lambda: False, self.clock.part)
        self._windows = iter_windows(config, corpus)

    def time_update(self) -> dict[str, float]:
        """Seconds of the parts of one update."""
        return self.clock.time(self.update)

    def update(self) -> None:
        """One update on the next window."""
        with self.clock.part("data"):
            window = next(self._windows)
        self.updater.run(window, is_check=False, measures_ratio=False)
        self.state.counters.step += 1


def iter_windows(config: TrainConfig, corpus: tuple[TokenStore, Vocabulary]) -> Iterator[Window]:
    """This rank's windows, from the loader that training uses."""
    assert config.engine.num_workers is not None, "resolve() sets it"
    return iter(
        build_loader(
            corpus[0],
            corpus[1],
            seq_len=config.data.seq_len,
            masking=config.masking,
            seed=config.seed,
            global_batch_size=config.global_batch_size,
            rank=rank(),
            world_size=world_size(),
            first_update=0,
            num_updates=NUM_UPDATES,
            num_workers=config.engine.num_workers,
            pin_memory=config.engine.device == "cuda",
            cross_document_attention=config.data.cross_document_attention,
        )
    )


def has_transformers() -> bool:
    """Whether the comparison can be made."""
    return importlib.util.find_spec("transformers") is not None


class TransformersUpdate:
    """``BertForMaskedLM`` (SDPA) of the same size, trained on the same windows as people usually train it.

    Same optimizer, decay groups, clipping and autocast type; its own head, which scores every token; compiled where
    our layers are.
    """

    def __init__(
        self, config: TrainConfig, corpus: tuple[TokenStore, Vocabulary], device: torch.device, precision: Precision
    ) -> None:
        self.clock, self._config, self._device, self._precision = PartClock(device), config, device, precision
        model = build_transformers_model(config, corpus[1].vocab_size).to(device).train()
        optim = config.optim
        groups = decay_groups(model, optim.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        if config.engine.compile == "true":
            model.compile()
        self.model = model
        self._windows = iter_windows(config, corpus)

    def time_update(self) -> dict[str, float]:
        """Seconds of the parts of one update."""
        return self.clock.time(self.update)

    def update(self) -> None:
        """One update on the next window."""
        with self.clock.part("data"):
            window = next(self._windows)
        size = self._config.engine.micro_batch_size
        assert size is not None, "resolve() sets it"
        micro_batches = list(window.micro_batches(size))
        for batch in micro_batches:
            input_ids = batch.input_ids.to(self._device, non_blocking=True)
            labels = labels_of_all_tokens(batch.input_ids, batch.positions, batch.labels, batch.weights)
            with self.clock.part("forward"), self._autocast():
                loss = self.model(input_ids=input_ids, labels=labels.to(self._device, non_blocking=True)).loss
            with self.clock.part("backward"):
                (loss / len(micro_batches)).backward()
        with self.clock.part("optimizer"):
            if self._config.optim.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optim.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _autocast(self) -> torch.autocast:
        dtype = self._precision.dtype
        return torch.autocast(
            self._device.type, torch.bfloat16 if dtype == torch.float32 else dtype, dtype != torch.float32
        )


class TransformersProcess:
    """:class:`TransformersUpdate` in a process of its own, so that our memory allocation does not serve it too."""

    def __init__(self, config: TrainConfig, corpus: tuple[TokenStore, Vocabulary], device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (config, corpus, device, torch.get_num_threads(), theirs)
        self._process = context.Process(target=_serve_updates, args=arguments)  # a daemon could have no data workers
        self._process.start()
        theirs.close()  # else the end of the process would not be noticed here

    def time_update(self) -> dict[str, float]:
        """Seconds of the parts of one update.

        Raises:
            RuntimeError: the process is no more; its own output says why.
        """
        try:
            self._connection.send(True)
            seconds: dict[str, float] = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise RuntimeError(f"the process of Transformers ended with status {self._process.exitcode}") from error
        return seconds

    def close(self) -> None:
        """End the process: it sees the end of the requests."""
        self._connection.close()
        self._process.join()


def _serve_updates(
    config: TrainConfig, corpus: tuple[TokenStore, Vocabulary], device: torch.device, threads: int, requests: Connection
) -> None:
    torch.set_num_threads(threads)
    contestant = TransformersUpdate(config, corpus, device, resolve_precision(config.engine, device))
    with contextlib.suppress(EOFError):  # whoever asks has ended
        while requests.recv():
            requests.send(contestant.time_update())


def labels_of_all_tokens(input_ids: Tensor, positions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """(B, T) labels as Transformers takes them, -100 where nothing is predicted, from those of the slots (B, K)."""
    full = torch.full_like(input_ids, -100)
    rows, slots = torch.nonzero(weights, as_tuple=True)
    full[rows, positions[rows, slots]] = labels[rows, slots]
    return full


def build_transformers_model(config: TrainConfig, vocab_size: int) -> Any:
    """A ``BertForMaskedLM`` of the same size and dropout."""
    from transformers import BertConfig, BertForMaskedLM

    model = config.model
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            intermediate_size=model.intermediate_size,
            hidden_dropout_prob=model.dropout,
            attention_probs_dropout_prob=model.attention_dropout,
            max_position_embeddings=model.max_position_embeddings,
            attn_implementation="sdpa",
        )
    )
