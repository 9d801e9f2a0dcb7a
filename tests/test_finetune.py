"""Whole runs of `sharebert finetune`: exact resume, stopping, what is refused, what scores depend on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetuning import finetune, invented_rows, read_results, read_rows, write_lines
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from test_cli import status_of

from sharebert.checkpoint import list_checkpoints
from sharebert.cli import main
from sharebert.config import ConfigError, FinetuneConfig, FinetuneOptimConfig, check_complete, from_dict
from sharebert.finetune import loop as loop_module
from sharebert.finetune import run as run_module
from sharebert.finetune.loop import Loop, build_schedule
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE
from sharebert.run_folder import refuse_other_data

transformers = pytest.importorskip("transformers")


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program's own clean-up may be needed."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run of 9 updates on a table: three epochs of 12 rows, 4 a time, with dropout."""
    folder = tmp_path_factory.mktemp("table")
    train = write_lines(folder / "train.jsonl", invented_rows(12))
    dev = write_lines(folder / "dev.jsonl", invented_rows(10, seed=3))
    files = [f"task.train={train}", f"task.dev={dev}", f"task.test={dev}"]
    sizes = ["global_batch_size=4", "engine.micro_batch_size=2", "dropout=0.1", "optim.lr=1e-3"]
    return ["task=table", *files, *sizes, "logging.every_steps=2", "checkpoint.every_steps=2"]


@pytest.fixture(scope="module")
def straight(encoder: Path, table: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    assert finetune(folder, encoder, *table) == EXIT_FINISHED
    return folder / "finetune-table"


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Die in the update after `step`."""
    original = Loop._rate

    def rate(self: Loop, step_of_rate: int) -> float:
        if self.counters.step == step:
            raise Killed
        return original(self, step_of_rate)

    monkeypatch.setattr(Loop, "_rate", rate)


def assert_same(first: Path, second: Path) -> None:
    """Equal weights, figures and predictions, bit for bit."""
    for name in ("model/model.safetensors", "predictions/dev.tsv", "predictions/test.tsv"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert read_rows(first) == read_rows(second)
    assert read_results(first) == read_results(second)


@pytest.mark.parametrize("killed_at", [[1], [3, 4], [8]], ids=str)
def test_a_killed_run_resumes_bit_for_bit(
    encoder: Path,
    table: list[str],
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: list[int],
) -> None:
    for step in killed_at:
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            with pytest.raises(Killed):
                finetune(tmp_path, encoder, *table)
    assert finetune(tmp_path, encoder, *table) == EXIT_FINISHED
    assert_same(straight, tmp_path / "finetune-table")


def test_a_run_killed_between_training_and_its_results_makes_them_again(
    encoder: Path, table: list[str], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("sharebert.finetune.results.write_atomically", die)
        with pytest.raises(Killed):
            finetune(tmp_path, encoder, *table)
    run = tmp_path / "finetune-table"
    assert [entry.step for entry in list_checkpoints(run / "checkpoints")] == [9]
    assert finetune(tmp_path, encoder, *table) == EXIT_FINISHED
    assert_same(straight, run)


def test_a_damaged_checkpoint_is_not_taken(
    encoder: Path, table: list[str], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "finetune-table"
    with monkeypatch.context() as patch:
        kill_at(patch, 5)
        with pytest.raises(Killed):
            finetune(tmp_path, encoder, *table)
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    file = checkpoint.path / "training_state.pt"
    file.write_bytes(file.read_bytes()[:-1])
    (run / "checkpoints/.saving-step-00000006-finetuned").mkdir()
    assert finetune(tmp_path, encoder, *table) == EXIT_FINISHED
    assert_same(straight, run)


def test_a_stop_signal_finishes_the_update_saves_and_exits_75(
    encoder: Path, table: list[str], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Loop._update

    def update(self: Loop) -> None:
        if self.counters.step == 4:
            os.kill(os.getpid(), signal.SIGUSR2)
        original(self)

    run = tmp_path / "finetune-table"
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_update", update)
        assert finetune(tmp_path, encoder, *table) == EXIT_STOPPED
    assert json.loads((run / "status.json").read_text()) == {"state": "stopped", "step": 5, "reason": "SIGUSR2"}
    assert finetune(tmp_path, encoder, *table) == EXIT_FINISHED
    assert_same(straight, run)


def test_a_run_stopped_while_it_scores_scores_again(
    encoder: Path, table: list[str], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop_module.predict

    def predict(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    run = tmp_path / "finetune-table"
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "predict", predict)
        assert finetune(tmp_path, encoder, *table) == EXIT_STOPPED
    assert not [row for row in read_rows(run) if "eval/score" in row]
    assert finetune(tmp_path, encoder, *table) == EXIT_FINISHED
    assert_same(straight, run)


def test_a_finished_run_has_nothing_to_do_and_another_request_is_refused(
    encoder: Path, table: list[str], straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(straight, tmp_path / "finetune-table")
    assert json.loads((run / "status.json").read_text()) == {"state": "finished", "step": 9, "reason": ""}
    assert not (run / "checkpoints").exists()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert finetune(tmp_path, encoder, *table, "evaluation.batch_size=3") == EXIT_FINISHED
    assert "is finished: nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before
    rows = (dev := Path(table[2].partition("=")[2])).read_text()
    dev.write_text(rows.replace('"label": 1', '"label": 0', 1))
    assert finetune(tmp_path, encoder, *table) == EXIT_USAGE
    assert "not what the run began with (task.dev: sha256" in capsys.readouterr().err
    dev.write_text(rows)
    other = shutil.copytree(encoder, tmp_path / "other")
    for changed in (f"encoder={other}", "random_encoder=true"):
        assert finetune(tmp_path, encoder, *table, changed) == EXIT_USAGE
        assert f"\n  {changed.split('=')[0]}: " in capsys.readouterr().err
    calm = load_file(encoder / "model.safetensors")
    calm["cls.predictions.bias"] += 1.0
    save_file(calm, other / "model.safetensors", metadata={"format": "pt"})
    config = OmegaConf.load(run / "config.yaml")
    config.encoder = str(other)
    OmegaConf.save(config, run / "config.yaml")
    assert finetune(tmp_path, other, *table) == EXIT_USAGE  # as if it had been another one under that name
    assert "not what the run began with (encoder: sha256" in capsys.readouterr().err
    assert finetune(tmp_path, encoder, *table, "seed=2", "checkpoint.resume=never") == EXIT_FINISHED
    assert (tmp_path / "finetune-table.replaced-1/results.json").is_file()
    assert read_results(run)["seed"] == 2


def test_other_data_under_the_same_names_is_refused_on_a_resume(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"task.{name}={write_lines(tmp_path / f'{name}.jsonl', invented_rows(8))}" for name in ("train", "dev")]
    settings = ["task=table", *files, "global_batch_size=4", "checkpoint.every_steps=1"]
    with monkeypatch.context() as patch:
        kill_at(patch, 1)
        with pytest.raises(Killed):
            finetune(tmp_path, encoder, *settings)
    relabelled = [{**row, "label": 1 - row["label"]} for row in invented_rows(8)]
    for name, rows, part in (("dev", relabelled, "dev labels"), ("train", invented_rows(8, seed=1), "train")):
        write_lines(tmp_path / f"{name}.jsonl", rows)
        assert finetune(tmp_path, encoder, *settings) == EXIT_USAGE
        assert f"not what the run began with ({part}: sha256" in capsys.readouterr().err


def test_a_part_that_is_gone_or_new_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\(test: none there, expected abc\)"):
        refuse_other_data({"train": "x", "test": "abc"}, {"train": "x"}, Path("run"))
    with pytest.raises(ConfigError, match=r"\(test: sha256 abc, expected none\)"):
        refuse_other_data({"train": "x", "test": None}, {"train": "x", "test": "abc"}, Path("run"))


def test_a_finished_run_needs_no_connection(
    encoder: Path,
    table: list[str],
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def offline(*_: object) -> None:
        raise ConfigError("no hub")

    monkeypatch.setattr(run_module, "source_hashes", offline)
    shutil.copytree(straight, tmp_path / "finetune-table")
    assert finetune(tmp_path, encoder, *table) == EXIT_FINISHED
    shown = capsys.readouterr().err
    assert "no hub: the data was not compared" in shown
    assert "is finished: nothing to do" in shown


def test_the_dev_score_depends_on_no_batch_size_and_scoring_changes_nothing(
    encoder: Path, table: list[str], straight: Path, tmp_path: Path
) -> None:
    assert finetune(tmp_path, encoder, *table, "evaluation.batch_size=3") == EXIT_FINISHED
    assert_same(straight, tmp_path / "finetune-table")
    assert finetune(tmp_path, encoder, *table, "run_name=often", "evaluation.every_steps=1") == EXIT_FINISHED
    assert read_results(tmp_path / "often") == read_results(straight)  # its model's hash is in there


def test_micro_batches_do_not_change_the_gradient(encoder: Path, table: list[str], tmp_path: Path) -> None:
    norms = []
    for size in (1, 4):
        settings = [f"run_name=m{size}", f"engine.micro_batch_size={size}", "dropout=0", "epochs=1"]
        assert finetune(tmp_path, encoder, *table, *settings) == EXIT_FINISHED
        norms.append([row["train/grad_norm"] for row in read_rows(tmp_path / f"m{size}") if "train/grad_norm" in row])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_a_run_learns_what_its_texts_say(encoder: Path, tmp_path: Path) -> None:
    rows = [{"text": f"the {word} is here", "label": label} for word, label in (("river", "wet"), ("road", "dry"))] * 8
    files = [f"task.{name}={write_lines(tmp_path / f'{name}.jsonl', rows)}" for name in ("train", "dev", "test")]
    settings = ["task=table", *files, "epochs=10", "optim.lr=3e-3", "global_batch_size=8"]
    assert finetune(tmp_path, encoder, *settings) == EXIT_FINISHED
    run = tmp_path / "finetune-table"
    assert read_results(run)["figures"]["eval/accuracy"] == 1.0
    log = (run / "log.txt").read_text()
    assert "dropout is 0, as the encoder was pretrained; the paper fine-tunes with 0.1" in log
    assert "longer than in pretraining" not in log
    lines = [line.split("\t") for line in (run / "predictions/test.tsv").read_text().splitlines()]
    assert lines[0] == ["index", "prediction", "label", "p(dry)", "p(wet)"]
    assert [line[1] for line in lines[1:3]] == ["wet", "dry"]
    classify = transformers.pipeline("text-classification", str(run / "model"))
    assert [found["label"] for found in classify([row["text"] for row in rows[:2]])] == ["wet", "dry"]


def test_a_regression_learns_values_of_any_scale(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["river", "road", "boat", "house"]
    rows = [{"text": f"the {word}", "label": 5000.5 + 1000 * place} for place, word in enumerate(words)] * 6
    files = [f"task.{name}={write_lines(tmp_path / f'{name}.jsonl', rows)}" for name in ("train", "dev")]
    settings = ["task=table", *files, "epochs=20", "optim.lr=3e-3", "global_batch_size=8"]
    short = shutil.copytree(encoder, tmp_path / "short encoder")
    config = json.loads((short / "config.json").read_text())
    assert config["sharebert_seq_len"] == 16
    (short / "config.json").write_text(json.dumps({**config, "sharebert_seq_len": 3}))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert finetune(tmp_path, Path("'~/short encoder'"), *settings) == EXIT_FINISHED
    run = tmp_path / "finetune-table"
    figures = read_results(run)["figures"]
    assert figures["eval/pearson"] > 0.9
    assert "are longer than in pretraining (3): the positions beyond" in (run / "log.txt").read_text()
    assert figures["eval/score"] == pytest.approx((figures["eval/pearson"] + figures["eval/spearman"]) / 2)
    written = [float(line.split("\t")[1]) for line in (run / "predictions/dev.tsv").read_text().splitlines()[1:]]
    assert np.mean(written) == pytest.approx(6500.5, abs=400)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    with torch.no_grad():
        value = model(**tokenizer("the river", return_tensors="pt")).logits.item()
    assert value == pytest.approx(written[0], rel=1e-4)


def test_a_schedule_follows_the_paper() -> None:
    schedule = build_schedule(FinetuneConfig(), 1000)
    assert schedule.max_steps == 94  # 3 epochs of 31.25 updates
    assert sorted(schedule.epoch_ends) == [31, 62, 94]
    assert schedule.optim.warmup_steps == 9
    assert (schedule.optim.lr, schedule.optim.schedule) == (3e-5, "linear")
    assert sorted(build_schedule(FinetuneConfig(epochs=0.5), 64).epoch_ends) == [1]
    flat = FinetuneConfig(optim=FinetuneOptimConfig(warmup_fraction=0.0))
    assert build_schedule(flat, 1000).optim.warmup_steps == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "encoder=None: expected a folder written by `sharebert export"),
    ({"encoder": "x"}, "task.train=None: expected a file with task=table"),
    ({"task": {"name": "mnli", "train": "a.tsv"}}, "task.train='a.tsv': expected none with task=mnli"),
    ({"task": {"path": "x"}}, "task.path='x': expected none with task=table"),
    ({"task": {"name": "mnlii"}}, "(did you mean 'mnli'?)"),
    (
        {"task": {"text_columns": ["a", "b", "c"]}},
        "task.text_columns=['a', 'b', 'c']: expected the names of one or two",
    ),
    ({"task": {"kind": "guess"}}, "task.kind='guess': expected one of"),
    ({"task": {"max_length": 4}}, "task.max_length=4: expected at least 8"),
    ({"task": {"stride": 0}}, "task.stride=0: expected a number above 0"),
    ({"task": {"name": "ax"}, "random_encoder": True}, "random_encoder=True: expected false with task=ax"),
    ({"epochs": 0.0}, "epochs=0.0: expected a number above 0"),
    ({"seed": -1}, "seed=-1: expected"),
    ({"dropout": 1.0}, "dropout=1.0: expected"),
    ({"optim": {"lr": 0.0}}, "optim.lr=0.0: expected a number above 0"),
    ({"optim": {"warmup_fraction": 1.5}}, "optim.warmup_fraction=1.5: expected a number from 0 to 1"),
    ({"optim": {"betas": [0.9]}}, "optim.betas=[0.9]: expected two numbers"),
    ({"optim": {"weight_decay": -1.0}}, "optim.weight_decay=-1.0: expected"),
    ({"engine": {"precision": "fp16"}}, "engine.precision='fp16': expected one of"),
    ({"engine": {"device": "tpu"}}, "engine.device='tpu': expected one of"),
    ({"checkpoint": {"resume": "here"}}, "checkpoint.resume='here': expected one of auto, never"),
    ({"evaluation": {"batch_size": 0}}, "evaluation.batch_size=0: expected a number above 0"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[str(values) for values, _ in REFUSED])
def test_a_wrong_setting_is_refused_with_its_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_complete(from_dict(FinetuneConfig, values))
    assert message in str(refusal.value)


def test_a_wrong_request_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["encoder=x", "tsk=mnli"], "tsk: no such key (did you mean 'task'?)"),
        (["encoder=/nowhere", "task=mnli"], "encoder='/nowhere': no config.json there"),
    ):
        assert main(["finetune", *arguments]) == EXIT_USAGE
        shown = capsys.readouterr().err
        assert shown.startswith(f"sharebert finetune: {message}")
        assert not list(tmp_path.iterdir())


def test_bad_data_is_said_in_one_line(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "train.jsonl", [{"text": "a", "label": 1}] * 4)
    settings = ["task=table", f"task.train={file}", f"task.dev={file}"]
    assert finetune(tmp_path, encoder, *settings) == EXIT_FAILED
    shown = capsys.readouterr().err
    assert "train.jsonl: every row has the label '1'" in shown
    assert "Traceback" not in shown
    assert json.loads((tmp_path / "finetune-table/status.json").read_text())["state"] == "failed"


def test_help_shows_the_tasks_and_inspect_shows_a_run(
    encoder: Path, table: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["finetune", "--help"]) in (EXIT_FINISHED, None)
    assert "task: ax, cola, mnli" in capsys.readouterr().out
    assert finetune(tmp_path, encoder, *table, "checkpoint.keep_finished=true", "run_name=a") == EXIT_FINISHED
    run = tmp_path / "a"
    capsys.readouterr()
    assert main(["inspect", str(run), "--json"]) == EXIT_FINISHED
    assert json.loads(capsys.readouterr().out) == read_results(run)
    assert main(["inspect", str(run / "checkpoints/latest"), "--json"]) == EXIT_FINISHED
    meta = json.loads(capsys.readouterr().out)
    assert (meta["phase"], meta["step"], meta["max_steps"]) == ("finetuned", 9, 9)
    for path in (run, run / "checkpoints/latest"):
        assert main(["inspect", str(path)]) == EXIT_FINISHED
        assert "eval/accuracy" in capsys.readouterr().out
    assert main(["export", str(run / "checkpoints/latest"), str(tmp_path / "b")]) == EXIT_FAILED
    assert "a checkpoint of fine-tuning; expected one of pretraining" in capsys.readouterr().err
    assert finetune(tmp_path, encoder, *table, "run_name=a") == EXIT_FINISHED
    assert (run / "checkpoints/latest").exists()  # they were asked for
    (run / "model/model.safetensors").write_bytes(b"")
    assert main(["inspect", str(run)]) == EXIT_FAILED
    assert "checksum does not fit results.json" in capsys.readouterr().err
