"""A tiny exported encoder, invented rows of every task, and runs of `sharebert finetune` on them, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import OBJECTS, SUBJECTS, VERBS

from sharebert import pretrain as pretrain_module
from sharebert.cli import main

KINDS = ("shared", "partly-shared", "unshared")


def export_encoders(small_run: list[str], folder: Path, norm: str) -> dict[str, Path]:
    """Exported folders of one tiny run, by the phase of their checkpoints."""
    changes = {
        "model.max_position_embeddings": 64,
        "model.norm": norm,
        "model.num_layers": 3,
        "max_steps": 6,
        "checkpoint.every_steps": 1,
        "checkpoint.keep_last": 9,
        "evaluation.every_steps": "null",
        "unshare": "multi_step",
        "unshare.check_every": 2,
        "unshare.threshold": 0.998,
        "unshare.patience": 1,
        "optim.lr": 0.02,
        "run_name": norm,
        "output_dir": folder,
    }
    kept = [item for item in small_run if item.split("=")[0] not in (*changes, "unshare.step")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_module, "measure_matmul_peak", lambda device, dtype: 1e12)
        patch.setattr(pretrain_module, "draw_curves", lambda run: None)
        patch.setattr(pretrain_module, "draw_share_map", lambda run, unit_layers, threshold: None)
        assert main(["train", *kept, *(f"{key}={value}" for key, value in changes.items())]) == 0
    found = {}
    for kind in KINDS:
        if checkpoints := sorted((folder / norm / "checkpoints").glob(f"step-????????-{kind}")):
            found[kind] = folder / f"{norm}-{kind}"
            assert main(["export", str(checkpoints[-1]), str(found[kind])]) == 0
    return found


def invented_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of clauses; the label says whether the two have the same subject."""
    rows = []
    for index in range(number):
        first = SUBJECTS[(index + seed) % 6]
        second = first if index % 2 else SUBJECTS[(index + seed + 1 + index % 4) % 6]
        clauses = [f"{first} {VERBS[index % 5]} {OBJECTS[index % 6]}.", f"{second} {VERBS[index % 6]}."]
        rows.append({"sentence1": clauses[0], "sentence2": clauses[1], "label": index % 2, "idx": index})
    return rows


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def finetune(output_dir: Path, encoder: Path, *settings: str) -> int:
    """Run `sharebert finetune` on the CPU in fp32, below `output_dir`."""
    common = [f"output_dir={output_dir}", f"encoder={encoder}", "engine.device=cpu", "engine.precision=fp32"]
    return main(["finetune", *common, *settings])


def read_rows(run: Path) -> list[dict[str, Any]]:
    """`metrics.jsonl`, without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def read_results(run: Path) -> dict[str, Any]:
    """`results.json`."""
    results: dict[str, Any] = json.loads((run / "results.json").read_text())
    return results
