"""Memory of a run, phase by phase, and the micro-batch that fits: `plan` says it beforehand, `train` warns."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sharebert import distributed
from sharebert.config import TrainConfig
from sharebert.data.masking import num_slots
from sharebert.launch import detect_ranks
from sharebert.memory import GIB, Held, Pass, free_bytes, held_bytes, process_bytes
from sharebert.model.bert import Bert
from sharebert.prefix_plan import shared_updates
from sharebert.sharing import Groups, SharedLayers, one_group, single_groups
from sharebert.update import PROBED_GROUPS

logger = logging.getLogger(__name__)

PHASES = ("shared", "unshared")


class OutOfDeviceMemoryError(RuntimeError):
    """A micro-batch did not fit; the message says what would."""


@dataclass(frozen=True)
class ParameterSizes:
    """Numbers in each parameter tensor of a model, by where it is."""

    outside: list[int]
    """Embeddings and head."""
    units: list[list[int]]
    """Of each sharing unit; all units have the same."""

    def of(self, groups: Groups) -> list[int]:
        """The unique parameters while these groups share."""
        return [*self.outside, *(size for first, _ in groups for size in self.units[first])]

    def in_phase(self, phase: str) -> list[int]:
        """The unique parameters in phase `shared` or `unshared`."""
        count = len(self.units)
        return self.of(one_group(count) if phase == "shared" else single_groups(count))


def parameter_sizes(config: TrainConfig, vocab_size: int) -> ParameterSizes:
    """From the model itself, built without memory."""
    with torch.device("meta"):
        model = Bert(config.model, vocab_size)
    sharing = SharedLayers(model.encoder.layers, config.unshare.unit_layers)
    units = [[slot.parameter.numel() for slot in sharing.unit_slots(unit)] for unit in range(len(sharing.units))]
    outside = [parameter.numel() for name, parameter in model.named_parameters() if ".layers." not in name]
    return ParameterSizes(outside, units)


def phases_of(config: TrainConfig) -> tuple[str, ...]:
    """The phases that a run goes through; `unshared` too where correlations decide whether it does."""
    shared, is_open = shared_updates(config)
    if shared == 0:
        return ("unshared",)
    return ("shared",) if shared == config.max_steps and not is_open else PHASES


class RunMemory:
    """Memory of one process of a run.

    Args:
        config: its device and precision are named, not `auto`.
        vocab_size: V.
        processes: in the whole job.
        sizes: of :func:`parameter_sizes`.
    """

    def __init__(self, config: TrainConfig, vocab_size: int, processes: int, sizes: ParameterSizes) -> None:
        self.config = config
        self.processes = processes
        self.local_batch = config.global_batch_size // processes
        self._pass = Pass(
            config.model,
            vocab_size,
            config.data.seq_len,
            num_slots(config.data.seq_len, config.masking.probability),
            config.engine.precision,
            config.engine.device,
            1,
            config.engine.activation_checkpointing,
            not config.data.cross_document_attention,
        )
        self._held = {phase: self._held_in(phase, sizes) for phase in phases_of(config)}

    def _held_in(self, phase: str, sizes: ParameterSizes) -> Held:
        groups = len(sizes.units) if phase == "unshared" else 1
        sampled = sum(sizes.units[0]) * min(groups, PROBED_GROUPS)
        is_watched = self.config.unshare.check_every is not None and len(sizes.units) > 1
        everything = sum(sizes.in_phase("unshared"))
        return held_bytes(
            sum(sizes.in_phase(phase)),
            self.config.optim,
            sampled=sampled,
            checked=everything if is_watched else 0,
            built=everything,
        )

    def micro_batch_sizes(self) -> list[int]:
        """Those that divide a process's share of the global batch, ascending."""
        return [size for size in range(1, self.local_batch + 1) if self.local_batch % size == 0]

    def by_phase(self, micro_batch_size: int, recomputes: bool | None = None) -> dict[str, int]:
        """Bytes in each phase, with activation checkpointing as configured or as given."""
        if recomputes is None:
            recomputes = self.config.engine.activation_checkpointing
        run = dataclasses.replace(self._pass, micro_batch_size=micro_batch_size, activation_checkpointing=recomputes)
        keeps_gradients = self.processes > 1 or micro_batch_size < self.local_batch
        return {phase: process_bytes(run, held, keeps_gradients) for phase, held in self._held.items()}

    def peak(self, micro_batch_size: int, recomputes: bool | None = None) -> int:
        """Bytes in the phase that takes most."""
        return max(self.by_phase(micro_batch_size, recomputes).values())

    def largest_micro_batch(self, limit: int, recomputes: bool | None = None, below: int | None = None) -> int | None:
        """The largest size, under `below`, that fits into `limit` bytes in every phase; None: not even one sequence."""
        sizes = [size for size in self.micro_batch_sizes() if below is None or size < below]
        return max((size for size in sizes if self.peak(size, recomputes) <= limit), default=None)

    def advice(self, limit: int, below: int | None = None) -> str:
        """What would fit into `limit` bytes, as a setting and its consequences."""
        if (size := self.largest_micro_batch(limit, below=below)) is not None:
            return self._setting(size, "", None)
        if not self.config.engine.activation_checkpointing and (size := self.largest_micro_batch(limit, True)):
            return self._setting(size, " engine.activation_checkpointing=true", True)
        least = readable_bytes(self.peak(1, True))
        return f"nothing does: a single sequence takes {least} with engine.activation_checkpointing=true"

    def _setting(self, size: int, more: str, recomputes: bool | None) -> str:
        needed = readable_bytes(self.peak(size, recomputes))
        return f"engine.micro_batch_size={size}{more} does: {needed}, {self.local_batch // size} x {size} sequences"


def check_memory(config: TrainConfig, vocab_size: int) -> RunMemory:
    """Warn, on rank 0, where a run will not fit on this machine; what would. Costs a few hundredths of a second.

    Args:
        config: resolved.
        vocab_size: V.
    """
    memory = RunMemory(config, vocab_size, distributed.world_size(), parameter_sizes(config, vocab_size))
    size, device = config.engine.micro_batch_size, config.engine.device
    assert size is not None, "resolve() sets it"
    limit = free_bytes(device)
    if limit is None or distributed.rank() > 0:
        return memory
    limit //= detect_ranks().local_world_size if device == "cpu" else 1
    if memory.peak(size) > limit:
        needed = f"{readable_bytes(memory.peak(size))} for a process, {readable_bytes(limit)} free"
        logger.warning("engine.micro_batch_size=%d will hardly fit: %s; %s", size, needed, memory.advice(limit))
    return memory


@contextlib.contextmanager
def explain_out_of_memory(memory: RunMemory, device: torch.device) -> Iterator[None]:
    """Say what would fit where CUDA has no memory left.

    Raises:
        OutOfDeviceMemoryError: in place of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        size = memory.config.engine.micro_batch_size
        total = torch.cuda.get_device_properties(device).total_memory
        message = f"engine.micro_batch_size={size} does not fit into {readable_bytes(total)}"
        advice = memory.advice(total, below=size)
        raise OutOfDeviceMemoryError(f"{message}; {advice}, as planned. torch says: {error}") from error


def readable_bytes(count: int) -> str:
    """Bytes as people read them."""
    if count >= GIB:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
