"""`sharebert deep-linear`: run everything, print the table, leave table, figures and pictures in the run folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from sharebert.config import ConfigError, DeepLinearConfig, flatten, to_dict
from sharebert.deep_linear.draw import draw_curves, draw_depth
from sharebert.deep_linear.experiments import bound_runs, depth_series, flow_runs, start_rates
from sharebert.deep_linear.table import Results, as_json, markdown
from sharebert.files import write_atomically
from sharebert.launch import EXIT_FINISHED

logger = logging.getLogger(__name__)


def run(config: DeepLinearConfig, folder: Path) -> int:
    """Run, print and write; the same configuration gives the same files, so what is there of it is replaced.

    Raises:
        ConfigError: the folder holds something else, or cannot be written.
    """
    _check_folder(config, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run folder {folder}: cannot be written ({error.strerror or error})") from error
    results = _run_all(config)
    # First: it says whose folder this is.
    write_atomically(folder / "results.json", json.dumps(as_json(results)) + "\n")
    table = markdown(results)
    write_atomically(folder / "table.md", table)
    print(table)
    draw_curves(results, folder / "curves.png")
    draw_depth(results, folder / "depth.png")
    logger.info("wrote %s", folder)
    return EXIT_FINISHED


def _run_all(config: DeepLinearConfig) -> Results:
    logger.info("continuous time: L = %d, three targets", config.num_layers)
    rates, flows = start_rates(config), flow_runs(config)
    logger.info("largest stable learning rates: L = %s", ", ".join(map(str, config.depths)))
    depth = depth_series(config)
    logger.info(
        "bounds over %s updates: L = %s", f"{config.bound_updates:,d}", ", ".join(map(str, config.bound_depths))
    )
    return Results(config, rates, flows, bound_runs(config), depth)


def _check_folder(config: DeepLinearConfig, folder: Path) -> None:
    """Refuse a folder of another configuration, or of another verb: its pictures have the same names."""
    try:
        before = json.loads((folder / "results.json").read_text(encoding="utf-8"))["config"]
    except FileNotFoundError:
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            message = f"run folder {folder}: holds something else; expected it empty, or another run_name"
            raise ConfigError(message) from None
        return
    mine, theirs = flatten(to_dict(config)), flatten(before)
    for key in sorted(mine.keys() | theirs.keys()):
        if key not in ("run_name", "output_dir") and mine.get(key) != theirs.get(key):
            message = f"{key}={mine.get(key)!r}: expected {theirs.get(key)!r} as in {folder}, or another run_name"
            raise ConfigError(message)
