"""A run that is killed or stopped and resumed ends bit for bit where the undisturbed run ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import Train
from safetensors.torch import load_file

from sharebert.checkpoint import list_checkpoints, load_training_state, read_meta
from sharebert.config import TrainConfig, from_dict, to_dict
from sharebert.data.sampler import rank_samples
from sharebert.evaluate import Evaluator
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE
from sharebert.metrics import read_metrics
from sharebert.run_folder import configuration_differences
from sharebert.update import Updater


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program's own clean-up may be needed."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Die in the middle of the update after `step`."""
    original = Updater._apply

    def apply(self: Updater, measures_ratio: bool) -> object:
        if self.state.counters.step == step:
            raise Killed
        return original(self, measures_ratio)

    monkeypatch.setattr(Updater, "_apply", apply)


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGUSR2) -> None:
    """Receive a stop signal during the update after `step`."""
    original = Updater._apply

    def apply(self: Updater, measures_ratio: bool) -> object:
        if self.state.counters.step == step:
            os.kill(os.getpid(), number)
        return original(self, measures_ratio)

    monkeypatch.setattr(Updater, "_apply", apply)


def final_state(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint: weights and optimizer state."""
    path = list_checkpoints(run / "checkpoints")[-1].path
    tensors = load_file(path / "model.safetensors")
    for name, values in load_training_state(path)["optimizer"].items():
        tensors.update({f"{name}/{key}": value for key, value in values.items()})
    return tensors


def assert_equal_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


# Unsharing is at update 6, so the last shared step is 5; an epoch is about 90 updates of 8 sequences.
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("killed_at", [[1], [3], [5], [6], [9], [4, 8]])
def test_a_killed_run_resumes_bit_for_bit(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: list[int], workers: int
) -> None:
    options = ["checkpoint.every_steps=2", f"engine.num_workers={workers}", "engine.micro_batch_size=4"]
    assert train("run_name=straight", *options) == EXIT_FINISHED
    for step in killed_at:
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            with pytest.raises(Killed):
                train("run_name=killed", *options)
    assert train("run_name=killed", *options) == EXIT_FINISHED
    outputs = tmp_path / "outputs"
    assert_equal_bits(final_state(outputs / "straight"), final_state(outputs / "killed"))
    figures = [
        [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in map(json.loads, lines)]
        for lines in ((outputs / name / "metrics.jsonl").read_text().splitlines() for name in ("straight", "killed"))
    ]
    assert figures[0] == figures[1]


def test_resuming_across_an_epoch_is_bit_for_bit(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["global_batch_size=128", "checkpoint.every_steps=3", "evaluation.every_steps=null"]
    train("run_name=straight", *options)  # 12 x 128 sequences: two epochs of about 700
    kill_at(monkeypatch, 7)
    with pytest.raises(Killed):
        train("run_name=killed", *options)
    monkeypatch.undo()
    assert train("run_name=killed", *options) == EXIT_FINISHED
    assert_equal_bits(final_state(tmp_path / "outputs/straight"), final_state(tmp_path / "outputs/killed"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_stop_signal_finishes_the_update_saves_and_exits_75(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = tmp_path / "outputs/stopped"
    with monkeypatch.context() as patch:
        signal_at(patch, 4, number)
        assert train("run_name=stopped") == EXIT_STOPPED
    status = json.loads((run / "status.json").read_text())
    assert status == {"state": "stopped", "step": 5, "reason": signal.Signals(number).name}
    assert read_meta(run / "checkpoints/step-00000005-shared")["before_unsharing"]
    assert train("run_name=stopped") == EXIT_FINISHED
    train("run_name=straight")
    assert_equal_bits(final_state(tmp_path / "outputs/straight"), final_state(run))


@pytest.mark.parametrize("step", [5, 12])
def test_a_stop_in_an_evaluation_and_a_kill_after_it_leave_each_figure_once(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    original, number = Evaluator.evaluate, itertools.count()
    last = {5: 1, 12: 3}[step]  # evaluations come at 0, 5, 10 and 12

    def evaluate(self: Evaluator, *arguments: object) -> object:
        if next(number) == last:
            os.kill(os.getpid(), signal.SIGUSR2)
        return original(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", evaluate)
        assert train("run_name=stopped") == EXIT_STOPPED
    if step == 5:
        with monkeypatch.context() as patch:
            kill_at(patch, 5)
            with pytest.raises(Killed):
                train("run_name=stopped")
    assert train("run_name=stopped") == EXIT_FINISHED
    assert train("run_name=straight") == EXIT_FINISHED
    runs = [tmp_path / "outputs" / name for name in ("straight", "stopped")]
    metas = [read_meta(list_checkpoints(run / "checkpoints")[-1].path) for run in runs]
    assert metas[0]["evaluation"] == metas[1]["evaluation"]
    rows = [[(row["step"], row.get("eval/loss")) for row in read_metrics(run / "metrics.jsonl")] for run in runs]
    assert rows[0] == rows[1]


def test_a_stop_in_the_unfinished_update_after_a_split_keeps_the_checkpoint_before_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharebert.trainer.LONG_UPDATE_SECONDS", -1.0)
    original = Updater._reduction

    def reduction(self: Updater, is_on: bool) -> object:
        if self.state.counters.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, is_on)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "_reduction", reduction)
        assert train("run_name=stopped", "engine.micro_batch_size=2") == EXIT_STOPPED
    names = [entry.path.name for entry in list_checkpoints(tmp_path / "outputs/stopped/checkpoints")]
    assert names == ["step-00000005-shared"]
    assert train("run_name=stopped", "engine.micro_batch_size=2") == EXIT_FINISHED
    train("run_name=straight", "engine.micro_batch_size=2")
    assert_equal_bits(final_state(tmp_path / "outputs/straight"), final_state(tmp_path / "outputs/stopped"))


def test_an_error_is_in_the_status_and_in_the_log_file(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "_apply", lambda self, measures_ratio: 1 / 0)
        assert train("run_name=a") == EXIT_FAILED
    status = json.loads((tmp_path / "outputs/a/status.json").read_text())
    assert status == {"state": "failed", "step": 0, "reason": "ZeroDivisionError: division by zero"}
    assert "ZeroDivisionError" in (tmp_path / "outputs/a/log.txt").read_text()
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1
    assert train("run_name=a") == EXIT_FINISHED


def test_a_picture_that_cannot_be_drawn_fails_no_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(run: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sharebert.pretrain.draw_curves", full_disk)
    assert train("run_name=a") == EXIT_FINISHED


def test_damaged_tokens_are_refused(
    train: Train, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"data.cache_dir={tmp_path}/cache"]
    train("run_name=a", *options)
    (tokens,) = (tmp_path / "cache").glob("*/train/tokens.bin")
    data = bytearray(tokens.read_bytes())
    data[100] ^= 1
    tokens.write_bytes(data)
    assert train("run_name=b", *options) == EXIT_FAILED
    assert "tokens.bin: sha256" in capsys.readouterr().err


def test_a_stop_during_a_long_update_keeps_the_last_completed_one(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharebert.trainer.LONG_UPDATE_SECONDS", 0.0)
    seen = []
    original = Updater._reduction

    def reduction(self: Updater, is_on: bool) -> object:
        seen.append(self.state.counters.step)
        if seen.count(3) == 2:  # the second micro-batch of update 4
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, is_on)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "_reduction", reduction)
        assert train("run_name=stopped", "engine.micro_batch_size=2") == EXIT_STOPPED
    assert seen.count(3) == 2
    assert json.loads((tmp_path / "outputs/stopped/status.json").read_text())["step"] == 3
    assert train("run_name=stopped", "engine.micro_batch_size=2") == EXIT_FINISHED
    train("run_name=straight", "engine.micro_batch_size=2")
    assert_equal_bits(final_state(tmp_path / "outputs/straight"), final_state(tmp_path / "outputs/stopped"))


def test_a_finished_run_says_so_and_does_nothing(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("run_name=done")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "outputs").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train("run_name=done") == EXIT_FINISHED
    assert "is finished (12 updates): nothing to do" in capsys.readouterr().err
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "outputs").rglob("*") if path.is_file()}
    assert {path: time for path, time in after.items() if path.name != ".lock"} == {
        path: time for path, time in before.items() if path.name != ".lock"
    }


def test_another_configuration_is_refused_with_the_differing_keys(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train("run_name=a", "checkpoint.every_steps=2", "max_steps=4", "unshare.step=2")
    changed = ["max_steps=4", "unshare.step=3", "optim.lr=0.5", "checkpoint.every_steps=1", "engine.micro_batch_size=2"]
    assert train("run_name=a", *changed) == EXIT_USAGE
    message = capsys.readouterr().err
    assert "optim.lr: 0.001 -> 0.5" in message
    assert "unshare.step: 2 -> 3" in message
    assert "checkpoint" not in message.split("another configuration")[1].split("expected the same")[0]
    assert "micro_batch_size" not in message


def test_a_setting_that_came_after_a_run_was_saved_counts_as_its_default() -> None:
    saved = to_dict(TrainConfig())
    del saved["unshare"]["shared_lr_factor"]
    assert configuration_differences(saved, TrainConfig()) == []
    other = from_dict(TrainConfig, {"unshare": {"shared_lr_factor": 0.5}})
    assert configuration_differences(saved, other) == ["unshare.shared_lr_factor: 1.0 -> 0.5"]


def test_settings_that_change_no_number_may_differ_on_resume(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 4)
        assert train("run_name=a") == EXIT_STOPPED
    different = ["engine.micro_batch_size=2", "engine.num_workers=1", "checkpoint.keep_last=5", "logging.every_steps=1"]
    assert train("run_name=a", *different) == EXIT_FINISHED


def test_another_global_batch_goes_on_with_the_next_sample_if_it_is_accepted(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples: list[int] = []

    def recorded(*arguments: int) -> object:
        samples.extend(found := rank_samples(*arguments))
        return found

    monkeypatch.setattr("sharebert.data.loader.rank_samples", recorded)
    with monkeypatch.context() as patch:
        signal_at(patch, 4)
        assert train("run_name=a") == EXIT_STOPPED
    capsys.readouterr()
    other = ["run_name=a", "global_batch_size=12"]
    assert train(*other) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert "global_batch_size: 8 -> 12" in shown
    assert "checkpoint.accept_other_batch=true" in shown
    with monkeypatch.context() as patch:
        signal_at(patch, 8)
        assert train(*other, "checkpoint.accept_other_batch=true") == EXIT_STOPPED
    assert "global_batch_size: 8 -> 12, from sample 40 on" in capsys.readouterr().err
    assert train(*other) == EXIT_FINISHED  # not asked for again: it is the run's own now
    assert samples == list(range(5 * 8 + 7 * 12))
    assert read_meta(tmp_path / "outputs/a/checkpoints/latest")["samples_seen"] == len(samples)


def test_changed_text_is_refused(
    train: Train, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text(text_file.read_text())
    options = ["run_name=a", f"data.files=[{copy}]"]
    train(*options)
    (tmp_path / "outputs/a/status.json").unlink()
    copy.write_text(text_file.read_text() + "\nOne more story about nothing at all.\n")
    assert train(*options) == EXIT_USAGE
    assert "the data is not what the run began with" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["run_name=a", "checkpoint.every_steps=2"]
    with monkeypatch.context() as patch:
        signal_at(patch, 7)
        train(*options)
    newest = tmp_path / "outputs/a/checkpoints/step-00000008-unshared"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    capsys.readouterr()
    assert train(*options) == EXIT_FINISHED
    shown = capsys.readouterr().err
    assert "step-00000008-unshared is damaged" in shown
    assert "goes on from" in shown
    assert "step-00000006-unshared at step 6" in shown
    train("run_name=straight", "checkpoint.every_steps=2")
    assert_equal_bits(final_state(tmp_path / "outputs/straight"), final_state(tmp_path / "outputs/a"))


def test_resume_never_starts_over_and_keeps_the_old_run(train: Train, tmp_path: Path) -> None:
    train("run_name=a")
    assert train("run_name=a", "checkpoint.resume=never", "optim.lr=0.01") == EXIT_FINISHED
    assert (tmp_path / "outputs/a.replaced-1/checkpoints/step-00000012-unshared").is_dir()
    config = read_meta(tmp_path / "outputs/a/checkpoints/step-00000012-unshared")["config"]
    assert config["optim"]["lr"] == 0.01


def test_resume_from_a_path_goes_on_from_there_in_another_folder(train: Train, tmp_path: Path) -> None:
    train("run_name=a")
    start = tmp_path / "outputs/a/checkpoints/step-00000005-shared"
    assert train("run_name=b", f"checkpoint.resume={start}") == EXIT_FINISHED
    assert_equal_bits(final_state(tmp_path / "outputs/a"), final_state(tmp_path / "outputs/b"))
    assert train("run_name=c", "checkpoint.resume=/nowhere") == EXIT_USAGE


def test_going_back_inside_a_run_folder_is_refused_and_changes_nothing(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("run_name=a")
    start = tmp_path / "outputs/a/checkpoints/step-00000005-shared"
    capsys.readouterr()
    assert train("run_name=a", f"checkpoint.resume={start}") == EXIT_USAGE
    assert "the run folder is past it" in capsys.readouterr().err
    assert [entry.step for entry in list_checkpoints(start.parent)] == [5, 12]


def test_a_bad_init_from_is_refused_before_any_work(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("init_from=/nowhere", "run_name=a") == EXIT_USAGE
    assert "init_from='/nowhere': expected a whole checkpoint" in capsys.readouterr().err
    train("run_name=b")
    start = tmp_path / "outputs/b/checkpoints/latest"
    assert train(f"init_from={start}", "run_name=c", "model.hidden_size=64") == EXIT_USAGE
    assert "model.hidden_size=64: expected 32" in capsys.readouterr().err
    assert train(f"init_from={start}", "run_name=d", "data.lowercase=false") == EXIT_USAGE
    assert "another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["fixed", "never"])
def test_a_run_that_starts_from_a_checkpoint_starts_at_its_loss(train: Train, tmp_path: Path, policy: str) -> None:
    train("run_name=first")
    start = tmp_path / "outputs/first/checkpoints/step-00000005-shared"
    assert train("run_name=second", f"init_from={start}", f"unshare={policy}") == EXIT_FINISHED
    first, second = (
        [json.loads(line) for line in (tmp_path / f"outputs/{name}/metrics.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    )
    at_5 = next(row["eval/loss"] for row in first if row["step"] == 5 and "eval/loss" in row)
    assert second[0]["step"] == 0
    assert second[0]["eval/loss"] == pytest.approx(at_5, rel=1e-5)


def test_two_processes_cannot_run_in_one_folder(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sharebert.run_folder import RunFolder

    other = RunFolder(tmp_path / "outputs/a")
    other.open(replace=False)
    try:
        assert train("run_name=a") == EXIT_USAGE
    finally:
        other.close()
    assert "another process is running in it" in capsys.readouterr().err


WATCHING = ["unshare.check_every=2", "unshare.threshold=0.998", "unshare.patience=1", "checkpoint.keep_last=30"]


def test_a_run_that_ends_before_it_could_unshare_says_so_at_both_ends(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = ["unshare=adaptive", "unshare.patience=1", "unshare.threshold=0.999", "max_steps=6"]
    train("run_name=late", "unshare.check_every=6", *checks)
    shown = capsys.readouterr().err
    assert "max_steps=6 is too few to unshare anything: that takes a check, one every 6 updates, and then an" in shown
    assert "still shared in 1 group(s): at the last check (update 6)" in shown
    train("run_name=latest", "unshare.check_every=8", "unshare.latest_step=4", *checks)
    assert "too few" not in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["adaptive", "multi_step"])
def test_a_run_killed_around_each_split_resumes_bit_for_bit(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    options = [f"unshare={policy}", *WATCHING, "checkpoint.every_steps=1", "optim.lr=0.02"]
    straight = tmp_path / "outputs/straight"
    assert train("run_name=straight", *options) == EXIT_FINISHED
    groups = [read_meta(entry.path)["layer_groups"] for entry in list_checkpoints(straight / "checkpoints")]
    splits = [step for step in range(1, 12) if groups[step - 1] != groups[step]]  # the last steps of the old groups
    assert len(splits) >= (1 if policy == "adaptive" else 2)
    around = {split + shift for split in splits for shift in (0, 1)}  # between check and act, and after
    for step in sorted(around - {12}):
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            with pytest.raises(Killed):
                train(f"run_name=killed-{step}", *options)
        assert train(f"run_name=killed-{step}", *options) == EXIT_FINISHED
        assert_equal_bits(final_state(straight), final_state(tmp_path / f"outputs/killed-{step}"))


def test_the_checkpoint_before_each_split_is_kept(train: Train, tmp_path: Path) -> None:
    train("run_name=a", "unshare=multi_step", *WATCHING[:3], "checkpoint.keep_last=1", "optim.lr=0.02")
    metas = [read_meta(entry.path) for entry in list_checkpoints(tmp_path / "outputs/a/checkpoints")]
    assert [meta["before_unsharing"] for meta in metas] == [True] * (len(metas) - 1) + [False]
    assert metas[0]["phase"] == "shared"
    assert any(meta["phase"] == "partly-shared" for meta in metas)
    assert len(metas[-1]["policy_state"]["last_check"]["correlations"]) == 3
