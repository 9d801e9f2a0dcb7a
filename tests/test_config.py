"""A wrong setting is refused by a message that names its key, what came and what was expected."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from sharebert.config import (
    ConfigError,
    FinetuneConfig,
    TrainConfig,
    check_world_size,
    flatten,
    from_dict,
    near_match,
    to_dict,
)


def nested(key: str, value: object) -> dict[str, Any]:
    """``{"model": {"norm": "pre"}}`` from ``model.norm`` and ``pre``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


BAD_VALUES: list[tuple[str, object]] = [
    ("max_steps", 0),
    ("global_batch_size", -1),
    ("seed", -1),
    ("seed", 2**63),
    ("model.num_layers", 0),
    ("model.num_heads", -2),
    ("model.intermediate_size", 0),
    ("model.max_position_embeddings", 0),
    ("model.norm", "middle"),
    ("model.dropout", 1.0),
    ("model.attention_dropout", -0.1),
    ("model.initializer_range", 0.0),
    ("data.source", "internet"),
    ("data.seq_len", 4),
    ("data.vocab_size", 0),
    ("data.num_proc", 0),
    ("data.validation_fraction", 1.5),
    ("masking.probability", 0.0),
    ("masking.probability", 1.0),
    ("masking.mask_share", 1.2),
    ("masking.random_share", -0.1),
    ("unshare.policy", "sometimes"),
    ("unshare.step", 0),
    ("unshare.fraction", 2.0),
    ("unshare.unit_layers", 0),
    ("unshare.check_every", 0),
    ("unshare.threshold", 1.0),
    ("unshare.patience", 0),
    ("unshare.earliest_step", -1),
    ("unshare.latest_step", 0),
    ("unshare.optimizer_state", "keep"),
    ("unshare.initial", "equal"),
    ("optim.name", "adam"),
    ("optim.schedule", "step"),
    ("optim.lr", 0.0),
    ("optim.lr", math.nan),
    ("optim.eps", -1e-6),
    ("optim.clip_norm", 0.0),
    ("optim.weight_decay", -0.01),
    ("optim.warmup_steps", -1),
    ("optim.decay_fraction", 1.1),
    ("optim.betas", (0.9, 1.0)),
    ("optim.betas", (0.9,)),
    ("engine.device", "gpu"),
    ("engine.precision", "int8"),
    ("engine.compile", "perhaps"),
    ("engine.micro_batch_size", 0),
    ("engine.num_workers", -1),
    ("checkpoint.every_steps", 0),
    ("checkpoint.keep_last", 0),
    ("checkpoint.keep_every", -5),
    ("checkpoint.resume", ""),
    ("evaluation.every_steps", 0),
    ("evaluation.max_sequences", 0),
    ("logging.every_steps", 0),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES, ids=[f"{key}={value}" for key, value in BAD_VALUES])
def test_a_value_out_of_range_is_refused_with_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_dict(TrainConfig, nested(key, value))
    named, _, expected = str(refusal.value).partition(": expected ")
    assert key in named
    assert expected


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("unshare.step", {"max_steps": 100, "unshare": {"step": 101}}, "max_steps=100"),
    ("data.seq_len", {"data": {"seq_len": 600}}, "model.max_position_embeddings=512"),
    ("model.hidden_size", {"model": {"hidden_size": 250}}, "model.num_heads=4"),
    ("unshare.unit_layers", {"unshare": {"unit_layers": 3}}, "model.num_layers=4"),
    ("unshare.check_every", {"unshare": {"policy": "adaptive"}}, "unshare.policy=adaptive"),
    ("unshare.latest_step", {"unshare": {"earliest_step": 9, "latest_step": 8}}, "unshare.earliest_step=9"),
    ("masking.mask_share + masking.random_share", {"masking": {"mask_share": 0.8, "random_share": 0.3}}, "at most 1"),
    ("data.files", {"data": {"source": "text_files"}}, "data.source=text_files"),
    ("data.hf_path", {"data": {"source": "hf_dataset"}}, "data.source=hf_dataset"),
]


@pytest.mark.parametrize(("key", "values", "other"), CONTRADICTIONS, ids=[entry[0] for entry in CONTRADICTIONS])
def test_a_contradiction_names_both_settings(key: str, values: dict[str, Any], other: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_dict(TrainConfig, values)
    assert str(refusal.value).startswith(f"{key}=")
    assert other in str(refusal.value)


def test_the_unshare_step_may_be_the_last_update_and_does_not_bind_other_policies() -> None:
    from_dict(TrainConfig, {"max_steps": 100, "unshare": {"step": 100}})
    from_dict(TrainConfig, {"max_steps": 100, "unshare": {"step": 101, "policy": "never"}})


def test_a_global_batch_must_divide_over_the_processes() -> None:
    config = TrainConfig(global_batch_size=64)
    check_world_size(config, 8)
    with pytest.raises(ConfigError, match="global_batch_size=64: expected a multiple of the 3 processes"):
        check_world_size(config, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_stepz": 3}, "max_stepz: no such key (did you mean 'max_steps'?)"),
        ({"unshare": {"polcy": "never"}}, "unshare.polcy: no such key (did you mean 'policy'?)"),
        ({"model": {"qqqq": 1}}, "model.qqqq: no such key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_near_match(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_dict(TrainConfig, values)
    assert str(refusal.value) == message


def test_a_wrong_choice_is_refused_with_the_near_match() -> None:
    with pytest.raises(ConfigError, match=r"unshare.policy='nevr': expected one of .* \(did you mean 'never'\?\)"):
        from_dict(TrainConfig, {"unshare": {"policy": "nevr"}})


def test_near_match_is_silent_when_nothing_is_near() -> None:
    assert near_match("trian", ["train", "prepare"]) == " (did you mean 'train'?)"
    assert near_match("qqqq", ["train", "prepare"]) == ""


def test_to_dict_and_from_dict_undo_each_other() -> None:
    config = from_dict(
        TrainConfig,
        {
            "run_name": "a",
            "model": {"norm": "post"},
            "data": {"source": "text_files", "files": ["a.txt", "b.txt"]},
            "unshare": {"step": 7},
            "optim": {"betas": [0.8, 0.95], "clip_norm": None},
            "engine": {"compile": True},
        },
    )
    values = to_dict(config)
    assert values["optim"]["betas"] == [0.8, 0.95]
    assert values["engine"]["compile"] == "true"
    assert from_dict(TrainConfig, values) == config


def test_flatten_joins_keys_with_dots() -> None:
    assert flatten({"a": 1, "b": {"c": 2, "d": {"e": [3]}}}) == {"a": 1, "b.c": 2, "b.d.e": [3]}


def test_a_configuration_cannot_be_changed_after_it_was_checked() -> None:
    config = TrainConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_steps = 0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.norm = "post"  # type: ignore[misc]


def dataclasses_of(kind: Any) -> list[Any]:
    """A dataclass and the dataclasses of its fields."""
    made = [kind]
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default_factory):
            made += dataclasses_of(field.default_factory)
    return made


def test_every_setting_says_what_it_means() -> None:
    """A doc string follows each field; groups are explained by their class."""
    import ast
    import inspect
    import textwrap

    for kind in [*dataclasses_of(TrainConfig), *dataclasses_of(FinetuneConfig)]:
        assert kind.__doc__
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and "Config" not in ast.unparse(node.annotation):
                is_explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert is_explained, f"{kind.__name__}: {ast.unparse(node)}"
