"""What a finished run leaves: predictions, figures and the model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from sharebert import distributed
from sharebert.checkpoint import MODEL_FILE
from sharebert.files import sha256_of_file, write_atomically
from sharebert.finetune.loop import Loop
from sharebert.finetune.model import encoder_folder, save_model
from sharebert.finetune.problem import Outputs
from sharebert.run_folder import RunFolder

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"
RESULTS_FILE = "results.json"


def read_results(run: Path) -> dict[str, Any]:
    """What a finished run has written last: what was run, its figures, and the hash of its model."""
    results: dict[str, Any] = json.loads((run / RESULTS_FILE).read_text(encoding="utf-8"))
    return results


def finish(loop: Loop, run: RunFolder, encoder_sha256: str) -> bool:
    """Predictions, figures and the model in the run folder; False when a stop was agreed on before."""
    dev = loop.final_outputs or loop.predict_splits(is_dev=True)
    test = None if dev is None else loop.predict_splits(is_dev=False)
    if dev is None or test is None:
        return False
    distributed.on_rank_zero(lambda: _write_results(loop, run, dev, test, encoder_sha256))
    return True


def _write_results(
    loop: Loop, run: RunFolder, dev: dict[str, Outputs], test: dict[str, Outputs], encoder_sha256: str
) -> None:
    """Rank 0. Everything is written over, so that a run killed in between does it again."""
    config, problem = loop.config, loop.problem
    for split in problem.splits:
        problem.write_predictions(split, (dev if split.is_dev else test)[split.name], run.path)
    figures = {f"eval/{name}": value for name, value in (loop.counters.evaluation or {}).items()}
    figures |= {f"test/{name}": value for name, value in loop.figures(test).items()}
    model = run.path / MODEL_FOLDER
    if loop.schedule.max_steps > 0:
        problem.finish_model(loop.model)
        save_model(loop.model, encoder_folder(config), model)
    results = {
        "task": config.task.name,
        "encoder": config.encoder,
        "encoder_sha256": encoder_sha256,
        "data_sha256": problem.source_hashes,
        "random_encoder": config.random_encoder,
        "lr": config.optim.lr,
        "seed": config.seed,
        "steps": loop.counters.step,
        "model_sha256": sha256_of_file(model / MODEL_FILE) if loop.schedule.max_steps > 0 else None,
        "figures": figures,
    }
    write_atomically(run.path / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
    for name, value in figures.items():
        logger.info("%-32s %.4f", name, value)
