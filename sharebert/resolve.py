"""Every `auto` and null of a configuration made explicit, by fixed rules that a resumed run repeats."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sharebert import distributed
from sharebert.config import TrainConfig
from sharebert.precision import Precision, resolve_compile, resolve_precision
from sharebert.unshare_policy import resolve_unshare_step


def resolve(config: TrainConfig, device: torch.device, meta: dict[str, Any] | None) -> tuple[TrainConfig, Precision]:
    """The configuration as it is run, written and compared on a resume; and its number format.

    Args:
        config: as composed.
        device: of this process.
        meta: of the checkpoint to go on from, whose precision is taken for `auto`.
    """
    engine = config.engine
    if meta is not None and engine.precision == "auto":
        engine = dataclasses.replace(engine, precision=meta["config"]["engine"]["precision"])
    precision = resolve_precision(engine, device)
    workers = engine.num_workers
    engine = dataclasses.replace(
        engine,
        device=device.type,
        precision=precision.name,
        compile=str(resolve_compile(engine, device)).lower(),
        micro_batch_size=largest_micro_batch(config.global_batch_size, engine.micro_batch_size),
        num_workers=workers if workers is not None else (2 if device.type == "cuda" else 0),
    )
    unshare = dataclasses.replace(config.unshare, step=resolve_unshare_step(config))
    return dataclasses.replace(config, engine=engine, unshare=unshare), precision


def largest_micro_batch(global_batch_size: int, bound: int | None, processes: int | None = None) -> int:
    """The largest divisor of a process's share of the batch that is at most `bound`; None: the share itself.

    `processes`: in the job; None: in this one.
    """
    local_batch = global_batch_size // (processes or distributed.world_size())
    bound = min(bound or local_batch, local_batch)
    return next(size for size in range(bound, 0, -1) if local_batch % size == 0)
