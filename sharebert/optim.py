"""The optimizer: decay groups, fused AdamW, clipping that counts shared gradients as the algorithm does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sharebert.config import OptimConfig
from sharebert.sharing import weighted_gradient_norm


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups: matrices decay; biases and layer norms (one dimension) do not.

    Each Parameter appears once, in the order of its first name, however many layers hold it.
    """
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Fused AdamW or plain SGD over the decay groups of `model`. The rate is set before every update."""
    groups = decay_groups(model, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the next update run at `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[nn.Parameter], copies: dict[nn.Parameter, int], max_norm: float | None
) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before, on the device.

    The norm is :func:`sharebert.sharing.weighted_gradient_norm`; the scale is that of
    `torch.nn.utils.clip_grad_norm_`. Nothing is read on the host.
    """
    norm = weighted_gradient_norm(parameters, copies)
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
    return norm


def optimizer_state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Optimizer state under the first name of each Parameter: what a checkpoint holds."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def load_optimizer_state_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Any]]
) -> None:
    """Undo :func:`optimizer_state_by_name`.

    Raises:
        ValueError: the state has a name that the model has not.
    """
    parameters = dict(model.named_parameters())
    unknown = sorted(set(state) - set(parameters))
    if unknown:
        raise ValueError(f"optimizer state for {unknown[0]!r}: the model has no parameter of that name")
    for name, values in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            # The step counter too: fused AdamW wants it where the parameter is.
            key: value.to(parameter.device) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }


class UpdateProbe:
    """Measures ‖update‖ / ‖weight‖ of a sample of parameters over one optimizer step (`share/update_to_weight`).

    Shows the step of this ratio at unsharing: the second moments that a layer takes along come from the mean
    gradient and are small for a single layer's. Costs a copy of the sample, at the measured steps only.
    """

    def __init__(self) -> None:
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    @torch.no_grad()
    def before(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remember `parameters` just before the optimizer's step."""
        self._before = [(p, p.detach().clone()) for p in parameters]

    @torch.no_grad()
    def after(self) -> float:
        """The ratio, read on the host; lets go of the copies."""
        now = torch.stack(list(torch._foreach_norm([p.detach() for p, _ in self._before])))
        moved = torch.stack(list(torch._foreach_norm([p.detach() - old for p, old in self._before])))
        self._before = []
        return float(torch.linalg.vector_norm(moved) / torch.linalg.vector_norm(now))
