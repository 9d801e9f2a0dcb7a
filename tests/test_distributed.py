"""Two gloo processes do what one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Train
from test_resume import final_state

from sharebert import distributed
from sharebert.checkpoint import read_meta

pytestmark = pytest.mark.processes

OPTIONS = ["max_steps=20", "unshare.step=10", "model.dropout=0", "model.attention_dropout=0"]
OPTIONS += ["engine.micro_batch_size=2", "checkpoint.every_steps=9"]  # accumulation 2 on each of two ranks


def torchrun(small_run: list[str], *overrides: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run `sharebert train` on two local processes; returns exit status and standard error."""
    keys = {override.split("=")[0] for override in overrides}
    arguments = [override for override in small_run if override.split("=")[0] not in keys]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    command += ["-m", "sharebert", "train", *arguments, *overrides]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, check=False)
    return result.returncode, result.stderr


def test_two_processes_train_as_one_and_one_goes_on_where_two_stopped(
    train: Train, small_run: list[str], tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    status, errors = torchrun(small_run, f"output_dir={outputs}", "run_name=two", *OPTIONS)
    assert status == 0, errors
    assert train("run_name=one", *OPTIONS) == 0
    one, two = final_state(outputs / "one"), final_state(outputs / "two")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0.0, atol=1e-5)
    assert read_meta(outputs / "two/checkpoints/step-00000020-unshared")["world_size"] == 2

    start = outputs / "two/checkpoints/step-00000009-shared"
    assert train("run_name=resumed", f"checkpoint.resume={start}", *OPTIONS) == 0
    resumed = final_state(outputs / "resumed")
    for name in one:
        torch.testing.assert_close(resumed[name], one[name], rtol=0.0, atol=1e-5)

    rows = {name: read_rows(outputs / name) for name in ("one", "two")}
    for ours, theirs in zip(rows["one"], rows["two"], strict=True):
        assert ours.keys() == theirs.keys()
        compared = {"train/loss", "train/grad_norm", "eval/loss", "eval/accuracy", "eval/unigram_loss", "eval/targets"}
        for key in compared & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4)


def test_two_processes_measure_and_decide_as_one(train: Train, small_run: list[str], tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    watching = ["unshare=multi_step", "unshare.check_every=2", "unshare.threshold=0.998", "unshare.patience=1"]
    options = [*OPTIONS, *watching, "max_steps=12", "optim.lr=0.02"]
    status, errors = torchrun(small_run, f"output_dir={outputs}", "run_name=two", *options)
    assert status == 0, errors
    assert train("run_name=one", *options) == 0
    one, two = read_rows(outputs / "one"), read_rows(outputs / "two")
    checks = [(ours, theirs) for ours, theirs in zip(one, two, strict=True) if "share/correlations" in ours]
    assert len({str(ours["share/groups"]) for ours, _ in checks}) >= 3
    for ours, theirs in checks:
        assert ours["share/groups"] == theirs["share/groups"]
        assert ours["share/correlations"] == pytest.approx(theirs["share/correlations"], abs=2e-4)
    final = [final_state(outputs / name) for name in ("one", "two")]
    for name in final[0]:
        torch.testing.assert_close(final[1][name], final[0][name], rtol=0.0, atol=1e-4)


def read_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_ranks_with_unequal_shares_of_the_held_out_text_do_not_wait_for_each_other(
    train: Train, small_run: list[str], tmp_path: Path
) -> None:
    options = ["max_steps=2", "unshare.step=2", "evaluation.max_sequences=5", "engine.micro_batch_size=2"]
    status, errors = torchrun(small_run, f"output_dir={tmp_path}/outputs", "run_name=two", *options)
    assert status == 0, errors
    assert "Warning" not in errors.replace("OMP_NUM_THREADS", "")
    train("run_name=one", *options)
    one, two = (read_rows(tmp_path / "outputs" / name) for name in ("one", "two"))
    assert one[-1]["eval/loss"] == pytest.approx(two[-1]["eval/loss"], rel=1e-4)


def test_an_error_on_one_rank_ends_all_with_its_traceback_once(small_run: list[str], tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import sharebert.trainer as trainer\n"
        "    def fail(self, update):\n"
        "        raise ZeroDivisionError('the reason')\n"
        "    trainer.Trainer._count = fail\n"
    )
    environment = {"PYTHONPATH": str(site)}
    status, errors = torchrun(small_run, f"output_dir={tmp_path}/outputs", "run_name=x", environment=environment)
    assert status != 0
    assert errors.count("ZeroDivisionError: the reason") == 1
    assert errors.count("Traceback (most recent call last)") == 1 + errors.count("torch.distributed.elastic")  # its own


def test_a_lone_process_needs_no_group() -> None:
    assert distributed.world_size() == 1
    assert distributed.rank() == 0
    assert distributed.sum_count(3) == 3
    assert distributed.on_rank_zero(lambda: "value") == "value"
    model = torch.nn.Linear(2, 2)
    assert distributed.wrap(model) is model
    with pytest.raises(KeyError):
        distributed.on_rank_zero(lambda: {}["missing"])
