"""What a pretraining run goes on from, and what its checkpoints keep for the run that goes on from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.same_tokenizer import refuse_other_tokenizer
from data_prep.tokenizer import load_text_tokenizer
from sharebert import checkpoint, distributed
from sharebert.checkpoint import CheckpointFolder
from sharebert.config import TrainConfig, to_dict
from sharebert.data.format import PreparedCorpus
from sharebert.metrics import Recorder
from sharebert.prefix_cache import PrefixCache, open_prefix_cache
from sharebert.provenance import command_line, describe_origin
from sharebert.run_folder import RunFolder, refuse_other_data
from sharebert.train_state import TrainState, init_from_folder


@dataclass(frozen=True)
class Origin:
    """What a run goes on from: nothing, a checkpoint of its own, or one of the prefix cache."""

    start: Path | None
    meta: Mapping[str, Any]
    """Of that checkpoint; empty without one."""
    prefixes: PrefixCache | None
    """Where other runs find the beginning of this one."""

    @property
    def last_step(self) -> int:
        """Last step that has figures; -1 without any."""
        return self.meta["step"] if self.meta else -1

    def wandb_run_id(self, run: RunFolder) -> str | None:
        """The W&B run to continue; another run's checkpoint begins a new one."""
        is_own = self.start is not None and self.start.resolve().parent == run.checkpoints.resolve()
        return self.meta.get("wandb_run_id") if is_own else None

    def sample_offset(self, global_batch_size: int) -> int:
        """Samples that the updates so far consisted of beyond `global_batch_size` each; 0 unless that was changed."""
        return self.meta["samples_seen"] - self.meta["step"] * global_batch_size if self.meta else 0


def find_origin(
    config: TrainConfig, run: RunFolder, corpus: PreparedCorpus, device: torch.device, start: Path | None
) -> Origin:
    """Look into the prefix cache where the run has no checkpoint of its own, and refuse other data than before."""
    prefixes = open_prefix_cache(config, corpus.content_hashes, device)
    if start is None and prefixes is not None:
        start = distributed.on_rank_zero(functools.partial(prefixes.fork, config, run.path))
    meta = checkpoint.read_meta(start) if start is not None else {}
    if prefixes is not None and meta and meta.get("prefix_key") != prefixes.key:
        prefixes = None  # begun under other circumstances: no other run would come by the same numbers
    if meta:
        refuse_other_data(meta["corpus"], corpus.content_hashes, run.path)
    elif config.init_from is not None:
        refuse_other_tokenizer(init_from_folder(config.init_from), load_text_tokenizer(corpus.tokenizer_path))
    return Origin(start, meta, prefixes)


def build_save(
    config: TrainConfig,
    run: RunFolder,
    corpus: PreparedCorpus,
    state: TrainState,
    origin: Origin,
    recorder: Recorder,
) -> Callable[[bool], None]:
    """What saves a checkpoint, told whether it is the last one before unsharing; to be called on every rank."""
    checkpoints = CheckpointFolder(
        run.checkpoints, keep_last=config.checkpoint.keep_last, keep_every=config.checkpoint.keep_every
    )
    tokenizer = corpus.tokenizer_path.read_bytes()  # now: the prepared data may be deleted while the run goes on

    def write(before_unsharing: bool) -> None:
        meta = _describe(config, state, corpus, origin, recorder.wandb_run_id)
        meta["before_unsharing"] = before_unsharing
        saved = checkpoints.save(
            tensors=state.tensors(), training_state=state.state_dict(), tokenizer=tokenizer, meta=meta
        )
        if origin.prefixes is not None:
            origin.prefixes.keep(saved, run.path)

    return lambda before_unsharing: distributed.on_rank_zero(lambda: write(before_unsharing))


def _describe(
    config: TrainConfig, state: TrainState, corpus: PreparedCorpus, origin: Origin, wandb_run_id: str | None
) -> dict[str, Any]:
    """`meta.json` of a checkpoint."""
    samples = state.counters.step * config.global_batch_size
    return {
        **state.describe(),
        "samples_seen": samples + origin.sample_offset(config.global_batch_size),
        "prefix_key": None if origin.prefixes is None else origin.prefixes.key,
        "prefix_from": origin.meta.get("prefix_from"),
        "config": to_dict(config),
        "corpus": corpus.content_hashes,
        "world_size": distributed.world_size(),
        "wandb_run_id": wandb_run_id,
        "command_line": command_line(),
        **describe_origin(),
    }
