"""Whether a model and the data mean the same tokens by the same ids: told from content, not from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_prep.tokenizer import load_given_tokenizer
from sharebert.config import ConfigError

_SAMPLES = (
    "The Farmer's BOAT, near an old mill-stream (e.g. THIS one): 3.14% of it!",
    "Ça va? Naïve CAFÉ owners, Ünïcode and ﬁne straße",
    "漢字 and Русский, ελληνικά; x_1 + [y] = {z}",
)
"""Texts that tokenizers read in different ways when they differ in case, accents, punctuation or Chinese characters."""


def refuse_other_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Refuse to start from the weights of a model that reads text as other ids than the data does.

    Args:
        folder: a checkpoint, or a folder that Transformers wrote.
        tokenizer: the `tokenizers.Tokenizer` of the data.

    Raises:
        ConfigError: naming a difference and the way out.
    """
    path, lowercase = _tokenizer_of(folder)
    difference = first_difference(load_given_tokenizer(path, lowercase, "init_from"), tokenizer)
    if difference:
        way_out = f"data.tokenizer={path}"
        if path.suffix == ".txt":
            way_out += f" data.lowercase={str(lowercase).lower()}"
        raise ConfigError(
            f"init_from={folder}: it was trained with another tokenizer than the prepared data ({difference}); "
            f"expected the same, as with {way_out}"
        )


def first_difference(theirs: Any, ours: Any) -> str | None:
    """What two tokenizers differ in, in a few words; None where they give the same ids."""
    there, here = theirs.get_vocab(with_added_tokens=True), ours.get_vocab(with_added_tokens=True)
    if len(there) != len(here):
        return f"{len(there)} tokens there, {len(here)} in the data"
    for token, identifier in there.items():
        if here.get(token) != identifier:
            return f"{token!r} is {identifier} there, {here.get(token, 'no token')} in the data"
    for text in _SAMPLES:
        tokens, expected = (tokenizer.encode(text, add_special_tokens=False).tokens for tokenizer in (ours, theirs))
        if tokens != expected:
            first = next((pair for pair in zip(expected, tokens, strict=False) if pair[0] != pair[1]), None)
            shown = f"{first[0]!r} there, {first[1]!r} in the data" if first else "one is longer"
            return f"{text!r} becomes other tokens: {shown}"
    return None


def _tokenizer_of(folder: Path) -> tuple[Path, bool]:
    """The tokenizer file in `folder`, and whether a vocab.txt goes with lowercase text (Transformers' default)."""
    described = folder / "tokenizer_config.json"
    settings = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {}
    for name in ("tokenizer.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name, bool(settings.get("do_lower_case", True))
    raise ConfigError(f"init_from={folder}: no tokenizer there; expected tokenizer.json or vocab.txt")
