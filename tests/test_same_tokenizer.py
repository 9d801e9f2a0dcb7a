"""Tokenizers are compared by what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

from data_prep.same_tokenizer import first_difference, refuse_other_tokenizer
from data_prep.tokenizer import SPECIAL_TOKENS, build_wordpiece
from sharebert.config import ConfigError

WORDS = [*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
VOCABULARY = {word: number for number, word in enumerate(WORDS)}


def copy_of(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.to_str())


def test_files_may_differ_where_the_ids_are_the_same() -> None:
    ours = build_wordpiece(VOCABULARY, lowercase=True)
    theirs = copy_of(ours)
    theirs.normalizer = normalizers.Sequence([normalizers.Replace("\x00", " "), ours.normalizer])
    theirs.enable_truncation(8)
    theirs.no_truncation()
    assert theirs.to_str() != ours.to_str()
    assert first_difference(theirs, ours) is None


def test_each_kind_of_difference_is_named() -> None:
    ours = build_wordpiece(VOCABULARY, lowercase=True)
    shorter = build_wordpiece(dict(list(VOCABULARY.items())[:-1]), lowercase=True)
    assert first_difference(shorter, ours) == "56 tokens there, 57 in the data"
    swapped = build_wordpiece({**VOCABULARY, "a": VOCABULARY["b"], "b": VOCABULARY["a"]}, lowercase=True)
    assert first_difference(swapped, ours) in ("'a' is 6 there, 5 in the data", "'b' is 5 there, 6 in the data")
    other = build_wordpiece({**{w: n for w, n in VOCABULARY.items() if w != "a"}, "new": 5}, lowercase=True)
    assert first_difference(other, ours) == "'new' is 5 there, no token in the data"
    cased = build_wordpiece(VOCABULARY, lowercase=False)
    assert str(first_difference(cased, ours)).endswith("becomes other tokens: '[UNK]' there, 't' in the data")


def test_accents_alone_are_noticed() -> None:
    ours = build_wordpiece(VOCABULARY, lowercase=True)
    theirs = copy_of(ours)
    theirs.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    assert "Ça va?" in str(first_difference(theirs, ours))


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_vocabulary_file_is_read_as_the_folder_says(lowercase: bool, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    if not lowercase:
        (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    refuse_other_tokenizer(tmp_path, build_wordpiece(VOCABULARY, lowercase))
    with pytest.raises(
        ConfigError, match=rf"data.tokenizer={tmp_path}/vocab.txt data.lowercase={str(lowercase).lower()}"
    ):
        refuse_other_tokenizer(tmp_path, build_wordpiece(VOCABULARY, not lowercase))
