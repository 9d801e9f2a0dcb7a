"""A run that starts from the shared prefix of another one ends bit for bit where the full run ends."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Train
from engine import small_config
from test_resume import Killed, assert_equal_bits, final_state, kill_at, signal_at

from sharebert.checkpoint import list_checkpoints, read_meta, verify
from sharebert.cli import main
from sharebert.config import TrainConfig, from_dict
from sharebert.launch import EXIT_FINISHED, EXIT_STOPPED
from sharebert.log import set_up_logging
from sharebert.prefix_cache import PREFIX_FILE, PrefixCache, open_prefix_cache, replay
from sharebert.unshare_policy import build_policy

Cached = Callable[..., str]


@pytest.fixture
def cached(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cached:
    """``cached("name", ...)`` trains a run with the cache tmp_path/cache; returns what it said."""

    def run(name: str, *overrides: str, status: int = EXIT_FINISHED) -> str:
        capsys.readouterr()
        assert train(f"run_name={name}", f"unshare.prefix_cache={tmp_path}/cache", *overrides) == status
        return capsys.readouterr().err

    return run


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in map(json.loads, lines)]


def assert_equal_runs(one: Path, other: Path) -> None:
    assert_equal_bits(final_state(one), final_state(other))
    assert rows(one) == rows(other)
    paths = [list_checkpoints(run / "checkpoints")[-1].path for run in (one, other)]
    first, second = (read_meta(path) for path in paths)
    for key in ("policy_state", "evaluation", "step", "samples_seen", "layer_groups"):
        assert first[key] == second[key]


@pytest.fixture(scope="module")
def finished(small_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that shared for 3 updates."""
    folder = tmp_path_factory.mktemp("runs")
    options = [option for option in small_run if not option.startswith(("max_steps=", "unshare.step="))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sharebert.pretrain.measure_matmul_peak", lambda device, dtype: 1e12)
        patch.setattr("sharebert.pretrain.draw_curves", lambda run: None)
        assert main(["train", *options, f"output_dir={folder}", "max_steps=4", "unshare.step=4"]) == EXIT_FINISHED
    return folder / "run"


@dataclass
class Kept:
    """A run, its shared checkpoint, and an empty cache."""

    run: Path
    saved: Path
    config: TrainConfig
    cache: PrefixCache

    @property
    def entry(self) -> Path:
        return self.cache.path / self.saved.name


@pytest.fixture
def kept(finished: Path, tmp_path: Path) -> Kept:
    (saved,) = finished.glob("checkpoints/step-*-shared")
    return Kept(
        finished, saved, from_dict(TrainConfig, read_meta(saved)["config"]), PrefixCache(tmp_path / "cache", {"key": 1})
    )


CHECKS = ["unshare.check_every=2", "optim.lr=0.02"]
SPLITS_EARLY = ["unshare=adaptive", *CHECKS, "unshare.threshold=0.999", "unshare.patience=2"]
KEEPS_ALL = ["checkpoint.every_steps=2", "checkpoint.keep_every=2"]


# Each run starts from the given step of the ones before it. A row of figures is due every 3 updates: after updates 4,
# 7 and 8 there is one only where the run unshares next, or measures correlations.
@pytest.mark.parametrize(
    "cells",
    [
        [
            (0, ["unshare.step=5"]),
            (4, ["unshare.step=5", "unshare.optimizer_state=reset"]),
            (4, ["unshare.step=8"]),
            (7, ["unshare=always"]),
            (12, ["unshare=always", "unshare.threshold=0.1"]),
        ],
        [
            (0, SPLITS_EARLY),
            (4, ["unshare=multi_step", *CHECKS, "unshare.threshold=0.998", "unshare.earliest_step=4"]),
            (8, ["unshare=adaptive", *CHECKS, "unshare.threshold=0.999", "unshare.patience=4"]),
        ],
        [(0, ["unshare=always", *CHECKS, *KEEPS_ALL]), (4, [*SPLITS_EARLY, "unshare.latest_step=9"])],
        [(0, ["unshare=always", *KEEPS_ALL]), (6, ["unshare.step=9"])],  # would have a row at step 8
    ],
)
def test_a_forked_run_is_the_full_run_bit_for_bit(
    train: Train, cached: Cached, tmp_path: Path, cells: list[tuple[int, list[str]]]
) -> None:
    outputs = tmp_path / "outputs"
    for number, (step, options) in enumerate(cells):
        shown = cached(f"forked-{number}", *options)
        if step == 0:
            assert "shared prefix" not in shown
            continue
        assert re.search(rf"starts from the shared prefix of step {step} \(trained by \S+\): {step} updates", shown)
        assert train(f"run_name=full-{number}", *options) == EXIT_FINISHED
        assert_equal_runs(outputs / f"full-{number}", outputs / f"forked-{number}")
        meta = read_meta(list_checkpoints(outputs / f"forked-{number}/checkpoints")[-1].path)
        assert meta["prefix_from"]["step"] == step


def test_only_runs_that_are_equal_up_to_there_have_the_same_key() -> None:
    def key(**groups: Any) -> str:
        config = small_config(**{**groups, "unshare": {"prefix_cache": "folder", **groups.get("unshare", {})}})
        hashes = {"train": config.data.text_column}
        cache = open_prefix_cache(config, hashes, torch.device("cpu"))
        assert cache is not None
        return cache.key

    assert key() == key(unshare={"step": 9, "optimizer_state": "reset"}, run_name="other", logging={"every_steps": 5})
    assert key() == key(unshare={"policy": "always"}, data={"cache_dir": "elsewhere", "num_proc": 3})
    different: list[dict[str, Any]] = [
        {"seed": 2},
        {"max_steps": 11},
        {"unshare": {"unit_layers": 2}},
        {"unshare": {"check_every": 2}},
        {"engine": {"micro_batch_size": 4}},
        {"engine": {"precision": "bf16"}},
        {"data": {"text_column": "other text"}},
        {"data": {"seq_len": 16}},
        {"optim": {"lr": 1e-3}},
        {"global_batch_size": 16},
    ]
    assert len({key(), *(key(**changes) for changes in different)}) == 1 + len(different)


@pytest.mark.parametrize("unshare", [{"step": 3}, {"policy": "never", "step": None}])
def test_a_run_that_unshares_earlier_or_never_shares_starts_by_itself(
    kept: Kept, tmp_path: Path, unshare: dict[str, Any]
) -> None:
    kept.cache.keep(kept.saved, kept.run)
    config = dataclasses.replace(kept.config, unshare=dataclasses.replace(kept.config.unshare, **unshare))
    assert kept.cache.fork(config, tmp_path) is None
    assert kept.cache.fork(kept.config, tmp_path) is not None


def test_a_run_that_went_on_under_other_circumstances_leaves_nothing(
    cached: Cached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 2)
        cached("first", status=EXIT_STOPPED)
    cached("first", "engine.micro_batch_size=2", "unshare.step=6")
    assert not list(tmp_path.glob("cache/*/step-*"))


def test_a_policy_that_would_have_split_before_a_checkpoint_does_not_start_from_it() -> None:
    unshare = {"policy": "adaptive", "check_every": 2, "patience": 1}
    config = from_dict(TrainConfig, {"unshare": unshare, "model": {"num_layers": 3}})
    figures = [{"step": 2, "share/correlations": [0.9, 0.9]}, {"step": 4, "share/correlations": [0.1, 0.1]}]
    for step, shares in ((2, True), (3, True), (4, True), (5, False)):
        policy = build_policy(config)
        assert replay(policy, [row for row in figures if row["step"] <= step], step) is shares
    policy = build_policy(config)
    assert replay(policy, figures, 4)
    assert len(policy.groups_for(5)) == 3  # it splits first thing in the update after that
    with pytest.raises(ValueError, match="not complete"):
        replay(build_policy(config), figures[:1], 5)


def test_a_forked_run_does_not_need_the_cache_and_resumes_bit_for_bit(
    train: Train, cached: Cached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached("earlier", "unshare.step=5")
    with monkeypatch.context() as patch:
        kill_at(patch, 4)  # in its first update
        with pytest.raises(Killed):
            cached("forked", "unshare.step=8")
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "outputs/earlier")
    with monkeypatch.context() as patch:
        signal_at(patch, 9)
        assert "goes on from" in cached("forked", "unshare.step=8", status=EXIT_STOPPED)
    cached("forked", "unshare.step=8")
    train("run_name=full", "unshare.step=8")
    assert_equal_runs(tmp_path / "outputs/full", tmp_path / "outputs/forked")
    newest = list_checkpoints(tmp_path / "outputs/forked/checkpoints")[-1].path
    assert read_meta(newest)["prefix_from"]["step"] == 4


def test_a_damaged_entry_is_named_and_passed_over_and_then_replaced(
    kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging()
    kept.cache.keep(kept.saved, kept.run)
    for file in ("model.safetensors", "training_state.pt", "meta.json", PREFIX_FILE):
        for fault in ("flipped", "cut", "absent"):
            path = kept.entry / file
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.unlink()  # the file of the run stays as it is
            if fault != "absent":
                path.write_bytes(data if fault == "flipped" else data[: len(data) // 2])
            assert kept.cache.fork(kept.config, tmp_path) is None
            assert "is damaged and passed over" in capsys.readouterr().err
            kept.cache.keep(kept.saved, kept.run)
    start = kept.cache.fork(kept.config, tmp_path)
    assert start is not None
    assert verify(start)["prefix_from"] == {"step": 3, "run": str(kept.run)}


def test_a_cache_that_cannot_be_written_is_named_and_fails_no_run(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    set_up_logging()
    with monkeypatch.context() as patch:
        patch.setattr("sharebert.prefix_cache.link_checkpoint", refuse)
        kept.cache.keep(kept.saved, kept.run)
    assert "was not kept ([Errno 28] No space left on device)" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    cache = PrefixCache(tmp_path / "file", {})
    assert cache.fork(kept.config, tmp_path) is None
    cache.keep(kept.saved, kept.run)
    assert "was not kept" in capsys.readouterr().err


def test_entries_are_links_where_the_file_system_has_them_and_copies_elsewhere(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    before = kept.saved.joinpath("model.safetensors").stat().st_nlink
    kept.cache.keep(kept.saved, kept.run)
    assert (kept.entry / "model.safetensors").stat().st_nlink == before + 1
    monkeypatch.setattr(os, "link", refuse)
    copies = PrefixCache(tmp_path / "copies", {})
    copies.keep(kept.saved, kept.run)
    assert (copies.path / kept.saved.name / "model.safetensors").stat().st_nlink == 1
    verify(copies.path / kept.saved.name)


def test_many_writers_of_one_entry_leave_a_whole_one_and_clear_what_a_killed_one_left(kept: Kept) -> None:
    half = kept.cache.path / f".saving-{kept.saved.name}"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    threads = [threading.Thread(target=kept.cache.keep, args=(kept.saved, kept.run)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    verify(kept.entry)
    assert sorted(path.name for path in kept.cache.path.iterdir()) == [".lock", "settings.json", kept.entry.name]
