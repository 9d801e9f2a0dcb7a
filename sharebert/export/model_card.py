"""README.md of an exported folder: what the model is, how it was made, what it reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def model_card(path: Path, meta: dict[str, Any], architecture: str) -> str:
    """The text, from the `meta` of the checkpoint at `path`."""
    config = meta["config"]
    data, optim, model = config["data"], config["optim"], config["model"]
    masked = "whole words" if config["masking"]["whole_word"] else "wordpieces"
    figures = "".join(
        f"| `{name}` | {f'{value:.4f}' if value % 1 else f'{value:,.0f}'} |\n"
        for name, value in (meta["evaluation"] or {}).items()
    )
    rows = [
        (
            "model",
            f"{model['name']}: {model['num_layers']} layers, width {model['hidden_size']}, {model['norm']}-norm, "
            f"vocabulary {meta['vocab_size']:,}",
        ),
        ("text", f"{data['source']} {data['hf_path'] or ''}".rstrip()),
        ("sequences", _sequences(data["seq_len"], model["max_position_embeddings"])),
        ("unsharing", _unsharing(meta)),
        *_beginning(meta),
        ("batch", f"{config['global_batch_size']} sequences an update, {meta['samples_seen']:,} seen"),
        (
            "optimizer",
            f"{optim['name']}, peak rate {optim['lr']:g}, warm-up {optim['warmup_steps']:,}, {optim['schedule']}",
        ),
        ("masking", f"{config['masking']['probability']:.0%}, {masked}"),
        ("sha256 of tokens", meta["corpus"]["train"]),
        ("sha256 of tokenizer", meta["corpus"]["tokenizer"]),
        ("code", f"commit {meta['git_commit'] or 'unknown'}"),
    ]
    recipe = "".join(f"| {name} | {value} |\n" for name, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
---

# {config["run_name"] or model["name"]}

`{architecture}`, pretrained with sharebert {meta["sharebert_version"]} (share layers, then unshare: arXiv 2110.03848).
Exported from `{path.resolve().name}`: step {meta["step"]:,} of {config["max_steps"]:,}, phase {meta["phase"]}.

| Recipe | |
|---|---|
{recipe}
Token type 1 (the second of two texts) was not trained: it is a copy of type 0.

Held out (last evaluation of the run up to this step):

| Figure | |
|---|---|
{figures or "| none | |" + chr(10)}"""


def _sequences(seq_len: int, positions: int) -> str:
    untrained = f" (positions from {seq_len + 1:,} to {positions:,} are untrained)" if seq_len < positions else ""
    return f"of {seq_len:,} tokens{untrained}"


def _unsharing(meta: dict[str, Any]) -> str:
    """By which policy, and at which updates."""
    unshare = meta["config"]["unshare"]
    if unshare["policy"] == "never":
        return "none: the layers never shared"
    updates = meta.get("unshared_at", [])  # not in checkpoints of the first version
    if not updates and unshare["policy"] == "fixed" and meta["phase"] == "unshared":
        updates = [unshare["step"]]
    when = f"at update {', '.join(f'{update:,}' for update in updates)}" if updates else "not yet"
    return f"{unshare['policy']}, {when}, units of {unshare['unit_layers']} layer(s)"


def _beginning(meta: dict[str, Any]) -> list[tuple[str, str]]:
    if meta["config"]["init_from"] is None:
        return []
    return [("began from", f"{meta['config']['init_from']}, sha256 {meta.get('init_from_sha256') or 'unknown'}")]
