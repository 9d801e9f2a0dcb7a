"""Final checkpoints on text that lies in files of its own, where a corpus comes with a held-out part."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sharebert.checkpoint import CheckpointError
from sharebert.data.format import DataError
from sharebert.evaluate_text import evaluate_files
from sharebert.report.arms import Arm
from sharebert.report.compare import spread
from sharebert.report.content import Comparison, show
from sharebert.report.page import Section, Table
from sharebert.report.read import Run

MAX_SEQUENCES = 4000


def evaluate_on_files(comparison: Comparison, files: Sequence[str], device: str) -> Section:
    """A section with loss and accuracy of every arm's complete runs on `files`, as `sharebert evaluate` has them."""
    names = ", ".join(files)
    text = [f"The last checkpoint of every complete run on {names}, of which {MAX_SEQUENCES:,} sequences at most."]
    try:
        rows = [_row(arm, [_figures(run, files, device) for run in arm.complete]) for arm in comparison.arms]
    except (CheckpointError, DataError) as error:  # the report is worth having without these figures
        return Section("Other held-out text", [f"Not evaluated: {error}"])
    return Section("Other held-out text", text, Table(["arm", "seeds", "held-out loss", "accuracy %"], rows))


def _row(arm: Arm, figures: list[dict[str, float]]) -> list[str]:
    loss = spread(values["eval/loss"] for values in figures)
    accuracy = spread(100 * values["eval/accuracy"] for values in figures)
    return [arm.name, str(len(figures)), show(loss, 4), show(accuracy, 2)]


def _figures(run: Run, files: Sequence[str], device: str) -> dict[str, float]:
    return evaluate_files(
        argparse.Namespace(
            checkpoint=run.path / "checkpoints/latest",
            files=list(files),
            text_column=run.settings.data.text_column,
            seq_len=None,
            batch_size=64,
            max_sequences=MAX_SEQUENCES,
            device=device,
            precision="auto",
        )
    )
