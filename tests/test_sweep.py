"""A sweep trains shared prefixes once, repeats nothing, and says what came of each run."""

from __future__ import annotations

import csv
import json
import logging
import random
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Train
from test_prefix_cache import assert_equal_runs
from test_resume import Killed, kill_at, signal_at

from sharebert.checkpoint import read_meta
from sharebert.compose import Cell, Request
from sharebert.config import TrainConfig, from_dict
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE
from sharebert.sweep import _is_complete, build_jobs
from sharebert.update import Updater


def read_table(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(sweep: Path, name: str) -> list[str]:
    return [row[name] for row in read_table(sweep)]


def count_updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps after which an update was carried out, from now on."""
    steps: list[int] = []
    original = Updater._apply

    def apply(self: Updater, measures_ratio: bool) -> object:
        steps.append(self.state.counters.step)
        return original(self, measures_ratio)

    monkeypatch.setattr(Updater, "_apply", apply)
    return steps


def test_a_sweep_trains_the_shared_prefix_once_and_each_run_is_the_lone_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "outputs/sweep"
    with monkeypatch.context() as patch:
        steps = count_updates(patch)
        assert train("-m", "run_name=sweep", "unshare.step=7,4") == EXIT_FINISHED
    assert len(steps) == 12 + (12 - 3)
    shown = capsys.readouterr()
    assert "starts from the shared prefix of step 3 (trained by unshare.step-4" in shown.err
    assert "6 shared updates trained, not 9" in shown.err
    assert column(sweep, "unshare.step") == column(sweep, "unshare_step") == ["4", "7"]
    assert column(sweep, "saved") == ["0", "3"]
    for row in read_table(sweep):
        name = f"lone-{row['unshare.step']}"
        train(f"run_name={name}", f"unshare.step={row['unshare.step']}")
        assert_equal_runs(tmp_path / "outputs" / name, sweep / row["cell"])


def test_a_finished_sweep_is_passed_over_without_reading_its_tensors(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-m", "run_name=sweep", "max_steps=4", "unshare.step=2,3"]
    train(*options)
    before = (tmp_path / "outputs/sweep/sweep.csv").read_text()
    monkeypatch.setattr("sharebert.pretrain.pretrain", lambda *_: pytest.fail("a finished run was opened"))
    capsys.readouterr()
    assert train(*options) == EXIT_FINISHED
    shown = capsys.readouterr()
    assert shown.err.count("is finished (4 updates): nothing to do") == 2
    assert "2 shared updates trained, not 3" in shown.err
    assert (tmp_path / "outputs/sweep/sweep.csv").read_text() == before


def test_finished_runs_of_a_gpu_are_passed_over_where_there_is_none(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `submit` asks on a login node."""
    train("run_name=a", "max_steps=4", "unshare.step=2")
    meta = read_meta(next((tmp_path / "outputs/a/checkpoints").glob("step-00000004-*")))
    meta["config"]["engine"] |= {"device": "cuda", "precision": "bf16", "compile": "true", "num_workers": 2}
    monkeypatch.setattr("sharebert.sweep.read_meta", lambda path: meta)
    for precision in ("auto", "bf16"):
        engine = {**meta["config"]["engine"], "device": "cuda", "precision": precision, "compile": "auto"}
        asked = from_dict(TrainConfig, {**meta["config"], "engine": engine})
        assert _is_complete(asked, tmp_path / "outputs/a")
    other = from_dict(TrainConfig, {**meta["config"], "engine": {**engine, "precision": "fp32"}})
    assert not _is_complete(other, tmp_path / "outputs/a")


def test_a_killed_sweep_repeats_nothing(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["-m", "run_name=sweep", "unshare.step=8,5", "checkpoint.every_steps=1"]
    sweep = tmp_path / "outputs/sweep"
    steps = []
    with monkeypatch.context() as patch:
        steps += count_updates(patch)
        kill_at(patch, 10)
        with pytest.raises(Killed):
            train(*options)
    assert column(sweep, "state") == ["running", "waiting"]
    with monkeypatch.context() as patch:
        steps = count_updates(patch)
        assert train(*options) == EXIT_FINISHED
    assert steps == [10, 11, *range(4, 12)]
    assert column(sweep, "state") == ["finished", "finished"]


def test_failed_and_refused_runs_are_named_at_the_end_and_do_not_keep_the_others_from_running(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Updater._apply

    def apply(self: Updater, measures_ratio: bool) -> object:
        if self.state.counters.step == 2 and self.config.unshare.step == 2:
            raise ZeroDivisionError("the\nreason")
        return original(self, measures_ratio)

    options = ["-m", "run_name=sweep", "max_steps=4", "unshare.step=9,2,3"]
    sweep = tmp_path / "outputs/sweep"
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "_apply", apply)
        assert train(*options) == EXIT_USAGE == max(EXIT_USAGE, EXIT_FAILED)
    last_lines = capsys.readouterr().out.splitlines()[-2:]
    assert last_lines[0].startswith(f"refused: {sweep}/unshare.step-9")
    assert last_lines[0].endswith("unshare.step=9: expected at most max_steps=4")
    assert re.fullmatch(rf"failed: {sweep}/unshare\.step-2\S+: ZeroDivisionError: the reason", last_lines[1])
    assert column(sweep, "state") == ["refused", "failed", "finished"]
    assert "ZeroDivisionError: the reason" in (sweep / "sweep.md").read_text()
    train(*options)
    assert column(sweep, "state") == ["refused", "finished", "finished"]
    assert column(sweep, "error")[1:] == ["", ""]


def test_a_stop_ends_the_sweep_and_the_table_lists_what_did_not_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["-m", "run_name=sweep", "unshare.step=6,4"]
    sweep = tmp_path / "outputs/sweep"
    with monkeypatch.context() as patch:
        signal_at(patch, 6)
        assert train(*options) == EXIT_STOPPED
    rows = read_table(sweep)
    shown = [(row["unshare.step"], row["state"], row["steps"]) for row in rows]
    assert shown == [("4", "stopped", "7"), ("6", "waiting", "0")]
    assert (rows[0]["loss"], bool(rows[0]["best_loss"])) == ("", True)
    assert train(*options) == EXIT_FINISHED
    assert column(sweep, "state") == ["finished"] * 2


def test_the_table_holds_the_figures_of_the_runs(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watching = ["unshare.check_every=2", "unshare.threshold=0.999", "unshare.patience=2", "optim.lr=0.02"]
    train("-m", "run_name=sweep", "unshare=always,adaptive,never", *watching)
    sweep = tmp_path / "outputs/sweep"
    rows = read_table(sweep)
    assert [row["unshare"] for row in rows] == ["never", "adaptive", "always"]
    assert [row["unshare_step"] for row in rows] == ["", "5", ""]
    assert [row["saved"] for row in rows] == ["0", "0", "4"]
    assert [row["shared"] for row in rows] == ["0", "4", "12"]
    for row in rows:
        lines = (sweep / row["cell"] / "metrics.jsonl").read_text().splitlines()
        evaluations = [values for values in map(json.loads, lines) if "eval/loss" in values]
        assert float(row["loss"]) == evaluations[-1]["eval/loss"]
        assert float(row["best_loss"]) == min(values["eval/loss"] for values in evaluations)
        assert float(row["best_accuracy"]) == max(values["eval/accuracy"] for values in evaluations)
        assert 0 < float(row["hours"]) < 1
    table = [line for line in (sweep / "sweep.md").read_text().splitlines() if line.startswith("|")]
    assert table == [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in table}) == 1


def test_several_runs_share_a_prefix_cache_unless_they_name_one_or_turn_it_off(tmp_path: Path) -> None:
    def caches(*unshare: dict[str, Any]) -> list[str | None]:
        cells = [Cell({"unshare": values}, tmp_path / f"sweep/{i}", (f"i={i}",)) for i, values in enumerate(unshare)]
        return [job.config.unshare.prefix_cache for job in build_jobs(Request(cells, True)) if job.config is not None]

    own = str(tmp_path / "sweep/prefix-cache")
    assert caches({"step": 2}, {"step": 3}) == [own, own]
    assert caches({"step": 2}) == [None]
    assert caches({"step": 2, "prefix_cache": "off"}, {"step": 3, "prefix_cache": "/other"}) == ["off", "/other"]


def process_state() -> dict[str, Any]:
    """What one run could leave behind for the next one in the same process."""
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "gradients": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "python random": random.getstate(),
        "numpy random": str(np.random.get_state()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "log handlers": [type(handler) for handler in logging.getLogger("sharebert").handlers],
        "threads of python": sorted(thread.name for thread in threading.enumerate()),
    }


def test_a_run_leaves_nothing_behind_that_the_next_one_could_see(train: Train) -> None:
    train("run_name=before", "max_steps=2", "unshare.step=2")
    before = process_state()
    train("run_name=first", "max_steps=2", "unshare.step=2", "debug=deterministic", "debug.detect_anomaly=true")
    assert process_state() == before


def test_the_second_job_of_a_sweep_is_the_lone_run_bit_for_bit(train: Train, tmp_path: Path) -> None:
    # Dropout, and a first job of another kind: nothing that it draws or sets reaches the second one.
    options = ["unshare.step=3", "model.dropout=0.1", "engine.micro_batch_size=4"]
    train("-m", "run_name=sweep", "seed=5,6", "unshare.prefix_cache=off", *options)
    train("run_name=lone", "seed=6", *options)
    (second,) = [row for row in read_table(tmp_path / "outputs/sweep") if row["seed"] == "6"]
    assert_equal_runs(tmp_path / "outputs/lone", tmp_path / "outputs/sweep" / second["cell"])
