"""The engine against the paper's Algorithms 1 and 2 written out literally, in float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from engine import VOCABULARY, build_trainer, small_config, windows
from torch.nn import functional

from sharebert.config import TrainConfig
from sharebert.data.loader import Window
from sharebert.model.bert import Bert, initialize
from sharebert.schedule import learning_rate
from sharebert.train_state import name_in_unit
from sharebert.trainer import Trainer


class LiteralAlgorithm1:
    """L layers that each own their weights, all the time; while t < tau they are updated with mean gradients."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.unit_layers = config.unshare.unit_layers
        self.model = Bert(config.model, VOCABULARY.vocab_size)
        initialize(
            self.model, config.seed, config.model.initializer_range, lambda name: name_in_unit(name, self.unit_layers)
        )
        self.model.double()
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": config.optim.weight_decay},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
        ]
        if config.optim.name == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0, foreach=False)
        else:
            optim = config.optim
            self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=optim.betas, eps=optim.eps, foreach=False)

    def update(self, t: int, window: Window) -> None:
        self.optimizer.zero_grad()
        (batch,) = window.micro_batches(len(window.input_ids))
        logits = self.model(batch.input_ids, batch.positions, batch.attention_mask, batch.documents)
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        ((losses * batch.weights.flatten()).sum() / batch.weights.sum()).backward()
        self._replace_gradients_by_means(t)
        if self.config.optim.clip_norm is not None:
            most = self.config.optim.clip_norm
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most, foreach=False)
            assert norm > most, f"{norm}: clipping does nothing here, so the comparison would not show a wrong one"
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(t - 1, self.config.optim, self.config.max_steps)
        self.optimizer.step()

    def _replace_gradients_by_means(self, t: int) -> None:
        if t >= self.config.unshare.step:
            return
        families: dict[str, list[torch.nn.Parameter]] = {}
        for name, parameter in self.model.encoder.layers.named_parameters(prefix="encoder.layers"):
            families.setdefault(name_in_unit(name, self.unit_layers), []).append(parameter)
        for family in families.values():
            replace_by_mean(family)


def replace_by_mean(parameters: list[torch.nn.Parameter]) -> None:
    mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
    for parameter in parameters:
        parameter.grad = mean.clone()


class LiteralAlgorithm2(LiteralAlgorithm1):
    """As before, but layers lie in groups with a mean each, which split where adjacent gradients stop agreeing."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        layers = list(self.model.encoder.layers)
        self.units = [layers[start : start + self.unit_layers] for start in range(0, len(layers), self.unit_layers)]
        self.groups = [list(range(len(self.units)))]
        self.low_checks = {boundary: 0 for boundary in range(len(self.units) - 1)}
        self.groups_after: list[list[list[int]]] = []

    def _parameters(self, unit: int) -> list[torch.nn.Parameter]:
        return [parameter for layer in self.units[unit] for parameter in layer.parameters()]

    def _correlation(self, boundary: int) -> float:
        a, b = (torch.cat([p.grad.flatten() for p in self._parameters(unit)]) for unit in (boundary, boundary + 1))
        return float(a @ b / (a.norm() * b.norm()))

    def _replace_gradients_by_means(self, t: int) -> None:
        new_groups = self._split() if t % self.config.unshare.check_every == 0 else self.groups
        for group in self.groups:  # the update of a check is still that of the old groups
            for same_slot in zip(*(self._parameters(unit) for unit in group), strict=True):
                replace_by_mean(list(same_slot))
        self.groups = new_groups
        self.groups_after.append(new_groups)

    def _split(self) -> list[list[int]]:
        correlations = {boundary: self._correlation(boundary) for boundary in self.low_checks}
        for boundary, correlation in correlations.items():
            is_low = correlation < self.config.unshare.threshold
            self.low_checks[boundary] = self.low_checks[boundary] + 1 if is_low else 0
        new_groups = []
        for group in self.groups:
            due = [boundary for boundary in group[:-1] if self.low_checks[boundary] >= self.config.unshare.patience]
            if due:
                cut = group.index(min(due, key=correlations.__getitem__)) + 1
                new_groups += [group[:cut], group[cut:]]
            else:
                new_groups.append(group)
        return new_groups


def update_both_and_compare(
    trainer: Trainer, literal: LiteralAlgorithm1, t: int, window: Window, tolerance: float
) -> None:
    trainer.maybe_unshare()
    assert trainer.train_step(window)
    literal.update(t, window)
    expected = dict(literal.model.named_parameters())
    for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter, expected[name], rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("unit_layers", [1, 2, 3])  # 1 x 6, 2 x 3, 3 x 2
@pytest.mark.parametrize("micro_batch_size", [24, 8])  # accumulation 1 and 3
@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 1e-12), ("adamw", 1e-9)])
def test_the_engine_is_algorithm_1_update_by_update(
    tmp_path: Path, norm: str, unit_layers: int, micro_batch_size: int, optimizer: str, tolerance: float
) -> None:
    optim = {"name": "sgd", "clip_norm": None, "weight_decay": 0.0} if optimizer == "sgd" else {"clip_norm": 0.2}
    config = small_config(
        global_batch_size=24,
        model={"norm": norm},
        unshare={"step": 6, "unit_layers": unit_layers},
        optim=optim,
        engine={"micro_batch_size": micro_batch_size},
    )
    trainer, _ = build_trainer(config, tmp_path, torch.float64)
    literal = LiteralAlgorithm1(config)
    for t, window in enumerate(windows(config, tmp_path), start=1):
        update_both_and_compare(trainer, literal, t, window, tolerance)
        assert trainer.sharing.phase == ("shared" if t < 6 else "unshared")
    assert t == 12


def test_documents_that_attend_to_themselves_only_do_so_in_training(tmp_path: Path) -> None:
    changes = {"optim": {"name": "sgd", "clip_norm": None, "weight_decay": 0.0}, "global_batch_size": 24}
    config = small_config(data={"cross_document_attention": False}, **changes)
    trainer, _ = build_trainer(config, tmp_path, torch.float64, max_sequences=32)
    across, _ = build_trainer(small_config(**changes), tmp_path, torch.float64, max_sequences=32)
    literal = LiteralAlgorithm1(config)
    for t, window in enumerate(windows(config, tmp_path), start=1):
        assert window.documents is not None
        update_both_and_compare(trainer, literal, t, window, 1e-12)
        assert across.train_step(dataclasses.replace(window, documents=None))
    ours, theirs = trainer.model.head.dense.weight, across.model.head.dense.weight
    assert (ours - theirs).abs().max() > 1e-6
    evaluations = [found.evaluator.evaluate(trainer.model)["eval/loss"] for found in (trainer, across)]
    assert evaluations[0] != evaluations[1]


def test_mean_and_sum_would_differ_in_the_comparison(tmp_path: Path) -> None:
    """The comparison above can fail: without the mean it does at the first update."""
    config = small_config(optim={"name": "sgd", "clip_norm": None, "weight_decay": 0.0})
    trainer, _ = build_trainer(config, tmp_path, torch.float64)
    trainer.sharing.average_gradients = lambda: None  # type: ignore[method-assign]
    literal = LiteralAlgorithm1(config)
    window = next(windows(config, tmp_path))
    trainer.train_step(window)
    literal.update(1, window)
    ours = trainer.model.encoder.layers[0].attention.qkv.weight
    assert (ours - literal.model.encoder.layers[0].attention.qkv.weight).abs().max() > 1e-6


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("micro_batch_size", [24, 8])
@pytest.mark.parametrize("unit_layers", [1, 2])
def test_the_engine_is_algorithm_2_over_three_splits(
    tmp_path: Path, norm: str, micro_batch_size: int, unit_layers: int
) -> None:
    config = small_config(
        max_steps=24,
        global_batch_size=24,
        model={"norm": norm, "num_layers": 6 * unit_layers},
        unshare={
            "policy": "multi_step",
            "check_every": 2,
            "patience": 2,
            "threshold": 0.998,
            "unit_layers": unit_layers,
        },
        optim={"clip_norm": 0.2},
        engine={"micro_batch_size": micro_batch_size},
    )
    trainer, _ = build_trainer(config, tmp_path, torch.float64)
    literal = LiteralAlgorithm2(config)
    for t, window in enumerate(windows(config, tmp_path), start=1):
        update_both_and_compare(trainer, literal, t, window, tolerance=1e-9)
        assert [list(range(*group)) for group in trainer.policy.groups_for(t + 1)] == literal.groups
    shapes = {str(groups) for groups in literal.groups_after}
    assert len(shapes) >= 4  # one group, and after each of three splits
    assert any(1 < len(groups) < 6 for groups in literal.groups_after)
