"""The tokenizer's part of an exported folder: tokenizer.json with our text rule inside, and its description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers, processors

from data_prep.clean import SPACED_CHARACTERS
from data_prep.tokenizer import find_special_ids
from sharebert.checkpoint import TOKENIZER_FILE

SPECIAL_ROLES = ("pad", "unk", "cls", "sep", "mask")


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """`pad_token` and so on, by the names that this tokenizer has for them."""
    ids = find_special_ids(tokenizer)
    return {f"{role}_token": tokenizer.id_to_token(getattr(ids, role)) for role in SPECIAL_ROLES}


def write_tokenizer(folder: Path, tokenizer: Any, special: Mapping[str, str], max_length: int) -> None:
    """Write what ``AutoTokenizer`` reads: a tokenizer that gives the ids of training, framed as in training.

    Args:
        folder: where to write.
        tokenizer: the `tokenizers.Tokenizer` of the checkpoint; changed.
        special: from :func:`special_tokens`.
        max_length: tokens that the model has positions for.
    """
    _add_text_rule(tokenizer)
    _add_frame(tokenizer, special["cls_token"], special["sep_token"])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "padding_side": "right",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        **special,
    }
    for part in _normalizer_parts(json.loads(tokenizer.to_str())["normalizer"]):
        if part["type"] == "BertNormalizer":
            # Accents go where text is lowercased, unless said otherwise: written out, for a reader.
            accents = part["lowercase"] if part["strip_accents"] is None else part["strip_accents"]
            config |= {"do_lower_case": part["lowercase"], "strip_accents": accents}
            config |= {"tokenize_chinese_chars": part["handle_chinese_chars"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")


def _normalizer_parts(normalizer: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer in its JSON, sequences taken apart."""
    if normalizer is None:
        return
    if normalizer["type"] != "Sequence":
        yield normalizer
    for part in normalizer.get("normalizers", []):
        yield from _normalizer_parts(part)


def _add_text_rule(tokenizer: Any) -> None:
    """Let the tokenizer turn control characters into spaces, as `data_prep.clean` does before ours sees the text."""
    to_space = normalizers.Replace(Regex(f"[{SPACED_CHARACTERS}]"), " ")
    given = tokenizer.normalizer
    tokenizer.normalizer = to_space
    (rule,) = _normalizer_parts(json.loads(tokenizer.to_str())["normalizer"])
    if given is not None:
        tokenizer.normalizer = given
        if rule not in _normalizer_parts(json.loads(tokenizer.to_str())["normalizer"]):  # else of an earlier export
            tokenizer.normalizer = normalizers.Sequence([to_space, given])


def _add_frame(tokenizer: Any, cls: str, sep: str) -> None:
    """Let the tokenizer frame one text as in training, two as BERT does; foreign files need not."""
    text, pair = (tokenizer.encode(letter, add_special_tokens=False).ids for letter in "ab")
    framed = tokenizer.encode("a", "b")
    cls_id, sep_id = tokenizer.token_to_id(cls), tokenizer.token_to_id(sep)
    types = [0] * (len(text) + 2) + [1] * (len(pair) + 1)
    if framed.ids == [cls_id, *text, sep_id, *pair, sep_id] and framed.type_ids == types:
        return
    frame = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=[(cls, cls_id), (sep, sep_id)]
    )
    given = tokenizer.post_processor
    adds_nothing = given is not None and tokenizer.num_special_tokens_to_add(False) == 0  # as ByteLevel: offsets only
    tokenizer.post_processor = processors.Sequence([given, frame]) if adds_nothing else frame
