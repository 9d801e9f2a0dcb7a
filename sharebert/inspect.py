"""The verb `inspect`: what a checkpoint, or a finished run of fine-tuning, holds, after checking every file of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharebert.checkpoint import FINETUNED, MODEL_FILE, CheckpointError, evaluated_at, verify
from sharebert.files import sha256_of_file
from sharebert.finetune.results import MODEL_FOLDER, RESULTS_FILE, read_results
from sharebert.launch import EXIT_FINISHED


def main(arguments: Sequence[str]) -> int:
    """Parse the flags and print; returns the exit status.

    Raises:
        CheckpointError: naming the file that is missing or damaged.
    """
    parser = argparse.ArgumentParser(prog="sharebert inspect", description="Show what a checkpoint holds.")
    parser.add_argument(
        "checkpoint", type=Path, help="folder of a checkpoint, the link `latest`, or the folder of a fine-tuning run"
    )
    parser.add_argument("--json", action="store_true", help="print meta.json's content, for programs")
    options = parser.parse_args(arguments)
    if (options.checkpoint / RESULTS_FILE).is_file():
        results = _checked_results(options.checkpoint)
        print(json.dumps(results, indent=2) if options.json else describe_results(options.checkpoint, results))
        return EXIT_FINISHED
    meta = verify(options.checkpoint)
    print(json.dumps(meta, indent=2) if options.json else describe(options.checkpoint.resolve(), meta))
    return EXIT_FINISHED


def describe(path: Path, meta: dict[str, Any]) -> str:
    """A few lines for people."""
    if meta["phase"] == FINETUNED:
        return _describe_finetuned(path, meta)
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
        *([("unshared from", meta["unshared_from"]["checkpoint"])] if "unshared_from" in meta else []),
        *_last_check(meta["policy_state"]["last_check"]),
        *_held_out(meta),
        (
            "trained with",
            f"{config['engine']['precision']} on {config['engine']['device']}, {meta['world_size']} process(es)",
        ),
        *_origin(meta),
    ]
    return _aligned(rows)


def _checked_results(run: Path) -> dict[str, Any]:
    """Results of a finished run of fine-tuning, its model checked against them."""
    results = read_results(run)
    model, expected = run / MODEL_FOLDER / MODEL_FILE, results["model_sha256"]
    if expected is not None and not (model.is_file() and sha256_of_file(model) == expected):
        raise CheckpointError(f"{model}: missing, or its checksum does not fit {RESULTS_FILE}")
    return results


def describe_results(path: Path, results: dict[str, Any]) -> str:
    """The same of a finished run of fine-tuning."""
    encoder = f"{results['encoder']}{' (its size only, random weights)' if results['random_encoder'] else ''}"
    rows = [
        ("run", str(path)),
        ("task", results["task"]),
        ("encoder", encoder),
        *([("model sha256", results["model_sha256"])] if results["model_sha256"] else []),
        ("updates", f"{results['steps']:,}, peak rate {results['lr']:g}, seed {results['seed']}"),
        *((name, f"{value:.4f}") for name, value in results["figures"].items()),
    ]
    return _aligned(rows)


def _describe_finetuned(path: Path, meta: dict[str, Any]) -> str:
    config = meta["config"]
    figures = meta["evaluation"] or {}
    rows = [
        ("checkpoint", path.name),
        ("step", f"{meta['step']:,} of {meta['max_steps']:,} ({meta['samples_seen']:,} sequences seen)"),
        ("task", config["task"]["name"]),
        ("encoder", f"{config['encoder']}{', random weights' if config['random_encoder'] else ''}"),
        ("parameters", f"{meta['parameters']:,}"),
        ("trained with", f"{config['engine']['precision']} on {config['engine']['device']}"),
        ("peak rate, seed", f"{config['optim']['lr']:g}, {config['seed']}"),
        *((f"eval/{name}", f"{value:.4f}{evaluated_at(meta)}") for name, value in figures.items()),
        *_origin(meta),
    ]
    return _aligned(rows)


def _origin(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Code, command and content hashes."""
    return [
        ("code", f"sharebert {meta['sharebert_version']}, commit {meta['git_commit'] or 'unknown'}"),
        ("command", meta["command_line"]),
        *((f"sha256 {part}", value) for part, value in meta["corpus"].items()),
        *((name, f"{entry['bytes']:,} bytes, sha256 {entry['sha256'][:16]}…") for name, entry in meta["files"].items()),
    ]


def _aligned(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _last_check(check: dict[str, Any] | None) -> list[tuple[str, str]]:
    if check is None:
        return []
    shown = " ".join("-" if value is None else f"{value:.2f}" for value in check["correlations"])
    return [("correlations", f"{shown}  (adjacent units, update {check['update']:,})")]


def _held_out(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Figures of the last evaluation, which may have been some updates before the save."""
    if meta["evaluation"] is None:
        return []
    names = ("loss", "unigram_loss", "accuracy", "unigram_accuracy")
    loss, unigram, accuracy, most_frequent = (meta["evaluation"][f"eval/{name}"] for name in names)
    shown = f"loss {loss:.4f} (unigram {unigram:.4f}), accuracy {accuracy:.4f} (most frequent token {most_frequent:.4f}"
    return [("held out", f"{shown}){evaluated_at(meta)}")]


def _at_step(unshare: dict[str, Any]) -> str:
    return f" at update {unshare['step']:,}" if unshare["policy"] == "fixed" else ""
