"""The verb `inspect`: what a checkpoint holds, after checking every file of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharebert.checkpoint import verify
from sharebert.launch import EXIT_FINISHED


def main(arguments: Sequence[str]) -> int:
    """Parse the flags and print; returns the exit status.

    Raises:
        CheckpointError: naming the file that is missing or damaged.
    """
    parser = argparse.ArgumentParser(prog="sharebert inspect", description="Show what a checkpoint holds.")
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or the link `latest`")
    parser.add_argument("--json", action="store_true", help="print meta.json's content, for programs")
    options = parser.parse_args(arguments)
    meta = verify(options.checkpoint)
    print(json.dumps(meta, indent=2) if options.json else describe(options.checkpoint.resolve(), meta))
    return EXIT_FINISHED


def describe(path: Path, meta: dict[str, Any]) -> str:
    """A few lines for people."""
    config, parameters = meta["config"], meta["parameters"]
    unit = meta["unit_layers"]
    groups = [(first * unit + 1, stop * unit) for first, stop in meta["layer_groups"]]
    shown = ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in groups)
    rows = [
        ("checkpoint", path.name),
        ("step", f"{meta['step']:,} of {config['max_steps']:,} ({meta['samples_seen']:,} sequences seen)"),
        ("phase", f"{meta['phase']}{', the last before unsharing' if meta['before_unsharing'] else ''}"),
        ("groups of layers", f"{shown}{f'  (units of {unit} layers)' if unit > 1 else ''}"),
        ("parameters", f"{parameters['unique']:,} unique, {parameters['effective']:,} effective"),
        ("model", f"{config['model']['name']}, {config['model']['norm']}-norm, vocabulary {meta['vocab_size']:,}"),
        ("unshare", config["unshare"]["policy"] + _at_step(config["unshare"])),
        *_last_check(meta["policy_state"]["last_check"]),
        (
            "trained with",
            f"{config['engine']['precision']} on {config['engine']['device']}, {meta['world_size']} process(es)",
        ),
        ("code", f"sharebert {meta['sharebert_version']}, commit {meta['git_commit'] or 'unknown'}"),
        ("command", meta["command_line"]),
        *((f"sha256 {part}", value) for part, value in meta["corpus"].items()),
        *((name, f"{entry['bytes']:,} bytes, sha256 {entry['sha256'][:16]}…") for name, entry in meta["files"].items()),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _last_check(check: dict[str, Any] | None) -> list[tuple[str, str]]:
    if check is None:
        return []
    shown = " ".join("-" if value is None else f"{value:.2f}" for value in check["correlations"])
    return [("correlations", f"{shown}  (adjacent units, update {check['update']:,})")]


def _at_step(unshare: dict[str, Any]) -> str:
    return f" at update {unshare['step']:,}" if unshare["policy"] == "fixed" else ""
