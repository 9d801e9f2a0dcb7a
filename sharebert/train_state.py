"""All that survives a restart, as one object: model, sharing, policy, optimizer, scaler and counters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharebert import checkpoint
from sharebert.config import ConfigError, ModelConfig, TrainConfig, from_dict, to_dict
from sharebert.model.bert import Bert, initialize
from sharebert.optim import build_optimizer, load_optimizer_state_by_name, optimizer_state_by_name
from sharebert.precision import Precision
from sharebert.sharing import Groups, SharedLayers
from sharebert.unshare_policy import UnsharePolicy, build_policy


@dataclass
class Counters:
    """What the loop counts."""

    step: int = 0
    """Completed updates."""
    evaluated_step: int = -1
    """Step of the last evaluation."""
    evaluation: dict[str, float] | None = None
    """Its figures."""
    skipped_updates: int = 0
    """fp16 updates tried and thrown away, over the whole run."""
    training_seconds: float = 0.0
    """Seconds spent in updates, over the whole run; evaluation and saving are not counted."""
    loss_sum: float = 0.0
    """Losses of the updates since the last row of figures, over all ranks."""
    loss_updates: int = 0
    """How many updates those are."""


@dataclass
class TrainState:
    """A run at an update boundary."""

    model: Bert
    sharing: SharedLayers
    policy: UnsharePolicy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    counters: Counters = field(default_factory=Counters)

    def tensors(self) -> dict[str, Tensor]:
        """The unique tensors of the model, each under the first of its names, on the host."""
        return {name: parameter.detach().cpu() for name, parameter in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds besides the tensors; plain containers, numbers and tensors."""
        return {
            "optimizer": optimizer_state_by_name(self.model, self.optimizer),
            "scaler": self.scaler.state_dict(),
            "counters": dict(vars(self.counters)),
        }

    def describe(self) -> dict[str, Any]:
        """The part of `meta.json` that says what the state is."""
        return {
            "step": self.counters.step,
            "phase": self.sharing.phase,
            "layer_groups": [list(group) for group in self.sharing.groups],
            "unit_layers": self.sharing.unit_layers,
            "policy_state": self.policy.state_dict(),
            "evaluation": self.counters.evaluation,
            "vocab_size": self.model.vocab_size,
            "parameters": {"unique": self.unique_parameters(), "effective": self.effective_parameters()},
        }

    def unique_parameters(self) -> int:
        """Numbers that are trained; a shared one counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def effective_parameters(self) -> int:
        """Numbers that the unshared network has."""
        copies = self.sharing.copies()
        return sum(parameter.numel() * copies.get(parameter, 1) for parameter in self.model.parameters())


def build_train_state(
    config: TrainConfig, vocab_size: int, device: torch.device, precision: Precision, start: Path | None
) -> TrainState:
    """The state to train on from: that of the checkpoint `start`, else a fresh one (from `init_from`'s weights)."""
    policy = build_policy(config)
    if start is not None:
        meta = checkpoint.read_meta(start)
        policy.load_state_dict(meta["policy_state"])
        model, sharing = _model_of_checkpoint(start, meta)
    else:
        model, sharing = _fresh_model(config, vocab_size)
        sharing.share(policy.groups_for(1))
    model.to(device)  # keeps shared Parameters shared: it moves their data, not the objects
    model.encoder.activation_checkpointing = config.engine.activation_checkpointing
    if config.engine.compile == "true":
        for layer in model.encoder.layers:
            layer.compile()
    state = TrainState(model, sharing, policy, build_optimizer(model, config.optim), precision.build_scaler())
    if start is not None:
        _restore(state, checkpoint.load_training_state(start))
    return state


def load_model(path: Path) -> tuple[Bert, SharedLayers, dict[str, Any]]:
    """Model, sharing and meta of a checkpoint, on the host, for use outside training.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    meta = checkpoint.verify(path)
    model, sharing = _model_of_checkpoint(path, meta)
    return model, sharing, meta


def _restore(state: TrainState, saved: dict[str, Any]) -> None:
    load_optimizer_state_by_name(state.model, state.optimizer, saved["optimizer"])
    if state.scaler.is_enabled() and saved["scaler"]:
        state.scaler.load_state_dict(saved["scaler"])
    state.counters = Counters(**saved["counters"])


def _model_of_checkpoint(path: Path, meta: dict[str, Any]) -> tuple[Bert, SharedLayers]:
    model = Bert(from_dict(ModelConfig, meta["config"]["model"]), meta["vocab_size"])
    sharing = SharedLayers(model.encoder.layers, meta["unit_layers"])
    sharing.share(_groups(meta))
    tensors = checkpoint.load_tensors(path)
    parameters = dict(model.named_parameters())
    if set(tensors) != set(parameters):
        names = sorted(set(tensors) ^ set(parameters))
        raise checkpoint.CheckpointError(f"{path}: its tensors do not fit its configuration, {names[0]!r} first")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return model, sharing


def _fresh_model(config: TrainConfig, vocab_size: int) -> tuple[Bert, SharedLayers]:
    unit_layers = config.unshare.unit_layers
    if config.init_from is not None:
        model = _initial_model(config, vocab_size)
    else:
        model = Bert(config.model, vocab_size)
        starts_equal = config.unshare.policy != "never" or config.unshare.initial == "same"
        initialize(
            model,
            config.seed,
            config.model.initializer_range,
            (lambda name: name_in_unit(name, unit_layers)) if starts_equal else lambda name: name,
        )
    return model, SharedLayers(model.encoder.layers, unit_layers)


def check_init_from(config: TrainConfig) -> None:
    """Refuse, before any work, an `init_from` that is not there, is damaged, or is of another size.

    Raises:
        ConfigError: naming the key.
    """
    try:
        meta = checkpoint.verify(Path(str(config.init_from)))
    except checkpoint.CheckpointError as error:
        raise ConfigError(f"init_from={config.init_from!r}: expected a whole checkpoint ({error})") from error
    saved, now = meta["config"]["model"], to_dict(config.model)
    for key in ("num_layers", "hidden_size", "num_heads", "intermediate_size", "max_position_embeddings", "norm"):
        if saved[key] != now[key]:
            raise ConfigError(f"model.{key}={now[key]!r}: expected {saved[key]!r}, as in init_from={config.init_from}")


def name_in_unit(name: str, unit_layers: int) -> str:
    """The name that a parameter of layer i has in common with those of layers i + A, i + 2A, ...

    >>> name_in_unit("encoder.layers.7.attention.qkv.weight", 3)
    'encoder.layers.1.attention.qkv.weight'
    """
    return re.sub(r"^encoder\.layers\.(\d+)\.", lambda m: f"encoder.layers.{int(m[1]) % unit_layers}.", name)


def _initial_model(config: TrainConfig, vocab_size: int) -> Bert:
    """The weights of `init_from`, every layer by itself; sizes have to agree, dropout may differ."""
    check_init_from(config)
    model, sharing, meta = load_model(Path(str(config.init_from)))
    if meta["vocab_size"] != vocab_size:
        came = f"init_from={config.init_from}: a vocabulary of {meta['vocab_size']}"
        raise ConfigError(f"{came}, expected {vocab_size} as in the data")
    sharing.unshare()
    fresh = Bert(config.model, vocab_size)
    fresh.load_state_dict(model.state_dict())
    return fresh


def _groups(meta: dict[str, Any]) -> Groups:
    return tuple((first, stop) for first, stop in meta["layer_groups"])
