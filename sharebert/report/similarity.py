"""How alike the layers' weights are after unsharing, from the final checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sharebert.checkpoint import CheckpointError, list_checkpoints
from sharebert.report.arms import Arm
from sharebert.report.page import Table
from sharebert.report.read import Run
from sharebert.train_state import load_model

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class LayerSimilarity:
    """Between all pairs of layers, over their weight matrices as one vector (norms and biases are left out)."""

    cosine: Matrix
    """(L, L), between -1 and 1."""
    distance: Matrix
    """(L, L): size of the difference over the root mean square of the two sizes; 0 for equal layers, about 1.41 for
    unrelated ones."""

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.cosine)

    def over_pairs(self, matrix: Matrix) -> Matrix:
        """The entries of one of the two matrices for pairs of different layers, each once."""
        return matrix[np.triu_indices(self.num_layers, k=1)]

    def adjacent(self, matrix: Matrix) -> Matrix:
        """The entries for neighbouring layers."""
        return np.diagonal(matrix, offset=1)


def compare_layers(layers: list[dict[str, torch.Tensor]]) -> LayerSimilarity:
    """Similarity of layers, each given by its parameters, equal in name and shape."""
    count = len(layers)
    products = np.zeros((count, count))
    for name in [name for name, parameter in layers[0].items() if parameter.ndim > 1]:
        stacked = torch.stack([layer[name].detach().flatten().double() for layer in layers])  # (L, numbers)
        products += (stacked @ stacked.T).numpy()
    squares = np.diagonal(products)
    sizes = np.sqrt(np.outer(squares, squares))
    differences = np.maximum(squares[:, None] + squares[None, :] - 2 * products, 0.0)
    means = (squares[:, None] + squares[None, :]) / 2
    return LayerSimilarity(products / np.maximum(sizes, 1e-300), np.sqrt(differences / np.maximum(means, 1e-300)))


def read_similarity(run: Run) -> LayerSimilarity | str:
    """From the checkpoint of the run's last update; else the reason why there is nothing to compare."""
    entries = list_checkpoints(run.path / "checkpoints")
    if not entries or entries[-1].step != run.settings.max_steps:
        return f"no checkpoint of step {run.settings.max_steps:,}"
    if entries[-1].phase == "shared":
        return "its layers still share one set of weights"
    try:
        model, _, _ = load_model(entries[-1].path)
    except CheckpointError as error:
        return str(error)
    return compare_layers([dict(layer.named_parameters()) for layer in model.encoder.layers])


def mean_similarity(found: list[LayerSimilarity]) -> LayerSimilarity:
    """Mean over runs of both matrices."""
    return LayerSimilarity(
        np.mean([item.cosine for item in found], axis=0), np.mean([item.distance for item in found], axis=0)
    )


def similarity_of_arm(arm: Arm) -> tuple[str, LayerSimilarity | None, str]:
    """Of its complete runs: a title, which says how many seeds could be compared where not all could; their mean; and
    why the others could not."""
    read = [(run, read_similarity(run)) for run in arm.complete]
    found = [item for _, item in read if isinstance(item, LayerSimilarity)]
    reasons: dict[str, list[str]] = {}
    for run, item in read:
        if isinstance(item, str):
            reasons.setdefault(item, []).append(str(run.settings.seed))
    note = "; ".join(f"{reason} (seed {', '.join(seeds)})" for reason, seeds in reasons.items())
    title = arm.name if len(found) == len(read) else f"{arm.name} ({len(found)} of {len(read)} seeds)"
    return title, mean_similarity(found) if found else None, note


def similarity_table(found: list[tuple[str, LayerSimilarity]]) -> Table:
    """The matrices in a few numbers."""
    head = ["arm", "cosine, neighbours", "cosine, all pairs", "lowest", "distance, neighbours", "distance, all pairs"]
    rows = []
    for title, item in found:
        cosine, distance = item.over_pairs(item.cosine), item.over_pairs(item.distance)
        means = (item.adjacent(item.cosine).mean(), cosine.mean(), cosine.min())
        distances = (item.adjacent(item.distance).mean(), distance.mean())
        rows.append([title, *(f"{value:.3f}" for value in (*means, *distances))])
    return Table(head, rows)
