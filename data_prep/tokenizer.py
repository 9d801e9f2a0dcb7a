"""WordPiece tokenizers: train one, load a given one, and turn text into ids that are never special.

Training is repeatable, which `tokenizers` alone is not: it numbers the characters and their `##` forms in the
order of a randomly seeded hash map, and ties between merges are broken by those numbers, so both the ids and
the set of wordpieces change from run to run. Given the sorted characters and `##` forms up front, every
number is fixed. As "special tokens", that is: the only list the trainer takes in order. The tokenizer is then
built anew from the vocabulary, in which five tokens are special and no more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from sharebert.config import ConfigError, DataConfig
from sharebert.data.format import DataError, SpecialIds

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Ids 0 to 4 of a trained tokenizer, in the order of `SpecialIds`."""

KNOWN_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Names under which the five special tokens of a given tokenizer are found."""


def train_tokenizer(texts: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool) -> Any:
    """Train a WordPiece tokenizer; the same texts give the same file, byte for byte, in every process.

    Args:
        texts: starts a new iteration over the texts; called twice (characters, then wordpieces).

    Raises:
        ConfigError: `vocab_size` cannot hold the special tokens and the characters of the texts.
    """
    letters, continuations = _alphabet(texts(), vocab_size, lowercase)
    needed = len(SPECIAL_TOKENS) + len(letters) + len(continuations)
    if vocab_size < needed:
        parts = f"{len(SPECIAL_TOKENS)} special tokens, {len(letters)} characters, {len(continuations)} with ##"
        raise ConfigError(f"data.vocab_size={vocab_size}: expected at least {needed} for this text ({parts})")
    tokenizer = build_wordpiece({}, lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS, *letters, *continuations],
        initial_alphabet=letters,
        limit_alphabet=len(letters),  # else characters left out of `letters` come back in random order
    )
    with _rust_threads():
        tokenizer.train_from_iterator(texts(), trainer)
    return build_wordpiece(tokenizer.get_vocab(with_added_tokens=True), lowercase)


def _alphabet(texts: Iterable[str], vocab_size: int, lowercase: bool) -> tuple[list[str], list[str]]:
    """(characters, `##` forms), sorted. At most an eighth of the vocabulary, or 256 if that is more, are
    taken, the most frequent ones: rarer characters make their word [UNK] instead of using up the vocabulary."""
    normalizer, pre_tokenizer = build_normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    found = sorted((character for character in counts if not character.isspace()), key=lambda c: (-counts[c], c))
    letters = sorted(found[: max(256, vocab_size // 8)])
    # Punctuation and Chinese characters are words of their own and have no ## form.
    inside_words = [letter for letter in letters if len(pre_tokenizer.pre_tokenize_str(f"a{letter}")) == 1]
    return letters, [f"##{letter}" for letter in inside_words]


@contextmanager
def _rust_threads() -> Iterator[None]:
    """Let the trainer use threads; afterwards say no to them for good, or every later fork prints a warning.

    A TOKENIZERS_PARALLELISM that the user has set is left alone.
    """
    if "TOKENIZERS_PARALLELISM" in os.environ and os.environ["TOKENIZERS_PARALLELISM"] != "false":
        yield
        return
    is_users_choice = os.environ.get("TOKENIZERS_PARALLELISM") == "false"
    if not is_users_choice:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def build_normalizer(lowercase: bool) -> Any:
    """BERT's normaliser; accents are stripped exactly when text is lowercased."""
    return normalizers.BertNormalizer(lowercase=lowercase, strip_accents=None)


def build_wordpiece(vocab: dict[str, int], lowercase: bool) -> Any:
    """A BERT tokenizer over `vocab`, in which only the five special tokens that it holds are special."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = build_normalizer(lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    if vocab:
        tokenizer.add_special_tokens([token for token in SPECIAL_TOKENS if token in vocab])
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    return tokenizer


def load_given_tokenizer(path: Path, lowercase: bool, key: str = "data.tokenizer") -> Any:
    """A tokenizer.json, or a vocab.txt with one wordpiece a line (`lowercase` counts for the latter only).

    Truncation and padding that a tokenizer.json may ask for are off: they would cut documents.

    Raises:
        ConfigError: no such file, not a tokenizer, or a special token is missing; the message names it.
    """
    if not path.is_file():
        raise ConfigError(f"{key}={str(path)!r}: no such file; expected a tokenizer.json or vocab.txt")
    if path.suffix == ".txt":
        tokenizer = build_wordpiece(_read_vocabulary(path, key), lowercase)
    else:
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the only class that `tokenizers` raises
            raise ConfigError(f"{key}={str(path)!r}: not a tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    find_special_ids(tokenizer, f"{key}={str(path)!r}")
    return tokenizer


def expected_vocab_size(config: DataConfig) -> int:
    """Entries of the vocabulary: those of the given tokenizer, else as many as are asked for.

    Raises:
        ConfigError: there is no such tokenizer, or it is none.
    """
    if config.tokenizer is None:
        return config.vocab_size
    return vocabulary_size(load_given_tokenizer(Path(config.tokenizer).expanduser(), config.lowercase))


def _read_vocabulary(path: Path, key: str) -> dict[str, int]:
    try:
        tokens = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}={str(path)!r}: invalid UTF-8 at byte offset {error.start:,}") from None
    vocab: dict[str, int] = {}
    for number, token in enumerate(token.removesuffix("\r") for token in tokens):
        if token in vocab:
            raise ConfigError(f"{key}={str(path)!r}: {token!r} stands in lines {vocab[token] + 1} and {number + 1}")
        vocab[token] = number
    missing = [token for token in SPECIAL_TOKENS if token not in vocab]
    if missing:
        raise ConfigError(f"{key}={str(path)!r}: no {', '.join(missing)}; expected all of {', '.join(SPECIAL_TOKENS)}")
    return vocab


def find_special_ids(tokenizer: Any, where: str = "tokenizer") -> SpecialIds:
    """The ids of the five special tokens, under any of `KNOWN_NAMES`.

    Raises:
        ConfigError: one is missing.
    """
    ids: dict[str, int] = {}
    for role, names in KNOWN_NAMES.items():
        found = [identifier for name in names if (identifier := tokenizer.token_to_id(name)) is not None]
        if not found:
            raise ConfigError(f"{where}: no {role} token; expected one of {', '.join(names)}")
        ids[role] = found[0]
    return SpecialIds(**ids)


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the highest id, added tokens included (a vocabulary may have holes)."""
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return 1 + max(ids.values())


def load_text_tokenizer(path: Path) -> Any:
    """A prepared corpus' tokenizer.json, set so that text which spells a special token stays text.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the only class that `tokenizers` raises
        raise DataError(f"{path}: not a tokenizer.json ({error})") from error
    special_ids = find_special_ids(tokenizer, str(path))
    # Only tokens that are marked special obey encode_special_tokens, and foreign files do not always mark them.
    ids = vars(special_ids).values()
    tokenizer.add_special_tokens([tokenizer.id_to_token(identifier) for identifier in ids])
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
