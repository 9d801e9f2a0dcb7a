"""Arms of a comparison: runs that are equal in all but the seed, and names that tell the arms apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sharebert.config import TrainConfig, flatten, to_dict
from sharebert.report.read import Run
from sharebert.run_folder import MAY_DIFFER

COMPARED_AFTER_ALL = ("data.files", "data.hf_path", "data.tokenizer", "engine.device", "evaluation.max_sequences")
"""May differ on a resume, where other checks stand in; two runs that differ in them are not the same experiment."""

UNSHARING = ("unit_layers", "shared_lr_factor", "optimizer_state")
WATCHING = (*UNSHARING, "check_every", "threshold", "patience", "earliest_step", "latest_step")
USED_BY = {
    "fixed": (*UNSHARING, "step"),
    "adaptive": WATCHING,
    "multi_step": WATCHING,
    "never": ("initial",),
    "always": ("unit_layers", "shared_lr_factor"),
}
"""Settings of unsharing that a policy looks at (checks are a diagnostic under most); others are used by all."""

POLICY_NAMES = {
    "never": "baseline",
    "fixed": "SWE-F",
    "adaptive": "SWE-A",
    "multi_step": "SWE-M",
    "always": "always shared",
}
SHORT_NAMES = {
    "unshare.step": "τ",
    "unshare.threshold": "\N{GREEK SMALL LETTER RHO}",
    "unshare.check_every": "check every",
    "unshare.optimizer_state": "state",
    "max_steps": "T",
    "optim.lr": "peak",
    "data.seq_len": "length",
    "model.num_layers": "layers",
}

PAPERS = {"unshare.shared_lr_factor": 1.0, "unshare.optimizer_state": "copy", "unshare.initial": "independent"}
"""What the paper does; named only where it is otherwise."""
ALWAYS_NAMED = {"max_steps", "unshare.threshold", "unshare.step", "unshare.unit_layers"}
"""Where arms differ in them."""


@dataclass(frozen=True)
class Arm:
    """Runs of one configuration."""

    name: str
    runs: tuple[Run, ...]
    """By seed, each seed once."""
    settings: dict[str, Any]
    """All that makes a configuration, flat, without the seed and what does not change the result."""

    @property
    def config(self) -> TrainConfig:
        """The configuration of its first run."""
        return self.runs[0].settings

    @property
    def policy(self) -> str:
        """The unshare policy."""
        return self.config.unshare.policy

    @property
    def complete(self) -> tuple[Run, ...]:
        """Runs that are finished: only these count in a mean."""
        return tuple(run for run in self.runs if run.is_complete)


def comparable_settings(config: TrainConfig) -> dict[str, Any]:
    """What two runs must have in common to be of one arm."""
    settings = flatten(to_dict(config))
    of_some = {key for keys in USED_BY.values() for key in keys}
    unused = {f"unshare.{key}" for key in of_some - set(USED_BY[config.unshare.policy])}
    return {key: value for key, value in settings.items() if _tells_apart(key) and key not in unused}


def _tells_apart(key: str) -> bool:
    if key in COMPARED_AFTER_ALL:
        return True
    return key != "seed" and not any(key.startswith(n) if n.endswith(".") else key == n for n in MAY_DIFFER)


def group_into_arms(runs: Sequence[Run]) -> tuple[list[Arm], list[str]]:
    """Arms of the readable runs, baselines first; and remarks on runs that do not count.

    Two runs of one arm with the same seed are no two samples: the one that came further stands.
    """
    found: dict[str, list[Run]] = {}
    remarks = []
    for run in runs:
        if run.is_readable:
            key = json.dumps(comparable_settings(run.settings), sort_keys=True, default=str)
            found.setdefault(key, []).append(run)
    groups = []
    for members in found.values():
        by_seed: dict[int, Run] = {}
        for run in sorted(members, key=lambda run: -run.evaluations[-1].step):
            other = by_seed.setdefault(run.settings.seed, run)
            if other is not run:
                remarks.append(f"{run.name} has the settings and the seed of {other.name} and is not counted")
        groups.append(tuple(by_seed[seed] for seed in sorted(by_seed)))
    groups.sort(key=lambda group: _order(group[0].settings))
    settings = [comparable_settings(group[0].settings) for group in groups]
    names = name_arms([group[0] for group in groups])
    return [Arm(*parts) for parts in zip(names, groups, settings, strict=True)], remarks


def _order(config: TrainConfig) -> tuple[Any, ...]:
    unshare = config.unshare
    return (list(POLICY_NAMES).index(unshare.policy), -config.max_steps, unshare.step or 0, unshare.threshold)


def name_arms(runs: Sequence[Run]) -> list[str]:
    """A name for each arm, of which a run is given: the policy, and the settings in which arms differ.

    A setting that is the same wherever a policy looks at it is not named, nor one of :func:`usual_values`;
    but τ always is.
    """
    settings = [comparable_settings(run.settings) for run in runs]
    differing, usual = _differing(settings), usual_values(settings)
    names = [_name(run.settings, flat, differing, usual) for run, flat in zip(runs, settings, strict=True)]
    repeated = {name for name in names if names.count(name) > 1}
    return [f"{name} ({run.name})" if name in repeated else name for name, run in zip(names, runs, strict=True)]


def _differing(settings: Sequence[dict[str, Any]]) -> set[str]:
    """Keys that arms of these settings differ in, where both have them."""
    values: dict[str, set[str]] = {}
    for flat in settings:
        for key, value in flat.items():
            values.setdefault(key, set()).add(str(value))
    return by_preset({key for key, found in values.items() if len(found) > 1} - {"unshare.policy"})


def usual_values(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is not worth naming of the settings in which arms differ: what the paper does, or most arms have."""
    usual = {}
    for key in _differing(settings) - ALWAYS_NAMED:
        values = [flat[key] for flat in settings if key in flat]
        most = max(values, key=values.count)
        if key in PAPERS:
            usual[key] = PAPERS[key]
        elif len(values) > 3 and values.count(most) > 2 / 3 * len(values):
            usual[key] = most
    return usual


def describe_usual(arms: Sequence[Arm]) -> str:
    """The settings of most arms, which their names leave out; empty where there are none."""
    usual = usual_values([arm.settings for arm in arms])
    return ", ".join(_describe(key, value) for key, value in sorted(usual.items()) if key not in PAPERS)


def by_preset(keys: set[str]) -> set[str]:
    """Without the single settings of the model where its preset is among the keys."""
    return {key for key in keys if key == "model.name" or not ("model.name" in keys and key.startswith("model."))}


def common_unsharing(arms: Sequence[Arm]) -> dict[str, Any]:
    """Settings of unsharing that are the same in all arms whose policy looks at them."""
    values: dict[str, list[Any]] = {}
    for arm in arms:
        for key in USED_BY[arm.policy]:
            values.setdefault(key, []).append(arm.settings[f"unshare.{key}"])
    return {key: found[0] for key, found in values.items() if all(value == found[0] for value in found)}


def _name(config: TrainConfig, settings: dict[str, Any], differing: set[str], usual: dict[str, Any]) -> str:
    policy, unit_layers = config.unshare.policy, config.unshare.unit_layers
    parts = [POLICY_NAMES[policy]]
    if policy == "fixed":
        parts[0] += f" τ={config.unshare.step:,}" if config.unshare.step else f" τ={config.unshare.fraction:g}·T"
    if unit_layers > 1 and policy != "never":
        parts.append(f"units {unit_layers}\N{MULTIPLICATION SIGN}{config.model.num_layers // unit_layers}")
    for key in sorted(differing - {"unshare.step", "unshare.unit_layers"}, key=lambda key: (key != "max_steps", key)):
        if key in settings and not (key in usual and settings[key] == usual[key]):
            parts.append(_describe(key, settings[key]))
    return ", ".join(parts)


def _describe(key: str, value: Any) -> str:
    if key == "model.norm":
        return {"pre": "Pre-LN", "post": "Post-LN"}[value]
    if key == "model.name":
        return str(value)
    if key == "unshare.initial":
        return f"{value} start"
    if key == "unshare.shared_lr_factor":
        return f"shared rate x{value:g}"
    shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    name = SHORT_NAMES.get(key, key.split(".")[-1])
    return f"{name} {shown}" if name in ("length", "state", "check every") else f"{name}={shown}"
