"""From a command line to composed configurations: one, or one for each cell of a sweep.

All cells are composed before the first one runs, so that a sweep can be ordered, planned or submitted as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharebert import config as configuration
from sharebert.config import ConfigError, near_match

MAX_FOLDER_LENGTH = 120


@dataclass(frozen=True)
class Cell:
    """One job that a command line asks for."""

    values: dict[str, Any]
    """The composed configuration, as plain dictionaries; not checked yet."""
    folder: Path
    """Its run folder."""
    overrides: tuple[str, ...]
    """The settings on the command line, of this cell."""


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    cells: list[Cell]
    """In the order in which they were typed; none where Hydra only showed something (`--cfg`, `--help`)."""
    is_multirun: bool

    @property
    def folder(self) -> Path:
        """The run folder; of a sweep, the folder that holds those of its cells."""
        return self.cells[0].folder.parent if self.is_multirun else self.cells[0].folder


def compose(verb: str, primary: str, kind: type, arguments: Sequence[str]) -> Request:
    """Let Hydra read the arguments.

    Args:
        verb: for its help.
        primary: name of the primary configuration file under ``conf/``.
        kind: its schema, for the near match of a wrong key.
        arguments: as typed; flags may stand anywhere.

    Raises:
        ConfigError: with the key, what came and what was expected.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    configuration.register()
    cells: list[Cell] = []
    swept: dict[str, Any] = {}
    is_multirun = any(argument in ("-m", "--multirun") for argument in arguments)

    def collect(composed: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        swept.update(hydra_config.sweeper.get("params") or {})
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
        values["run_name"] = run_name(values["run_name"], hydra_config.runtime.choices)
        overrides = tuple(hydra_config.overrides.task)
        folder = Path(values["output_dir"]) / values["run_name"]
        if is_multirun:
            folder /= job_folder(overrides, arguments)
        cells.append(Cell(values, folder, overrides))

    shows_all = os.environ.get("HYDRA_FULL_ERROR") == "1"
    with tempfile.TemporaryDirectory() as scratch, _hydra_reads([f"sharebert {verb}", *_flags_first(arguments)]):
        sys.argv.append(f"hydra.sweep.dir={scratch}")  # Hydra leaves a multirun.yaml; the run folders are ours
        try:
            hydra.main(config_path="pkg://sharebert.conf", config_name=primary, version_base="1.3")(collect)()
        except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
            if shows_all or isinstance(error, BrokenPipeError):
                raise
            raise ConfigError(_explain(error, kind)) from error
    if swept and cells and not is_multirun:
        came = ", ".join(f"{key}={values}" for key, values in swept.items())
        raise ConfigError(f"{' '.join(arguments)}: a sweep over {came}, but one run was asked for; give -m")
    if is_multirun and not cells:
        # glob() that matches nothing: Hydra runs nothing, and says nothing.
        raise ConfigError(f"{' '.join(arguments)}: the sweep has no runs, expected one or more")
    return Request(cells, is_multirun)


@contextlib.contextmanager
def _hydra_reads(argv: list[str]) -> Iterator[None]:
    """Let Hydra find its arguments in sys.argv, and raise its errors (it would print them and exit with status 1)."""
    before, setting = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = before
        if setting is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = setting


def _flags_first(arguments: Sequence[str]) -> list[str]:
    """Move flags before the settings: Hydra's parser refuses settings on both sides of a flag."""
    takes_value = {
        "--cfg",
        "--config-dir",
        "--config-name",
        "--config-path",
        "--package",
        "-c",
        "-cd",
        "-cn",
        "-cp",
        "-p",
    }
    flags: list[str] = []
    settings: list[str] = []
    previous = ""
    for argument in arguments:
        is_value = previous in takes_value
        (flags if argument.startswith("-") or is_value else settings).append(argument)
        previous = argument
    return flags + settings


def run_name(given: str | None, choices: Mapping[str, str | None]) -> str:
    """The run's name: as given, else the experiment's, else `run`.

    Args:
        given: the setting.
        choices: of all groups; an experiment in a folder may be chosen in its own group too.

    >>> run_name(None, {"experiment": "paper/table1_swe_f"}) == run_name(None, {"experiment/paper": "table1_swe_f"})
    True
    """
    chosen = [f"{group}/{name}" for group, name in choices.items() if is_experiment(group) and name is not None]
    return given or "-".join(chosen).removeprefix("experiment/").replace("/", "-") or "run"


def is_experiment(group: str) -> bool:
    """Whether a group holds experiments: `experiment`, or a folder of it."""
    return f"{group}/".startswith("experiment/")


def job_folder(overrides: Sequence[str], arguments: Sequence[str] = ()) -> str:
    """Name of a sweep's job below its run folder, from the job's overrides: no shell has to quote it.

    The same overrides give the same name whatever their order, so the same command finds its runs again. What is
    swept comes first: it has to stay readable where a long name is cut.

    Args:
        overrides: of this job.
        arguments: of the whole sweep; an override that is not among them is swept.

    >>> job_folder(["max_steps=150", "unshare.step=50"], ["max_steps=150", "unshare.step=50,100"])
    'unshare.step-50_max_steps-150'
    """
    is_named = any(override.startswith("run_name=") for override in overrides)
    keys = {item: item.lstrip("+~").split("=")[0] for item in overrides}
    in_path = {
        key for key in keys.values() if key in ("run_name", "output_dir") or (not is_named and is_experiment(key))
    }
    named = [item for item in overrides if keys[item] not in in_path] or list(overrides)
    named.sort(key=lambda item: (item in arguments, item))
    text = "_".join(item.lstrip("+~") for item in named).replace("=", "-")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("-.")
    if len(name) > MAX_FOLDER_LENGTH or name != text:
        # Cut or replaced characters could make two jobs one.
        name = f"{name[:MAX_FOLDER_LENGTH]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


def _explain(error: BaseException, kind: type) -> str:
    """One message for people from Hydra's or OmegaConf's error: the key, what came, what was expected."""
    cause = error.__cause__ if error.__cause__ is not None else error
    text = str(cause).split("\n    full_key:")[0].strip()
    key = str(getattr(cause, "full_key", "") or "")
    if re.search(r"Key '.*' (is )?not in", text):
        keys = configuration.flatten(configuration.to_dict(kind()))
        groups = [key.split(".")[0] for key in keys if "." in key]
        return f"{key}: no such key{near_match(key, [*keys, *groups])}"
    missing = re.search(
        r"Could not find '([^']+)'.*Available options in '([^']+)':\s*(.*?)(?:\n\n|Config search path|$)",
        text,
        re.DOTALL,
    )
    if missing:
        options = missing[3].split()
        wrong = missing[1].rsplit("/", 1)[-1]
        return f"{missing[2]}={wrong}: expected one of {', '.join(options)}{near_match(wrong, options)}"
    return f"{key}: {text}" if key and key not in text else text
