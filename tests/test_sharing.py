"""Sharing and unsharing, on BERT and on modules that are not ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine import VOCABULARY, build_trainer, small_config, windows
from torch import nn

from sharebert.optim import build_optimizer, decay_groups
from sharebert.sharing import SharedLayers, one_group, phase_name, single_groups, weighted_gradient_norm


def three_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)]


def test_shared_layers_hold_the_same_parameter_objects_and_stay_distinct_modules() -> None:
    layers = three_layers()
    SharedLayers(layers).share(one_group(3))
    assert layers[0][0].weight is layers[1][0].weight is layers[2][0].weight
    assert len({id(layer) for layer in layers}) == 3


def test_sharing_different_layers_starts_from_their_mean() -> None:
    layers = three_layers()
    mean = torch.stack([layer[0].weight.detach().clone() for layer in layers]).mean(0)
    SharedLayers(layers).share(one_group(3))
    torch.testing.assert_close(layers[2][0].weight.detach(), mean)


def test_sharing_equal_layers_changes_no_bit() -> None:
    layers = three_layers()
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    before = layers[0][0].weight.detach().clone()
    SharedLayers(layers).share(one_group(3))
    assert torch.equal(layers[1][0].weight, before)


def test_units_of_two_layers_share_slot_by_slot() -> None:
    layers = [nn.Linear(2, 2) for _ in range(6)]
    sharing = SharedLayers(layers, unit_layers=2)
    sharing.share(one_group(3))
    assert layers[0].weight is layers[2].weight is layers[4].weight
    assert layers[1].weight is layers[3].weight is layers[5].weight
    assert layers[0].weight is not layers[1].weight
    assert set(sharing.copies().values()) == {3}


def test_groups_of_any_contiguous_shape_split_further() -> None:
    layers = [nn.Linear(2, 2) for _ in range(5)]
    sharing = SharedLayers(layers)
    sharing.share(one_group(5))
    sharing.unshare(((0, 3), (3, 5)))
    assert layers[0].weight is layers[2].weight
    assert layers[3].weight is layers[4].weight
    assert layers[0].weight is not layers[3].weight
    assert sharing.phase == "partly-shared"
    sharing.unshare(((0, 1), (1, 3), (3, 5)))
    assert layers[0].weight is not layers[1].weight
    assert layers[1].weight is layers[2].weight
    assert sharing.copies()[layers[1].weight] == 2
    with pytest.raises(ValueError, match="refinement"):
        sharing.unshare(((0, 5),))


@pytest.mark.parametrize("groups", [(), ((0, 2),), ((0, 2), (3, 5)), ((0, 3), (2, 5)), ((1, 5),), ((0, 0), (0, 5))])
def test_groups_that_do_not_cover_the_units_are_refused(groups: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="expected contiguous pairs"):
        SharedLayers([nn.Linear(2, 2) for _ in range(5)]).share(groups)


def test_layers_of_different_structure_are_refused_with_both_printed() -> None:
    with pytest.raises(ValueError, match=r"(?s)layers 0 and 1 differ.*in_features=2.*in_features=3"):
        SharedLayers([nn.Linear(2, 2), nn.Linear(3, 2)])
    with pytest.raises(ValueError, match="unit_layers=2: expected a divisor of the number of layers, 3"):
        SharedLayers(three_layers(), unit_layers=2)


def test_phase_names() -> None:
    assert phase_name(one_group(4)) == "shared"
    assert phase_name(single_groups(4)) == "unshared"
    assert phase_name(((0, 1), (1, 4))) == "partly-shared"
    assert phase_name(one_group(1)) == "unshared"


def test_gradient_mean_divides_by_the_size_of_each_group() -> None:
    layers = [nn.Linear(2, 2) for _ in range(5)]
    sharing = SharedLayers(layers)
    sharing.share(((0, 1), (1, 3), (3, 5)))
    for parameter in sharing.copies():
        parameter.grad = torch.full_like(parameter, 6.0)
    sharing.average_gradients()
    assert [float(layer.weight.grad[0, 0]) for layer in layers] == [6.0, 3.0, 3.0, 3.0, 3.0]


def test_the_gradient_norm_counts_a_shared_gradient_once_per_layer() -> None:
    layers = [nn.Linear(3, 3) for _ in range(4)]
    copies = [nn.Linear(3, 3) for _ in range(4)]
    sharing = SharedLayers(layers)
    sharing.share(one_group(4))
    for name, parameter in layers[0].named_parameters():
        parameter.grad = torch.randn_like(parameter)
        for copy in copies:
            copy.get_parameter(name).grad = parameter.grad.clone()
    norm = weighted_gradient_norm(list(layers[0].parameters()), sharing.copies())
    expected = torch.nn.utils.get_total_norm([p.grad for copy in copies for p in copy.parameters()])
    torch.testing.assert_close(norm, expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_unsharing_leaves_the_loss_as_it_is_and_optimizer_and_model_agree(tmp_path: Path, norm: str) -> None:
    config = small_config(model={"norm": norm})
    trainer, _ = build_trainer(config, tmp_path)
    all_windows = list(windows(config, tmp_path))
    for window in all_windows[:5]:
        trainer.train_step(window)
    model, optimizer = trainer.model, trainer.state.optimizer
    (batch,) = all_windows[5].micro_batches(8)
    with torch.no_grad():
        before = model(batch.input_ids, batch.positions, batch.attention_mask)
    decayed_before = {name for name, p in model.named_parameters(remove_duplicate=False) if is_decayed(optimizer, p)}
    trainer.maybe_unshare()
    with torch.no_grad():
        after = model(batch.input_ids, batch.positions, batch.attention_mask)
    assert torch.equal(before, after)

    in_model = {id(p) for p in model.parameters()}
    in_optimizer = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert set(in_optimizer) == in_model
    assert len(in_optimizer) == len(in_model)
    assert {id(p) for p in optimizer.state} == in_model
    decayed_after = {name for name, p in model.named_parameters(remove_duplicate=False) if is_decayed(optimizer, p)}
    assert decayed_after == decayed_before

    weights = [layer.attention.qkv.weight.detach().clone() for layer in model.encoder.layers]
    trainer.train_step(all_windows[5])
    moved = [layer.attention.qkv.weight.detach() for layer in model.encoder.layers]
    assert all(not torch.equal(old, new) for old, new in zip(weights, moved, strict=True))
    assert len({tuple(weight.flatten().tolist()) for weight in moved}) == 6

    second = model.encoder.layers[1].attention.qkv.weight.detach().clone()
    with torch.no_grad():
        model.encoder.layers[0].attention.qkv.weight.zero_()
    assert torch.equal(model.encoder.layers[1].attention.qkv.weight, second)
    # The decoder is the token embedding still: moving it moves the logits.
    with torch.no_grad():
        model.embeddings.token.weight[7] += 1.0
        assert not torch.equal(model(batch.input_ids, batch.positions)[..., 7], after[..., 7])


def is_decayed(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    (group,) = [group for group in optimizer.param_groups if any(p is parameter for p in group["params"])]
    return bool(group["weight_decay"] > 0)


@pytest.mark.parametrize("state", ["copy", "reset"])
def test_optimizer_state_of_new_layers_is_copied_or_reset(state: str) -> None:
    layers = [nn.Linear(2, 2) for _ in range(3)]
    model = nn.ModuleList([nn.Linear(2, 2), *layers])
    sharing = SharedLayers(layers)
    sharing.share(one_group(3))
    optimizer = build_optimizer(model, small_config().optim)
    sum((p**2).sum() for p in model.parameters()).backward()
    optimizer.step()
    kept = optimizer.state[model[0].weight]["exp_avg"]
    shared = optimizer.state[layers[0].weight]["exp_avg"].clone()
    origins = sharing.unshare(optimizer=optimizer, state=state)
    assert set(origins.values()) == set(layers[0].parameters())
    assert optimizer.state[model[0].weight]["exp_avg"] is kept
    if state == "reset":
        assert all(p not in optimizer.state for layer in layers for p in layer.parameters())
    else:
        moments = [optimizer.state[layer.weight]["exp_avg"] for layer in layers]
        assert all(torch.equal(moment, shared) for moment in moments)
        assert len({moment.data_ptr() for moment in moments}) == 3


def test_decay_groups_hold_each_parameter_once_and_spare_biases_and_norms() -> None:
    layers = three_layers()
    SharedLayers(layers).share(one_group(3))
    decayed, spared = decay_groups(nn.ModuleList(layers), 0.01)
    assert [p.dim() for p in decayed["params"]] == [2]
    assert [p.dim() for p in spared["params"]] == [1, 1, 1]
    assert spared["weight_decay"] == 0.0


def test_hooks_and_training_mode_survive_unsharing() -> None:
    layers = three_layers()
    calls = []
    layers[1].register_forward_hook(lambda *_: calls.append(1))
    sharing = SharedLayers(layers)
    sharing.share(one_group(3))
    sharing.unshare()
    layers[1](torch.zeros(1, 4))
    assert calls == [1]


def test_initial_weights_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    def weights(**unshare: object) -> dict[str, torch.Tensor]:
        trainer, _ = build_trainer(small_config(unshare=unshare), tmp_path)
        return dict(trainer.model.named_parameters(remove_duplicate=False))

    fixed, always = weights(policy="fixed"), weights(policy="always")
    never, same = weights(policy="never"), weights(policy="never", initial="same")
    assert all(torch.equal(fixed[name], always[name]) and torch.equal(fixed[name], same[name]) for name in fixed)
    name = "encoder.layers.{}.attention.qkv.weight"
    assert torch.equal(fixed[name.format(0)], fixed[name.format(5)])
    assert not torch.equal(never[name.format(0)], never[name.format(5)])
    outside = [name for name in fixed if not name.startswith("encoder.layers")]
    assert all(torch.equal(fixed[name], never[name]) for name in outside)
    assert VOCABULARY.vocab_size == 50
