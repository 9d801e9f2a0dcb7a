"""`export --unshare`: a checkpoint unshared without training, by what the run itself does first in its next update."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import torch

from sharebert import checkpoint
from sharebert.config import ConfigError, TrainConfig, from_dict, to_dict
from sharebert.files import appearing_folder
from sharebert.optim import build_optimizer, load_optimizer_state_by_name, optimizer_state_by_name
from sharebert.sharing import SharedLayers
from sharebert.train_state import Counters, TrainState, load_model
from sharebert.unshare_policy import UnsharePolicy, build_policy


def write_unshared(path: Path, folder: Path) -> dict[str, Any]:
    """Write the checkpoint at `path` to `folder`, with weights and optimizer state of its own for every layer.

    That is the state of a run which unshares all in its next update, and the configuration in it says so: where the
    policy would not do that by itself, it becomes `fixed` with that update. A run of this configuration goes on from
    there bit for bit as if it had unshared by itself. Optimizer state is copied or dropped as
    `unshare.optimizer_state` says.

    Returns:
        The `meta.json` of the checkpoint at `folder`; `unshared_from` says what it was made of.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: nothing shares in it any more, or `folder` is there and not empty.
    """
    with appearing_folder(folder) as target:
        model, sharing, meta = load_model(path)
        if sharing.phase == "unshared":
            expected = "expected one of phase shared or partly-shared"
            raise ConfigError(f"{path}: a checkpoint of phase unshared, in which no layers share; {expected}")
        saved = checkpoint.load_training_state(path)
        config, policy = _unsharing_next(meta, sharing)
        optimizer = build_optimizer(model, config.optim)
        load_optimizer_state_by_name(model, optimizer, saved["optimizer"])
        sharing.unshare(None, optimizer, config.unshare.optimizer_state)
        counters = Counters(**saved["counters"])
        counters.unshared_at.append(counters.step + 1)
        scaler = torch.amp.GradScaler(enabled=False)  # its saved state is passed on as it is
        state = TrainState(model, sharing, policy, optimizer, scaler, counters, meta.get("init_from_sha256"))
        meta |= {**state.describe(), "before_unsharing": False, "config": to_dict(config)}
        weights = meta["files"][checkpoint.MODEL_FILE]["sha256"]
        meta["unshared_from"] = {"checkpoint": path.resolve().name, "weights_sha256": weights}
        training_state = {
            **saved,
            "optimizer": optimizer_state_by_name(model, optimizer),
            "counters": dict(vars(counters)),
        }
        tokenizer = (path / checkpoint.TOKENIZER_FILE).read_bytes()
        checkpoint.write_files(target, state.tensors(), training_state, tokenizer, meta)
    return checkpoint.read_meta(folder)


def _unsharing_next(meta: dict[str, Any], sharing: SharedLayers) -> tuple[TrainConfig, UnsharePolicy]:
    """Configuration and policy of the checkpoint's run, changed so that all layers are unshared in the next update.

    Those of a finished run, which has no next update, stay as they are.
    """
    config, update = from_dict(TrainConfig, meta["config"]), meta["step"] + 1
    policy = build_policy(config)
    policy.load_state_dict(meta["policy_state"])
    if len(policy.groups_for(update)) < len(sharing.units) and update <= config.max_steps:
        unshare = dataclasses.replace(config.unshare, policy="fixed", step=update)
        config = dataclasses.replace(config, unshare=unshare)
        policy = build_policy(config)
        policy.load_state_dict(meta["policy_state"])
    return config, policy


def how_to_go_on(meta: dict[str, Any], folder: Path) -> str:
    """What was written, and what to add to the command of the run to train on from there; for people."""
    step, config = meta["step"], meta["config"]
    wrote = f"wrote {folder}: step {step:,} of {config['max_steps']:,}, unshared"
    if step >= config["max_steps"]:
        beginning = shlex.join([f"init_from={_hydra_value(folder)}", "unshare=never"])
        return f"{wrote}; its run is finished. Another one can begin with its weights:\n  {beginning}"
    settings = ["run_name=NEW", f"checkpoint.resume={_hydra_value(folder)}"]
    if config["unshare"]["policy"] == "fixed":
        settings += ["unshare.policy=fixed", f"unshare.step={config['unshare']['step']}"]
    return f"{wrote}; to train on from it, add to the command of its run:\n  {shlex.join(settings)}"


def _hydra_value(path: Path) -> str:
    """A path as Hydra reads it after a key: in quotes, where it has other than plain characters."""
    if re.fullmatch(r"[\w./-]+", str(path), re.ASCII):
        return str(path)
    return "'{}'".format(re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", r"\'"), str(path)))
