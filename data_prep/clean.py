"""The one rule for what text is, used when the tokenizer is trained and when text is tokenised.

- A line ends at a line feed and nowhere else; a document is what its source says (see `text_files`).
  Unicode line separators (U+2028, U+2029, U+0085) and form feeds split neither.
- Control characters (Unicode class Cc, but for tab and line feed), private-use characters, lone surrogates,
  the replacement character U+FFFD and the zero-width space U+200B become one space each: BERT's normaliser
  would delete them, and glue the words on both sides together.
- Other invisible format characters (soft hyphen, joiners, direction marks, byte order mark) stay: BERT's
  normaliser deletes them, and what is left is the word that a reader sees.
- A text that spells a special token is text: "[MASK]" becomes the wordpieces of "[", "mask" and "]"
  (see `tokenizer.load_text_tokenizer`).
- A document without a token after all that is dropped, and counted as empty.
"""

from __future__ import annotations

import re

TEXT_RULE_VERSION = 1
"""Part of the key of a prepared corpus; raise it with every change of the rule."""

_BECOMES_SPACE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\ufffd\ud800-\udfff\ue000-\uf8ff\U000f0000-\U0010ffff]")


def clean_text(text: str) -> str:
    """`text` under the rule above; the number of characters never changes."""
    return _BECOMES_SPACE.sub(" ", text)
