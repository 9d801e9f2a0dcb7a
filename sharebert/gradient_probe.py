"""Gradients of single units while they share weights, and how well those of adjacent units agree.

Autograd only knows the sum over the units that hold a Parameter. Inside :class:`GradientProbe` each of them computes
with a leaf of its own over the *same* storage, so that its gradient stays apart; no weight is copied. Afterwards the
sum is put together in the order in which autograd would have added it up, and the update goes on as any other.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sharebert.sharing import SharedLayers, Slot


class GradientProbe:
    """Context of one accumulation window whose gradients are wanted unit by unit.

    Peak extra memory: one gradient for each unit that shares. Under DDP the window has to run without its
    synchronisation, and all of :meth:`gradients` be averaged over ranks, before :meth:`merge`.
    """

    def __init__(self, sharing: SharedLayers) -> None:
        self._sharing = sharing
        self._leaves: list[tuple[Slot, nn.Parameter, nn.Parameter]] = []  # slot, shared Parameter, leaf

    def __enter__(self) -> GradientProbe:
        for first, stop in self._sharing.groups:
            for unit in range(first, stop if stop - first > 1 else first):
                for slot in self._sharing.unit_slots(unit):
                    shared = slot.parameter
                    leaf = nn.Parameter(shared.detach(), requires_grad=shared.requires_grad)
                    # Into the module's own table: setattr raises, and a plain tensor makes compiled code recompile.
                    slot.module._parameters[slot.name] = leaf
                    self._leaves.append((slot, shared, leaf))
        return self

    def __exit__(self, *_: object) -> None:
        for slot, shared, _leaf in self._leaves:
            slot.module._parameters[slot.name] = shared

    def gradients(self) -> list[Tensor]:
        """The gradient of every leaf that has one."""
        return [leaf.grad for _, _, leaf in self._leaves if leaf.grad is not None]

    def correlations(self) -> Tensor:
        """Correlation of each pair of adjacent units, see :func:`adjacent_correlations`; inside the context only."""
        units = range(len(self._sharing.units))
        return adjacent_correlations(
            [[slot.parameter.grad for slot in self._sharing.unit_slots(unit)] for unit in units]
        )

    @torch.no_grad()
    def merge(self) -> None:
        """Give each shared Parameter the sum of its leaves' gradients, and let go of those.

        Backward reaches the last layer first; adding up from there gives bit for bit what autograd gives, where
        the window is one micro-batch.
        """
        for _, shared, leaf in reversed(self._leaves):
            if leaf.grad is not None:
                shared.grad = leaf.grad if shared.grad is None else shared.grad.add_(leaf.grad)
                leaf.grad = None


@torch.no_grad()
def adjacent_correlations(unit_gradients: Iterable[list[Tensor | None]]) -> Tensor:
    """Cosine between the gradients of adjacent units, each unit's flattened into one vector (PAPER section 1).

    The theory of the paper speaks of the trace inner product of two gradient matrices; summed over the matrices of
    a layer that is the dot product of the flattened gradients, and the cosine is it at norm 1.

    Args:
        unit_gradients: for each of U units the gradients of its parameters, in an order common to all.

    Returns:
        (U - 1,) on the gradients' device; NaN where one of the two gradients is zero or missing.
    """
    squares: list[Tensor | None] = []
    products: list[Tensor | None] = []
    before: list[Tensor | None] | None = None
    for gradients in unit_gradients:
        squares.append(_dot(gradients, gradients))
        if before is not None:
            products.append(_dot(before, gradients))
        before = gradients
    if not products:
        return torch.empty(0)
    present = next((square for square in squares if square is not None), torch.zeros(()))
    zero = torch.zeros_like(present)  # for a unit without gradients, on the device of the others
    norms = torch.stack([zero if square is None else square for square in squares]).sqrt()  # (U,)
    dots = torch.stack([zero if product is None else product for product in products])  # (U - 1,)
    return dots / (norms[:-1] * norms[1:])  # 0 / 0 is NaN


def _dot(first: list[Tensor | None], second: list[Tensor | None]) -> Tensor | None:
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    return torch.stack([torch.dot(a.flatten(), b.flatten()) for a, b in pairs]).sum()
