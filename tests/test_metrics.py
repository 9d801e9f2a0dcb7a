"""Sinks, cut back on resume."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from sharebert.config import ConfigError, LoggingConfig, TrainConfig
from sharebert.curves import draw_curves
from sharebert.metrics import JsonLines, Progress, TensorBoard, build_sinks, check_extras, read_metrics


def test_rows_after_the_resumed_step_and_half_lines_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, 0)
    for step in (10, 20, 30):
        first.write(step, {"train/loss": float(step)})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 40, "train/lo')
    second = JsonLines(path, 20)
    second.write(21, {"train/loss": 1.0})
    second.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 21]
    assert [row["step"] for row in read_metrics(path)] == [10, 20, 21]
    assert read_metrics(tmp_path / "nothing.jsonl") == []


def test_an_evaluation_that_is_repeated_after_a_resume_stands_there_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for values in ({"train/loss": 1.0}, {"eval/loss": 2.0}, {"eval/loss": 2.0}):
        sink = JsonLines(path, 20)
        sink.write(20, values)
        sink.close()
    sink = JsonLines(path, 20)
    for step in (21, 21):
        sink.write(step, {"eval/loss": 3.0})
    sink.close()
    rows = [(row["step"], *row.keys() - {"step"}) for row in read_metrics(path)]
    assert rows == [(20, "train/loss"), (20, "eval/loss"), (21, "eval/loss"), (21, "eval/loss")]


def test_tensorboard_hides_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        sink = TensorBoard(tmp_path, last_step)
        for step in steps:
            sink.write(step, {"train/loss": step + last_step, "share/phase": "shared"})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 5), (4, 6)]


class FakeWandb(types.ModuleType):
    """Keeps what a run of Weights & Biases is told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.asked: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def init(self, **asked: Any) -> types.SimpleNamespace:
        """As the package's own."""
        self.asked = asked
        log = lambda values, step: self.rows.append((step, values))  # noqa: E731
        return types.SimpleNamespace(id=asked["id"] or "new", log=log, finish=lambda: None)


def test_a_sink_that_begins_later_than_the_run_gets_the_rows_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "outputs/sweep/step-5"
    folder.mkdir(parents=True)
    rows = [{"step": step, "train/loss": step + 0.5} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    logging = LoggingConfig(tensorboard=True, wandb=True)
    config = TrainConfig(run_name="sweep", output_dir=str(tmp_path / "outputs"), logging=logging)
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for wandb_run_id, last_step in ((None, 2), ("mine", 3)):  # the second time both are there, and go on
        sinks = build_sinks(folder, config, last_step, wandb_run_id)
        for sink in sinks:
            sink.write(last_step + 1, {"train/loss": 9.0})
            sink.close()
    assert (wandb.asked["name"], wandb.asked["id"]) == ("sweep/step-5", "mine")
    assert [(step, values["train/loss"]) for step, values in wandb.rows] == [(1, 1.5), (2, 2.5), (3, 9.0), (4, 9.0)]
    events = EventAccumulator(str(folder / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(1, 1.5), (2, 2.5), (3, 9.0), (4, 9.0)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_extra_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    check_extras(LoggingConfig())
    with pytest.raises(ConfigError, match=rf"logging\.{name}=true.*pip install 'sharebert\[{name}\]'"):
        check_extras(LoggingConfig(**{name: True}))


def test_plain_lines_name_step_phase_loss_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="sharebert")
    progress = Progress(0, 100, enabled=True)
    progress.show(50, {"share/phase": "shared", "train/loss": 2.5, "perf/tokens_per_second": 1234.5})
    assert "update 50/100  shared  loss 2.500  1,234 tokens/s" in caplog.text
    assert "left" in caplog.text


def test_curves_are_drawn_and_mark_where_layers_were_unshared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sink = JsonLines(tmp_path / "metrics.jsonl", 0)
    for step in range(1, 9):
        unique = 10 if step < 5 else 40
        sink.write(step, {"train/loss": 1.0 / step, "train/grad_norm": 1.0, "share/unique_parameters": unique})
    sink.write(8, {"eval/loss": 0.5, "eval/accuracy": 0.4, "eval/unigram_loss": 2.0, "eval/unigram_accuracy": 0.1})
    sink.close()
    draw_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / ".curves.png").exists()


def test_without_matplotlib_curves_are_left_out_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    draw_curves(tmp_path)
    assert "pip install 'sharebert[plot]'" in caplog.text
    assert not (tmp_path / "curves.png").exists()
