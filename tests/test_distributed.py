"""Several gloo processes do what one does, stop together, and come back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Train
from ranks import run_ranks, train_on_ranks
from ranks import train as train_rank
from test_preemption import corpus_files, signal_at_document
from test_resume import final_state, signal_at

from sharebert import distributed
from sharebert.checkpoint import read_meta
from sharebert.gradient_probe import GradientProbe
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, Ranks, detect_ranks
from sharebert.trainer import Trainer

pytestmark = pytest.mark.processes

OPTIONS = ["max_steps=12", "unshare.step=6", "model.dropout=0", "model.attention_dropout=0", "global_batch_size=12"]
OPTIONS += ["engine.micro_batch_size=2", "checkpoint.every_steps=5"]  # accumulation 3 on each of two ranks


def over(small_run: list[str], *overrides: str) -> list[str]:
    """`overrides` over those of `small_run`."""
    keys = {override.split("=")[0] for override in overrides}
    return [override for override in small_run if override.split("=")[0] not in keys] + list(overrides)


def read_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def status(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "status.json").read_text()))


# ---------------------------------------------------------------------- the same training


def test_runs_on_one_two_and_three_processes_are_one_and_go_on_from_each_other(
    train: Train, small_run: list[str], tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    common = [*OPTIONS, "masking.whole_word=true"]  # ranks and micro-batches have other numbers of targets then

    def on_ranks(world_size: int, name: str, *options: str) -> None:
        overrides = over(small_run, f"output_dir={outputs}", f"run_name={name}", *common, *options)
        statuses, errors = train_on_ranks(world_size, *overrides)
        assert statuses == [EXIT_FINISHED] * world_size, errors
        assert "Warning" not in errors

    assert train("run_name=one", *common) == EXIT_FINISHED
    on_ranks(2, "two")
    on_ranks(3, "three", f"checkpoint.resume={outputs}/one/checkpoints/step-00000005-shared")
    on_ranks(2, "two-after-three", f"checkpoint.resume={outputs}/three/checkpoints/step-00000010-unshared")
    start = outputs / "two/checkpoints/step-00000005-shared"
    assert train("run_name=one-after-two", f"checkpoint.resume={start}", *common) == EXIT_FINISHED

    one = final_state(outputs / "one")
    for name in ("two", "three", "two-after-three", "one-after-two"):
        other = final_state(outputs / name)
        assert one.keys() == other.keys()
        for key in one:
            torch.testing.assert_close(other[key], one[key], rtol=0.0, atol=1e-5)
    assert read_meta(outputs / "three/checkpoints/step-00000012-unshared")["world_size"] == 3
    compared = {"train/loss", "train/grad_norm", "eval/loss", "eval/accuracy", "eval/unigram_loss", "eval/targets"}
    for ours, theirs in zip(read_rows(outputs / "one"), read_rows(outputs / "two"), strict=True):
        assert ours.keys() == theirs.keys()
        for key in compared & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4)


def train_with_other_correlations(arguments: list[str]) -> int:
    """As if another GPU rounded otherwise: rank 1 measures other correlations than rank 0."""
    if detect_ranks().rank == 1:
        correlations = GradientProbe.correlations
        patch = pytest.MonkeyPatch()
        patch.setattr(GradientProbe, "correlations", lambda probe: correlations(probe) + 0.5)
    return train_rank(arguments)


def test_two_processes_measure_and_decide_as_one(train: Train, small_run: list[str], tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    watching = ["unshare=multi_step", "unshare.check_every=2", "unshare.threshold=0.998", "unshare.patience=1"]
    options = [*OPTIONS, *watching, "optim.lr=0.02", "global_batch_size=8"]
    arguments = over(small_run, f"output_dir={outputs}", "run_name=two", *options)
    statuses, errors = run_ranks(2, train_with_other_correlations, arguments)
    assert statuses == [EXIT_FINISHED] * 2, errors
    assert train("run_name=one", *options) == EXIT_FINISHED
    one, two = read_rows(outputs / "one"), read_rows(outputs / "two")
    checks = [(ours, theirs) for ours, theirs in zip(one, two, strict=True) if "share/correlations" in ours]
    assert len({str(ours["share/groups"]) for ours, _ in checks}) >= 3
    for ours, theirs in checks:
        assert ours["share/groups"] == theirs["share/groups"]
        assert ours["share/correlations"] == pytest.approx(theirs["share/correlations"], abs=2e-4)
    final = [final_state(outputs / name) for name in ("one", "two")]
    for name in final[0]:
        torch.testing.assert_close(final[1][name], final[0][name], rtol=0.0, atol=1e-4)


def test_ranks_with_unequal_shares_of_the_held_out_text_do_not_wait_for_each_other(
    train: Train, small_run: list[str], tmp_path: Path
) -> None:
    options = ["max_steps=2", "unshare.step=2", "evaluation.max_sequences=5", "engine.micro_batch_size=2"]
    outputs = tmp_path / "outputs"
    statuses, errors = train_on_ranks(2, *over(small_run, f"output_dir={outputs}", "run_name=two", *options))
    assert statuses == [EXIT_FINISHED] * 2, errors
    train("run_name=one", *options)
    one, two = (read_rows(outputs / name) for name in ("one", "two"))
    assert one[-1]["eval/loss"] == pytest.approx(two[-1]["eval/loss"], rel=1e-4)


# ---------------------------------------------------------------------- stopping


def train_with_signal(place: str, arguments: list[str]) -> int:
    """`sharebert train`, where rank 1 alone is asked to stop."""
    if detect_ranks().rank == 1:
        patch = pytest.MonkeyPatch()
        if place == "update":
            signal_at(patch, 4, signal.SIGTERM)
        else:  # it waits for the other one, which prepares
            patch.setattr("sharebert.run_corpus.open_planned", lambda plan: os.kill(os.getpid(), signal.SIGTERM))
    elif place == "data":
        signal_at_document(pytest.MonkeyPatch(), 450, lambda: time.sleep(1.5))
    return train_rank(arguments)


def test_a_signal_to_one_rank_stops_all_after_the_same_update(
    train: Train, small_run: list[str], tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    arguments = over(small_run, f"output_dir={outputs}", "run_name=two", "engine.micro_batch_size=2")
    statuses, errors = run_ranks(2, train_with_signal, "update", arguments)
    assert statuses == [EXIT_STOPPED] * 2, errors
    assert status(outputs / "two") == {"state": "stopped", "step": 5, "reason": "asked on another rank"}


def test_a_signal_to_one_rank_stops_another_one_that_prepares_the_data(small_run: list[str], tmp_path: Path) -> None:
    cache, outputs = tmp_path / "cache", tmp_path / "outputs"
    arguments = over(small_run, f"output_dir={outputs}", "run_name=two", f"data.cache_dir={cache}")
    statuses, errors = run_ranks(2, train_with_signal, "data", arguments)
    assert statuses == [EXIT_STOPPED] * 2, errors
    assert status(outputs / "two") == {"state": "stopped", "step": 0, "reason": "asked on another rank"}
    assert "Traceback" not in errors
    statuses, errors = train_on_ranks(2, *arguments)
    assert statuses == [EXIT_FINISHED] * 2, errors
    assert len(corpus_files(cache)) == 2


# ---------------------------------------------------------------------- errors


def train_and_fail(place: str, arguments: list[str]) -> int:
    """`sharebert train`, where one rank fails."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("the reason")

    patch = pytest.MonkeyPatch()
    if place == "update" and detect_ranks().rank == 1:
        patch.setattr(Trainer, "_count", fail)
    if place == "data" and detect_ranks().rank == 0:
        patch.setattr("sharebert.run_corpus.prepare_corpus", fail)
    return train_rank(arguments)


@pytest.mark.parametrize("place", ["update", "data"])
def test_an_error_on_one_rank_ends_all_with_its_traceback_once(
    small_run: list[str], tmp_path: Path, place: str
) -> None:
    cache = tmp_path if place == "data" else next(item for item in small_run if "cache_dir" in item).split("=")[1]
    arguments = over(small_run, f"output_dir={tmp_path}/outputs", f"data.cache_dir={cache}")
    statuses, errors = run_ranks(2, train_and_fail, place, arguments)
    assert statuses == [EXIT_FAILED] * 2
    assert errors.count("ZeroDivisionError: the reason") == 1
    assert errors.count("Traceback (most recent call last)") == 1
    assert errors.count("ended because another rank did") == 1


def wait_for_rank_zero() -> int:
    """Work of rank 0 is waited for beyond the time limit of the group; a rank that hangs is not."""
    ranks = detect_ranks()
    distributed.join_group(ranks, torch.device("cpu"), timeout_minutes=2 / 60)
    assert distributed.on_rank_zero(lambda: time.sleep(3) or "done") == "done"
    if ranks.rank == 1:
        time.sleep(4)  # as if for ever
        return 0
    with pytest.raises(RuntimeError) as caught:
        distributed.sum_count(1)
    return 0 if distributed.is_lost_peer(caught.value) else 1


def test_the_time_limit_of_the_group_holds_for_ranks_that_hang_not_for_the_work_of_rank_zero() -> None:
    statuses, errors = run_ranks(2, wait_for_rank_zero)
    assert statuses == [0, 0], errors


def test_after_an_error_only_a_lone_rank_leaves_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's way out waits for the others, who wait for the rank that failed."""
    seen: list[str] = []
    monkeypatch.setattr(distributed, "join_group", lambda *_: seen.append("join"))
    monkeypatch.setattr(distributed, "leave_group", lambda: seen.append("leave"))
    for world_size, expected in ((2, ["join"]), (1, ["join", "leave"])):
        monkeypatch.setattr(distributed, "world_size", lambda size=world_size: size)
        seen.clear()
        with pytest.raises(ZeroDivisionError), distributed.process_group(Ranks(), torch.device("cpu"), 1.0):
            raise ZeroDivisionError
        assert seen == expected
        seen.clear()
        with distributed.process_group(Ranks(), torch.device("cpu"), 1.0):
            pass
        assert seen == ["join", "leave"]


def test_a_lone_process_needs_no_group() -> None:
    assert distributed.world_size() == 1
    assert distributed.rank() == 0
    assert distributed.sum_count(3) == 3
    assert distributed.on_rank_zero(lambda: "value") == "value"
    distributed.tell_all("nobody")
    assert not distributed.was_told("nobody")
    model = torch.nn.Linear(2, 2)
    assert distributed.wrap(model) is model
    with pytest.raises(KeyError):
        distributed.on_rank_zero(lambda: {}["missing"])


# ---------------------------------------------------------------------- under torchrun


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_rank_died_and_it_goes_on(
    train: Train, small_run: list[str], tmp_path: Path
) -> None:
    """Rank 0 also comes 3 s after the other one, the first time."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0':\n"
        "    if os.environ['RANK'] == '0':\n"
        "        time.sleep(3)\n"
        "    else:\n"
        "        from sharebert.trainer import Trainer\n"
        "        cross = Trainer._cross_boundary\n"
        "        Trainer._cross_boundary = lambda self: os._exit(1) if self.counters.step == 7 else cross(self)\n"
    )
    outputs = tmp_path / "outputs"
    options = ["model.dropout=0", "model.attention_dropout=0", "checkpoint.every_steps=3", "checkpoint.resume=never"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    command += ["--max-restarts=1", "-m", "sharebert", "train"]
    command += over(small_run, f"output_dir={outputs}", "run_name=two", *options)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert f"goes on from {outputs}/two/checkpoints/step-00000006-unshared" in result.stderr
    assert [path.name for path in outputs.iterdir()] == ["two"]
    assert status(outputs / "two") == {"state": "finished", "step": 12, "reason": ""}
    assert train("run_name=one", *options) == EXIT_FINISHED
    one, two = final_state(outputs / "one"), final_state(outputs / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0.0, atol=1e-5)
