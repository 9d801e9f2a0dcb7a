"""Asked to stop in any part of its work, a run ends with status 75; the next one ends as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Train
from test_resume import Killed, assert_equal_bits, final_state, signal_at

from data_prep.documents import iterate_documents
from sharebert import checkpoint, evaluate, launch
from sharebert.checkpoint import list_checkpoints, read_meta
from sharebert.cli import main
from sharebert.launch import EXIT_FINISHED, EXIT_STOPPED


def signal_in_call(
    patch: pytest.MonkeyPatch, place: Any, name: str, number: int = 1, signals: tuple[int, ...] = (signal.SIGUSR2,)
) -> None:
    """Receive `signals` at the beginning of the `number`-th call of the function `name` of `place`."""
    original, calls = getattr(place, name), []

    def call(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            for one in signals:
                os.kill(os.getpid(), one)
        return original(*arguments, **keywords)

    patch.setattr(place, name, call)


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("perf/")} for line in lines]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def straight(train: Train, tmp_path: Path, kept: Path) -> Path:
    """A run that nothing disturbs; made once."""
    run = kept / "straight"
    if not run.exists():
        assert train("run_name=straight", *OPTIONS) == EXIT_FINISHED
        (tmp_path / "outputs/straight").rename(run)
    return run


OPTIONS = ["engine.micro_batch_size=4", "checkpoint.every_steps=4"]
PLACES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "first update": lambda patch: signal_at(patch, 0, signal.SIGUSR1),
    "first evaluation": lambda patch: signal_in_call(patch, evaluate, "correct_predictions", 2),
    "evaluation": lambda patch: signal_in_call(patch, evaluate, "correct_predictions", 6),  # the one after update 5
    "last evaluation": lambda patch: signal_in_call(patch, evaluate, "correct_predictions", 14),
    "save": lambda patch: signal_in_call(patch, checkpoint, "save_file"),
    "save before unsharing": lambda patch: signal_in_call(patch, checkpoint, "save_file", 2),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_stop_at_any_place_changes_nothing_in_the_end(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Path, place: str
) -> None:
    run = tmp_path / "outputs/stopped"
    with monkeypatch.context() as patch:
        PLACES[place](patch)
        assert train("run_name=stopped", *OPTIONS) == EXIT_STOPPED
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    assert train("run_name=stopped", *OPTIONS) == EXIT_FINISHED
    assert_equal_bits(final_state(straight), final_state(run))
    assert rows(straight) == rows(run)


def test_a_stop_in_the_last_save_comes_too_late_to_matter(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_in_call(monkeypatch, checkpoint, "save_file", 4)  # after updates 4, 5, 8 and 12
    assert train("run_name=a", *OPTIONS) == EXIT_FINISHED


def test_a_second_signal_during_a_save_ends_at_once_and_harms_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Path
) -> None:
    def leave(status: int) -> None:
        raise Killed(status)

    run = tmp_path / "outputs/a"
    with monkeypatch.context() as patch:
        patch.setattr(launch, "ECHO_SECONDS", 0.0)
        patch.setattr(launch.os, "_exit", leave)
        signal_in_call(patch, checkpoint, "save_file", 3, (signal.SIGTERM, signal.SIGTERM))
        with pytest.raises(Killed):
            train("run_name=a", *OPTIONS)
    assert train("run_name=a", *OPTIONS) == EXIT_FINISHED
    assert_equal_bits(final_state(straight), final_state(run))


def test_the_time_limit_stops_as_a_signal_does(train: Train, tmp_path: Path, straight: Path) -> None:
    run = tmp_path / "outputs/a"
    assert train("run_name=a", "max_run_minutes=0.001", *OPTIONS) == EXIT_STOPPED  # long over, in a process of tests
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped"
    assert status["reason"] == "max_run_minutes=0.001"
    assert train("run_name=a", *OPTIONS) == EXIT_FINISHED
    assert_equal_bits(final_state(straight), final_state(run))


def test_a_restart_of_a_job_that_began_anew_goes_on(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["run_name=a", "checkpoint.resume=never"]
    with monkeypatch.context() as patch:
        signal_at(patch, 4)
        assert train(*options) == EXIT_STOPPED
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(*options) == EXIT_FINISHED
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["a"]
    assert rows(tmp_path / "outputs/a")[0]["step"] == 0


# ---------------------------------------------------------------------- while the data is prepared


def corpus_files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.glob("text_files-*/*/*.bin")}


def signal_at_document(patch: pytest.MonkeyPatch, number: int, target: Callable[[], None]) -> None:
    """Call `target` when document `number`, over all passes, is read."""
    calls = []

    def documents(sources: Any, config: Any, counts: Any, check_stop: Any = lambda: None) -> Any:
        def check() -> None:
            calls.append(1)
            if len(calls) == number:
                target()
            check_stop()

        return iterate_documents(sources, config, counts, check)

    patch.setattr("data_prep.prepare.iterate_documents", documents)


@pytest.mark.parametrize("number", [150, 450], ids=["for the tokenizer", "for the tokens"])
def test_a_stop_while_data_is_prepared_keeps_what_is_finished(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("data_prep.encode.BATCH_DOCUMENTS", 10)
    cache, run = tmp_path / "cache", tmp_path / "outputs/a"
    with monkeypatch.context() as patch:
        signal_at_document(patch, number, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("run_name=a", f"data.cache_dir={cache}") == EXIT_STOPPED
    assert json.loads((run / "status.json").read_text()) == {"state": "stopped", "step": 0, "reason": "SIGTERM"}
    if number == 450:
        (journal,) = cache.glob("*.partial/progress.json")
        assert json.loads(journal.read_text())["documents_done"] == 140
        assert list(cache.glob("tokenizer-*.json"))
    assert train("run_name=a", f"data.cache_dir={cache}") == EXIT_FINISHED
    assert train("run_name=b", f"data.cache_dir={tmp_path}/other") == EXIT_FINISHED
    assert corpus_files(cache) == corpus_files(tmp_path / "other")
    assert not list(cache.glob("*.partial"))


@pytest.mark.processes
def test_prepare_stops_with_its_workers_when_all_of_them_get_the_signal(
    small_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.encode.BATCH_DOCUMENTS", 10)
    options = [item for item in small_run if not item.startswith(("data.cache_dir=", "data.num_proc="))]
    options += [f"data.cache_dir={tmp_path}", "data.num_proc=2"]

    def signal_all() -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        signal_at_document(patch, 580, signal_all)
        assert main(["prepare", *options]) == EXIT_STOPPED
    assert not multiprocessing.active_children()
    assert main(["prepare", *options]) == EXIT_FINISHED


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # torch's own
def test_a_signal_during_the_first_compilation_stops_after_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_in_call(monkeypatch, __import__("torch._dynamo.convert_frame", fromlist=["x"]), "compile_frame")
    assert train("run_name=a", "engine.compile=true", "evaluation.every_steps=null") == EXIT_STOPPED
    (entry,) = list_checkpoints(tmp_path / "outputs/a/checkpoints")
    assert read_meta(entry.path)["step"] <= 1
