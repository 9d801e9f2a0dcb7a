"""The verb `export`: a checkpoint as a folder that Hugging Face Transformers loads, with no code of ours.

Post-LN becomes `BertForMaskedLM`, Pre-LN `MegatronBertForMaskedLM`. Layers that share weights become copies. Neither
Transformers nor anything else beyond the checkpoint is needed to write it. With `--unshare`, instead: a checkpoint to
train on from.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer

from sharebert.checkpoint import MODEL_FILE, TOKENIZER_FILE
from sharebert.export.model_card import model_card
from sharebert.export.tokenizer import special_tokens, write_tokenizer
from sharebert.export.unshared import how_to_go_on, write_unshared
from sharebert.files import appearing_folder
from sharebert.launch import EXIT_FINISHED
from sharebert.model.convert import SEQ_LEN_KEY, to_transformers_state
from sharebert.train_state import load_model


def main(arguments: Sequence[str]) -> int:
    """Parse the flags, export and print what to try next; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="sharebert export", description="Write a checkpoint as a folder that Hugging Face Transformers loads."
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or the link `latest`")
    parser.add_argument("folder", type=Path, help="where to write; must not be there yet, or be empty")
    parser.add_argument(
        "--unshare", action="store_true", help="write a checkpoint to train on from instead, its layers unshared"
    )
    options = parser.parse_args(arguments)
    if options.unshare:
        print(how_to_go_on(write_unshared(options.checkpoint, options.folder), options.folder))
        return EXIT_FINISHED
    export(options.checkpoint, options.folder)
    print(f"wrote {options.folder}; with transformers installed, try:\n  {_line_to_try(options.folder)}")
    return EXIT_FINISHED


def _line_to_try(folder: Path) -> str:
    """A shell command that fills a mask, whatever characters the path has."""
    mask = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["mask_token"]
    # As JSON they have double quotes, which the shell's single ones leave alone.
    path, text = (json.dumps(value, ensure_ascii=False) for value in (str(folder), f"Return the {mask} of the list."))
    code = f'from transformers import pipeline; print(pipeline("fill-mask", {path})({text}))'
    return f"python -c {shlex.quote(code)}"


def export(path: Path, folder: Path) -> None:
    """Write the checkpoint at `path` to `folder`, which appears as a whole.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: `folder` is there and not empty.
    """
    with appearing_folder(folder) as target:
        model, _, meta = load_model(path)
        architecture, config, state = to_transformers_state(model)
        # Pretraining has one kind of token; row 1 would stay at its initial noise and disturb tasks with two texts.
        token_types = state["bert.embeddings.token_type_embeddings.weight"]
        token_types[1] = token_types[0]
        tokenizer = Tokenizer.from_file(str(path / TOKENIZER_FILE))
        special = special_tokens(tokenizer)
        ids = {f"{role}_token_id": tokenizer.token_to_id(special[f"{role}_token"]) for role in ("pad", "cls", "sep")}
        config = {**config, **ids, **_trained_length(meta)}
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(state, target / MODEL_FILE, metadata={"format": "pt"})
        write_tokenizer(target, tokenizer, special, config["max_position_embeddings"])
        (target / "README.md").write_text(model_card(path, meta, architecture), encoding="utf-8")


def _trained_length(meta: dict[str, Any]) -> dict[str, int]:
    """The length of the sequences of pretraining; nothing after other weights, which may know greater lengths."""
    config = meta["config"]
    return {SEQ_LEN_KEY: config["data"]["seq_len"]} if config["init_from"] is None else {}
