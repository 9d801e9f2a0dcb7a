"""A deep linear network in float64: its loss, closed-form gradients, starts and the three methods compared.

Legend of shapes: L layers, d the width; `...` any batch of networks. The weights of one network are one array
(L, ..., d, d), first layer first, so that a layer is one contiguous block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def identity_start(num_layers: int, dimension: int) -> Array:
    """Every layer the identity, (L, d, d)."""
    return np.tile(np.eye(dimension), (num_layers, 1, 1))


def zero_asymmetric_start(num_layers: int, dimension: int) -> Array:
    """ZAS: every layer the identity except the last, which is zero, (L, d, d)."""
    weights = identity_start(num_layers, dimension)
    weights[-1] = 0.0
    return weights


@dataclass(frozen=True)
class Method:
    """A way to train the network: where it starts, and whether all layers take the mean gradient."""

    name: str
    """Stands in tables and files."""
    start: Callable[[int, int], Array]
    """Weights before the first update, from L and d."""
    is_shared: bool
    """Every layer is updated with the mean over the layers' gradients (Algorithm 1), so equal layers stay equal."""


SHARED = Method("shared", identity_start, is_shared=True)
IDENTITY = Method("unshared, identity start", identity_start, is_shared=False)
ZAS = Method("unshared, ZAS", zero_asymmetric_start, is_shared=False)
METHODS = (SHARED, IDENTITY, ZAS)


def loss_and_gradients(weights: Array, target: Array) -> tuple[Array, Array]:
    """R = 1/2 |W_L ... W_1 - target|_F^2 (...), and its gradient with respect to each layer (L, ..., d, d).

    Gradient l is (W_L ... W_l+1)^T (W_L ... W_1 - target) (W_l-1 ... W_1)^T. The left part is carried back from the
    last layer, as backpropagation does: 2 L small products, then one batched one.
    """
    num_layers = len(weights)
    before = np.empty((num_layers + 1, *weights.shape[1:]))  # before[l] = W_l ... W_1
    before[0] = np.eye(weights.shape[-1])
    for layer, weight in enumerate(weights):
        np.matmul(weight, before[layer], out=before[layer + 1])
    back = np.empty(weights.shape)
    error = np.subtract(before[-1], target, out=back[-1])
    transposed = weights.swapaxes(-1, -2)
    for layer in range(num_layers - 1, 0, -1):
        np.matmul(transposed[layer], back[layer], out=back[layer - 1])
    loss = 0.5 * np.square(error).sum(axis=(-2, -1))
    return loss, back @ before[:-1].swapaxes(-1, -2)


def descent_direction(gradients: Array, is_shared: bool) -> Array:
    """What an update subtracts, per unit of learning rate: each layer's gradient, or their mean for all (Algorithm 1).

    The mean has one layer, (1, ..., d, d), and broadcasts over the layers.
    """
    return gradients.mean(axis=0, keepdims=True) if is_shared else gradients


def loss_rate(weights: Array, target: Array, is_shared: bool) -> float:
    """dR/dt under gradient flow, where each layer moves against :func:`descent_direction`."""
    _, gradients = loss_and_gradients(weights, target)
    return -float((gradients * descent_direction(gradients, is_shared)).sum())


def lemma_direction(weight: Array, num_layers: int, target: Array) -> Array:
    """The shared direction as the paper's Lemma 1 writes it, W^(L-1) (W^L - target), from the common weight W (d, d).

    Derived for a start at the identity and a symmetric target: then W is a polynomial in the target and all factors
    commute.
    """
    power = np.linalg.matrix_power(weight, num_layers - 1)
    return power @ (power @ weight - target)


def adjacent_correlations(gradients: Array) -> Array:
    """Cosine of the gradients of each pair of adjacent layers, (L - 1); NaN where one of them is zero."""
    flat = gradients.reshape(len(gradients), -1)
    norms = np.linalg.norm(flat, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((flat[1:] * flat[:-1]).sum(axis=1) / (norms[1:] * norms[:-1]))
