"""Which tokens are predicted, and what the model sees in their place (Devlin et al. 2019, section 3.1).

A pure function of (seed, epoch, sequence): the masks of a run are the same for any number of workers and
after a resume, and differ between epochs.

Legend: B sequences, T tokens, K prediction slots, V the vocabulary, P predicted tokens of a batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray

from sharebert.config import ConfigError, MaskingConfig
from sharebert.data.format import SpecialIds
from sharebert.seeding import keyed_bits, keyed_uniform

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_LAST_KEY = np.uint64(2**64 - 1)
_SPACE_LETTERS = ("Ġ", "Ċ", "ĉ", "č")  # byte-level letters of space, line feed, tab and carriage return


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What masking must know of the tokenizer.

    The ids given are the special tokens: never predicted, never drawn as a replacement. Leave `unk_id`
    at None to treat [UNK] as an ordinary token, as the original BERT does.
    """

    vocab_size: int
    """V, without any padding of the model's own."""
    pad_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    unk_id: Optional[int] = None
    starts_word: Optional[BoolArray] = None
    """bool (V,) from :func:`word_starts`; only whole-word masking needs it."""

    def __post_init__(self) -> None:
        for special_id in self.special_ids:
            if not 0 <= special_id < self.vocab_size:
                raise ValueError(f"special id {special_id}: expected 0 to {self.vocab_size - 1}")
        if self.starts_word is not None and self.starts_word.shape != (self.vocab_size,):
            raise ValueError(f"starts_word has shape {self.starts_word.shape}: expected ({self.vocab_size},)")

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that are never predicted and never drawn."""
        ids = (self.pad_id, self.cls_id, self.sep_id, self.mask_id)
        return ids if self.unk_id is None else (*ids, self.unk_id)

    @cached_property
    def is_special(self) -> BoolArray:
        """bool (V,)."""
        flags = np.zeros(self.vocab_size, dtype=np.bool_)
        flags[list(self.special_ids)] = True
        return flags

    @cached_property
    def ordinary_ids(self) -> IntArray:
        """Ids that may be drawn as a random replacement, ascending."""
        return np.flatnonzero(~self.is_special).astype(np.int64)


@dataclass(frozen=True)
class MaskedSequences:
    """Sequences ready for the model. Free slots have position 0, label 0 and weight 0, and come last in a row."""

    input_ids: IntArray
    """(B, T), with 80/10/10 applied."""
    positions: IntArray
    """(B, K), ascending over the used slots of a row."""
    labels: IntArray
    """(B, K), the true tokens."""
    weights: NDArray[np.float32]
    """(B, K), 1 for used slots."""


def num_slots(seq_len: int, probability: float) -> int:
    """K = max(1, round(probability x length)) prediction slots, as the original BERT (Python's rounding)."""
    return max(1, round(probability * seq_len))


def mask_sequences(
    input_ids: IntArray,
    lengths: IntArray,
    epochs: IntArray,
    sequences: IntArray,
    *,
    seed: int,
    vocabulary: Vocabulary,
    config: MaskingConfig,
) -> MaskedSequences:
    """Choose the tokens to predict and replace them.

    A sequence has max(1, round(probability x its length)) slots; with fewer candidates, or where no further
    whole word fits, slots stay free.

    Args:
        input_ids: (B, T), unmasked; not changed.
        lengths: (B,), tokens that are not padding, [CLS] and [SEP] included.
        epochs: (B,), part of the key.
        sequences: (B,), index of each sequence in the corpus, part of the key.
        seed: part of the key.
        vocabulary: special tokens and word starts.
        config: shares and the kind of masking.

    Raises:
        ConfigError: whole-word masking without word starts.
    """
    is_chosen = _choose(input_ids, lengths, epochs, sequences, seed, vocabulary, config)  # (B, T)
    rows, columns = np.nonzero(is_chosen)  # (P,), row by row, ascending within a row
    slot = np.cumsum(is_chosen, axis=1)[rows, columns] - 1  # (P,)
    shape = (len(input_ids), num_slots(input_ids.shape[1], config.probability))
    positions, labels = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)  # (B, K)
    weights = np.zeros(shape, dtype=np.float32)  # (B, K)
    positions[rows, slot] = columns
    labels[rows, slot] = input_ids[rows, columns]
    weights[rows, slot] = 1.0
    masked_ids = input_ids.copy()
    key = (epochs[rows], sequences[rows], columns)
    masked_ids[rows, columns] = _replace(input_ids[rows, columns], key, seed, vocabulary, config)
    return MaskedSequences(masked_ids, positions, labels, weights)


def _choose(
    input_ids: IntArray,
    lengths: IntArray,
    epochs: IntArray,
    sequences: IntArray,
    seed: int,
    vocabulary: Vocabulary,
    config: MaskingConfig,
) -> BoolArray:
    """The tokens to predict; bool (B, T)."""
    columns = np.arange(input_ids.shape[1])  # (T,)
    slots = np.maximum(1, np.rint(config.probability * lengths)).astype(np.int64)  # (B,), as in num_slots
    is_candidate = ~vocabulary.is_special[input_ids] & (columns < lengths[:, None])  # (B, T)
    bits = keyed_bits(seed, "choose", epochs[:, None], sequences[:, None], columns)  # (B, T)
    if not config.whole_word:
        return _choose_tokens(bits, is_candidate, slots)
    if vocabulary.starts_word is None:
        raise ConfigError("masking.whole_word=True: expected a tokenizer whose word starts are known")
    return _choose_words(bits, is_candidate, vocabulary.starts_word[input_ids], slots)


def _choose_tokens(bits: NDArray[np.uint64], is_candidate: BoolArray, slots: IntArray) -> BoolArray:
    """The candidates with the lowest keys, as many as the row has slots; bool (B, T)."""
    keys = np.where(is_candidate, bits, _LAST_KEY)
    most = int(slots.max())
    lowest = np.sort(np.partition(keys, most - 1, axis=1)[:, :most], axis=1)  # cheaper than sorting whole rows
    thresholds = np.take_along_axis(lowest, slots[:, None] - 1, axis=1)  # (B, 1)
    return np.asarray(is_candidate & (keys <= thresholds), dtype=np.bool_)


def _choose_words(
    bits: NDArray[np.uint64], is_candidate: BoolArray, starts_word: BoolArray, slots: IntArray
) -> BoolArray:
    """Whole words in random order, passing over those that no longer fit; bool (B, T).

    A word runs from its start to the next start, and never over a special token: so the rest of a word
    that was cut by [CLS] counts as a word. The loop is over words of a row, for all rows at once.
    """
    B, T = bits.shape
    follows_special = np.concatenate((np.ones((B, 1), dtype=np.bool_), ~is_candidate[:, :-1]), axis=1)
    is_start = is_candidate & (starts_word | follows_special)
    ends_run = is_start | ~is_candidate
    columns = np.arange(T)
    next_end = np.minimum.accumulate(np.where(ends_run, columns, T)[:, ::-1], axis=1)[:, ::-1]  # at or after a column
    next_end = np.concatenate((next_end[:, 1:], np.full((B, 1), T)), axis=1)  # strictly after
    sizes = np.where(is_start, next_end - columns, 0)  # (B, T), at the start of each word

    order = np.argsort(np.where(is_start, bits, _LAST_KEY), axis=1)  # words first, in random order
    sizes_in_order = np.ascontiguousarray(np.take_along_axis(sizes, order, axis=1).T)  # (T, B)
    is_taken = np.zeros((T, B), dtype=np.bool_)
    left = slots.copy()
    for word in range(int(is_start.sum(axis=1).max(initial=0))):
        size = sizes_in_order[word]
        is_taken[word] = (size > 0) & (size <= left)
        left -= size * is_taken[word]
        if not left.any():
            break
    start_is_taken = np.zeros((B, T), dtype=np.bool_)
    np.put_along_axis(start_is_taken, order, is_taken.T, axis=1)
    word_start = np.maximum.accumulate(np.where(ends_run, columns, 0), axis=1)  # (B, T)
    return np.asarray(is_candidate & np.take_along_axis(start_is_taken, word_start, axis=1), dtype=np.bool_)


def _replace(
    tokens: IntArray, key: tuple[IntArray, IntArray, IntArray], seed: int, vocabulary: Vocabulary, config: MaskingConfig
) -> IntArray:
    """What the model sees in place of `tokens` (P,), drawn for each token by itself, within words too."""
    kind = keyed_uniform(seed, "kind", *key)  # (P,)
    ordinary_ids = vocabulary.ordinary_ids
    drawn = (keyed_uniform(seed, "replacement", *key) * ordinary_ids.size).astype(np.int64)  # (P,)
    becomes_random = kind < config.mask_share + config.random_share
    shown = np.where(becomes_random, ordinary_ids[drawn], tokens)
    return np.where(kind < config.mask_share, vocabulary.mask_id, shown)


def build_vocabulary(tokenizer: Path, special_ids: SpecialIds, vocab_size: int, whole_word: bool) -> Vocabulary:
    """What masking has to know of a tokenizer.json; [UNK] counts as special."""
    ids = special_ids
    starts = word_starts(tokenizer) if whole_word else None
    return Vocabulary(vocab_size, ids.pad, ids.cls, ids.sep, ids.mask, ids.unk, starts)


def word_starts(tokenizer: Any) -> BoolArray:
    """Which tokens begin a word, told from the vocabulary; bool (V,).

    WordPiece: tokens without the continuation prefix (``##``). Byte-level BPE: tokens that begin with a space
    or another blank (``Ġ``). Metaspace (SentencePiece style): tokens that begin with ``▁``. With the last two a
    word is what stands between blanks, punctuation included; a first word without a space before it has no
    marked start, but follows a special token, after which masking begins a word anyway.

    Args:
        tokenizer: path of a tokenizer.json, or a `tokenizers.Tokenizer`.

    Raises:
        ConfigError: a tokenizer of another kind.
    """
    is_path = isinstance(tokenizer, (str, Path))
    description = json.loads(Path(tokenizer).read_text("utf-8") if is_path else tokenizer.to_str())
    tokens = description["model"]["vocab"]
    if isinstance(tokens, list):  # Unigram: pairs of token and score, in the order of ids
        tokens = {token: index for index, (token, _) in enumerate(tokens)}
    tokens = dict(tokens)
    tokens.update({added["content"]: added["id"] for added in description.get("added_tokens") or []})
    flags = np.zeros(max(tokens.values()) + 1, dtype=np.bool_)
    starts_word = _word_start_rule(description)
    for token, index in tokens.items():
        flags[index] = starts_word(token)
    return flags


def _word_start_rule(description: dict[str, Any]) -> Callable[[str], bool]:
    """Whether a token of the tokenizer described begins a word."""
    model = description["model"]
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        return lambda token: not token.startswith(prefix)
    components = _component_names(description.get("pre_tokenizer")) | _component_names(description.get("normalizer"))
    if "ByteLevel" in components:
        return lambda token: token.startswith(_SPACE_LETTERS)
    if "Metaspace" in components:
        return lambda token: token.startswith("▁")
    found = f"{model['type']} with {', '.join(sorted(components)) or 'no pre-tokenizer'}"
    raise ConfigError(
        f"masking.whole_word=True: the tokenizer is {found}; expected WordPiece, byte-level BPE or metaspace, "
        "whose vocabularies show where words start"
    )


def _component_names(component: Optional[dict[str, Any]]) -> set[str]:
    """Types of a normalizer or pre-tokenizer and of its parts; ``Metaspace`` too for one that writes ``▁``."""
    if component is None:
        return set()
    parts = component.get("pretokenizers") or component.get("normalizers") or []
    names = {component["type"]}.union(*(_component_names(part) for part in parts)) - {"Sequence"}
    writes_metaspace = component["type"] == "Replace" and component.get("content") == "▁"
    return names | {"Metaspace"} if writes_metaspace else names
