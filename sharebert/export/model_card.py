"""README.md of an exported folder: what the model is, how it was made, what it reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sharebert.checkpoint import evaluated_at

MOST_NAMES = 8


def model_card(path: Path, meta: dict[str, Any], architecture: str) -> str:
    """The text, from the `meta` of the checkpoint at `path`."""
    config = meta["config"]
    figures = "".join(
        f"| `{name}` | {f'{value:.4f}' if value % 1 else f'{value:,.0f}'} |\n"
        for name, value in (meta["evaluation"] or {}).items()
    )
    recipe = "".join("| {} | {} |\n".format(name, value.replace("|", "\\|")) for name, value in _recipe(meta))
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
---

# {config["run_name"] or config["model"]["name"]}

`{architecture}`, pretrained with sharebert {meta["sharebert_version"]} (share layers, then unshare: arXiv 2110.03848).
Exported from `{path.resolve().name}`: step {meta["step"]:,} of {config["max_steps"]:,}, phase {meta["phase"]}.

| Recipe | |
|---|---|
{recipe}
Token type 1 (the second of two texts) was not trained: it is a copy of type 0.

Held out{evaluated_at(meta)}:

| Figure | |
|---|---|
{figures or "| none | |" + chr(10)}"""


def _recipe(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """What was trained, on what, and how."""
    config = meta["config"]
    data, optim, model = config["data"], config["optim"], config["model"]
    masked = "whole words" if config["masking"]["whole_word"] else "wordpieces"
    size = f"{model['num_layers']} layers, width {model['hidden_size']}, {model['norm']}-norm"
    rate = f"peak rate {optim['lr']:g}, warm-up {optim['warmup_steps']:,}, {optim['schedule']}"
    betas = " and ".join(f"{beta:g}" for beta in optim["betas"])
    clip_norm = "none" if optim["clip_norm"] is None else f"{optim['clip_norm']:g}"
    decay = f"betas {betas}, weight decay {optim['weight_decay']:g}, clip norm {clip_norm}"
    return [
        ("model", f"{model['name']}: {size}, vocabulary {meta['vocab_size']:,}"),
        ("text", _text(data)),
        ("sequences", _sequences(config)),
        ("unsharing", _unsharing(meta)),
        *_beginning(meta),
        ("batch", f"{config['global_batch_size']} sequences an update, {meta['samples_seen']:,} seen"),
        ("optimizer", f"{optim['name']}, {rate}, {decay}"),
        ("masking", f"{config['masking']['probability']:.0%}, {masked}"),
        ("seed", str(config["seed"])),
        ("sha256 of tokens", meta["corpus"]["train"]),
        ("sha256 of tokenizer", meta["corpus"]["tokenizer"]),
        ("code", f"commit {meta['git_commit'] or 'unknown'}"),
    ]


def _text(data: dict[str, Any]) -> str:
    """The source, and the names of its dataset and files: of many, the first ones."""
    names = [*([data["hf_path"]] if data["hf_path"] else []), *(Path(file).name for file in data["files"])]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return " ".join([data["source"], ", ".join([*names[:MOST_NAMES], *more])]).rstrip()


def _sequences(config: dict[str, Any]) -> str:
    seq_len, positions = config["data"]["seq_len"], config["model"]["max_position_embeddings"]
    state = "are untrained" if config["init_from"] is None else "are those that it began from"
    beyond = f" (positions from {seq_len + 1:,} to {positions:,} {state})" if seq_len < positions else ""
    return f"of {seq_len:,} tokens{beyond}"


def _unsharing(meta: dict[str, Any]) -> str:
    """By which policy, and at which updates."""
    unshare = meta["config"]["unshare"]
    if unshare["policy"] == "never":
        return "none: the layers never shared"
    updates = meta.get("unshared_at", [])  # not in checkpoints of the first version
    if not updates and unshare["policy"] == "fixed" and meta["phase"] == "unshared":
        updates = [unshare["step"]]
    units = f"units of {unshare['unit_layers']} layer(s)"
    if "unshared_from" in meta:  # by `export --unshare`, whatever the policy of the run
        earlier = f" (in part {_at(updates[:-1])})" if updates[1:] else ""
        origin = f"from {meta['unshared_from']['checkpoint']}, after update {meta['step']:,}"
        return f"unshared offline {origin}{earlier}, {units}"
    when = _at(updates) if updates else "not yet"
    return f"{unshare['policy']}, {when}, {units}"


def _at(updates: list[int]) -> str:
    return f"at update {', '.join(f'{update:,}' for update in updates)}"


def _beginning(meta: dict[str, Any]) -> list[tuple[str, str]]:
    if meta["config"]["init_from"] is None:
        return []
    return [("began from", f"{meta['config']['init_from']}, sha256 {meta.get('init_from_sha256') or 'unknown'}")]
