"""The verb `export`: a checkpoint as a folder that Hugging Face Transformers loads, with no code of ours.

Post-LN becomes `BertForMaskedLM`, Pre-LN `MegatronBertForMaskedLM`. Layers that share weights become copies. Neither
Transformers nor anything else beyond the checkpoint is needed to write it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from data_prep.clean import SPACED_CHARACTERS
from data_prep.tokenizer import find_special_ids
from sharebert.checkpoint import MODEL_FILE, TOKENIZER_FILE
from sharebert.config import ConfigError
from sharebert.launch import EXIT_FINISHED
from sharebert.model.convert import to_transformers_state
from sharebert.train_state import load_model

SPECIAL_ROLES = ("pad", "unk", "cls", "sep", "mask")


def main(arguments: Sequence[str]) -> int:
    """Parse the flags, export and print a line to try; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sharebert export", description="Write a checkpoint as a folder that Hugging Face Transformers loads."
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or the link `latest`")
    parser.add_argument("folder", type=Path, help="where to write; must not be there yet, or be empty")
    options = parser.parse_args(arguments)
    export(options.checkpoint, options.folder)
    mask = json.loads((options.folder / "tokenizer_config.json").read_text())["mask_token"]
    print(f"wrote {options.folder}; with transformers installed, try:")
    print(
        f"""  python -c "from transformers import pipeline; """
        f"""print(pipeline('fill-mask', '{options.folder}')('Return the {mask} of the list.'))\""""
    )
    return EXIT_FINISHED


def export(path: Path, folder: Path) -> None:
    """Write the checkpoint at `path` to `folder`, which appears as a whole.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: `folder` is there and not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: expected a folder that is not there yet, or empty")
    model, _, meta = load_model(path)
    architecture, config, state = to_transformers_state(model)
    # Pretraining has one kind of token; row 1 would stay at its initial noise and disturb tasks with two texts.
    token_types = state["bert.embeddings.token_type_embeddings.weight"]
    token_types[1] = token_types[0]
    tokenizer = Tokenizer.from_file(str(path / TOKENIZER_FILE))
    special = _special_tokens(tokenizer)
    ids = {f"{role}_token_id": tokenizer.token_to_id(special[f"{role}_token"]) for role in ("pad", "cls", "sep")}
    temporary = folder.with_name(f".{folder.name}.exporting")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write_model(temporary, {**config, **ids}, state)
    _write_tokenizer(temporary, tokenizer, special, config["max_position_embeddings"])
    (temporary / "README.md").write_text(_model_card(path, meta, architecture), encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    temporary.rename(folder)


def _write_model(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(state, folder / MODEL_FILE, metadata={"format": "pt"})


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    """`pad_token` and so on, by the names that this tokenizer has for them."""
    ids = find_special_ids(tokenizer)
    return {f"{role}_token": tokenizer.id_to_token(getattr(ids, role)) for role in SPECIAL_ROLES}


def _write_tokenizer(folder: Path, tokenizer: Any, special: dict[str, str], max_length: int) -> None:
    """tokenizer.json with our text rule inside, and what Transformers wants to know besides."""
    to_space = normalizers.Replace(Regex(f"[{SPACED_CHARACTERS}]"), " ")
    parts = [to_space] if tokenizer.normalizer is None else [to_space, tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence(parts)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    description = json.loads((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "padding_side": "right",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **special,
    }
    bert = [part for part in description["normalizer"]["normalizers"] if part["type"] == "BertNormalizer"]
    if bert:
        config |= {"do_lower_case": bert[0]["lowercase"], "strip_accents": bert[0]["strip_accents"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")


def _model_card(path: Path, meta: dict[str, Any], architecture: str) -> str:
    """README.md: what the model is, how it was made, what it reaches."""
    config, unshare = meta["config"], meta["config"]["unshare"]
    figures = meta["evaluation"] or {}
    data, optim = config["data"], config["optim"]
    at_step = f", at update {unshare['step']:,}" if unshare["policy"] == "fixed" else ""
    masked = "whole words" if config["masking"]["whole_word"] else "wordpieces"
    held_out = "".join(f"| `{name}` | {value:.4f} |\n" for name, value in figures.items())
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
---

# {config["run_name"] or config["model"]["name"]}

`{architecture}`, pretrained with sharebert {meta["sharebert_version"]} (one set of weights shared across layers, then
unshared: arXiv 2110.03848). Exported from `{path.resolve().name}`: step {meta["step"]:,} of {config["max_steps"]:,},
phase {meta["phase"]}.

| Recipe | |
|---|---|
| model | {config["model"]["name"]}: {config["model"]["num_layers"]} layers, width {config["model"]["hidden_size"]}, \
{config["model"]["norm"]}-norm |
| text | {data["source"]} {data["hf_path"] or ""}, sequences of {data["seq_len"]} tokens |
| unsharing | {unshare["policy"]}{at_step}, units of {unshare["unit_layers"]} layer(s) |
| batch | {config["global_batch_size"]} sequences an update, {meta["samples_seen"]:,} seen |
| optimizer | {optim["name"]}, peak rate {optim["lr"]:g}, warm-up {optim["warmup_steps"]:,}, {optim["schedule"]} |
| masking | {config["masking"]["probability"]:.0%}, {masked} |
| sha256 of tokens | {meta["corpus"]["train"]} |
| sha256 of tokenizer | {meta["corpus"]["tokenizer"]} |
| code | commit {meta["git_commit"] or "unknown"} |

Held out (last evaluation of the run up to this step):

| Figure | |
|---|---|
{held_out or "| none | |" + chr(10)}"""
