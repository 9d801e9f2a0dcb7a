"""The process group, the few collectives the program needs, and DistributedDataParallel.

Every function also works in a lone process, where no group exists: callers have no second path.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous as find_store
from torch.nn.parallel import DistributedDataParallel

from sharebert.launch import Ranks, rendezvous

T = TypeVar("T")

_PATIENCE = 10
"""Times the group's time limit that the others wait for what rank 0 does alone, saving for example."""
_patient_group: dist.ProcessGroup | None = None
"""All ranks again, for waiting so long. Rank 0 itself is as impatient as ever: it would wait for one that hangs."""


class RankZeroError(RuntimeError):
    """Rank 0 could not do its part; it prints why."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone: the fault lies there."""
    signs = ["Connection closed by peer", "Connection reset by peer", "Socket closed", "Broken pipe", "remote process"]
    signs += ["Timed out waiting", "failed to recv", "failed to send"]
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def join_group(ranks: Ranks, device: torch.device, timeout_minutes: float) -> None:
    """Join the job's process group: gloo for host tensors always, NCCL besides for CUDA tensors."""
    global _patient_group
    if not ranks.launched:
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    os.environ.update(rendezvous())
    timeout = timedelta(minutes=timeout_minutes)
    store, number, size = next(find_store("env://", ranks.rank, ranks.world_size, timeout=timeout))
    # torchrun keeps the store over its restarts. Under the same names, ranks would find the addresses of dead ones.
    store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=timeout)
    _patient_group = dist.new_group(backend="gloo", timeout=timeout if ranks.rank == 0 else _PATIENCE * timeout)


@contextlib.contextmanager
def process_group(ranks: Ranks, device: torch.device, timeout_minutes: float) -> Iterator[None]:
    """The job's process group, joined, and left at the end.

    After an error several ranks do not leave it: NCCL waits in that for whatever other ranks have begun together, and
    they for this one. The end of the process, for which the caller has to see
    (:func:`sharebert.launch.leave_at_once`), ends them.
    """
    join_group(ranks, device, timeout_minutes)
    try:
        yield
    except BaseException:
        if world_size() == 1:  # nobody waits, and the next run of a sweep joins one of its own
            leave_group()
        raise
    leave_group()


def leave_group() -> None:
    """Leave the process group, if this process joined one."""
    global _patient_group
    _patient_group = None
    if dist.is_initialized():
        dist.destroy_process_group()


def tell_all(message: str) -> None:
    """Leave `message` for all ranks, which see it by :func:`was_told` whatever they are doing."""
    if world_size() > 1:
        _store().set(message, "told")


def was_told(*messages: str) -> bool:
    """Whether all of `messages` were left, by any rank; a question over the network that waits for nobody."""
    return world_size() > 1 and bool(_store().check(list(messages)))


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


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

    The others wait for it beyond the group's time limit, ten times as long.

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
    dist.broadcast_object_list(box, src=0, group=_patient_group, device=torch.device("cpu"))
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise RankZeroError(box[1])
    return cast("T", box[0])


def gather(value: T) -> list[T]:
    """`value` (picklable) of every rank, in their order, on every rank."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value, group=_patient_group)
    return values


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
