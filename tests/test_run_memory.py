"""Memory of a run by phase, the micro-batch that fits, and what training says about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Train
from engine import VOCABULARY, small_config

from sharebert import run_memory
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED
from sharebert.precision import Precision
from sharebert.run_folder import RunFolder
from sharebert.run_memory import RunMemory, parameter_sizes, phases_of, readable_bytes
from sharebert.train_state import build_train_state
from sharebert.trainer import Trainer

CPU = torch.device("cpu")


def memory_of(processes: int = 1, **groups: dict[str, object]) -> RunMemory:
    config = small_config(**groups)
    return RunMemory(config, 50, processes, parameter_sizes(config, 50))


@pytest.mark.parametrize("unit_layers", [1, 2, 6])
def test_parameters_are_those_of_the_model_that_trains(unit_layers: int) -> None:
    for policy, phase in (("always", "shared"), ("never", "unshared")):
        config = small_config(unshare={"policy": policy, "unit_layers": unit_layers})
        state = build_train_state(config, VOCABULARY.vocab_size, CPU, Precision("fp32", CPU), None)
        sizes = parameter_sizes(config, VOCABULARY.vocab_size).in_phase(phase)
        assert sum(sizes) == state.unique_parameters()
        assert sorted(sizes) == sorted(parameter.numel() for parameter in state.model.parameters())


@pytest.mark.parametrize(
    ("unshare", "phases"),
    [
        ({"policy": "fixed", "step": 6}, ("shared", "unshared")),
        ({"policy": "fixed", "step": 1}, ("unshared",)),
        ({"policy": "adaptive", "check_every": 2}, ("shared", "unshared")),
        ({"policy": "adaptive", "check_every": 4}, ("shared",)),  # the third check is in the last update
        ({"policy": "adaptive", "check_every": 4, "latest_step": 12}, ("shared", "unshared")),
        ({"policy": "never"}, ("unshared",)),
        ({"policy": "always"}, ("shared",)),
        ({"policy": "always", "unit_layers": 6}, ("unshared",)),
    ],
)
def test_phases_are_those_of_the_policy(unshare: dict[str, object], phases: tuple[str, ...]) -> None:
    assert phases_of(small_config(unshare=unshare)) == phases


def test_gradients_are_there_all_along_with_micro_batches_and_with_several_processes() -> None:
    alone = memory_of().peak(8)
    assert memory_of(processes=2).local_batch == 4
    gradients = 4 * sum(parameter_sizes(small_config(), 50).in_phase("unshared"))
    # The same 4 sequences: as half of a window, or as the share of one of two processes.
    assert memory_of().peak(4) == memory_of(processes=2).peak(4)
    assert memory_of(global_batch_size=16).peak(8) - alone == pytest.approx(gradients, rel=0.2)  # type: ignore[arg-type]


def test_a_check_holds_the_gradients_of_every_unit() -> None:
    def shared(**unshare: object) -> int:
        model = {"num_layers": 20, "hidden_size": 256, "num_heads": 2, "intermediate_size": 1024}
        return memory_of(model={**model, "max_position_embeddings": 16}, unshare=unshare).by_phase(1)["shared"]

    assert shared(policy="adaptive", check_every=2) > shared(policy="always") == shared(policy="fixed", step=3)


def test_the_largest_micro_batch_divides_the_batch_and_fits() -> None:
    memory = memory_of(global_batch_size=12)  # type: ignore[arg-type]
    assert memory.micro_batch_sizes() == [1, 2, 3, 4, 6, 12]
    assert memory.largest_micro_batch(memory.peak(12)) == 12
    assert memory.largest_micro_batch(memory.peak(4)) == 4
    assert memory.largest_micro_batch(memory.peak(12), below=12) == 6
    assert memory.largest_micro_batch(memory.peak(1) - 1) is None


def test_advice_names_what_fits_or_says_that_nothing_does() -> None:
    memory = memory_of()
    assert memory.advice(memory.peak(4)).startswith("engine.micro_batch_size=4 does: ")
    assert memory.advice(memory.peak(4)).endswith("2 x 4 sequences")
    assert memory.peak(1, True) < memory.peak(1)
    text = memory.advice(memory.peak(1) - 1)
    assert text.startswith("engine.micro_batch_size=")
    assert "engine.activation_checkpointing=true does" in text
    assert memory.advice(1000).startswith("nothing does: a single sequence takes ")


def test_training_warns_of_a_batch_that_will_hardly_fit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_memory, "free_bytes", lambda device: 1000)
    assert train("max_steps=1", "unshare=never") == EXIT_FINISHED
    shown = capsys.readouterr().err
    assert "engine.micro_batch_size=8 will hardly fit" in shown
    assert "nothing does" in shown


def test_training_is_silent_about_a_batch_that_fits(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("max_steps=1", "unshare=never") == EXIT_FINISHED
    assert "hardly fit" not in capsys.readouterr().err


def test_a_gpu_without_memory_left_names_the_micro_batch_that_would_fit(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    monkeypatch.setattr(Trainer, "fit", fail)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))
    assert train() == EXIT_FAILED
    shown = capsys.readouterr().err
    assert "engine.micro_batch_size=8 does not fit into 1.00 GiB; engine.micro_batch_size=4 does" in shown
    assert "Traceback" not in shown
    reason = RunFolder(tmp_path / "outputs" / "run").read_status()["reason"]
    assert "engine.micro_batch_size=4" in reason


def test_bytes_are_readable() -> None:
    assert [readable_bytes(count) for count in (512, 3 * 2**20, 5 * 2**30)] == ["0.5 KiB", "3.0 MiB", "5.00 GiB"]


def test_a_phase_that_does_not_occur_has_no_memory() -> None:
    config = dataclasses.replace(small_config(), unshare=dataclasses.replace(small_config().unshare, policy="never"))
    assert list(RunMemory(config, 50, 1, parameter_sizes(config, 50)).by_phase(1)) == ["unshared"]
