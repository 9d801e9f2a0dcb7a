"""The engine against the paper's Algorithm 1 written out literally, in float64."""

from __future__ import annotations

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
        logits = self.model(batch.input_ids, batch.positions, batch.attention_mask)
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        ((losses * batch.weights.flatten()).sum() / batch.weights.sum()).backward()
        if t < self.config.unshare.step:
            self._replace_gradients_by_means()
        if self.config.optim.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm, foreach=False)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(t - 1, self.config.optim, self.config.max_steps)
        self.optimizer.step()

    def _replace_gradients_by_means(self) -> None:
        families: dict[str, list[torch.nn.Parameter]] = {}
        for name, parameter in self.model.encoder.layers.named_parameters(prefix="encoder.layers"):
            families.setdefault(name_in_unit(name, self.unit_layers), []).append(parameter)
        for family in families.values():
            mean = torch.stack([parameter.grad for parameter in family]).mean(0)
            for parameter in family:
                parameter.grad = mean.clone()


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("unit_layers", [1, 2, 3])  # 1 x 6, 2 x 3, 3 x 2
@pytest.mark.parametrize("micro_batch_size", [24, 8])  # accumulation 1 and 3
@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 1e-12), ("adamw", 1e-9)])
def test_the_engine_is_algorithm_1_update_by_update(
    tmp_path: Path, norm: str, unit_layers: int, micro_batch_size: int, optimizer: str, tolerance: float
) -> None:
    optim = {"name": "sgd", "clip_norm": None, "weight_decay": 0.0} if optimizer == "sgd" else {"clip_norm": 0.5}
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
        trainer.maybe_unshare()
        assert trainer.train_step(window)
        literal.update(t, window)
        expected = dict(literal.model.named_parameters())
        for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(parameter, expected[name], rtol=0.0, atol=tolerance)
        assert trainer.sharing.phase == ("shared" if t < 6 else "unshared")
    assert t == 12


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
