"""Two gloo processes fine-tune and score as one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetuning import finetune, invented_rows, read_results, write_lines
from safetensors.torch import load_file

from sharebert import distributed
from sharebert.config import TaskConfig
from sharebert.finetune.classification import TextProblem
from sharebert.finetune.evaluate import predict
from sharebert.finetune.own_table import read_own_table
from sharebert.finetune.sequences import load_tokenizer
from sharebert.launch import EXIT_STOPPED

transformers = pytest.importorskip("transformers")


def torchrun(*arguments: str) -> tuple[int, str]:
    """Run sharebert on two local processes; returns exit status and standard error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["-m", "sharebert", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, check=False)
    return result.returncode, result.stderr


@pytest.mark.processes
def test_two_processes_train_as_one_and_give_a_model_the_same_score(encoder: Path, tmp_path: Path) -> None:
    rows = {"train": invented_rows(12), "dev": invented_rows(11, seed=3)}  # shares of 6 and 5 rows
    files = {name: str(write_lines(tmp_path / f"{name}.jsonl", some)) for name, some in rows.items()}
    settings = ["task=table", *(f"task.{name}={path}" for name, path in files.items()), "evaluation.batch_size=2"]
    settings += ["dropout=0", "global_batch_size=4", "engine.micro_batch_size=1", "optim.lr=1e-3"]
    common = [f"output_dir={tmp_path}", f"encoder={encoder}", "engine.device=cpu", "engine.precision=fp32"]
    status, errors = torchrun("finetune", *common, *settings, "run_name=two")
    assert status == 0, errors
    assert finetune(tmp_path, encoder, *settings, "run_name=one") == 0
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0.0, atol=1e-5)

    # The model of two processes, scored by one: every prediction is the same.
    task = read_own_table(TaskConfig(**files))
    problem = TextProblem(task, load_tokenizer(encoder / "tokenizer.json", 64), [])
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "two/model")
    (split,) = problem.splits
    for batch_size in (1, 4, 64):
        outputs = predict(model, problem, split.sequences, batch_size, lambda: False)
        assert outputs is not None
        figures = read_results(tmp_path / "two")["figures"]
        for name, value in problem.figures(split, outputs).items():
            assert figures[f"eval/{name}"] == value
        problem.write_predictions(split, outputs, tmp_path)
        assert (tmp_path / "predictions/dev.tsv").read_text() == (tmp_path / "two/predictions/dev.tsv").read_text()
    assert len(np.unique(task.dev[0].labels)) == 2


def test_a_rank_leaves_before_training_when_another_was_asked_to(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [f"task.{name}={write_lines(tmp_path / f'{name}.jsonl', invented_rows(8))}" for name in ("train", "dev")]
    asked: list[object] = []

    def gather(value: object) -> list[object]:
        asked.append(value)
        return [value, True]

    monkeypatch.setattr(distributed, "gather", gather)
    assert finetune(tmp_path, encoder, "task=table", *files) == EXIT_STOPPED
    assert asked == [False]
    status = json.loads((tmp_path / "finetune-table/status.json").read_text())
    assert status == {"state": "stopped", "step": 0, "reason": "asked on another rank"}
