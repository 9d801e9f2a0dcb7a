"""The process group, the few collectives the program needs, and DistributedDataParallel.

Every function also works in a lone process, where no group exists: callers have no second path.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sharebert.launch import Ranks

T = TypeVar("T")


class RankZeroError(RuntimeError):
    """Rank 0 could not do its part; it prints why."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone: the fault lies there."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "Broken pipe", "remote process")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def join_group(ranks: Ranks, device: torch.device) -> None:
    """Join the job's process group: gloo for host tensors always, NCCL besides for CUDA tensors."""
    if not ranks.launched:
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, timeout=timedelta(minutes=30))


def leave_group() -> None:
    """Leave the process group, if this process joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Processes in the job."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum of `values` over the ranks, in place. Host tensors go over gloo, CUDA tensors over NCCL."""
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def sum_count(count: int) -> int:
    """Sum of a host integer over the ranks."""
    return count if world_size() == 1 else int(sum_over_ranks(torch.tensor([count], dtype=torch.int64)).item())


def max_count(count: int) -> int:
    """Largest of a host integer over the ranks."""
    return count if world_size() == 1 else int(max_over_ranks(torch.tensor([count], dtype=torch.int64)).item())


def max_over_ranks(values: Tensor) -> Tensor:
    """Elementwise maximum of `values` over the ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def mean_over_ranks(tensors: list[Tensor]) -> None:
    """Mean of each of `tensors` over the ranks, in place, as DDP does it."""
    if world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)
        torch._foreach_div_(tensors, world_size())


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and hand its (small, picklable) result to every rank, outside the step.

    Raises:
        Exception: what `work` raised, on rank 0; :class:`RankZeroError` on the others.
    """
    if world_size() == 1:
        return work()
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if rank() == 0:
        try:
            box[0] = work()
        except Exception as error:
            failure, box[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise RankZeroError(box[1])
    return cast("T", box[0])


def wrap(model: nn.Module) -> nn.Module:
    """`model` with its gradients averaged over the ranks; `model` itself in a lone process.

    Called again after unsharing: the reducer holds the list of parameters it was built with. The old wrapper
    has to be dropped first, its hooks go with it.
    """
    if world_size() == 1:
        return model
    device = next(model.parameters()).device
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
