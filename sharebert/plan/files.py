"""What a run finds on disk, and what it will leave there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_prep.cache import open_planned, plan_corpus
from data_prep.text_files import find_files
from data_prep.tokenizer import expected_vocab_size
from sharebert.config import ConfigError, DataConfig, TrainConfig
from sharebert.data.format import DataError, PreparedCorpus
from sharebert.prefix_plan import shared_updates

MOST_BYTES_TO_HASH = 2**30
"""Larger sources are not looked for among the prepared corpora: their content would have to be hashed, 1 s per GB."""


@dataclass(frozen=True)
class Search:
    """What came of looking for a prepared corpus."""

    corpus: PreparedCorpus | None
    was_made: bool = True
    """False where it would have taken long."""


def find_prepared(config: DataConfig) -> Search:
    """Look for the corpus; nothing is found where the sources are not there."""
    try:
        if not _is_quickly_hashed(config):
            return Search(None, was_made=False)
        return Search(open_planned(plan_corpus(config)))
    except (ConfigError, DataError, OSError):  # `prepare` and `train` say what is wrong
        return Search(None)


def _is_quickly_hashed(config: DataConfig) -> bool:
    if config.source == "hf_dataset":
        return False  # may have to ask the hub
    paths = find_files(config.files, "data.files") if config.source == "text_files" else []
    return sum(path.stat().st_size for path in paths) <= MOST_BYTES_TO_HASH


def expected_tokenizer_bytes(config: DataConfig) -> int:
    """Of tokenizer.json, about."""
    return 1000 + 22 * expected_vocab_size(config)


def checkpoint_bytes(sizes: Sequence[int], moments: int) -> int:
    """Of the weights and the optimizer's state of unique parameters of these `sizes`, in fp32, with the files' own."""
    per_parameter = 110 + moments * 330 + (330 if moments else 0)  # names, places, alignment
    return 4 * (1 + moments) * sum(sizes) + per_parameter * len(sizes) + 8000


def kept_checkpoints(config: TrainConfig) -> dict[str, int]:
    """How many checkpoints of each phase there are at the end; at most, where correlations decide."""
    policy, last = config.checkpoint, config.max_steps
    shared, is_open = shared_updates(config)
    splits = {shared} if 0 < shared < last else set()
    regular = range(policy.every_steps, last + 1, policy.every_steps) if policy.every_steps else ()
    saved = sorted({*regular, *splits, last})
    kept = {*splits, *saved[-policy.keep_last :]}
    if policy.keep_every:
        kept |= {step for step in saved if step % policy.keep_every == 0}
    counts = {"shared": sum(step <= shared for step in kept), "unshared": sum(step > shared for step in kept)}
    if is_open and config.unshare.policy == "multi_step":
        counts["unshared"] += config.model.num_layers // config.unshare.unit_layers - 2  # one before each split
    return counts
