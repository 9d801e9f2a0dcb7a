"""The memory model against torch: what autograd keeps, to the byte; and what a process takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sharebert.bench.memory import measure_peak_memory
from sharebert.config import ModelConfig, OptimConfig, TrainConfig, from_dict
from sharebert.loss import masked_lm_loss_sum
from sharebert.memory import (
    Pass,
    _group_bytes,
    attention_bytes,
    embedding_bytes,
    encoder_bytes,
    free_bytes,
    head_bytes,
    held_bytes,
    layer_bytes,
    logit_bytes,
    tensor_bytes,
)
from sharebert.model.bert import Bert, padded_vocabulary_size
from sharebert.model.layers import TransformerLayer
from sharebert.precision import Precision
from sharebert.run_memory import RunMemory, parameter_sizes

CPU = torch.device("cpu")
B, T, K, D, V = 2, 32, 5, 64, 300


def model_config(norm: str = "pre", dropout: float = 0.0, num_layers: int = 3) -> ModelConfig:
    sizes = {"hidden_size": D, "num_heads": 4, "intermediate_size": 256, "num_layers": num_layers}
    return ModelConfig(norm=norm, dropout=dropout, attention_dropout=dropout, **sizes)


def bytes_kept(module: nn.Module, precision: str, forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps of a forward pass, each storage once, without the module's own parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Precision(precision, CPU).autocast():
        forward()
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("has_documents", [False, True])
def test_autograd_keeps_of_a_layer_what_the_model_says(
    precision: str, norm: str, dropout: float, has_documents: bool
) -> None:
    config = model_config(norm, dropout)
    layer = TransformerLayer(config)
    hidden = torch.randn(B, T, D, requires_grad=True)
    run = Pass(config, V, T, K, precision, "cpu", B, has_documents=has_documents)
    mask = torch.ones(B, 1, T, T, dtype=torch.bool) if has_documents else None
    assert bytes_kept(layer, precision, lambda: layer(hidden, mask)) == layer_bytes(run)
    positions = torch.randint(0, T, (B, K))
    mask = torch.ones(B, 1, K, T, dtype=torch.bool) if has_documents else None
    assert bytes_kept(layer, precision, lambda: layer(hidden, mask, positions)) == layer_bytes(run, is_last=True)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_autograd_keeps_of_embeddings_and_head_what_the_model_says(precision: str, norm: str, dropout: float) -> None:
    config = model_config(norm, dropout)
    bert, run = Bert(config, V), Pass(config, V, T, K, precision, "cpu", B)
    input_ids = torch.randint(0, V, (B, T))
    assert bytes_kept(bert, precision, lambda: bert.embeddings(input_ids)) == embedding_bytes(run)
    hidden = torch.randn(B, K, D, requires_grad=True)

    def score() -> Tensor:
        ended = hidden if bert.encoder.norm is None else bert.encoder.norm(hidden)
        return bert.head(ended, bert.embeddings.token.weight)

    assert bytes_kept(bert, precision, score) == head_bytes(run)


def test_with_activation_checkpointing_a_layer_keeps_what_goes_in() -> None:
    config = model_config()
    bert = Bert(config, V)
    bert.encoder.activation_checkpointing = True
    hidden = torch.randn(B, T, D, requires_grad=True)
    run = Pass(config, V, T, K, "fp32", "cpu", B, activation_checkpointing=True)
    positions = torch.randint(0, T, (B, K))
    norm = B * K * (4 * D + 8)  # at the end of the encoder
    kept = bytes_kept(bert.encoder, "fp32", lambda: bert.encoder(hidden, positions))
    # torch also remembers the state of its random numbers for each layer, 5 KB.
    assert kept == pytest.approx(encoder_bytes(run) + norm, abs=3 * 6000)


def test_the_loss_keeps_the_logits_and_little_else() -> None:
    run = Pass(model_config(), V, T, K, "bf16", "cpu", B)
    logits = torch.randn(B, K, padded_vocabulary_size(V), dtype=torch.bfloat16, requires_grad=True)
    labels, weights = torch.randint(0, V, (B, K)), torch.ones(B, K)
    kept = bytes_kept(nn.Module(), "fp32", lambda: masked_lm_loss_sum(logits, labels, weights))
    assert kept == logit_bytes(run) + B * K * (8 + 4 + 4)  # labels, weights, a number a row


def test_memory_of_the_held_tensors_is_that_of_fp32_and_its_moments() -> None:
    adamw, sgd = held_bytes(128, OptimConfig()), held_bytes(128, OptimConfig(name="sgd"))
    assert (adamw.weights, adamw.gradients, adamw.optimizer) == (512, 512, 1024)
    assert (sgd.weights, sgd.gradients, sgd.optimizer) == (512, 512, 0)


def test_more_sequences_and_gradients_kept_take_more_and_recomputing_takes_less() -> None:
    config = model_config(dropout=0.1, num_layers=12)
    held = held_bytes(100_000, OptimConfig())

    def tensors(size: int, recomputes: bool = False, keeps_gradients: bool = False) -> int:
        run = Pass(config, V, 512, 77, "bf16", "cuda", size, activation_checkpointing=recomputes)
        return tensor_bytes(run, held, keeps_gradients)

    assert tensors(8) > tensors(4) > tensors(4, recomputes=True)
    assert tensors(4, keeps_gradients=True) == tensors(4) + held.gradients


def test_attention_on_cuda_keeps_no_probabilities() -> None:
    def kept(device: str, length: int) -> int:
        return attention_bytes(Pass(model_config(dropout=0.1), V, length, K, "bf16", device, 1), length)

    assert kept("cuda", 256) == 2 * kept("cuda", 128)
    assert kept("cpu", 256) == 2 * (3 * 256 * D + 3 * 4 * 256**2)  # three times the 256 x 256 of four heads


def test_free_memory_is_known_on_a_cpu() -> None:
    free = free_bytes("cpu")
    assert free is not None
    assert free > 2**20


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    assert _group_bytes(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _group_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert _group_bytes(tmp_path) == 700


CASES = [
    # policy, layers, width, sequences, length, precision, recomputes
    ("always", 12, 768, 2, 128, "bf16", False),
    ("never", 12, 768, 2, 128, "bf16", False),
    ("always", 12, 768, 8, 128, "bf16", True),
    ("always", 12, 768, 8, 128, "fp32", False),
    ("never", 12, 768, 2, 512, "bf16", False),
    ("always", 24, 1024, 2, 128, "bf16", False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "layers", "width", "sequences", "length", "precision", "recomputes"), CASES)
def test_memory_of_a_process_is_within_a_tenth_of_the_plan(
    policy: str, layers: int, width: int, sequences: int, length: int, precision: str, recomputes: bool
) -> None:
    sizes = {"num_layers": layers, "hidden_size": width, "num_heads": width // 64, "intermediate_size": 4 * width}
    engine = {"device": "cpu", "precision": precision, "compile": "false", "num_workers": 0}
    config = from_dict(
        TrainConfig,
        {
            "global_batch_size": sequences,
            "model": sizes,
            "data": {"seq_len": length, "vocab_size": 30522},
            "unshare": {"policy": policy},
            "engine": {**engine, "micro_batch_size": sequences, "activation_checkpointing": recomputes},
        },
    )
    planned = RunMemory(config, 30522, 1, parameter_sizes(config, 30522)).peak(sequences)
    assert planned == pytest.approx(measure_peak_memory(config, 30522, CPU), rel=0.1)
