"""`export --unshare`: training on from what it writes is training on from unsharing in the run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from conftest import Train
from test_resume import assert_equal_bits, final_state

from sharebert.checkpoint import load_tensors, read_meta
from sharebert.cli import main

SHORT = ["max_steps=8", "evaluation.every_steps=null"]
WATCHING = ["unshare=multi_step", "unshare.check_every=2", "unshare.threshold=0.998", "unshare.patience=1"]


def printed_settings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `export --unshare` says to add to the command, but for the name of the run."""
    line = capsys.readouterr().out.splitlines()[-1]
    return [setting for setting in shlex.split(line) if setting != "run_name=NEW"]


def test_the_same_command_goes_on_bit_for_bit_as_the_run_that_unshares_there(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SHORT, "unshare.optimizer_state=reset"]
    assert train("run_name=straight", *options) == 0
    start, folder = tmp_path / "outputs/straight/checkpoints/step-00000005-shared", tmp_path / "unshared"
    assert main(["export", "--unshare", str(start), str(folder)]) == 0
    before, meta = read_meta(start), read_meta(folder)
    assert (meta["step"], meta["phase"], meta["unshared_at"], meta["before_unsharing"]) == (5, "unshared", [6], False)
    assert meta["layer_groups"] == [[0, 1], [1, 2], [2, 3], [3, 4]]
    weights = before["files"]["model.safetensors"]["sha256"]
    assert meta["unshared_from"] == {"checkpoint": "step-00000005-shared", "weights_sha256": weights}
    assert meta["config"] == before["config"]
    assert len(load_tensors(folder)) > len(load_tensors(start))
    assert train("run_name=b", *options, *printed_settings(capsys)) == 0
    assert_equal_bits(final_state(tmp_path / "outputs/straight"), final_state(tmp_path / "outputs/b"))
    assert read_meta(tmp_path / "outputs/b/checkpoints/latest")["unshared_at"] == [6]


@pytest.mark.parametrize(
    ("policy", "start", "straight"),
    [
        (["unshare=always"], "step-00000004-shared", ["unshare=fixed", "unshare.step=5"]),
        (
            [*WATCHING, "optim.lr=0.02"],
            "step-00000004-partly-shared",
            [*WATCHING, "optim.lr=0.02", "unshare.latest_step=5"],
        ),
    ],
    ids=["always", "multi_step"],
)
def test_a_run_that_would_share_on_can_be_unshared_anywhere(
    train: Train, tmp_path: Path, policy: list[str], start: str, straight: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    saving = ["checkpoint.every_steps=2", "checkpoint.keep_last=9"]
    assert train("run_name=a", *SHORT, *saving, *policy) == 0
    checkpoint, folder = tmp_path / "outputs/a/checkpoints" / start, tmp_path / "unshared"
    capsys.readouterr()
    assert main(["export", "--unshare", str(checkpoint), str(folder)]) == 0
    settings = printed_settings(capsys)
    assert settings == [f"checkpoint.resume={folder}", "unshare.policy=fixed", "unshare.step=5"]
    assert train("run_name=b", *SHORT, *policy, *settings) == 0
    assert train("run_name=straight", *SHORT, *straight) == 0
    assert_equal_bits(final_state(tmp_path / "outputs/straight"), final_state(tmp_path / "outputs/b"))
    capsys.readouterr()
    assert train("run_name=c", *SHORT, *policy, settings[0]) == 2
    assert f"unshare.policy: fixed -> {policy[0].removeprefix('unshare=')}" in capsys.readouterr().err


def test_a_finished_run_is_a_start_for_another_one(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run_name=a", *SHORT, "max_steps=3", "unshare=always") == 0
    latest, folder = tmp_path / "outputs/a/checkpoints/latest", tmp_path / "unshared"
    assert main(["export", "--unshare", str(latest), str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "its run is finished" in shown
    assert main(["inspect", str(folder)]) == 0
    assert "unshared from      step-00000003-shared" in capsys.readouterr().out
    assert train("run_name=b", *SHORT, *shlex.split(shown.splitlines()[-1])) == 0


def test_a_checkpoint_in_which_nothing_shares_is_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run_name=a", *SHORT, "max_steps=1", "unshare=never") == 0
    latest = tmp_path / "outputs/a/checkpoints/latest"
    assert main(["export", "--unshare", str(latest), str(tmp_path / "unshared")]) == 2
    assert "a checkpoint of phase unshared, in which no layers share" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
