"""Measure, and say what was found: for people as a table, for programs as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from data_prep.tokenizer import expected_vocab_size
from sharebert import distributed
from sharebert.allocator import prepare_memory
from sharebert.bench.clock import PARTS, synchronize
from sharebert.bench.contestants import (
    Contestant,
    OurUpdate,
    TransformersProcess,
    has_transformers,
    phase_config,
    random_corpus,
)
from sharebert.bench.memory import measure_peak_memory
from sharebert.config import TrainConfig
from sharebert.data.masking import num_slots
from sharebert.flops import MATMUL_SIZE, flops_per_update, measure_matmul_peak
from sharebert.launch import EXIT_FINISHED, Ranks
from sharebert.optim import optimizer_state_by_name
from sharebert.precision import resolve_device
from sharebert.resolve import resolve
from sharebert.table import markdown_table

logger = logging.getLogger(__name__)

PHASES = ("shared", "unshared")
WARM_UP_UPDATES = 2
LEAST_ROUNDS, MOST_ROUNDS = 3, 100
CPU_TOKENS = 1024
"""Tokens in a measured update on a CPU, unless the user says otherwise: an update of a BERT-base takes 2 s then."""

Rounds = dict[str, list[dict[str, float]]]
"""For each contestant, the seconds of the parts of its updates."""


def bench(config: TrainConfig, ranks: Ranks, *, as_json: bool, sequences: int | None, seconds: float) -> int:
    """Run the contestants in turn and print the figures; returns the exit status. Writes nothing.

    Args:
        config: what `sharebert train` would be given.
        ranks: this process among those of the job.
        as_json: print JSON instead of a table.
        sequences: in a measured update of one process; None: 1,024 tokens on a CPU, one micro-batch on CUDA.
        seconds: about how long to measure, besides warm-up.
    """
    device = resolve_device(config.engine, ranks)
    with distributed.process_group(ranks, device, config.engine.group_timeout_minutes):
        figures = _measure(config, device, sequences, seconds)
    if ranks.rank == 0:
        print(json.dumps(figures) if as_json else describe(figures))
    return EXIT_FINISHED


def _measure(config: TrainConfig, device: torch.device, sequences: int | None, seconds: float) -> dict[str, Any]:
    prepare_memory(device)
    config, precision = resolve(config, device, None)
    vocab_size = expected_vocab_size(config.data)
    sequences = sequences or _default_sequences(config, device)
    configs = {phase: phase_config(config, phase, sequences) for phase in PHASES}
    memory = {phase: _peak_memory(configs[phase], vocab_size, device) for phase in PHASES}
    with tempfile.TemporaryDirectory() as folder:
        corpus = random_corpus(Path(folder), vocab_size, 64 * sequences * config.data.seq_len)
        ours = {phase: OurUpdate(configs[phase], corpus, device, precision) for phase in PHASES}
        contestants: dict[str, Contestant] = {**ours}
        with contextlib.ExitStack() as closing:
            if has_transformers() and distributed.world_size() == 1:
                theirs = TransformersProcess(configs["unshared"], corpus, device)
                closing.callback(theirs.close)
                contestants["transformers"] = theirs
            rounds, peak = _run_rounds(contestants, device, precision.dtype, seconds)
    figures = _rates(configs["shared"], vocab_size, rounds, peak)
    figures["seconds"]["all_reduce"] = {phase: _time_all_reduce(ours[phase], device) for phase in PHASES}
    return {
        **_circumstances(configs["shared"], device, len(rounds["shared"])),
        **figures,
        "peak_memory_bytes": memory,
        **_sizes(ours),
        "unshare_seconds": _time_unsharing(ours["shared"], device),
    }


def _default_sequences(config: TrainConfig, device: torch.device) -> int:
    assert config.engine.micro_batch_size is not None, "resolve() sets it"
    if device.type == "cuda":
        return config.engine.micro_batch_size
    return min(config.engine.micro_batch_size, max(1, CPU_TOKENS // config.data.seq_len))


def _peak_memory(config: TrainConfig, vocab_size: int, device: torch.device) -> int:
    """Of one process of the job, without its group."""
    alone = dataclasses.replace(config, global_batch_size=config.global_batch_size // distributed.world_size())
    return distributed.on_rank_zero(lambda: measure_peak_memory(alone, vocab_size, device))


def _run_rounds(
    contestants: Mapping[str, Contestant], device: torch.device, dtype: torch.dtype, seconds: float
) -> tuple[Rounds, float]:
    """Let the contestants run in turn, forwards and backwards; their seconds, and the peak in operations a second.

    Each round measures the peak too: the machine may be faster at one time than at another.
    """
    for contestant in contestants.values():
        for _ in range(WARM_UP_UPDATES):
            contestant.time_update()
    rounds: Rounds = {name: [] for name in contestants}
    peaks: list[float] = []
    order, begin = list(contestants.items()), time.perf_counter()

    def goes_on() -> bool:
        is_time_left = time.perf_counter() - begin < seconds and len(peaks) < MOST_ROUNDS
        return is_time_left or len(peaks) < LEAST_ROUNDS

    while distributed.on_rank_zero(goes_on):
        for name, contestant in order:
            rounds[name].append(contestant.time_update())
        order.reverse()
        peaks.append(measure_matmul_peak(device, dtype))
    return rounds, statistics.median(peaks)


def _circumstances(config: TrainConfig, device: torch.device, rounds: int) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": distributed.world_size(),
        "torch": torch.__version__,
        "precision": config.engine.precision,
        "compile": config.engine.compile == "true",
        "activation_checkpointing": config.engine.activation_checkpointing,
        "model": config.model.name,
        "seq_len": config.data.seq_len,
        "sequences": config.global_batch_size // distributed.world_size(),
        "rounds": rounds,
    }


def _rates(config: TrainConfig, vocab_size: int, rounds: Rounds, peak: float) -> dict[str, Any]:
    """Medians over the rounds, and what follows from them."""
    seconds = {
        name: {part: statistics.median(row[part] for row in rows) for part in ("update", *PARTS)}
        for name, rows in rounds.items()
    }
    slots = num_slots(config.data.seq_len, config.masking.probability)
    flops = flops_per_update(config.model, config.data.seq_len, slots, vocab_size, config.global_batch_size)
    rate = {name: config.global_batch_size * config.data.seq_len / seconds[name]["update"] for name in seconds}
    theirs = rate.get("transformers")
    return {
        "flops_per_update": flops,
        "matmul_peak_gflops": peak / 1e9,
        "matmul_size": MATMUL_SIZE[config.engine.device],
        "tokens_per_second": {phase: rate[phase] for phase in PHASES},
        "peak_share": {phase: flops / seconds[phase]["update"] / (peak * distributed.world_size()) for phase in PHASES},
        "seconds": {part: {name: seconds[name][part] for name in seconds} for part in ("update", *PARTS)},
        "transformers": None if theirs is None else {"tokens_per_second": theirs},
        "ratio": {phase: None if theirs is None else rate[phase] / theirs for phase in PHASES},
        "shared_to_unshared": {
            part: seconds["shared"][part] / seconds["unshared"][part] for part in ("update", "optimizer")
        },
    }


def _sizes(ours: Mapping[str, OurUpdate]) -> dict[str, Any]:
    """Bytes that fall with the number of unique parameters."""
    bytes_of: dict[str, dict[str, int]] = {"optimizer_state": {}, "gradients": {}, "all_reduce": {}}
    for phase, contestant in ours.items():
        state = optimizer_state_by_name(contestant.state.model, contestant.state.optimizer)
        moments = [v for values in state.values() for v in values.values() if torch.is_tensor(v) and v.dim() > 0]
        gradients = 4 * contestant.state.unique_parameters()
        bytes_of["optimizer_state"][phase] = sum(tensor.nbytes for tensor in moments)
        bytes_of["gradients"][phase] = gradients
        bytes_of["all_reduce"][phase] = gradients if distributed.world_size() > 1 else 0
    unique = {phase: contestant.state.unique_parameters() for phase, contestant in ours.items()}
    return {"bytes": bytes_of, "unique_parameters": unique, "unique_share": unique["shared"] / unique["unshared"]}


def _time_all_reduce(ours: OurUpdate, device: torch.device) -> float:
    """Seconds that one reduction of all gradients takes by itself; in training it runs beside the backward pass."""
    if distributed.world_size() == 1:
        return 0.0
    buffer = torch.zeros(ours.state.unique_parameters(), device=device)
    seconds = []
    for _ in range(LEAST_ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        distributed.sum_over_ranks(buffer)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _time_unsharing(ours: OurUpdate, device: torch.device) -> float:
    """Seconds from one set of weights to one for each layer, optimizer state and DDP's wrapper included."""
    synchronize(device)
    start = time.perf_counter()
    ours.state.sharing.unshare(optimizer=ours.state.optimizer)
    ours.updater.take_stock()
    synchronize(device)
    return time.perf_counter() - start


# ---------------------------------------------------------------------- for people


def describe(figures: Mapping[str, Any]) -> str:
    """The figures as lines of text and a table."""
    names = [name for name in (*PHASES, "transformers") if name in figures["seconds"]["update"]]
    rate = dict(figures["tokens_per_second"])
    if figures["transformers"]:
        rate["transformers"] = figures["transformers"]["tokens_per_second"]
    rows = [
        ["tokens/s", *_cells(names, rate, "{:,.0f}")],
        ["against Transformers", *_cells(names, figures["ratio"], "{:.2f}x")],
        ["share of the peak", *_cells(names, figures["peak_share"], "{:.0%}")],
        ["seconds an update", *_cells(names, figures["seconds"]["update"], "{:.4f}")],
        *([f"  {part}", *_cells(names, figures["seconds"][part], "{:.4f}")] for part in PARTS),
    ]
    if figures["processes"] > 1:
        rows.append(["  all-reduce, by itself", *_cells(names, figures["seconds"]["all_reduce"], "{:.4f}")])
    gib = {phase: size / 2**30 for phase, size in figures["peak_memory_bytes"].items()}
    mib = {phase: size / 2**20 for phase, size in figures["bytes"]["optimizer_state"].items()}
    rows += [
        ["peak memory (GiB)", *_cells(names, gib, "{:.2f}")],
        ["optimizer state (MiB)", *_cells(names, mib, "{:,.0f}")],
        ["unique parameters", *_cells(names, figures["unique_parameters"], "{:,}")],
    ]
    heads = {"transformers": "Transformers"}
    threads = f"{figures['processes']} process(es) of {figures['threads']} thread(s)"
    shape = f"{figures['sequences']} x {figures['seq_len']} tokens an update and process"
    relative = figures["shared_to_unshared"]
    return "\n".join(
        [
            f"{figures['model']} on {figures['device']}, {threads}, torch {figures['torch']}, {figures['precision']}, "
            f"compile {'on' if figures['compile'] else 'off'}",
            f"{shape}; medians of {figures['rounds']} rounds, each of one update of every column; "
            f"peak of a {figures['matmul_size']}^3 product: {figures['matmul_peak_gflops']:,.0f} GFLOP/s",
            "",
            markdown_table(["", *(heads.get(name, name) for name in names)], rows),
            "",
            f"Shared against unshared: update {relative['update']:.2f}x, optimizer {relative['optimizer']:.2f}x, "
            f"unique parameters {figures['unique_share']:.2f}x. Unsharing takes {figures['unshare_seconds']:.2f} s.",
        ]
    )


def _cells(names: list[str], values: Mapping[str, float | None], form: str) -> list[str]:
    """One cell a column; empty where there is no value."""
    found = [values.get(name) for name in names]
    return ["" if value is None else form.format(value) for value in found]
