"""The verbs `inspect` and `evaluate` on a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import Train, invented_text

from data_prep.prepare import tokenize_files
from sharebert.cli import main


@pytest.fixture
def run(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run."""
    monkeypatch.setattr("sys.argv", ["sharebert", "train"])
    assert train("run_name=a", "evaluation.every_steps=null") == 0
    capsys.readouterr()
    return tmp_path / "outputs/a"


def test_inspect_prints_phase_step_and_groups_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run / "checkpoints/step-00000005-shared"), "--json"]) == 0
    shared = json.loads(capsys.readouterr().out)
    assert (shared["phase"], shared["step"], shared["layer_groups"]) == ("shared", 5, [[0, 4]])
    assert shared["before_unsharing"]
    assert shared["samples_seen"] == 40
    assert shared["parameters"]["unique"] < shared["parameters"]["effective"]
    assert main(["inspect", str(run / "checkpoints/latest"), "--json"]) == 0
    unshared = json.loads(capsys.readouterr().out)
    assert (unshared["phase"], unshared["layer_groups"]) == ("unshared", [[0, 1], [1, 2], [2, 3], [3, 4]])
    assert unshared["parameters"]["unique"] == unshared["parameters"]["effective"] == shared["parameters"]["effective"]
    assert {"config", "corpus", "git_commit", "command_line", "library_versions", "files"} <= unshared.keys()
    assert unshared["command_line"] == "sharebert train"


def test_inspect_says_it_to_people_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run / "checkpoints/step-00000005-shared")]) == 0
    shown = capsys.readouterr().out
    assert "shared, the last before unsharing" in shown
    assert "1-4" in shown
    assert "fixed at update 6" in shown
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    (loss,) = re.findall(r"held out +loss (\d\.\d{4}) .*, at step 0\n", shown)  # that of step 0 is the last before it
    assert float(loss) == pytest.approx(first["eval/loss"], abs=1e-4)


def test_inspect_names_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints/step-00000005-shared/training_state.pt").write_bytes(b"")
    assert main(["inspect", str(run / "checkpoints/step-00000005-shared")]) == 1
    assert "training_state.pt: expected" in capsys.readouterr().err
    assert main(["inspect", str(run / "nothing")]) == 1


def test_evaluate_reads_any_text_and_agrees_with_itself(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "other.txt"
    text.write_text(invented_text(40, seed=5))
    for name in ("step-00000005-shared", "latest"):
        command = ["evaluate", str(run / "checkpoints" / name), "--files", str(text), "--precision", "fp32"]
        assert main([*command, "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert main([*command, "--json", "--batch-size", "3"]) == 0
        assert json.loads(capsys.readouterr().out) == pytest.approx(figures, rel=1e-5)
        assert figures["eval/targets"] > 100
        assert 0 < figures["eval/loss"] < 8
    assert main(command) == 0
    assert "eval/unigram_loss" in capsys.readouterr().out


def test_evaluate_reads_text_as_the_run_did(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("run_name=lines", "data.txt_documents=line", "max_steps=1", "unshare.step=1") == 0
    seen: list[str] = []
    monkeypatch.setattr(
        "sharebert.evaluate_text.tokenize_files",
        lambda config, *paths: seen.append(config.txt_documents) or tokenize_files(config, *paths),
    )
    (tmp_path / "other.txt").write_text(invented_text(40, seed=5))
    checkpoint = tmp_path / "outputs/lines/checkpoints/latest"
    assert main(["evaluate", str(checkpoint), "--files", str(tmp_path / "other.txt")]) == 0
    assert seen == ["line"]


def test_evaluate_names_a_pattern_that_matches_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run / "checkpoints/latest"), "--files", "/nowhere/*.txt"]) == 2
    assert "/nowhere/*.txt" in capsys.readouterr().err
