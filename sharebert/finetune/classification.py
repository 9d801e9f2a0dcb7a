"""Classification and regression of one or two texts, as a problem.

A regression is trained on values scaled to mean 0 and deviation 1 of the training set, so that it does not matter
what unit they have; the saved model predicts them as they were, the scale being folded into its last layer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sharebert.config import ConfigError, near_match
from sharebert.data.format import DataError
from sharebert.files import write_atomically
from sharebert.finetune.glue import submission_file
from sharebert.finetune.metrics import score
from sharebert.finetune.problem import Outputs, Problem, ScoredSplit
from sharebert.finetune.sequences import Sequences, encode
from sharebert.finetune.tasks import Floats, TextSplit, TextTask

logger = logging.getLogger(__name__)


class TextProblem(Problem):
    """A :class:`TextTask` as sequences.

    Args:
        task: with its rows.
        tokenizer: of the encoder, cutting to the task's length.
        score_names: figures whose mean is the score; empty: the task's own rule.
    """

    model_class = "AutoModelForSequenceClassification"

    def __init__(self, task: TextTask, tokenizer: Any, score_names: list[str]) -> None:
        self.task = task
        self._rows = {split.name: split for split in (*task.dev, *task.test)}
        self.splits = [
            ScoredSplit(split.name, is_dev, encode(tokenizer, split.texts))
            for is_dev, splits in ((True, task.dev), (False, task.test))
            for split in splits
        ]
        for split in task.dev:
            if np.isnan(split.labels).all():
                raise DataError(f"split {split.name}: no row has a label; expected a dev set that can be scored")
        self._score_names = self._check_score(score_names)
        self.train, self._labels = self._training_rows(task.train, tokenizer)
        is_scaled = not task.label_names and len(self._labels) > 0
        self._shift = float(self._labels.mean()) if is_scaled else 0.0
        self._scale = (float(self._labels.std()) or 1.0) if is_scaled else 1.0

    def _training_rows(self, split: TextSplit | None, tokenizer: Any) -> tuple[Sequences, Floats]:
        if split is None:
            return encode(tokenizer, ([],)), np.empty(0)
        is_labelled = ~np.isnan(split.labels)
        if not is_labelled.any():
            raise DataError(f"split {split.name}: no row has a label; expected a set that can be trained on")
        if left_out := int((~is_labelled).sum()):
            logger.warning("%d of %d training rows have no label and are left out", left_out, len(is_labelled))
        texts = tuple([text for text, keep in zip(column, is_labelled, strict=True) if keep] for column in split.texts)
        return encode(tokenizer, texts), split.labels[is_labelled]

    def _check_score(self, names: list[str]) -> tuple[str, ...]:
        known = [f"{name}{split.suffix}" for split in self.task.dev for name in self.task.metrics]
        for name in names:
            if name not in known:
                hint = near_match(name, known)
                raise ConfigError(f"task.score={names}: {name!r} is not among {', '.join(known)}{hint}")
        return tuple(names) or self.task.score or tuple(known)

    def model_settings(self) -> dict[str, Any]:
        """The names of the classes, kept in the saved model."""
        names = self.task.label_names
        if not names:
            return {"num_labels": 1, "problem_type": "regression"}
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": "single_label_classification",
        }

    def outputs(self, model_output: Any, attention_mask: Tensor) -> Tensor:
        """(B, classes) or (B, 1)."""
        logits: Tensor = model_output.logits.float()
        return logits

    def targets(self, rows: NDArray[np.int64]) -> Tensor:
        """(B,) class numbers, int64; or scaled values, fp32."""
        labels = torch.from_numpy((self._labels[rows] - self._shift) / self._scale)
        return labels.long() if self.task.label_names else labels.float()

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, or squared error."""
        if self.task.label_names:
            return functional.cross_entropy(outputs, targets, reduction="sum")
        return functional.mse_loss(outputs[:, 0], targets, reduction="sum")

    def predictions(self, outputs: Outputs) -> Floats:
        """(rows,) class numbers, or values as they were before scaling."""
        stacked = np.stack(outputs).astype(np.float64)
        return stacked.argmax(1).astype(np.float64) if self.task.label_names else self._unscaled(stacked)

    def _unscaled(self, outputs: Floats) -> Floats:
        return outputs[:, 0] * self._scale + self._shift

    def figures(self, split: ScoredSplit, outputs: Outputs) -> dict[str, float]:
        """The task's metrics over the labelled rows."""
        rows = self._rows[split.name]
        figures = score(self.task.metrics, rows.labels, self.predictions(outputs))
        return {f"{name}{rows.suffix}": value for name, value in figures.items()}

    def score(self, figures: dict[str, float]) -> float:
        """Mean of the figures that count."""
        return sum(figures[name] for name in self._score_names) / len(self._score_names)

    def write_predictions(self, split: ScoredSplit, outputs: Outputs, folder: Path) -> None:
        """``predictions/<split>.tsv``, and for a test set of GLUE ``submission/<task>.tsv``."""
        rows, predictions = self._rows[split.name], self.predictions(outputs)
        (folder / "predictions").mkdir(exist_ok=True)
        write_atomically(folder / f"predictions/{split.name}.tsv", self._table(rows, predictions, outputs))
        if rows.submission:
            (folder / "submission").mkdir(exist_ok=True)
            write_atomically(folder / f"submission/{rows.submission}.tsv", submission_file(self.task, predictions))

    def _table(self, rows: TextSplit, predictions: Floats, outputs: Outputs) -> str:
        """A line for each row: its index, prediction and label, and the probability of each class."""
        names = self.task.label_names
        header = ["index", "prediction", "label", *(f"p({name})" for name in names)]
        probabilities = torch.from_numpy(np.stack(outputs)).double().softmax(1).tolist()
        lines = ["\t".join(header)]
        for index, (prediction, label) in enumerate(zip(predictions, rows.labels, strict=True)):
            shown = [str(index), *("" if np.isnan(value) else self._show(value) for value in (prediction, label))]
            lines.append("\t".join([*shown, *(f"{value:.4f}" for value in probabilities[index] if names)]))
        return "\n".join(lines) + "\n"

    def _show(self, value: float) -> str:
        return self.task.label_names[int(value)] if self.task.label_names else f"{value:.6g}"

    @torch.no_grad()
    def finish_model(self, model: Any) -> None:
        """Let the last layer give values as they were before scaling."""
        if not self.task.label_names:
            model.classifier.weight.mul_(self._scale)
            model.classifier.bias.mul_(self._scale).add_(self._shift)
