"""All that survives a restart, as one object: model, sharing, policy, optimizer, scaler and counters."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharebert import checkpoint
from sharebert.config import ConfigError, ModelConfig, TrainConfig, from_dict, to_dict
from sharebert.files import sha256_of_file
from sharebert.model.bert import Bert, initialize
from sharebert.model.pretrained import (
    is_transformers_folder,
    load_pretrained,
    read_pretrained,
    read_shape,
    weight_files,
)
from sharebert.optim import build_optimizer, load_optimizer_state_by_name, optimizer_state_by_name
from sharebert.precision import Precision
from sharebert.sharing import Groups, SharedLayers
from sharebert.unshare_policy import UnsharePolicy, build_policy

logger = logging.getLogger(__name__)


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
    unshared_at: list[int] = field(default_factory=list)
    """Updates that began with giving layers weights of their own."""
    loss_updates: int = 0
    """How many updates those are."""
    row_loss_sum: float = 0.0
    """The sum that went into the last row of figures; a run that would not have written this row opens it again."""
    row_loss_updates: int = 0
    """How many updates that was."""


@dataclass
class TrainState:
    """A run at an update boundary."""

    model: Bert
    sharing: SharedLayers
    policy: UnsharePolicy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    counters: Counters = field(default_factory=Counters)
    init_from_sha256: str | None = None
    """Hash of the weights that the run began from."""

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
            "unshared_at": self.counters.unshared_at,
            "init_from_sha256": self.init_from_sha256,
            "evaluation": self.counters.evaluation,
            "evaluated_step": self.counters.evaluated_step,
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
        init_from_sha256 = meta.get("init_from_sha256")  # not in checkpoints of the first version
        policy.load_state_dict(meta["policy_state"])
        model, sharing = _model_of_checkpoint(start, meta)
    else:
        model, sharing = _fresh_model(config, vocab_size)
        sharing.share(policy.groups_for(1))
        init_from_sha256 = None if config.init_from is None else hash_init_from(config.init_from)
        if init_from_sha256 is not None and sharing.phase != "unshared":
            logger.info("init_from: layers that share begin at their mean")
    model.to(device)  # keeps shared Parameters shared: it moves their data, not the objects
    model.encoder.activation_checkpointing = config.engine.activation_checkpointing
    if config.engine.compile == "true":
        # Layer by layer the all-reduce of DDP overlaps anyway; dynamo would split each layer at DDP's buckets.
        torch._dynamo.config.optimize_ddp = False
        for layer in model.encoder.layers:
            layer.compile()
    state = TrainState(model, sharing, policy, build_optimizer(model, config.optim), precision.build_scaler())
    state.init_from_sha256 = init_from_sha256
    if start is not None:
        _restore(state, checkpoint.load_training_state(start))
    return state


def load_model(path: Path) -> tuple[Bert, SharedLayers, dict[str, Any]]:
    """Model, sharing and meta of a checkpoint, on the host, for use outside training.

    Raises:
        CheckpointError: a file is missing or damaged, or it is a checkpoint of fine-tuning.
    """
    meta = _verify_pretraining(path)
    model, sharing = _model_of_checkpoint(path, meta)
    return model, sharing, meta


def _verify_pretraining(path: Path) -> dict[str, Any]:
    meta = checkpoint.verify(path)
    if meta["phase"] == checkpoint.FINETUNED:
        raise checkpoint.CheckpointError(f"{path}: a checkpoint of fine-tuning; expected one of pretraining")
    return meta


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
    """Refuse, before any work, an `init_from` that is not there, is damaged, or is of another shape.

    Raises:
        ConfigError: naming every key that does not fit.
    """
    folder = init_from_folder(config.init_from)
    if is_transformers := is_transformers_folder(folder):
        saved = read_shape(folder)
    else:
        try:
            saved = _verify_pretraining(folder)["config"]["model"]
        except checkpoint.CheckpointError as error:
            expected = "expected a whole checkpoint, or a folder that Transformers wrote"
            if not folder.exists():
                expected += ", as from `hf download NAME --local-dir FOLDER`"
            raise ConfigError(f"init_from={config.init_from!r}: {expected} ({error})") from error
    now = to_dict(config.model)
    keys = ("num_layers", "hidden_size", "num_heads", "intermediate_size", "max_position_embeddings", "norm")
    wrong = [f"model.{key}={now[key]!r}: expected {saved[key]!r}" for key in keys if saved[key] != now[key]]
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)}, as in init_from={config.init_from}")
    if is_transformers:
        read_pretrained(folder, config.model)


def init_from_folder(init_from: str | None) -> Path:
    """The folder that `init_from` names."""
    return Path(str(init_from)).expanduser()


def hash_init_from(init_from: str) -> str:
    """Hash of the weights that `init_from` names, whatever path leads to them.

    Raises:
        CheckpointError, ConfigError: there are none.
    """
    folder = init_from_folder(init_from)
    if not is_transformers_folder(folder):
        return str(checkpoint.read_meta(folder)["files"][checkpoint.MODEL_FILE]["sha256"])
    hashes = [sha256_of_file(file) for file in weight_files(folder)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def began_from(meta: dict[str, Any], init_from: str | None) -> bool:
    """Whether the run of a checkpoint's `meta` began from the weights that `init_from` names today."""
    if init_from is None or meta.get("init_from_sha256") is None:
        return False
    try:
        return hash_init_from(init_from) == str(meta["init_from_sha256"])
    except (checkpoint.CheckpointError, ConfigError):
        return False


def name_in_unit(name: str, unit_layers: int) -> str:
    """The name that a parameter of layer i has in common with those of layers i + A, i + 2A, ...

    >>> name_in_unit("encoder.layers.7.attention.qkv.weight", 3)
    'encoder.layers.1.attention.qkv.weight'
    """
    return re.sub(r"^encoder\.layers\.(\d+)\.", lambda m: f"encoder.layers.{int(m[1]) % unit_layers}.", name)


def _initial_model(config: TrainConfig, vocab_size: int) -> Bert:
    """The weights of `init_from`, every layer by itself; sizes have to agree, dropout may differ."""
    check_init_from(config)
    folder = init_from_folder(config.init_from)
    if is_transformers_folder(folder):
        fresh = Bert(config.model, vocab_size)
        initialize(fresh, config.seed, config.model.initializer_range)  # for a head that is not there
        load_pretrained(folder, fresh)
        return fresh
    model, sharing, meta = load_model(folder)
    if meta["vocab_size"] != vocab_size:
        came = f"init_from={config.init_from}: a vocabulary of {meta['vocab_size']}"
        raise ConfigError(f"{came}, expected {vocab_size} as in the data")
    sharing.unshare()
    fresh = Bert(config.model, vocab_size)
    fresh.load_state_dict(model.state_dict())
    return fresh


def _groups(meta: dict[str, Any]) -> Groups:
    return tuple((first, stop) for first, stop in meta["layer_groups"])
