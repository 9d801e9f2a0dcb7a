"""The bench does the work that it says, and says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sharebert.bench import memory
from sharebert.bench import run as bench_module
from sharebert.bench.contestants import (
    TransformersProcess,
    TransformersUpdate,
    labels_of_all_tokens,
    phase_config,
    random_corpus,
)
from sharebert.cli import main
from sharebert.config import TrainConfig, from_dict
from sharebert.resolve import resolve

CPU = torch.device("cpu")
TINY = {
    "model": {
        "num_layers": 4,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    },
    "data": {"seq_len": 16, "vocab_size": 60},
    "engine": {"device": "cpu", "precision": "fp32"},
}


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "prepare_memory", lambda device: None)
    monkeypatch.setattr(bench_module, "has_transformers", lambda: False)
    monkeypatch.setattr(bench_module, "measure_peak_memory", lambda config, vocab_size, device: 2**20)
    monkeypatch.setattr(bench_module, "measure_matmul_peak", lambda device, dtype: 1e12)


def arguments() -> list[str]:
    return [f"{group}.{key}={value}" for group, values in TINY.items() for key, value in values.items()]


def test_the_figures_are_those_that_are_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments(), "--json", "--sequences", "4", "--seconds", "0"]) == 0
    figures = json.loads(capsys.readouterr().out)
    for name in ("tokens_per_second", "peak_share", "peak_memory_bytes", "ratio"):
        assert set(figures[name]) == {"shared", "unshared"}
    assert set(figures["seconds"]) == {"update", "data", "forward", "backward", "optimizer", "all_reduce"}
    assert figures["seconds"]["all_reduce"] == {"shared": 0.0, "unshared": 0.0}
    for phase in ("shared", "unshared"):
        parts = [figures["seconds"][part][phase] for part in ("data", "forward", "backward", "optimizer")]
        assert 0.0 < sum(parts) <= 1.5 * figures["seconds"]["update"][phase]
        assert figures["tokens_per_second"][phase] == pytest.approx(64 / figures["seconds"]["update"][phase])
        assert figures["bytes"]["optimizer_state"][phase] == 8 * figures["unique_parameters"][phase]
        assert figures["bytes"]["gradients"][phase] == 4 * figures["unique_parameters"][phase]
    assert (figures["rounds"], figures["sequences"], figures["transformers"]) == (3, 4, None)
    assert figures["unique_share"] < 0.5
    assert list(tmp_path.iterdir()) == []


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments(), "--seconds", "0"]) == 0
    shown = capsys.readouterr().out
    assert "| tokens/s" in shown
    assert "Unsharing takes" in shown


def test_the_work_of_transformers_is_the_same(tmp_path: Path) -> None:
    """The same tokens predicted in the same windows, and updates that learn."""
    pytest.importorskip("transformers")
    config, precision = resolve(from_dict(TrainConfig, {**TINY, "optim": {"lr": 1e-2}}), CPU, None)
    corpus = random_corpus(tmp_path, 60, 2000)
    theirs = TransformersUpdate(phase_config(config, "unshared", 4), corpus, CPU, precision)
    before = [parameter.clone() for parameter in theirs.model.parameters()]
    seconds = theirs.time_update()
    assert min(seconds[part] for part in ("data", "forward", "backward", "optimizer")) > 0.0
    moved = [not torch.equal(old, new) for old, new in zip(before, theirs.model.parameters(), strict=True)]
    assert sum(moved) > 0.9 * len(moved)


def test_labels_stand_at_the_predicted_tokens_only() -> None:
    ids, positions = torch.zeros(2, 5, dtype=torch.int64), torch.tensor([[1, 3], [0, 2]])
    labels, weights = torch.tensor([[7, 8], [9, 6]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    expected = [[-100, 7, -100, 8, -100], [9, -100, -100, -100, -100]]
    assert labels_of_all_tokens(ids, positions, labels, weights).tolist() == expected


def test_peak_memory_is_that_of_a_training_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "prepare_memory", lambda device: None)
    config, _ = resolve(from_dict(TrainConfig, TINY), CPU, None)
    peak = memory.run_two_updates(phase_config(config, "shared", 4), 60, CPU)
    assert peak > 50 * 2**20  # Python with torch alone is more


# ---------------------------------------------------------------------- processes of their own


@pytest.fixture
def with_workers() -> TrainConfig:
    """What a run on a GPU has by default: data workers, which a daemon may not start."""
    config, _ = resolve(from_dict(TrainConfig, {**TINY, "engine": {**TINY["engine"], "num_workers": 1}}), CPU, None)
    return phase_config(config, "unshared", 4)


@pytest.mark.processes
def test_memory_is_measured_in_a_process_that_has_data_workers(with_workers: TrainConfig) -> None:
    assert memory.measure_peak_memory(with_workers, 60, CPU) > 2**20


@pytest.mark.processes
@pytest.mark.slow
def test_transformers_runs_in_a_process_that_has_data_workers(with_workers: TrainConfig, tmp_path: Path) -> None:
    theirs = TransformersProcess(with_workers, random_corpus(tmp_path, 60, 4000), CPU)
    try:
        assert theirs.time_update()["update"] > 0
        theirs._process.terminate()
        with pytest.raises(RuntimeError, match="the process of Transformers ended with status -15"):
            theirs.time_update()
    finally:
        theirs.close()


def test_the_vocabulary_is_that_of_the_given_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(125))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    monkeypatch.chdir(tmp_path)
    unique = {}
    for tokenizer in ("null", "vocab.txt"):
        command = ["bench", *arguments(), f"data.tokenizer={tokenizer}", "--json", "--sequences", "4", "--seconds", "0"]
        assert main(command) == 0
        unique[tokenizer] = json.loads(capsys.readouterr().out)["unique_parameters"]["unshared"]
    assert unique["vocab.txt"] - unique["null"] == (192 - 64) * 16 + (130 - 60)  # rows (padded), biases
