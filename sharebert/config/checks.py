"""Errors and checks of settings, and dataclasses to and from plain dictionaries."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting is wrong; the message names the key, what came and what was expected."""


def near_match(word: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the choice nearest to `word`, or an empty string."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def check(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: expected {expected}")


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value!r}: expected one of {', '.join(choices)}{near_match(value, choices)}")


def check_positive(group: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value is None or 0 < value < math.inf, f"{group}{name}", value, "a number above 0")


def check_fraction(group: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value is None or 0.0 <= value <= 1.0, f"{group}{name}", value, "a number from 0 to 1")


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the (nested) dataclass `cls` from plain dictionaries, with all its checks.

    Raises:
        ConfigError: an unknown key (with the near match), or a value that a check refuses.
    """
    hints = typing.get_type_hints(cls)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise ConfigError(f"{path}{unknown[0]}: no such key{near_match(unknown[0], hints)}")
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            arguments[key] = from_dict(hint, value, f"{path}{key}.")
        else:
            arguments[key] = value
    return cls(**arguments)


def to_dict(config: Any) -> dict[str, Any]:
    """Plain nested dictionaries, as JSON and YAML can hold them (tuples become lists)."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return typing.cast("dict[str, Any]", plain(dataclasses.asdict(config)))


def flatten(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """``{"model": {"norm": "pre"}}`` as ``{"model.norm": "pre"}``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{path}{key}."))
        else:
            flat[f"{path}{key}"] = value
    return flat
