"""Device and number format: the fixed rules behind `auto`, autocast, and the gradient scaler."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import torch

from sharebert.config import ConfigError, EngineConfig
from sharebert.launch import Ranks

logger = logging.getLogger(__name__)


def resolve_device(config: EngineConfig, ranks: Ranks) -> torch.device:
    """The device of this rank: CUDA where there is one, unless the configuration says otherwise."""
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("engine.device='cuda': expected a CUDA device, but torch sees none; use engine.device=cpu")
    if ranks.gpu >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(f"local rank {ranks.local_rank}: expected one GPU for each process, torch sees {count}")
    device = torch.device("cuda", ranks.gpu)
    torch.cuda.set_device(device)
    return device


def hardware_has_bf16(device: torch.device) -> bool:
    """Whether bf16 products run on instructions of their own there, rather than emulated."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in checks if check is not None)


@dataclass(frozen=True)
class Precision:
    """A resolved number format: parameters, gradients and optimizer state are always fp32."""

    name: str
    """`bf16`, `fp16` or `fp32`."""
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the matrix products."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.name]

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context of every forward pass.

        The weight cache is off: with it a weight shared by L layers is cast once and its L gradient contributions
        add up in 16 bits. Without it every layer casts anew, as unshared layers do anyway, the contributions add
        up in fp32, and the error is exactly that of unshared layers (test_precision).
        """
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)

    def build_scaler(self) -> torch.amp.GradScaler:
        """A gradient scaler that acts under fp16 only."""
        return torch.amp.GradScaler(self.device.type, enabled=self.name == "fp16")


def resolve_precision(config: EngineConfig, device: torch.device) -> Precision:
    """bf16 where the hardware has it, else fp32, unless the configuration says otherwise."""
    name = config.precision
    if name == "auto":
        name = "bf16" if hardware_has_bf16(device) else "fp32"
    # Where there is no GPU to ask, the run is another machine's.
    is_asked = name == "bf16" and device.type == "cuda" and torch.cuda.is_available()
    if is_asked and not hardware_has_bf16(device):
        raise ConfigError("engine.precision='bf16': expected a GPU of compute capability 8.0; use fp16 or fp32")
    if name == "fp16" and device.type == "cpu":
        logger.warning("fp16 on a CPU is there for tests of the gradient scaler; bf16 or fp32 is faster")
    return Precision(name, device)


def resolve_compile(config: EngineConfig, device: torch.device) -> bool:
    """Compile layers on CUDA, not on CPU, unless the configuration says otherwise."""
    return device.type == "cuda" if config.compile == "auto" else config.compile == "true"
