"""The verb `plan`: what a run would take and write, from its settings; nothing is trained and nothing is written."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.tokenizer import expected_vocab_size
from sharebert.checkpoint import list_checkpoints
from sharebert.compose import Request
from sharebert.config import ConfigError, TrainConfig, check_world_size, from_dict
from sharebert.config.checks import check_positive
from sharebert.data.format import PreparedCorpus, num_sequences
from sharebert.data.masking import num_slots
from sharebert.flops import flops_per_update, measure_matmul_peak
from sharebert.launch import EXIT_FINISHED, Ranks
from sharebert.memory import GIB, free_bytes
from sharebert.plan.files import (
    Search,
    checkpoint_bytes,
    expected_tokenizer_bytes,
    find_prepared,
    kept_checkpoints,
)
from sharebert.plan.table import describe, describe_sweep
from sharebert.precision import Precision, hardware_has_bf16, resolve_device
from sharebert.prefix_plan import plan_prefixes, shared_updates
from sharebert.resolve import largest_micro_batch
from sharebert.run_memory import ParameterSizes, RunMemory, parameter_sizes, phases_of
from sharebert.unshare_policy import resolve_unshare_step

BYTES_PER_ROW = 420
"""Of `metrics.jsonl`, about."""

ASSUMED_PEAK_SHARE = {"cpu": 0.65, "cuda": 0.5}
"""Model operations as a share of the measured matmul peak, where no rate is given; see `sharebert bench`."""


@dataclass(frozen=True)
class Circumstances:
    """What a plan depends on besides the settings."""

    processes: int = 1
    memory_gib: float | None = None
    """Of each device; None: what is free here."""
    tokens_per_second: float | None = None
    """Of the whole job; None: assumed from the matmul peak of this machine."""
    tflops: float | None = None
    """Operations that each process sustains, in 10^12 a second: another way to give the rate."""

    def __post_init__(self) -> None:
        check_positive("", self, "processes", "memory_gib", "tokens_per_second", "tflops")
        if self.tokens_per_second is not None and self.tflops is not None:
            raise ConfigError("--tflops and --tokens-per-second both give the rate; expected one of them")

    @property
    def gives_rate(self) -> bool:
        """Whether nothing has to be assumed."""
        return self.tokens_per_second is not None or self.tflops is not None


def plan(request: Request, circumstances: Circumstances, *, as_json: bool) -> int:
    """Print the plan of a run, or of all runs of a sweep; returns the exit status.

    Args:
        request: with at least one cell.
        circumstances: what the flags say.
        as_json: print JSON instead of tables.

    Raises:
        ConfigError: a wrong setting.
    """
    configs = [from_dict(TrainConfig, cell.values) for cell in request.cells]
    plans = plan_runs(configs, [cell.folder for cell in request.cells], circumstances)
    if not request.is_multirun:
        print(json.dumps(plans[0]) if as_json else describe(plans[0]))
        return EXIT_FINISHED
    sweep = {"cells": plans, "prefix": _prefix_saving(configs, plans)}
    print(json.dumps(sweep) if as_json else describe_sweep(sweep))
    return EXIT_FINISHED


def plan_runs(
    configs: Sequence[TrainConfig], folders: Sequence[Path], circumstances: Circumstances
) -> list[dict[str, Any]]:
    """The plan of each run, as JSON can hold it; what they have in common is looked up once."""
    searches: dict[str, Search] = {}
    peaks: dict[tuple[str, str], float] = {}
    plans = []
    for config, folder in zip(configs, folders, strict=True):
        check_world_size(config, circumstances.processes)
        config = _resolve(config, circumstances.processes)
        key = repr(config.data)
        if key not in searches:
            searches[key] = find_prepared(config.data)
        kind = (config.engine.device, config.engine.precision)
        if not circumstances.gives_rate and kind not in peaks and _is_here(config):
            device = torch.device(config.engine.device)
            peaks[kind] = measure_matmul_peak(device, Precision(config.engine.precision, device).dtype)
        plans.append(_plan(config, folder, searches[key], peaks.get(kind), circumstances))
    return plans


def _plan(
    config: TrainConfig,
    folder: Path,
    search: Search,
    matmul_peak: float | None,
    circumstances: Circumstances,
) -> dict[str, Any]:
    corpus = search.corpus
    vocab_size = corpus.vocab_size if corpus is not None else expected_vocab_size(config.data)
    sizes = parameter_sizes(config, vocab_size)
    slots = num_slots(config.data.seq_len, config.masking.probability)
    flops = flops_per_update(config.model, config.data.seq_len, slots, vocab_size, config.global_batch_size)
    return {
        "run_folder": str(folder),
        "continues_from_step": max((entry.step for entry in list_checkpoints(folder / "checkpoints")), default=0),
        "model": config.model.name,
        "device": config.engine.device,
        "precision": config.engine.precision,
        "processes": circumstances.processes,
        **_counts(sizes, vocab_size),
        **_unsharing(config),
        **_memory(config, RunMemory(config, vocab_size, circumstances.processes, sizes), circumstances),
        "flops_per_update": flops,
        "flops": flops * config.max_steps,
        **_data(config, search),
        **_duration(config, flops, matmul_peak, circumstances),
        **_disk(config, folder, sizes, corpus),
    }


def _resolve(config: TrainConfig, processes: int) -> TrainConfig:
    """Device, precision and micro-batch as `sharebert.resolve` would, but also for CUDA where there is none."""
    engine = config.engine
    kind = engine.device if engine.device == "cuda" else resolve_device(engine, Ranks()).type
    precision = engine.precision
    if precision == "auto":
        has_bf16 = (kind == "cuda" and not torch.cuda.is_available()) or hardware_has_bf16(torch.device(kind))
        precision = "bf16" if has_bf16 else "fp32"
    size = largest_micro_batch(config.global_batch_size, engine.micro_batch_size, processes)
    engine = dataclasses.replace(engine, device=kind, precision=precision, micro_batch_size=size)
    unshare = dataclasses.replace(config.unshare, step=resolve_unshare_step(config))
    return dataclasses.replace(config, engine=engine, unshare=unshare)


def _is_here(config: TrainConfig) -> bool:
    return config.engine.device == "cpu" or torch.cuda.is_available()


# ---------------------------------------------------------------------- the parts of a plan


def _counts(sizes: ParameterSizes, vocab_size: int) -> dict[str, Any]:
    """Parameters, and what depends on nothing but their number."""
    unique = {phase: sizes.in_phase(phase) for phase in ("shared", "unshared")}
    return {
        "vocab_size": vocab_size,
        "parameters": {
            "unique_shared": sum(unique["shared"]),
            "unique_unshared": sum(unique["unshared"]),
            "effective": sum(unique["unshared"]),
        },
        "all_reduce_bytes": {phase: 4 * sum(numbers) for phase, numbers in unique.items()},
    }


def _unsharing(config: TrainConfig) -> dict[str, Any]:
    """Which phases there are, and when the second begins."""
    unshare, (shared, is_open) = config.unshare, shared_updates(config)
    return {
        "max_steps": config.max_steps,
        "unshare_policy": unshare.policy,
        "unshare_step": unshare.step,
        "phases": list(phases_of(config)),
        "shared_updates": shared,
        "shared_updates_is_least": is_open,
        "check_every": unshare.check_every,
        "threshold": unshare.threshold,
        "patience": unshare.patience,
        "earliest_step": unshare.earliest_step,
        "latest_step": unshare.latest_step,
    }


def _memory(config: TrainConfig, memory: RunMemory, circumstances: Circumstances) -> dict[str, Any]:
    """Memory of one process at the micro-batch asked for, and the largest that fits."""
    size = config.engine.micro_batch_size
    assert size is not None, "_resolve sets it"
    limit = _memory_limit(config, circumstances)
    by_phase = memory.by_phase(size)
    fits = None if limit is None else memory.peak(size) <= limit
    return {
        "micro_batch_size": size,
        "micro_batches_per_update": memory.local_batch // size,
        "activation_checkpointing": config.engine.activation_checkpointing,
        "memory_bytes": memory.peak(size),
        "memory_bytes_by_phase": by_phase,
        "memory_limit_bytes": limit,
        "memory_limit_is_given": circumstances.memory_gib is not None,
        "fits": fits,
        "largest_micro_batch_size": None if limit is None else memory.largest_micro_batch(limit),
        "advice": "" if fits or limit is None else memory.advice(limit),
    }


def _memory_limit(config: TrainConfig, circumstances: Circumstances) -> int | None:
    """Bytes that a process may take; None where nobody knows."""
    if circumstances.memory_gib is not None:
        return int(circumstances.memory_gib * GIB)
    free = free_bytes(config.engine.device)
    if free is None or config.engine.device == "cuda":
        return free
    return free // circumstances.processes  # as if all of them ran here


def _data(config: TrainConfig, search: Search) -> dict[str, Any]:
    """How much the run reads; epochs where the corpus is prepared."""
    corpus, sequences = search.corpus, config.max_steps * config.global_batch_size
    total = None if corpus is None else num_sequences(corpus.train.num_tokens, config.data.seq_len)
    return {
        "global_batch_size": config.global_batch_size,
        "seq_len": config.data.seq_len,
        "sequences": sequences,
        "tokens": sequences * config.data.seq_len,
        "corpus_was_looked_for": search.was_made,
        "corpus": None if corpus is None else str(corpus.folder),
        "corpus_sequences": total,
        "epochs": None if not total else sequences / total,
    }


def _duration(
    config: TrainConfig, flops: int, matmul_peak: float | None, circumstances: Circumstances
) -> dict[str, Any]:
    """Hours of the updates at the given rate, else at one assumed from this machine's matmul peak."""
    tokens = config.global_batch_size * config.data.seq_len
    rate, share = circumstances.tokens_per_second, None
    if circumstances.tflops is not None:
        rate = circumstances.processes * circumstances.tflops * 1e12 / (flops / tokens)
    elif rate is None and matmul_peak is not None:
        share = ASSUMED_PEAK_SHARE[config.engine.device]
        machines = 1 if config.engine.device == "cpu" else circumstances.processes  # as for memory: all of them here
        rate = machines * matmul_peak * share / (flops / tokens)
    hours = None if rate is None else config.max_steps * tokens / rate / 3600
    return {
        "tokens_per_second": rate,
        "rate_is_given": circumstances.gives_rate,
        "matmul_peak_gflops": None if matmul_peak is None else matmul_peak / 1e9,
        "assumed_peak_share": share,
        "hours": hours,
        "device_hours": None if hours is None else hours * circumstances.processes,
    }


def _disk(config: TrainConfig, folder: Path, sizes: ParameterSizes, corpus: PreparedCorpus | None) -> dict[str, Any]:
    """Checkpoints and what else the run leaves in its folder."""
    tokenizer = expected_tokenizer_bytes(config.data) if corpus is None else corpus.tokenizer_path.stat().st_size
    moments = 2 if config.optim.name == "adamw" else 0
    bytes_of = {phase: checkpoint_bytes(sizes.in_phase(phase), moments) + tokenizer for phase in ("shared", "unshared")}
    kept = kept_checkpoints(config)
    last = "shared" if phases_of(config) == ("shared",) else "unshared"
    count = sum(kept.values())
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    return {
        "checkpoint_bytes": bytes_of,
        "checkpoints_kept": count,
        "checkpoints_bytes": sum(number * bytes_of[phase] for phase, number in kept.items()),
        # A new one is whole before an old one goes.
        "disk_bytes_at_most": sum(number * bytes_of[phase] for phase, number in kept.items()) + bytes_of[last],
        "disk_free_bytes": shutil.disk_usage(existing).free,
        "metrics_bytes": BYTES_PER_ROW * (config.max_steps // config.logging.every_steps),
    }


def _prefix_saving(configs: Sequence[TrainConfig], plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a sweep saves by training shared prefixes once."""
    prefixes = plan_prefixes(configs)
    hours = [plan["hours"] for plan in plans]
    saved = [
        None if plan["hours"] is None else plan["hours"] * cell.starts_from / plan["max_steps"]
        for plan, cell in zip(plans, prefixes.per_cell, strict=True)
    ]
    total = sum(plan["max_steps"] for plan in plans)
    is_known = None not in hours
    return {
        "order": list(prefixes.order),
        "starts_from": [cell.starts_from for cell in prefixes.per_cell],
        "shared_updates": prefixes.without_cache,
        "shared_updates_trained": prefixes.trained,
        "shared_updates_saved": prefixes.without_cache - prefixes.trained,
        "updates": total,
        "updates_trained": total - prefixes.without_cache + prefixes.trained,
        "is_least": any(cell.is_open for cell in prefixes.per_cell),
        "hours": sum(hours) if is_known else None,
        "hours_saved": sum(saved) if is_known else None,
    }
