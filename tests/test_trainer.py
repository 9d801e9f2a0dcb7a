"""The loop: order at boundaries, what disturbs nothing, and what stops it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import build_trainer, small_config, windows
from torch.utils._python_dispatch import TorchDispatchMode

from sharebert.config import TrainConfig
from sharebert.trainer import Stopwatch, Trainer
from sharebert.update import MAX_CONSECUTIVE_SKIPS, NonFiniteError


def trained(config: TrainConfig, folder: Path) -> tuple[Trainer, Any]:
    trainer, rows = build_trainer(config, folder)
    assert trainer.fit(windows(config, folder))
    return trainer, rows


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters(remove_duplicate=False)}


def assert_same_bits(first: Trainer, second: Trainer) -> None:
    ours, theirs = weights(first), weights(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("per_reading", [0.0, -3600.0])
def test_a_clock_that_stands_still_or_goes_back_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_reading: float
) -> None:
    config = small_config(max_steps=3, unshare={"step": 2})
    undisturbed, _ = trained(config, tmp_path / "a")
    readings = itertools.count(1e6, per_reading)
    monkeypatch.setattr("sharebert.trainer.time.perf_counter", lambda: next(readings))
    assert_same_bits(trained(config, tmp_path / "b")[0], undisturbed)


def test_a_paused_stopwatch_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    watch = Stopwatch()
    now = 7.0
    with watch.paused():
        now = 10.0
        assert watch.seconds == 2.0  # the figure that goes into a checkpoint
    now = 11.0
    assert watch.seconds == 3.0


def test_evaluations_logs_and_saves_change_nothing(tmp_path: Path) -> None:
    dropout = {"dropout": 0.2, "attention_dropout": 0.2}
    quiet = small_config(model=dropout, logging={"every_steps": 100})
    busy = small_config(
        model=dropout, evaluation={"every_steps": 1}, checkpoint={"every_steps": 1}, logging={"every_steps": 1}
    )
    assert_same_bits(trained(quiet, tmp_path)[0], trained(busy, tmp_path)[0])


def test_another_rate_while_layers_share(tmp_path: Path) -> None:
    def rates(factor: float) -> list[float]:
        unshare = {"step": 3, "shared_lr_factor": factor}
        return trained(small_config(max_steps=4, unshare=unshare, logging={"every_steps": 1}), tmp_path)[1].series(
            "train/lr"
        )

    def moved(factor: float) -> torch.Tensor:
        unshare = {"policy": "always", "shared_lr_factor": factor}
        trainer, _ = build_trainer(small_config(max_steps=1, unshare=unshare, optim={"name": "sgd"}), tmp_path)
        before = weights(trainer)
        assert trainer.fit(windows(trainer.config, tmp_path))
        return torch.cat([(after - before[name]).flatten() for name, after in weights(trainer).items()])

    usual = rates(1.0)
    assert rates(0.5) == pytest.approx([0.5 * usual[0], 0.5 * usual[1], usual[2], usual[3]])
    torch.testing.assert_close(moved(0.5), 0.5 * moved(1.0), rtol=1e-3, atol=1e-7)


def test_another_rate_lasts_until_no_layers_share(tmp_path: Path) -> None:
    def rows(factor: float) -> list[dict[str, Any]]:
        watching = {"check_every": 2, "patience": 1, "threshold": 0.998, "shared_lr_factor": factor}
        config = small_config(max_steps=16, unshare={"policy": "multi_step", "step": None, **watching})
        return [row for row in trained(config, tmp_path)[1].rows if "train/lr" in row]

    usual = [row["train/lr"] for row in rows(1.0)]
    slower = rows(0.5)
    assert {row["share/phase"] for row in slower} == {"shared", "partly-shared", "unshared"}
    for row, rate in zip(slower, usual, strict=True):
        assert row["train/lr"] == pytest.approx(rate if row["share/phase"] == "unshared" else 0.5 * rate)


def test_dropout_does_not_repeat_between_updates_or_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr("sharebert.update.seed_dropout", lambda *key: seen.append(key))
    trained(small_config(max_steps=2, unshare={"step": 1}, engine={"micro_batch_size": 4}), tmp_path)
    assert seen == [(1, 0, 0, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, 0)]  # seed, step, micro-batch, rank


def test_accumulation_gives_the_update_of_the_whole_batch(tmp_path: Path) -> None:
    whole, _ = trained(small_config(engine={"micro_batch_size": 8}), tmp_path)
    parts, _ = trained(small_config(engine={"micro_batch_size": 2}), tmp_path)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], weight, rtol=0.0, atol=2e-5)


def test_a_checkpoint_is_saved_before_unsharing_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    config = small_config(checkpoint={"every_steps": 4})
    trainer, _ = build_trainer(config, tmp_path)
    saved = []
    trainer.save = lambda before_unsharing: saved.append(
        (trainer.counters.step, trainer.sharing.phase, before_unsharing)
    )
    trainer.fit(windows(config, tmp_path))
    expected = [(4, "shared", False), (5, "shared", True), (8, "unshared", False), (12, "unshared", False)]
    assert saved == expected


def test_rows_have_the_promised_names_and_an_extra_one_on_each_side_of_unsharing(tmp_path: Path) -> None:
    config = small_config(logging={"every_steps": 4}, evaluation={"every_steps": 10})
    _, rows = trained(config, tmp_path)
    training = [row for row in rows.rows if "train/loss" in row]
    assert [row["step"] for row in training] == [4, 5, 6, 8, 12]
    assert [row["share/phase"] for row in training] == ["shared", "shared", "unshared", "unshared", "unshared"]
    names = "train/loss train/lr train/grad_norm train/skipped_updates perf/tokens_per_second perf/mfu share/phase"
    names += " share/unique_parameters share/update_to_weight"
    assert set(names.split()) <= training[0].keys()
    evaluations = [row for row in rows.rows if "eval/loss" in row]
    assert [row["step"] for row in evaluations] == [0, 10, 12]
    assert {"eval/accuracy", "eval/perplexity", "eval/unigram_loss", "eval/unigram_accuracy"} <= evaluations[0].keys()


def test_the_update_to_weight_ratio_is_that_of_the_update(tmp_path: Path) -> None:
    config = small_config(model={"num_layers": 2}, optim={"name": "sgd", "lr": 1e-2, "clip_norm": None})
    trainer, rows = build_trainer(config, tmp_path)
    layer = trainer.model.encoder.layers[0]
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    window = next(windows(config, tmp_path))
    trainer.train_step(window)
    trainer._log()
    moved = sum((p.detach() - before[name]).square().sum() for name, p in layer.named_parameters()) ** 0.5
    size = sum(p.detach().square().sum() for p in layer.parameters()) ** 0.5
    assert rows.series("share/update_to_weight") == pytest.approx([float(moved / size)], rel=1e-5)


def test_the_loss_falls(tmp_path: Path) -> None:
    config = small_config(max_steps=150, unshare={"step": 20}, logging={"every_steps": 10})
    rows = trained(config, tmp_path)[1]
    assert rows.series("train/loss")[-1] < rows.series("train/loss")[0] - 0.05
    assert rows.series("eval/loss")[-1] < rows.series("eval/loss")[0] - 0.05


def test_a_loss_that_is_not_a_number_stops_the_run_before_anything_is_saved(tmp_path: Path) -> None:
    config = small_config(logging={"every_steps": 100}, checkpoint={"every_steps": 4})
    trainer, _ = build_trainer(config, tmp_path)
    saved = []
    trainer.save = lambda before_unsharing: saved.append(trainer.counters.step)

    def poisoned() -> Any:
        for update, window in enumerate(windows(config, tmp_path), start=1):
            if update == 7:
                with torch.no_grad():
                    trainer.model.head.bias[5] = float("nan")
            yield window

    with pytest.raises(NonFiniteError, match=r"update 7: .*not a finite number"):
        trainer.fit(poisoned())
    assert saved == [4, 5]


def test_fp16_gradients_are_unscaled_before_they_are_clipped(tmp_path: Path) -> None:
    def run(precision: str) -> tuple[list[float], torch.Tensor]:
        optim = {"name": "sgd", "lr": 0.1, "clip_norm": 0.5, "weight_decay": 0.0}
        config = small_config(engine={"precision": precision}, max_steps=2, unshare={"step": 2}, optim=optim)
        trainer, rows = build_trainer(config, tmp_path)
        before = weights(trainer)
        assert trainer.fit(windows(config, tmp_path))
        moved = torch.cat([(after - before[name]).flatten() for name, after in weights(trainer).items()])
        return rows.series("train/grad_norm"), moved

    (norms, moved), (expected_norms, expected) = run("fp16"), run("fp32")
    assert norms == pytest.approx(expected_norms, rel=2e-2)
    assert min(norms) > 0.5  # else nothing is clipped
    assert float((moved - expected).norm() / expected.norm()) < 2e-2


def test_fp16_updates_that_overflow_are_tried_again_and_counted(tmp_path: Path) -> None:
    config = small_config(engine={"precision": "fp16"}, max_steps=4, unshare={"step": 3})
    trainer, rows = build_trainer(config, tmp_path)
    scaler = trainer.state.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**40})
    trainer.updater._loss_scale = scaler.get_scale()
    assert trainer.fit(windows(config, tmp_path))
    assert trainer.counters.step == 4
    assert trainer.counters.skipped_updates > 5
    assert all(loss < 20 for loss in rows.series("train/loss"))
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_fp16_that_never_fits_gives_up(tmp_path: Path) -> None:
    config = small_config(engine={"precision": "fp16"}, max_steps=4, unshare={"step": 3})
    trainer, _ = build_trainer(config, tmp_path)
    with torch.no_grad():
        trainer.model.head.bias[5] = float("inf")
    with pytest.raises(NonFiniteError, match=f"{MAX_CONSECUTIVE_SKIPS} fp16 tries in a row"):
        trainer.fit(windows(config, tmp_path))


class ReadsOfTheDevice(TorchDispatchMode):
    """Counts what would make a host wait for a CUDA device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["fixed", "never"])
def test_an_update_reads_nothing_back_from_the_device(tmp_path: Path, policy: str) -> None:
    config = small_config(logging={"every_steps": 3}, unshare={"policy": policy})
    trainer, _ = build_trainer(config, tmp_path)
    all_windows = list(windows(config, tmp_path))
    trainer.train_step(all_windows[0])
    with ReadsOfTheDevice() as reads:
        trainer.train_step(all_windows[1])
        trainer._cross_boundary()
    assert reads.count == 0
    with ReadsOfTheDevice() as reads:
        trainer.train_step(all_windows[2])
        trainer._cross_boundary()
    assert reads.count > 0  # the third is a row of figures: the mode sees what it should


def test_an_evaluation_that_is_stopped_is_done_after_the_resume(tmp_path: Path) -> None:
    config = small_config(evaluation={"every_steps": 4})
    trainer, rows = build_trainer(config, tmp_path)
    original = trainer.evaluator.evaluate
    trainer.evaluator.evaluate = lambda model, should_stop: (  # type: ignore[method-assign]
        None if trainer.counters.step == 4 else original(model, should_stop)
    )
    assert not trainer.fit(windows(config, tmp_path))
    assert trainer.counters.step == 4
    trainer.evaluator.evaluate = original  # type: ignore[method-assign]
    assert trainer.fit(windows(config, tmp_path, first_update=4))
    assert [row["step"] for row in rows.rows if "eval/loss" in row] == [0, 4, 8, 12]
