"""The model of a task holds every tensor of the encoder, bit for bit, and only its head is new."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetuning import export_encoders
from safetensors.torch import load_file, save_file

from sharebert.config import ConfigError
from sharebert.data.format import DataError
from sharebert.finetune.classification import TextProblem
from sharebert.finetune.model import (
    build_model,
    check_extra,
    read_encoder_config,
    save_model,
    tensors_hash,
)
from sharebert.finetune.problem import Problem
from sharebert.finetune.sequences import load_tokenizer
from sharebert.finetune.squad import SquadProblem
from sharebert.finetune.tasks import TextSplit, TextTask

transformers = pytest.importorskip("transformers")

POOLER = ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]


def text_problem(encoder: Path, labels: tuple[str, ...] = ("no", "yes")) -> Problem:
    """A classification, or without labels a regression, of two rows."""
    values = np.array([0.0, 1.0]) if labels else np.array([100.0, 300.0])
    rows = TextSplit("train", (["the river", "a boat"],), values)
    dev = TextSplit("dev", rows.texts, values)
    metrics = ("accuracy",) if labels else ("pearson",)
    return TextProblem(TextTask(labels, metrics, (), rows, (dev,)), load_tokenizer(encoder / "tokenizer.json", 16), [])


def squad_problem() -> Problem:
    """One that names its class and its head."""
    return SquadProblem.__new__(SquadProblem)


@pytest.fixture(scope="module", params=["pre", "post"])
def exports(request: pytest.FixtureRequest, small_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Exported folders of one run, by phase."""
    found = export_encoders(small_run, tmp_path_factory.mktemp("exports"), request.param)
    assert {"shared", "partly-shared"} <= found.keys()
    return found


def encoder_tensors(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("bert.") and name not in POOLER}


@pytest.mark.parametrize("task", ["text", "squad"])
def test_every_tensor_of_every_kind_of_encoder_arrives_and_only_the_head_is_new(
    exports: dict[str, Path], task: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("sharebert"), "propagate", True)
    for folder in exports.values():
        caplog.clear()
        problem = text_problem(folder) if task == "text" else squad_problem()
        with caplog.at_level(logging.INFO):
            model = build_model(folder, problem, seed=1, random_encoder=False)
        before, after = load_file(folder / "model.safetensors"), dict(model.named_parameters())
        assert encoder_tensors(after).keys() == encoder_tensors(before).keys()
        assert tensors_hash(encoder_tensors(after)) == tensors_hash(encoder_tensors(before))
        head = [*POOLER, "classifier.weight", "classifier.bias"]
        expected = head if task == "text" else ["qa_outputs.weight", "qa_outputs.bias"]
        assert sorted(set(after) - set(before)) == sorted(expected)
        assert f"new, random ({len(expected)} tensors): {', '.join(expected)}" in caplog.text
        assert f"encoder: {len(encoder_tensors(before))} tensors of {folder}" in caplog.text
        assert model.training


def test_new_weights_are_a_function_of_the_seed_only(encoder: Path) -> None:
    problem = text_problem(encoder)
    first = build_model(encoder, problem, seed=1, random_encoder=False).state_dict()
    torch.manual_seed(77)
    again = build_model(encoder, problem, seed=1, random_encoder=False).state_dict()
    assert tensors_hash(first) == tensors_hash(again)
    other = build_model(encoder, problem, seed=2, random_encoder=False).state_dict()
    changed = [name for name in first if not torch.equal(first[name], other[name])]
    assert changed == ["bert.pooler.dense.weight", "classifier.weight"]  # biases begin at 0


def test_a_random_encoder_has_the_size_but_no_weight_of_the_encoder(encoder: Path) -> None:
    problem = text_problem(encoder)
    model = build_model(encoder, problem, seed=1, random_encoder=True)
    pretrained = load_file(encoder / "model.safetensors")
    matrices = [name for name, tensor in encoder_tensors(pretrained).items() if tensor.dim() == 2]
    for name, parameter in model.named_parameters():
        if name in matrices:
            assert parameter.shape == pretrained[name].shape
            assert not torch.equal(parameter, pretrained[name])
    other = build_model(encoder, problem, seed=2, random_encoder=True)
    assert tensors_hash(dict(model.named_parameters())) != tensors_hash(dict(other.named_parameters()))


def test_a_saved_model_is_loaded_by_transformers_with_its_labels_and_tokenizer(encoder: Path, tmp_path: Path) -> None:
    model = build_model(encoder, text_problem(encoder), seed=1, random_encoder=False)
    save_model(model, encoder, tmp_path / "model")
    loaded, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values())
    assert tensors_hash(loaded.state_dict()) == tensors_hash(model.state_dict())
    assert loaded.config.id2label == {0: "no", 1: "yes"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (
        tokenizer("the river")["input_ids"] == load_tokenizer(encoder / "tokenizer.json", None).encode("the river").ids
    )


def test_a_fine_tuned_model_is_an_encoder_with_a_pooler_whose_head_is_not_used(encoder: Path, tmp_path: Path) -> None:
    model = build_model(encoder, text_problem(encoder), seed=1, random_encoder=False)
    save_model(model, encoder, tmp_path / "model")
    problem = text_problem(encoder, labels=("a", "b"))
    again = build_model(tmp_path / "model", problem, seed=2, random_encoder=False, dropout=0.25)
    first, second = model.state_dict(), again.state_dict()
    assert [name for name in first if not torch.equal(first[name], second[name])] == ["classifier.weight"]
    assert {module.p for module in again.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}


def test_a_saved_regression_predicts_values_as_they_were(encoder: Path) -> None:
    problem = text_problem(encoder, labels=())
    assert isinstance(problem, TextProblem)
    assert problem.targets(np.array([0, 1])).tolist() == [-1.0, 1.0]  # mean 200, deviation 100
    model: Any = build_model(encoder, problem, seed=1, random_encoder=False).eval()
    batch = problem.train.batch(np.array([0, 1]), 0, torch.device("cpu"))
    with torch.no_grad():
        outputs = list(model(**batch).logits.numpy())
        expected = problem.predictions(outputs)
        problem.finish_model(model)
        np.testing.assert_allclose(model(**batch).logits[:, 0].numpy(), expected, rtol=1e-5)
    assert expected == pytest.approx([200, 200], abs=100)


def test_names_of_the_original_bert_are_understood(exports: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(exports["shared"], tmp_path / "original")
    given = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "classifier_dropout": 0.4}))
    norms = {
        name.rpartition(".")[0] for name, tensor in given.items() if re.search("(?i)(LayerNorm|ln)[.]weight", name)
    }
    assert len(norms) >= 7
    others = {"embeddings.position_ids": torch.arange(64)[None], "cls.predictions.decoder.weight": torch.ones(2, 2)}
    for prefix in ("", "bert."):
        old = {f"{prefix}{name}" if name.startswith("emb") else name: tensor for name, tensor in others.items()}
        for name, tensor in given.items():
            module, _, leaf = name.rpartition(".")
            leaf = {"weight": "gamma", "bias": "beta"}[leaf] if module in norms else leaf
            module = f"{prefix}{module.removeprefix('bert.')}" if module.startswith("bert.") else module
            old[f"{module}.{leaf}"] = tensor
        save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
        model = build_model(folder, text_problem(folder), seed=1, random_encoder=False, dropout=0.25)
        after = dict(model.named_parameters())
        assert tensors_hash(encoder_tensors(after)) == tensors_hash(encoder_tensors(given))
        assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}


# ---------------------------------------------------------------------- what is refused


def test_a_training_checkpoint_is_refused_with_the_command_to_export_it(encoder: Path) -> None:
    checkpoint = sorted((encoder.parent / "pre/checkpoints").glob("step-*"))[-1]
    with pytest.raises(ConfigError, match=f"a training checkpoint; export it first: sharebert export {checkpoint}"):
        read_encoder_config(checkpoint)


def test_a_folder_that_holds_no_encoder_is_refused(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json there; expected a folder written by `sharebert export"):
        read_encoder_config(tmp_path)
    shutil.copytree(encoder, tmp_path / "other")
    (tmp_path / "other/model.safetensors").rename(tmp_path / "other/pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin there; expected model.safetensors: load it with"):
        read_encoder_config(tmp_path / "other")
    (tmp_path / "other/pytorch_model.bin").rename(tmp_path / "other/model.safetensors")
    config = json.loads((encoder / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="model_type 'gpt2'"):
        read_encoder_config(tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drop", "tensor 'bert.embeddings.LayerNorm.weight' is missing|tensor 'bert.encoder.ln.bias' is missing"),
        ("add", "tensor 'bert.encoder.layer.9.ln.bias' has no place"),
        ("cut", r"tensor 'bert.encoder.ln.bias' is \(3,\); expected \(32,\)"),
        ("damage", "cannot be read"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused_by_the_name_of_the_tensor(
    encoder: Path, tmp_path: Path, change: str, message: str
) -> None:
    folder = shutil.copytree(encoder, tmp_path / "changed")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if change == "drop":
        del tensors["bert.encoder.ln.bias"]
    elif change == "add":
        tensors["bert.encoder.layer.9.ln.bias"] = torch.zeros(32)
    elif change == "cut":
        tensors["bert.encoder.ln.bias"] = torch.zeros(3)
    if change == "damage":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=message):
        build_model(folder, text_problem(encoder), seed=1, random_encoder=False)


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"transformers; pip install 'sharebert\[hf\]'"):
        check_extra()
