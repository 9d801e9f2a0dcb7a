"""Targets Phi (d, d) of one spectrum: positive definite, indefinite, and one that no shared network can reach."""

from __future__ import annotations

import numpy as np

from sharebert.deep_linear.network import Array


def positive_definite(dimension: int, smallest: float, largest: float, seed: int) -> Array:
    """Symmetric, with eigenvalues from `smallest` to `largest` in equal ratios, along random directions."""
    return _from_spectrum(np.geomspace(smallest, largest, dimension), 0.0, seed)


def indefinite(dimension: int, smallest: float, largest: float, seed: int) -> Array:
    """The same, with the smallest and the largest eigenvalue made negative."""
    return _from_spectrum(_with_two_negative(dimension, smallest, largest), 0.0, seed)


def without_root(dimension: int, smallest: float, largest: float, shear: float, seed: int) -> Array:
    """Not symmetric, with the eigenvalues of :func:`indefinite`.

    A real matrix whose negative eigenvalues are all different has no real L-th root for an even L, so W^L never is
    this target. `shear` is how far its eigenvectors are from orthogonal.
    """
    return _from_spectrum(_with_two_negative(dimension, smallest, largest), shear, seed)


def unit_norm(target: Array) -> Array:
    """The target scaled to |Phi|_F = 1."""
    return target / np.linalg.norm(target)


def _with_two_negative(dimension: int, smallest: float, largest: float) -> Array:
    values = np.geomspace(smallest, largest, dimension)
    values[[0, -1]] *= -1
    return values


def _from_spectrum(eigenvalues: Array, shear: float, seed: int) -> Array:
    dimension = len(eigenvalues)
    directions, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(dimension, dimension)))
    sheared = np.eye(dimension) + np.triu(np.full((dimension, dimension), shear), 1)
    return np.asarray(directions @ sheared @ np.diag(eigenvalues) @ np.linalg.inv(sheared) @ directions.T)
