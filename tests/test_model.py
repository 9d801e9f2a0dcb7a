import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sharebert.config import ModelConfig
from sharebert.model.bert import Bert, initialize, padded_vocabulary_size, positions_within
from sharebert.model.convert import to_transformers_state

VOCAB_SIZE = 70  # padded to 128
SMALL = ModelConfig(
    num_layers=2, hidden_size=32, num_heads=4, intermediate_size=48, max_position_embeddings=20, initializer_range=0.2
)
NORMS = ["pre", "post"]


def build(norm: str, **changes: Any) -> Bert:
    """A small model with every parameter random, biases and norms too."""
    model = Bert(dataclasses.replace(SMALL, norm=norm, **changes), VOCAB_SIZE)
    initialize(model, 3, SMALL.initializer_range)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input ids (3, 12), positions (3, 4), labels (3, 4) and a mask (3, 12) with padding."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, VOCAB_SIZE, (3, 12), generator=generator)
    positions = torch.tensor([[1, 3, 4, 11], [0, 2, 5, 6], [0, 1, 2, 3]])
    labels = torch.randint(0, VOCAB_SIZE, (3, 4), generator=generator)
    attention_mask = torch.arange(12) < torch.tensor([12, 8, 5]).unsqueeze(1)
    return input_ids, positions, labels, attention_mask


def in_transformers(model: Bert) -> Any:
    """The same model as an object of Transformers."""
    transformers = pytest.importorskip("transformers")
    architecture, config, state = to_transformers_state(model)
    config_class = {"bert": transformers.BertConfig, "megatron-bert": transformers.MegatronBertConfig}
    other = getattr(transformers, architecture)(config_class[config["model_type"]].from_dict(config))
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert set(missing) == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert unexpected == []
    other.tie_weights()
    return other.eval()


def at_positions(logits: Tensor, positions: Tensor) -> Tensor:
    """(B, T, V) at (B, K): (B, K, V)."""
    return torch.take_along_dim(logits, positions.unsqueeze(-1), dim=1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("with_padding", [False, True])
def test_logits_are_those_of_transformers(norm: str, with_padding: bool) -> None:
    model = build(norm)
    other = in_transformers(model)
    input_ids, positions, _, attention_mask = batch()
    mask = attention_mask if with_padding else None
    with torch.no_grad():
        ours = model(input_ids, positions, mask)[..., :VOCAB_SIZE]
        theirs = other(input_ids, attention_mask=None if mask is None else mask.long()).logits
    assert ours.std() > 0.5
    torch.testing.assert_close(ours, at_positions(theirs, positions), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_the_loss_and_its_gradient_are_those_of_the_exported_model(norm: str) -> None:
    model = build(norm)
    other = in_transformers(model)
    input_ids, positions, labels, attention_mask = batch()
    logits = model(input_ids, positions, attention_mask)
    assert logits.shape == (3, 4, 128)
    ours = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    all_labels = torch.full_like(input_ids, -100).scatter(1, positions, labels)
    theirs = other(input_ids, attention_mask=attention_mask.long(), labels=all_labels).loss
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    ours.backward()
    theirs.backward()
    gradient = model.embeddings.token.weight.grad
    expected = other.get_input_embeddings().weight.grad
    assert gradient is not None
    # Transformers gives the id 0 (its padding_idx) no gradient from the input side
    torch.testing.assert_close(gradient[1:VOCAB_SIZE], expected[1:], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_the_exported_state_holds_independent_tensors_of_the_real_vocabulary(norm: str) -> None:
    model = build(norm)
    _, config, state = to_transformers_state(model)
    assert config["vocab_size"] == VOCAB_SIZE
    assert state["bert.embeddings.word_embeddings.weight"].shape == (VOCAB_SIZE, 32)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    exported = [tensor.untyped_storage().data_ptr() for tensor in state.values()]
    assert len(set(exported)) == len(exported)
    assert own.isdisjoint(exported)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_reach_every_parameter_and_are_0_for_padded_ids(norm: str, precision: torch.dtype) -> None:
    model = build(norm).train()
    input_ids, positions, labels, attention_mask = batch()
    with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
        logits = model(input_ids, positions, attention_mask)
    assert torch.isfinite(logits).all()
    functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert name.endswith("token_type.weight") or parameter.grad.abs().sum() > 0, name
    token = model.embeddings.token.weight
    assert token.grad is not None
    assert (token[VOCAB_SIZE:] == 0).all()
    assert (token.grad[VOCAB_SIZE:] == 0).all()


def test_padded_ids_have_probability_0_and_are_never_the_best() -> None:
    input_ids, positions, _, _ = batch()
    logits = build("pre")(input_ids, positions)
    assert (logits.softmax(-1)[..., VOCAB_SIZE:] == 0).all()
    assert (logits.argmax(-1) < VOCAB_SIZE).all()
    assert [padded_vocabulary_size(size) for size in (1, 64, 65, 30522)] == [64, 64, 128, 30528]


@pytest.mark.parametrize("norm", NORMS)
def test_what_stands_at_padding_changes_nothing(norm: str) -> None:
    model = build(norm)
    input_ids, _, _, attention_mask = batch()
    positions = torch.tensor([[0, 1, 2, 3]] * 3)
    changed = torch.where(attention_mask, input_ids, (input_ids + 1) % VOCAB_SIZE)
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids, positions, attention_mask), model(changed, positions, attention_mask)
        )


@pytest.mark.parametrize("norm", NORMS)
def test_activation_checkpointing_changes_no_gradient_with_dropout_on(norm: str) -> None:
    input_ids, positions, labels, _ = batch()
    gradients = []
    for is_on in (False, True):
        model = build(norm).train()
        model.encoder.activation_checkpointing = is_on
        torch.manual_seed(0)
        functional.cross_entropy(model(input_ids, positions).flatten(0, 1), labels.flatten()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=0, rtol=0)


def test_layers_may_hold_the_same_parameters() -> None:
    model = build("pre")
    for module, first in zip(model.encoder.layers[1].modules(), model.encoder.layers[0].modules(), strict=True):
        module._parameters.update(first._parameters)
    input_ids, positions, labels, _ = batch()
    functional.cross_entropy(model(input_ids, positions).flatten(0, 1), labels.flatten()).backward()
    assert sum(name.startswith("encoder.layers.") for name, _ in model.named_parameters()) == 12
    _, _, state = to_transformers_state(model)
    weights = [state[f"bert.encoder.layer.{index}.output.dense.weight"] for index in (0, 1)]
    assert torch.equal(*weights)
    assert weights[0].data_ptr() != weights[1].data_ptr()


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    first, second = Bert(SMALL, VOCAB_SIZE), Bert(dataclasses.replace(SMALL, num_layers=3), VOCAB_SIZE)
    torch.manual_seed(0)
    initialize(first, 3, 0.02)
    torch.rand(5)
    initialize(second, 3, 0.02)
    values = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, values[name]), name
    initialize(second, 4, 0.02)
    assert not torch.equal(first.head.dense.weight, second.head.dense.weight)


def test_initial_values_have_the_range_asked_for() -> None:
    model = Bert(SMALL, VOCAB_SIZE)
    initialize(model, 3, 0.05)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        else:
            drawn = parameter[:VOCAB_SIZE] if name == "embeddings.token.weight" else parameter
            assert drawn.std().item() == pytest.approx(0.05, rel=0.25), name
    assert (model.embeddings.token.weight[VOCAB_SIZE:] == 0).all()


def test_layers_start_equal_where_their_names_are_one_and_different_elsewhere() -> None:
    model = Bert(SMALL, VOCAB_SIZE)
    layers = model.encoder.layers
    initialize(model, 3, 0.02)
    assert not torch.equal(layers[0].attention.qkv.weight, layers[1].attention.qkv.weight)
    initialize(model, 3, 0.02, lambda name: name.replace("layers.1.", "layers.0."))
    for first, second in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(first, second)


def test_parameter_names_are_stable() -> None:
    layer = [
        f"{module}.{leaf}"
        for module, leaf in itertools.product(
            [
                "attention.qkv",
                "attention.output",
                "attention_norm",
                "feed_forward.up",
                "feed_forward.down",
                "feed_forward_norm",
            ],
            ["weight", "bias"],
        )
    ]
    layers = [f"encoder.layers.{index}.{name}" for index in range(2) for name in layer]
    embeddings = [f"embeddings.{name}.weight" for name in ("token", "position", "token_type")]
    head = ["head.bias", "head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias"]
    norm = ["norm.weight", "norm.bias"]
    expected = {
        "pre": [*embeddings, *layers, *(f"encoder.{name}" for name in norm), *head],
        "post": [*embeddings, *(f"embeddings.{name}" for name in norm), *layers, *head],
    }
    for kind in NORMS:
        assert [name for name, _ in build(kind).named_parameters()] == expected[kind]


@pytest.mark.filterwarnings(
    r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch's own probe
@pytest.mark.parametrize("norm", NORMS)
def test_all_layers_run_one_compiled_graph_without_breaks(norm: str) -> None:
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = build(norm, num_layers=3).train()
    input_ids, positions, _, _ = batch()
    expected = model.eval()(input_ids, positions)
    for layer in model.encoder.layers:
        layer.compile(backend=count, fullgraph=True)
    model.train()(input_ids, positions)
    model(input_ids, positions)
    assert len(graphs) == 2  # one for the last layer, which computes the prediction slots only
    torch.testing.assert_close(model.eval()(input_ids, positions), expected)  # dropout draws otherwise when compiled
    assert len(graphs) == 4


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("has_documents", [False, True])
def test_the_last_layer_gives_the_slots_what_it_would_give_all_tokens(norm: str, has_documents: bool) -> None:
    model = build(norm).eval()
    input_ids, positions, _, attention_mask = batch()
    T = input_ids.shape[1]
    documents = torch.arange(T).div(5, rounding_mode="floor").expand_as(input_ids) if has_documents else None
    every = torch.arange(T).expand_as(input_ids)
    expected = at_positions(model(input_ids, every, attention_mask, documents), positions)
    torch.testing.assert_close(model(input_ids, positions, attention_mask, documents), expected, rtol=1e-5, atol=1e-5)


def test_positions_count_from_the_first_token_of_a_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 2, 2, 2, 2, 2, 3]])
    assert positions_within(documents).tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 0, 0, 1, 2, 3, 4, 0]]


@pytest.mark.parametrize("norm", NORMS)
def test_the_logits_of_a_document_do_not_depend_on_its_neighbours(norm: str) -> None:
    model = build(norm).eval()
    T, vocab_size = 12, model.vocab_size
    documents = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3])
    first, second = (torch.randint(5, vocab_size, (1, T)) for _ in range(2))
    second[0, 4:9] = first[0, 4:9]
    slots = torch.arange(4, 9)[None]
    with torch.no_grad():
        ours, theirs = (model(ids, slots, None, documents) for ids in (first, second))
        alone = model(first[:, 4:9], torch.arange(5)[None])
        across = [model(ids, slots) for ids in (first, second)]
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(ours, alone, rtol=0.0, atol=1e-5)
    assert not torch.allclose(*across, atol=1e-3)
