"""Runs that begin from weights: of a checkpoint, or of a folder that Transformers wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Train
from safetensors.torch import load_file, save_file

from sharebert.checkpoint import read_meta
from sharebert.cli import main
from sharebert.config import ConfigError, ModelConfig
from sharebert.model.bert import Bert, initialize
from sharebert.model.pretrained import load_pretrained, read_pretrained, read_shape
from sharebert.train_state import load_model

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}
CLASSES = (
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertModel",
    "BertForSequenceClassification",
    "MegatronBertForMaskedLM",
    "MegatronBertForPreTraining",
    "MegatronBertModel",
)


def write_folder(folder: Path, class_name: str = "BertForMaskedLM", **changes: Any) -> Any:
    """A folder as Transformers writes it, of a model with random weights and biases; returns the model."""
    torch.manual_seed(0)
    kind = transformers.MegatronBertConfig if class_name.startswith("Megatron") else transformers.BertConfig
    model = getattr(transformers, class_name)(kind(**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def load_ours(folder: Path, vocab_size: int = 100) -> Bert:
    shape = read_shape(folder)
    model = Bert(ModelConfig(**shape), vocab_size)
    initialize(model, 1, 0.02)
    load_pretrained(folder, model)
    return model.eval()


@pytest.mark.parametrize("class_name", CLASSES)
def test_the_hidden_states_and_logits_are_those_of_transformers(
    class_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = write_folder(tmp_path, class_name)
    ours = load_ours(tmp_path)
    ids = torch.randint(5, 100, (3, 16))
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[1, 9:] = False
    with torch.no_grad():
        hidden = ours.encoder(ours.embeddings(ids), torch.arange(ids.shape[1]).expand_as(ids), mask)
        encoder = theirs.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        torch.testing.assert_close(hidden[mask], encoder[mask], rtol=0.0, atol=1e-5)
        if class_name.endswith(("MaskedLM", "PreTraining")):
            output = theirs(input_ids=ids, attention_mask=mask.long())
            logits = output.logits if class_name.endswith("MaskedLM") else output.prediction_logits
            found = ours(ids, torch.arange(16).repeat(3, 1), mask)[..., :100]
            torch.testing.assert_close(found[mask], logits[mask], rtol=0.0, atol=1e-5)


def test_what_is_left_out_and_what_is_new_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sharebert.log import set_up_logging

    set_up_logging()
    write_folder(tmp_path / "a", "BertForPreTraining")
    load_ours(tmp_path / "a", vocab_size=98)
    said = capsys.readouterr().err
    assert "left out: bert.pooler.dense, cls.seq_relationship" in said
    assert "ids 98 to 99 are no tokens of the data" in said
    assert "token type 1 is not trained here" in said
    assert "no masked-LM head" not in said
    write_folder(tmp_path / "b", "BertForSequenceClassification")
    load_ours(tmp_path / "b")
    said = capsys.readouterr().err
    assert "left out: bert.pooler.dense, classifier" in said
    assert "no masked-LM head there" in said


def test_older_and_other_files_of_the_same_model_are_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "new")
    expected = load_ours(tmp_path / "new").state_dict()
    state = load_file(tmp_path / "new/model.safetensors")

    def renamed(name: str) -> str:
        if "LayerNorm" not in name:
            return name
        return name.replace(".weight", ".gamma").replace(".bias", ".beta")

    old = {renamed(name): tensor for name, tensor in state.items()}
    old["bert.embeddings.position_ids"] = torch.arange(16)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    shutil.copytree(tmp_path / "new", tmp_path / "old", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "old/config.json").read_text())
    sizes = {key: config[key] for key in SHAPE}  # as the configurations of the first BERTs
    (tmp_path / "old/config.json").write_text(json.dumps(sizes))
    torch.save(old, tmp_path / "old/pytorch_model.bin")
    shutil.copytree(tmp_path / "new", tmp_path / "parts", ignore=shutil.ignore_patterns("*.safetensors"))
    names = sorted(state)
    for number, half in enumerate((names[:9], names[9:])):
        save_file({name: state[name] for name in half}, tmp_path / f"parts/model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{int(name in names[9:])}.safetensors" for name in names}}
    (tmp_path / "parts/model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("old", "parts"):
        found = load_ours(tmp_path / name).state_dict()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def untie(state: dict[str, torch.Tensor]) -> None:
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"] + 1e-3


def add_layer(state: dict[str, torch.Tensor]) -> None:
    state["bert.encoder.layer.4.output.dense.bias"] = torch.zeros(32)


def shorten(state: dict[str, torch.Tensor]) -> None:
    name = "bert.embeddings.position_embeddings.weight"
    state[name] = state[name][:8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (untie, "'cls.predictions.decoder.weight' differs from 'bert.embeddings.word_embeddings.weight'"),
        (add_layer, "'bert.encoder.layer.4.output.dense.bias' has no place"),
        (shorten, r"'bert.embeddings.position_embeddings.weight' is \(8, 32\), expected \(16, 32\)"),
        (
            lambda state: state.pop("bert.encoder.layer.2.attention.self.key.bias"),
            "no tensor 'bert.encoder.layer.2.att",
        ),
        (lambda state: state.pop("cls.predictions.bias"), "no tensor 'cls.predictions.bias'"),
    ],
    ids=["untied", "too many layers", "too few positions", "no key", "half a head"],
)
def test_weights_that_do_not_fit_are_refused(change: Callable[..., Any], message: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        read_pretrained(tmp_path, ModelConfig(**read_shape(tmp_path)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu_new"),
        ("layer_norm_eps", 1e-5),
        ("position_embedding_type", "relative_key"),
        ("type_vocab_size", 1),
        ("is_decoder", True),
        ("model_type", "roberta"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    config = {"model_type": "bert", **SHAPE, "hidden_act": "gelu", key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{key}={value!r}, expected"):
        read_shape(tmp_path)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_from_its_own_export_at_the_same_loss(train: Train, tmp_path: Path) -> None:
    outputs, folder = tmp_path / "outputs", tmp_path / "my-bert"
    assert train("run_name=a") == 0
    assert main(["export", str(outputs / "a/checkpoints/latest"), str(folder)]) == 0
    options = ["run_name=b", "unshare=never", "max_steps=1", f"init_from={folder}"]
    assert train(*options, f"data.tokenizer={folder}/tokenizer.json") == 0
    assert rows(outputs / "b")[0]["eval/loss"] == pytest.approx(rows(outputs / "a")[-1]["eval/loss"], abs=1e-5)
    assert main(["export", str(outputs / "b/checkpoints/latest"), str(tmp_path / "again")]) == 0
    names = ("tokenizer.json", "tokenizer_config.json")
    assert [(folder / name).read_text() for name in names] == [
        (tmp_path / "again" / name).read_text() for name in names
    ]


@pytest.fixture
def downloaded(train: Train, tmp_path: Path) -> Path:
    """A BertForPreTraining with the vocabulary of the small run, as vocab.txt only."""
    assert train("run_name=a", "max_steps=1", "unshare=never", "evaluation.every_steps=null") == 0
    tokenizer = json.loads((tmp_path / "outputs/a/checkpoints/latest/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    folder = tmp_path / "downloaded"
    write_folder(folder, "BertForPreTraining", vocab_size=len(vocabulary))
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
    return folder


FROM = ["model.norm=post", "max_steps=1", "evaluation.every_steps=null", "optim.lr=1e-30"]


def test_layers_are_kept_or_begin_at_their_mean(
    train: Train, tmp_path: Path, downloaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = f"init_from={downloaded}"
    assert train("run_name=kept", "unshare=never", *FROM, start) == 0
    assert "their mean" not in capsys.readouterr().err
    assert train("run_name=mean", "unshare=always", *FROM, start) == 0
    assert "init_from: layers that share begin at their mean" in capsys.readouterr().err
    kept, mean = (load_model(tmp_path / f"outputs/{name}/checkpoints/latest")[0] for name in ("kept", "mean"))
    state = load_file(downloaded / "model.safetensors")
    biases = torch.stack([state[f"bert.encoder.layer.{layer}.output.dense.bias"] for layer in range(4)])
    for layer in range(4):
        assert torch.equal(kept.encoder.layers[layer].feed_forward.down.bias, biases[layer])
        torch.testing.assert_close(mean.encoder.layers[layer].feed_forward.down.bias, biases.mean(0))


def test_another_shape_or_tokenizer_is_refused_before_any_work(
    train: Train, tmp_path: Path, downloaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = f"init_from={downloaded}"
    post = ["model.norm=post", "unshare=never"]
    assert train("run_name=b", start, "model.num_layers=2") == 2
    assert "model.num_layers=2: expected 4; model.norm='pre': expected 'post', as in init_from=" in (
        capsys.readouterr().err
    )
    given = [f"data.tokenizer={downloaded}/vocab.txt", f"data.cache_dir={tmp_path}/cache"]
    assert train("run_name=c", *post, start, *given, "data.lowercase=false") == 2
    said = capsys.readouterr().err
    assert "another tokenizer" in said
    assert f"expected the same, as with data.tokenizer={downloaded}/vocab.txt data.lowercase=true" in said
    assert not (tmp_path / "cache").exists()
    (downloaded / "vocab.txt").unlink()
    assert train("run_name=e", *post, start) == 2
    assert "no tokenizer there; expected tokenizer.json or vocab.txt" in capsys.readouterr().err
    (downloaded / "model.safetensors").unlink()
    assert train("run_name=f", *post, start) == 2
    assert "expected model.safetensors or pytorch_model.bin" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_a_run_goes_on_where_the_weights_that_it_began_from_have_moved(
    train: Train, tmp_path: Path, downloaded: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    norm, start = "post", downloaded
    if kind == "checkpoint":
        norm, start = "pre", tmp_path / "outputs/a/checkpoints/step-00000001-unshared"
    run = tmp_path / "outputs/b"
    options = ["unshare=never", "max_steps=3", "checkpoint.every_steps=2", "evaluation.every_steps=null"]

    def go_on(init_from: Path) -> int:
        """The command of the run again, after its last update was lost."""
        shutil.rmtree(run / "checkpoints/step-00000003-unshared", ignore_errors=True)
        (run / "status.json").unlink(missing_ok=True)
        return train("run_name=b", f"model.norm={norm}", *options, f"init_from={init_from}")

    assert go_on(start) == 0
    sha256 = read_meta(run / "checkpoints/latest")["init_from_sha256"]
    moved = start.rename(tmp_path / "moved")
    assert go_on(moved) == 0
    assert read_meta(run / "checkpoints/latest")["init_from_sha256"] == sha256
    capsys.readouterr()
    other = run / "checkpoints/step-00000002-unshared"
    assert go_on(other) == 2
    assert f"init_from: {start} -> {other}" in capsys.readouterr().err
