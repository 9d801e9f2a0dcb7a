"""A checkpoint is whole or absent."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Train
from test_resume import assert_equal_bits, final_state

from sharebert import checkpoint
from sharebert.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    NewerFormatError,
    check_free_space,
    find_newest_good,
    free_name,
    link_checkpoint,
    list_checkpoints,
    load_tensors,
    load_training_state,
    read_meta,
    verify,
)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep_last=2, keep_every=None)


def save(
    folder: CheckpointFolder, step: int, phase: str = "shared", before_unsharing: bool = False, **meta: object
) -> Path:
    return folder.save(
        tensors={"weight": torch.full((300,), float(step))},
        training_state={"optimizer": {"weight": {"step": torch.tensor(float(step))}}, "counters": {"step": step}},
        tokenizer=b"{}",
        meta={"step": step, "phase": phase, "before_unsharing": before_unsharing, **meta},
    )


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def test_a_saved_checkpoint_reads_back(folder: CheckpointFolder) -> None:
    path = save(folder, 49999)
    assert path.name == "step-00049999-shared"
    assert verify(path)["step"] == 49999
    assert torch.equal(load_tensors(path)["weight"], torch.full((300,), 49999.0))
    assert load_training_state(path)["counters"] == {"step": 49999}
    assert os.readlink(folder.path / "latest") == "step-00049999-shared"


def test_retention_keeps_the_newest_the_ones_before_unsharing_and_every_nth(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep_last=2, keep_every=40)
    for step in range(10, 101, 10):
        save(folder, step, "shared" if step <= 30 else "unshared", before_unsharing=step == 30)
    assert [entry.step for entry in list_checkpoints(folder.path)] == [30, 40, 80, 90, 100]


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "one bit"])
def test_any_damage_is_found_and_the_checkpoint_before_is_taken(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    good = save(folder, 10)
    file = save(folder, 20) / name
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[:-2])  # of meta.json the last byte is a line feed
    else:
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        verify(file.parent)
    assert find_newest_good(folder.path) == good
    assert "step-00000020-shared is damaged" in caplog.text


def test_every_single_bit_of_meta_counts(folder: CheckpointFolder) -> None:
    path = save(folder, 10)
    original, expected = (path / "meta.json").read_bytes(), read_meta(path)
    for position in range(0, len(original), 7):
        data = bytearray(original)
        data[position] ^= 1
        (path / "meta.json").write_bytes(data)
        try:
            meta = read_meta(path)
        except CheckpointError:
            continue
        assert meta == expected, f"byte {position} changed unnoticed"  # white space between keys may


def test_saving_over_a_damaged_folder_moves_it_aside(folder: CheckpointFolder) -> None:
    path = save(folder, 10)
    (path / "model.safetensors").write_bytes(b"not a tensor")
    assert verify(save(folder, 10))["step"] == 10
    assert names(folder) == ["latest", "step-00000010-shared", "step-00000010-shared.damaged-1"]


def test_saving_again_over_a_good_one_keeps_it(folder: CheckpointFolder) -> None:
    before = (save(folder, 10) / "meta.json").stat().st_mtime_ns
    assert (save(folder, 10) / "meta.json").stat().st_mtime_ns == before


def test_other_folders_and_links_are_none_of_ours(folder: CheckpointFolder) -> None:
    save(folder, 10)
    for name in ("step-00000099-shared.damaged-1", ".saving-step-00000099-shared", "notes", "step-7-shared"):
        (folder.path / name).mkdir()
    assert [entry.step for entry in list_checkpoints(folder.path)] == [10]


def test_a_name_to_move_something_to_is_free(tmp_path: Path) -> None:
    for number in (1, 2):
        free_name(tmp_path / "run", "replaced").mkdir()
        assert (tmp_path / f"run.replaced-{number}").is_dir()


def test_retention_counts_no_damaged_checkpoint_that_lies_ahead(folder: CheckpointFolder) -> None:
    """A run that goes on from 10 past a damaged 30 must not take 30 for its newest."""
    folder.keep_last = 3
    save(folder, 10)
    for step in (30, 40):
        (save(folder, step) / "model.safetensors").write_bytes(b"")
    folder.keep_last = 1
    saved = save(folder, 20)
    assert [entry.step for entry in list_checkpoints(folder.path)] == [20, 30, 40]
    assert find_newest_good(folder.path) == saved


def test_damaged_ones_are_moved_aside_where_retention_does_not_count_them(folder: CheckpointFolder) -> None:
    good = save(folder, 10)
    (save(folder, 20) / "model.safetensors").write_bytes(b"")
    assert find_newest_good(folder.path) == good
    assert names(folder) == ["latest", "step-00000010-shared", "step-00000020-shared.damaged-1"]
    assert (folder.path / "latest").readlink().name == good.name
    (save(folder, 30) / "model.safetensors").write_bytes(b"")
    assert find_newest_good(folder.path) == good  # two are kept, and a damaged one took no place


def test_a_kill_before_latest_is_moved_is_mended(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, 10)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, target: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save(folder, 20)
    newest = find_newest_good(folder.path)
    assert newest is not None
    assert (folder.path / "latest").readlink().name == newest.name == "step-00000020-shared"
    assert names(folder) == ["latest", "step-00000010-shared", "step-00000020-shared"]


def test_a_newer_format_is_neither_passed_over_nor_moved(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 10)
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 0)
    with pytest.raises(NewerFormatError):
        find_newest_good(folder.path)
    assert names(folder) == ["latest", "step-00000010-shared"]


def test_a_deletion_that_was_killed_leaves_no_half_checkpoint(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def die(path: Path, **_: object) -> None:
        if path.name.startswith(".deleting"):
            (path / "meta.json").unlink()
            raise KilledError

    for step in (10, 20):
        save(folder, step)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KilledError):
            save(folder, 30)
    assert [entry.step for entry in list_checkpoints(folder.path)] == [20, 30]
    checkpoint.remove_leftovers(folder.path)
    assert names(folder) == ["latest", "step-00000020-shared", "step-00000030-shared"]


def test_a_checkpoint_saved_again_survives_a_kill_between_the_two_renames(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    rename = Path.rename

    def die(path: Path, target: Path) -> Path:
        if path.name.startswith(".saving"):
            raise KilledError
        return rename(path, target)

    save(folder, 10, evaluation=None)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KilledError):
            save(folder, 10, evaluation={"eval/loss": 1.0})
    assert not list_checkpoints(folder.path)
    checkpoint.remove_leftovers(folder.path)
    assert [path.name for path in folder.path.iterdir() if not path.is_symlink()] == ["step-00000010-shared"]
    assert verify(folder.path / "step-00000010-shared")["evaluation"] == {"eval/loss": 1.0}


@pytest.mark.parametrize("comes_back", [True, False], ids=["at once", "at the next start"])
def test_a_checkpoint_stays_when_its_replacement_cannot_take_its_name(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.startswith(".saving") or (path.name.startswith(".deleting") and not comes_back):
            raise OSError(errno.ESTALE, "stale")
        return rename(path, target)

    save(folder, 10)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointError, match="older checkpoints are intact"):
            save(folder, 10, evaluation={"eval/loss": 1.0})
    assert len(list_checkpoints(folder.path)) == comes_back
    checkpoint.remove_leftovers(folder.path)
    assert names(folder) == ["latest", "step-00000010-shared"]
    assert "evaluation" not in verify(folder.path / "step-00000010-shared")


def test_a_linked_checkpoint_is_whole_or_absent(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    source, write_text = save(folder, 10), Path.write_text

    def die(path: Path, *arguments: Any, **options: Any) -> int:
        if path.name == "more.json":
            raise KilledError
        return write_text(path, *arguments, **options)

    other = tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", die)
        with pytest.raises(KilledError):
            link_checkpoint(source, other, {"more.json": "{}"})
    checkpoint.remove_leftovers(other)
    assert not list_checkpoints(other)
    link_checkpoint(source, other, {"more.json": "{}"})
    assert (list_checkpoints(other)[0].path / "more.json").read_text() == "{}"


def test_within_a_step_the_later_phase_is_the_newer(folder: CheckpointFolder) -> None:
    for phase in ("unshared", "shared", "partly-shared"):
        save(folder, 10, phase)
    assert [entry.phase for entry in list_checkpoints(folder.path)] == ["partly-shared", "unshared"]


def test_a_newer_format_is_refused(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folder, 10)
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 0)
    with pytest.raises(CheckpointError, match="format version 1; this sharebert reads up to 0"):
        read_meta(path)


def test_too_little_free_space_is_said_with_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check_free_space(tmp_path, 10**9)
    with pytest.raises(CheckpointError, match=r"1\.00 GB free, expected at least 2\.00 GB"):
        check_free_space(tmp_path, 2 * 10**9)


def test_a_full_disk_leaves_the_checkpoint_before_usable(folder: CheckpointFolder) -> None:
    good = save(folder, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800, hard))  # the file system takes no more than 800 bytes of a file
    try:
        with pytest.raises(CheckpointError, match=r"could not be written.*older checkpoints are intact"):
            save(folder, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert names(folder) == ["latest", "step-00000010-shared"]
    assert find_newest_good(folder.path) == good
    verify(save(folder, 20))


def wait_for_a_checkpoint(checkpoints: Path, process: subprocess.Popen[bytes], newer_than: int) -> None:
    """Return once a later checkpoint than step `newer_than` begins to exist, or the process ended."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        steps = [entry.step for entry in list_checkpoints(checkpoints)]
        if steps and steps[-1] > newer_than:
            return
        time.sleep(0.01)


def kill_loop(small_run: list[str], output_dir: Path, kills: int) -> None:
    """Kill a run that saves after every update, again and again, at times that fall anywhere in a save."""
    options = ["max_steps=4000", "unshare.step=9", "checkpoint.every_steps=1", "evaluation.every_steps=null"]
    keys = {option.split("=")[0] for option in options}
    command = [sys.executable, "-m", "sharebert", "train", f"output_dir={output_dir}", "run_name=killed", *options]
    command += [override for override in small_run if override.split("=")[0] not in keys]
    checkpoints, reached = output_dir / "killed/checkpoints", 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kill in range(kills):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
        wait_for_a_checkpoint(checkpoints, process, reached)
        time.sleep(0.1 + 0.037 * kill % 0.2)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        entries = list_checkpoints(checkpoints)
        for entry in entries:  # under its final name a checkpoint is whole, at any moment
            verify(entry.path)
        assert entries[-1].step > reached
        reached = entries[-1].step


def finish_and_compare(train: Train, tmp_path: Path, output_dir: Path) -> None:
    """The state at the last kill is that of a run which was never killed."""
    killed = output_dir / "killed"
    reached = list_checkpoints(killed / "checkpoints")[-1].step
    options = ["max_steps=4000", "unshare.step=9", "evaluation.every_steps=null", f"checkpoint.every_steps={reached}"]

    class Reached(BaseException):
        pass

    def stop_after_saving(self: Any, **arguments: Any) -> Path:
        path = original(self, **arguments)
        if arguments["meta"]["step"] == reached:
            raise Reached
        return path

    original = CheckpointFolder.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "save", stop_after_saving)
        with pytest.raises(Reached):
            train("run_name=straight", *options)
    assert_equal_bits(final_state(tmp_path / "outputs/straight"), final_state(killed))


@pytest.mark.processes
def test_sigkill_while_saving_every_step_never_leaves_half_a_checkpoint(
    train: Train, small_run: list[str], tmp_path: Path
) -> None:
    kill_loop(small_run, tmp_path / "outputs", kills=2)
    finish_and_compare(train, tmp_path, tmp_path / "outputs")


@pytest.mark.slow
@pytest.mark.processes
def test_twenty_sigkills_while_saving_every_step(train: Train, small_run: list[str], tmp_path: Path) -> None:
    kill_loop(small_run, tmp_path / "outputs", kills=20)
    finish_and_compare(train, tmp_path, tmp_path / "outputs")
