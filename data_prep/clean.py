"""The one rule for what text is, used when the tokenizer is trained and when text is tokenised.

- A line ends at a line feed and nowhere else; a document is what its source says (see `text_files`).
  Unicode line separators (U+2028, U+2029, U+0085) and form feeds split neither.
- Control characters (Unicode class Cc, but for tab and line feed), private-use characters, lone surrogates,
  the replacement character U+FFFD and the zero-width space U+200B become one space each: BERT's normaliser
  would delete them, and glue the words on both sides together.
- Other invisible format characters (soft hyphen, joiners, direction marks, byte order mark) stay: BERT's
  normaliser deletes them, and what is left is the word that a reader sees.
- A word without end is cut to its first 1,000 characters. A word here is a run of characters without white
  space, punctuation (ASCII, general, Chinese, full width) and Chinese characters: what BERT's tokenizer looks up.
- A text that spells a special token is text: "[MASK]" becomes the wordpieces of "[", "mask" and "]"
  (see `tokenizer.load_text_tokenizer`).
- A document without a token after all that is dropped, and counted as empty.

Every replaced character and cut word is counted; meta.json gives the numbers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TEXT_RULE_VERSION = 2
"""Part of the key of a prepared corpus; raise it with every change of the rule."""

LONGEST_WORD_CHARACTERS = 1_000

SPACED_CHARACTERS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\ufffd\ue000-\uf8ff\U000f0000-\U0010ffff"
"""What becomes a space, as the inside of a character class; lone surrogates, which no UTF-8 text can hold, besides."""

_BECOMES_SPACE = re.compile(f"[{SPACED_CHARACTERS}\ud800-\udfff]")
_PUNCTUATION = r"!-/:-@\[-`{-~\u2000-\u206f\u3000-\u303f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
_CHINESE = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ffff"
_WORD = re.compile(rf"[^\s{_PUNCTUATION}{_CHINESE}]+")


class CleanText(NamedTuple):
    """A text under the rule, and how it differs from the raw one."""

    text: str
    control_characters: int
    """Characters that became a space."""
    long_words: int
    """Words that were cut."""


def clean_text(text: str) -> str:
    """`text` under the rule above."""
    return clean_and_count(text).text


def clean_and_count(text: str) -> CleanText:
    """`text` under the rule above, and what was changed."""
    text, control_characters = _BECOMES_SPACE.subn(" ", text)
    long_words = 0

    def cut(word: re.Match[str]) -> str:
        nonlocal long_words
        long_words += word.end() - word.start() > LONGEST_WORD_CHARACTERS
        return word[0][:LONGEST_WORD_CHARACTERS]

    if _may_hold_a_long_word(text):
        text = _WORD.sub(cut, text)
    return CleanText(text, control_characters, long_words)


def _may_hold_a_long_word(text: str) -> bool:
    """Whether one of the blocks, two of which fit into a long word, has no space; costs next to nothing."""
    block = LONGEST_WORD_CHARACTERS // 2
    return any(text.find(" ", start, start + block) < 0 for start in range(0, len(text) - block + 1, block))
