"""Every experiment composes, with every other choice of `unshare` and `data`, and holds the numbers it stands for."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from sharebert import config as configuration
from sharebert.config import TrainConfig, flatten, from_dict, to_dict

CONF = Path(__file__).parent.parent / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
PAPER = sorted(path.stem for path in (CONF / "experiment/paper").glob("*.yaml"))
PRESETS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
NEEDED = {"text_files": ["data.files=[a.txt]"], "hf_dataset": ["data.hf_path=owner/name"]}
"""What a choice of `data` cannot do without."""


@pytest.fixture(autouse=True)
def _schema() -> Iterator[None]:
    configuration.register()
    with hydra.initialize_config_module("sharebert.conf", version_base="1.3"):
        yield


def compose(*overrides: str) -> tuple[TrainConfig, dict[str, str]]:
    """The configuration that the command line would run, and the choices of its groups."""
    composed = hydra.compose("train", list(overrides), return_hydra_config=True)
    choices = dict(composed.hydra.runtime.choices)
    OmegaConf.set_struct(composed, False)
    del composed["hydra"]
    values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    return from_dict(TrainConfig, values), choices


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as plain dictionaries."""
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return OmegaConf.to_container(loaded)  # type: ignore[return-value]


def read_body(experiment: str) -> dict[str, Any]:
    """What an experiment sets in its body or in that of the experiment from which it starts, flat."""
    content = read_yaml(CONF / f"experiment/{experiment}.yaml")
    above = [default for default in content.pop("defaults") if isinstance(default, str)]
    inherited = (read_body(name.removeprefix("/experiment/")) for name in above)
    return {**dict(item for body in inherited for item in body.items()), **flatten(content)}


def choices_of(group: str) -> list[str]:
    """The files of a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_composes_to_what_its_file_says(experiment: str) -> None:
    config, choices = compose(f"+experiment={experiment}")
    content = read_yaml(CONF / f"experiment/{experiment}.yaml")
    for default in content.pop("defaults"):
        ((group, choice),) = default.items()
        assert choices[group.removeprefix("override /")] == choice
    result = flatten(to_dict(config))
    for key, value in flatten(content).items():
        assert result[key] == (float(value) if isinstance(result[key], float) else value), key


@pytest.mark.parametrize("experiment", [*EXPERIMENTS, "paper/table1_swe_a", "paper/table2_swe_f"])
def test_every_choice_of_unshare_and_data_wins_over_the_experiment(experiment: str) -> None:
    body = read_body(experiment)
    every = (choices_of("unshare"), choices_of("data"))
    for unshare, data in zip(*(itertools.islice(itertools.cycle(c), max(map(len, every))) for c in every), strict=True):
        config, _ = compose(f"+experiment={experiment}", f"unshare={unshare}", f"data={data}", *NEEDED.get(data, []))
        result = flatten(to_dict(config))
        for group, choice in (("unshare", unshare), ("data", data)):
            expected = flatten({group: read_yaml(CONF / group / f"{choice}.yaml")})
            missed = {key for key, value in expected.items() if key not in body and result[key] != value}
            assert not missed, f"{group}={choice}"


@pytest.mark.parametrize("experiment", [*EXPERIMENTS, *(f"paper/{name}" for name in PAPER)])
def test_an_experiment_opens_with_the_command_that_runs_it(experiment: str) -> None:
    first, second, third, *_ = (CONF / f"experiment/{experiment}.yaml").read_text().splitlines()
    assert first == "# @package _global_"
    assert second.split(" data=")[0] == f"# sharebert train +experiment={experiment}"
    assert third == "#"
    compose(*shlex.split(second)[3:])


@pytest.mark.parametrize("experiment", [*EXPERIMENTS, *(f"paper/{name}" for name in PAPER)])
def test_an_experiment_chooses_groups_through_its_defaults_only(experiment: str) -> None:
    content = read_yaml(CONF / f"experiment/{experiment}.yaml")
    choices = [default for default in content.pop("defaults") if not isinstance(default, str)]
    assert all(key.startswith("override /") for default in choices for key in default)
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert all(isinstance(content[key], Mapping) for key in groups & set(content)), "a group chosen in the body"
    forbidden = {key for key in flatten(content) if key.split(".")[-1] in ("policy", "source", "name")}
    assert not forbidden, "these would win over the command line's choice of a group"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_preset_starts_narrow_networks_from_larger_weights(preset: str) -> None:
    model = compose(f"model={preset}")[0].model
    assert model.name == preset
    expected = 0.02 if model.hidden_size >= 768 else 0.55 / math.sqrt(model.hidden_size)
    assert model.initializer_range == pytest.approx(expected, rel=2e-3)
    assert model.hidden_size == 64 * model.num_heads
    assert model.intermediate_size == 4 * model.hidden_size


WIKIPEDIA = {
    "global_batch_size": 512,
    "data.seq_len": 512,
    "data.vocab_size": 30522,
    "data.hf_path": "wikimedia/wikipedia",
    "model.norm": "pre",
    "model.dropout": 0.1,
    "model.attention_dropout": 0.1,
    "masking.probability": 0.15,
    "masking.whole_word": False,
    "optim.name": "adamw",
    "optim.lr": 3e-4,
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.clip_norm": 1.0,
    "optim.warmup_steps": 10_000,
    "optim.schedule": "linear",
    "unshare.unit_layers": 1,
    "unshare.optimizer_state": "copy",
}
LARGE = {"model.num_layers": 24, "model.hidden_size": 1024, "model.num_heads": 16, "model.intermediate_size": 4096}
BASE = {"model.num_layers": 12, "model.hidden_size": 768, "model.num_heads": 12, "model.intermediate_size": 3072}
SHARE_50K = {"unshare.policy": "fixed", "unshare.step": 50_000}
ADAPTIVE = {"unshare.check_every": 1000, "unshare.threshold": 0.5, "unshare.patience": 3}
TABLE_1 = {**WIKIPEDIA, **LARGE, "max_steps": 500_000}
TABLE_2 = {**TABLE_1, "max_steps": 1_000_000, "model.norm": "post", "masking.whole_word": True, "optim.lr": 1e-4}
NEVER, SWE_M = {"unshare.policy": "never"}, {**ADAPTIVE, "unshare.policy": "multi_step"}
RECIPES: dict[str, dict[str, Any]] = {
    "bert_base_half": {**WIKIPEDIA, **BASE, **SHARE_50K, "max_steps": 500_000},
    "paper/table1_base_1m": {**TABLE_1, **NEVER, "max_steps": 1_000_000},
    "paper/table1_base_500k": {**TABLE_1, **NEVER},
    "paper/table1_swe_f": {**TABLE_1, **SHARE_50K},
    "paper/table1_swe_a": {**TABLE_1, **ADAPTIVE, "unshare.policy": "adaptive"},
    "paper/table1_swe_m": {**TABLE_1, **SWE_M},
    "paper/table2_base_2m": {**TABLE_2, **NEVER, "max_steps": 2_000_000},
    "paper/table2_base_1m": {**TABLE_2, **NEVER},
    "paper/table2_swe_f": {**TABLE_2, **SHARE_50K},
    "paper/table2_swe_m": {**TABLE_2, **SWE_M},
    "paper/table3_tau_200k": {**TABLE_1, **SHARE_50K, "unshare.step": 200_000},
    **{f"paper/table3_rho_{rho}": {**TABLE_1, **SWE_M, "unshare.threshold": rho} for rho in (0.1, 0.3, 0.7, 0.9)},
    **{
        f"paper/table4_{layers}x{24 // layers}": {**TABLE_1, **SHARE_50K, "unshare.unit_layers": layers}
        for layers in (12, 6, 4, 2)
    },
}


@pytest.mark.parametrize("experiment", RECIPES)
def test_an_experiment_holds_the_numbers_of_the_paper(experiment: str) -> None:
    result = flatten(to_dict(compose(f"+experiment={experiment}")[0]))
    assert {key: result[key] for key in RECIPES[experiment]} == RECIPES[experiment]


def test_the_primary_config_changes_no_default_but_the_preset_of_the_model() -> None:
    result, defaults = flatten(to_dict(compose()[0])), flatten(to_dict(TrainConfig()))
    assert {key for key in result if result[key] != defaults[key]} <= {
        key for key in result if key.startswith("model.")
    }
