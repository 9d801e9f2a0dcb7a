"""The verb `export`: a checkpoint as a folder that Hugging Face Transformers loads, with no code of ours.

Post-LN becomes `BertForMaskedLM`, Pre-LN `MegatronBertForMaskedLM`. Layers that share weights become copies. Neither
Transformers nor anything else beyond the checkpoint is needed to write it. With `--unshare`, instead: a checkpoint to
train on from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer

from sharebert.checkpoint import MODEL_FILE, TOKENIZER_FILE
from sharebert.export.model_card import model_card
from sharebert.export.tokenizer import special_tokens, write_tokenizer
from sharebert.export.unshared import how_to_go_on, write_unshared
from sharebert.files import appearing_folder
from sharebert.launch import EXIT_FINISHED
from sharebert.model.convert import to_transformers_state
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
    mask = json.loads((options.folder / "tokenizer_config.json").read_text(encoding="utf-8"))["mask_token"]
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
    with appearing_folder(folder) as target:
        model, _, meta = load_model(path)
        architecture, config, state = to_transformers_state(model)
        # Pretraining has one kind of token; row 1 would stay at its initial noise and disturb tasks with two texts.
        token_types = state["bert.embeddings.token_type_embeddings.weight"]
        token_types[1] = token_types[0]
        tokenizer = Tokenizer.from_file(str(path / TOKENIZER_FILE))
        special = special_tokens(tokenizer)
        ids = {f"{role}_token_id": tokenizer.token_to_id(special[f"{role}_token"]) for role in ("pad", "cls", "sep")}
        (target / "config.json").write_text(json.dumps({**config, **ids}, indent=2) + "\n", encoding="utf-8")
        save_file(state, target / MODEL_FILE, metadata={"format": "pt"})
        write_tokenizer(target, tokenizer, special, config["max_position_embeddings"])
        (target / "README.md").write_text(model_card(path, meta, architecture), encoding="utf-8")
