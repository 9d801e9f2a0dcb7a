"""What the training loop and the evaluation have to know of a task, whatever it is."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sharebert.finetune.sequences import Sequences

Outputs = list[NDArray[np.float32]]
"""Of each sequence of a split, in its order: what `Problem.outputs` gave for it, cut to its length."""


@dataclass(frozen=True)
class ScoredSplit:
    """A split that predictions are made for."""

    name: str
    is_dev: bool
    """Scored during training, under `eval/...`; else at the end, under `test/...`, where it has labels."""
    sequences: Sequences


class Problem(ABC):
    """A task as sequences of tokens, targets, a loss and figures."""

    model_class: str
    """Name of the Transformers class with the task's head."""
    train: Sequences
    """Empty where nothing is trained."""
    splits: list[ScoredSplit]
    source_hashes: dict[str, str]
    """Of the files that the rows came from, by name."""
    label_hashes: dict[str, str]
    """Of labels or answers as they were read, with the names of the classes, by `<split> labels`."""

    @abstractmethod
    def model_settings(self) -> dict[str, Any]:
        """What the head's size and names are in the model's `config.json`."""

    @abstractmethod
    def outputs(self, model_output: Any, attention_mask: Tensor) -> Tensor:
        """The part of the model's output that counts: (B, ...), or (B, T, ...) with the tokens second."""

    @abstractmethod
    def targets(self, rows: NDArray[np.int64]) -> Tensor:
        """Of these training sequences: (B,) or (B, 2)."""

    @abstractmethod
    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, summed over the sequences of a batch; fp32."""

    @abstractmethod
    def figures(self, split: ScoredSplit, outputs: Outputs) -> dict[str, float]:
        """Figures of a split by name; empty where no row has a label."""

    @abstractmethod
    def score(self, figures: dict[str, float]) -> float:
        """The one number by which runs are compared, from the figures of all dev splits."""

    @abstractmethod
    def write_predictions(self, split: ScoredSplit, outputs: Outputs, folder: Path) -> None:
        """Files of predictions for a split, below the run folder."""

    def content_hashes(self) -> dict[str, str]:
        """sha256 of the training set, targets included, and of each split, as token ids; and of all labels."""
        targets = self.targets(np.arange(len(self.train))).numpy().tobytes()
        train = hashlib.sha256(self.train.digest().encode() + targets).hexdigest()
        return {
            "train": train,
            **{split.name: split.sequences.digest() for split in self.splits},
            **self.label_hashes,
        }

    def finish_model(self, model: Any) -> None:  # noqa: B027
        """Last change of the trained model before it is saved."""
