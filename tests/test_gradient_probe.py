"""Gradients of single units, and a check that changes nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engine import build_trainer, small_config, windows
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from sharebert import distributed
from sharebert.data.loader import Window
from sharebert.gradient_probe import GradientProbe, adjacent_correlations
from sharebert.model.bert import Bert
from sharebert.sharing import Groups, SharedLayers, one_group
from sharebert.trainer import Trainer


def literal_correlations(trainer: Trainer, window: Window, unit_layers: int) -> Tensor:
    """One backward pass through a model whose layers all have copies of their own."""
    copy = Bert(trainer.config.model, 50).double()
    copy.load_state_dict(trainer.model.state_dict())
    (batch,) = window.micro_batches(len(window.input_ids))
    logits = copy(batch.input_ids, batch.positions, batch.attention_mask)
    losses = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    ((losses * batch.weights.flatten()).sum() / batch.weights.sum()).backward()
    layers = list(copy.encoder.layers)
    vectors = [
        torch.cat([p.grad.flatten() for layer in layers[start : start + unit_layers] for p in layer.parameters()])
        for start in range(0, len(layers), unit_layers)
    ]
    return torch.stack([functional.cosine_similarity(a, b, dim=0) for a, b in pairwise(vectors)])


@pytest.mark.parametrize("micro_batch_size", [8, 4])
@pytest.mark.parametrize(
    ("unit_layers", "groups"),
    [(1, one_group(6)), (2, one_group(3)), (1, ((0, 2), (2, 6))), (1, ((0, 1), (1, 2), (2, 6))), (3, ((0, 1), (1, 2)))],
)
def test_the_correlations_are_those_of_separate_copies(
    tmp_path: Path, unit_layers: int, groups: Groups, micro_batch_size: int
) -> None:
    unshare = {"policy": "always", "unit_layers": unit_layers, "check_every": 1}
    config = small_config(unshare=unshare, engine={"micro_batch_size": micro_batch_size})
    trainer, _ = build_trainer(config, tmp_path, torch.float64)
    all_windows = list(windows(config, tmp_path))
    for window in all_windows[:3]:  # until layers have something to disagree about
        trainer.train_step(window)
    if groups != trainer.sharing.groups:
        trainer.sharing.unshare(groups, trainer.state.optimizer)
        trainer.updater.take_stock()
        trainer.train_step(all_windows[3])
    expected = literal_correlations(trainer, all_windows[4], unit_layers)
    update = trainer.updater.run(all_windows[4], is_check=True, measures_ratio=False)
    assert update is not None
    torch.testing.assert_close(update.correlations, expected, rtol=0.0, atol=1e-10)


def weights_after(tmp_path: Path, check_every: int | None, **groups: object) -> dict[str, Tensor]:
    unshare = {"policy": "fixed", "step": 6, "check_every": check_every, **groups.pop("unshare", {})}  # type: ignore[dict-item]
    config = small_config(model={"dropout": 0.1, "attention_dropout": 0.1}, unshare=unshare, **groups)  # type: ignore[arg-type]
    trainer, _ = build_trainer(config, tmp_path)
    assert trainer.fit(windows(config, tmp_path))
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("unit_layers", [1, 2])
def test_a_check_updates_bit_for_bit_as_any_update(tmp_path: Path, precision: str, unit_layers: int) -> None:
    options = {"engine": {"precision": precision}, "unshare": {"unit_layers": unit_layers}}
    plain, checked = weights_after(tmp_path, None, **options), weights_after(tmp_path, 1, **options)
    assert all(torch.equal(plain[name], checked[name]) for name in plain)


def test_with_accumulation_a_check_updates_as_any_update_to_rounding(tmp_path: Path) -> None:
    engine = {"micro_batch_size": 2}
    sgd = {"name": "sgd", "lr": 0.1}  # AdamW would divide the rounding of a tiny gradient by its size
    plain = weights_after(tmp_path, None, engine=engine, optim=sgd)
    checked = weights_after(tmp_path, 1, engine=engine, optim=sgd)
    for name, weight in plain.items():
        torch.testing.assert_close(checked[name], weight, rtol=1e-6, atol=1e-6)


def test_activation_checkpointing_changes_neither_weights_nor_correlations(tmp_path: Path) -> None:
    plain = weights_after(tmp_path, 1)
    recomputed = weights_after(tmp_path, 1, engine={"activation_checkpointing": True})
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_the_shared_parameters_come_back_after_an_error() -> None:
    layers = [nn.Linear(2, 2) for _ in range(3)]
    sharing = SharedLayers(layers)
    sharing.share(one_group(3))
    before = layers[0].weight

    def fail_inside() -> None:
        with GradientProbe(sharing):
            assert layers[1].weight is not before
            assert layers[1].weight.data_ptr() == before.data_ptr()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert all(layer.weight is before for layer in layers)


def test_a_zero_gradient_has_no_correlation() -> None:
    ones, zeros = [torch.ones(3)], [torch.zeros(3)]
    correlations = adjacent_correlations([ones, ones, zeros, [None], [-torch.ones(3)]])
    assert correlations[0] == pytest.approx(1.0)
    assert correlations[1:].isnan().all()
    assert adjacent_correlations([ones]).shape == (0,)


def test_correlation_is_the_cosine_of_flattened_gradients() -> None:
    torch.manual_seed(0)
    first, second = ([torch.randn(4, 3), torch.randn(5)] for _ in range(2))
    flat = [torch.cat([tensor.flatten() for tensor in unit]) for unit in (first, second)]
    expected = functional.cosine_similarity(*flat, dim=0)
    torch.testing.assert_close(adjacent_correlations([first, second])[0], expected)


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_layers_compile_once_for_checks_splits_and_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """Under DDP too, here with a group of one process; and where a window holds the padded end of the corpus."""
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: original(self, backend=count))
    torch._dynamo.reset()
    unshare = {"policy": "multi_step", "check_every": 2, "threshold": 0.999, "patience": 1}
    config = small_config(unshare=unshare, evaluation={"every_steps": 5}, engine={"compile": "true"})
    if world_size > 1:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        monkeypatch.setattr(distributed, "world_size", lambda: world_size)  # so that the model is wrapped
    try:
        trainer, rows = build_trainer(config, tmp_path)
        assert isinstance(trainer.updater._wrapped, DistributedDataParallel) == (world_size > 1)
        all_windows = list(windows(config, tmp_path))
        assert not all_windows[0].is_padded
        assert any(window.is_padded for window in all_windows)
        trainer._evaluate_when_due()
        trainer.train_step(all_windows[0])
        compiled = len(graphs)
        assert compiled >= 1
        for window in all_windows[1:]:
            trainer.maybe_unshare()
            trainer.train_step(window)
            trainer._cross_boundary()
    finally:
        if world_size > 1:
            torch.distributed.destroy_process_group()
    assert len({str(groups) for groups in rows.series("share/groups")}) > 2
    assert len(graphs) == compiled


def correlations_of(model: nn.Module, layers: list[nn.Module], inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """By the probe, while all layers share; and by separate copies."""
    sharing = SharedLayers(layers)
    sharing.share(one_group(len(layers)))
    with GradientProbe(sharing) as probe:
        model(**inputs).last_hidden_state.square().sum().backward()
        ours = probe.correlations()
        probe.merge()
    summed = layers[0].get_parameter(next(name for name, _ in layers[0].named_parameters())).grad.clone()
    sharing.unshare()
    model.zero_grad()
    model(**inputs).last_hidden_state.square().sum().backward()
    theirs = adjacent_correlations([[p.grad for p in layer.parameters()] for layer in layers])
    each = [next(layer.parameters()).grad for layer in layers]
    torch.testing.assert_close(summed, torch.stack(each).sum(0), rtol=1e-4, atol=1e-4)
    return ours, theirs


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_it_works_on_transformers_bert_and_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "attn_implementation": "sdpa"}
    bert = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, **sizes
        )
    ).eval()
    gpt2 = transformers.GPT2Model(
        transformers.GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=16, **sizes)
    ).eval()
    inputs = {"input_ids": torch.randint(50, (3, 12))}
    for model, layers in ((bert, list(bert.encoder.layer)), (gpt2, list(gpt2.h))):
        ours, theirs = correlations_of(model, layers, inputs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
