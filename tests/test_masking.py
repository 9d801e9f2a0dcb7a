import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from sharebert.config import ConfigError, MaskingConfig
from sharebert.data.masking import MaskedSequences, Vocabulary, mask_sequences, num_slots, word_starts

PAD, UNK, CLS, SEP, MASK = range(5)
VOCAB_SIZE = 200
T = 64
STARTS_WORD = np.arange(VOCAB_SIZE) < 120  # the rest continue a word
VOCABULARY = Vocabulary(VOCAB_SIZE, PAD, CLS, SEP, MASK, UNK, STARTS_WORD)
TOKENS = MaskingConfig()
WORDS = MaskingConfig(whole_word=True)


def sequences(count: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """Input ids (count, T) with inner [SEP] and [UNK], and lengths from 3 to T (count,)."""
    generator = np.random.default_rng(0)
    lengths = np.where(generator.random(count) < 0.5, T, generator.integers(3, T + 1, count))
    input_ids = generator.integers(5, VOCAB_SIZE, (count, T))
    specials = generator.random((count, T))
    input_ids[specials < 0.03] = SEP
    input_ids[specials > 0.98] = UNK
    input_ids[:, 0] = CLS
    input_ids[np.arange(count), lengths - 1] = SEP
    input_ids[np.arange(T) >= lengths[:, None]] = PAD
    return input_ids, lengths


def masked(
    config: MaskingConfig, epoch: int = 0, seed: int = 1, vocabulary: Vocabulary = VOCABULARY
) -> MaskedSequences:
    input_ids, lengths = sequences()
    rows = np.arange(len(input_ids))
    return mask_sequences(
        input_ids, lengths, np.full_like(rows, epoch), rows, seed=seed, vocabulary=vocabulary, config=config
    )


def chosen(result: MaskedSequences) -> np.ndarray:
    """bool (B, T)."""
    flags = np.zeros(result.input_ids.shape, dtype=bool)
    rows, slots = np.nonzero(result.weights)
    flags[rows, result.positions[rows, slots]] = True
    return flags


def words_of(row: np.ndarray) -> list[list[int]]:
    """Columns of each word, the slow and plain way."""
    words: list[list[int]] = []
    is_open = False
    for column, token in enumerate(row):
        if token in (PAD, UNK, CLS, SEP, MASK):
            is_open = False
        elif is_open and not STARTS_WORD[token]:
            words[-1].append(column)
        else:
            words.append([column])
            is_open = True
    return words


@pytest.mark.parametrize("config", [TOKENS, WORDS], ids=["tokens", "words"])
def test_no_special_token_is_predicted_or_drawn(config: MaskingConfig) -> None:
    input_ids, _ = sequences()
    result = masked(config)
    assert not VOCABULARY.is_special[input_ids[chosen(result)]].any()
    changed = result.input_ids != input_ids
    assert not np.isin(result.input_ids[changed], [PAD, UNK, CLS, SEP]).any()
    assert result.input_ids.max() < VOCAB_SIZE


@pytest.mark.parametrize("config", [TOKENS, WORDS], ids=["tokens", "words"])
def test_slots_tell_where_and_what_is_predicted(config: MaskingConfig) -> None:
    input_ids, _ = sequences()
    before = input_ids.copy()
    result = masked(config)
    assert np.array_equal(input_ids, before)
    assert result.positions.shape == result.labels.shape == result.weights.shape == (1000, num_slots(T, 0.15))
    assert (result.positions.dtype, result.labels.dtype, result.weights.dtype) == (np.int64, np.int64, np.float32)
    is_used = result.weights == 1
    assert ((result.weights == 0) | is_used).all()
    assert (np.diff(result.weights, axis=1) <= 0).all()  # free slots come last
    assert (result.positions[~is_used] == 0).all()
    assert (result.labels[~is_used] == 0).all()
    assert (np.diff(result.positions, axis=1)[is_used[:, 1:]] > 0).all()
    assert np.array_equal(result.labels[is_used], np.take_along_axis(input_ids, result.positions, axis=1)[is_used])
    assert np.array_equal(result.input_ids[~chosen(result)], input_ids[~chosen(result)])


def test_random_masking_fills_the_slots_that_each_length_gives() -> None:
    input_ids, lengths = sequences()
    candidates = (~VOCABULARY.is_special[input_ids]).sum(axis=1)
    slots = [max(1, round(0.15 * int(length))) for length in lengths]
    assert np.array_equal(masked(TOKENS).weights.sum(axis=1), np.minimum(slots, candidates))


def test_every_ordinary_token_is_equally_likely_to_be_predicted() -> None:
    input_ids, lengths = sequences()
    total = sum(chosen(masked(TOKENS, epoch)) for epoch in range(40))
    is_full = (lengths == T)[:, None] & ~VOCABULARY.is_special[input_ids]
    slots, candidates = num_slots(T, 0.15), is_full.sum(axis=1, keepdims=True)
    expected = np.broadcast_to(40 * slots / np.maximum(candidates, 1), is_full.shape)
    columns = np.arange(1, T - 1)
    ratios = [total[:, c][is_full[:, c]].sum() / expected[:, c][is_full[:, c]].sum() for c in columns]
    assert np.abs(np.array(ratios) - 1).max() < 0.1


@pytest.mark.parametrize("config", [TOKENS, WORDS], ids=["tokens", "words"])
def test_of_the_chosen_80_percent_are_masked_10_random_and_10_kept(config: MaskingConfig) -> None:
    input_ids, _ = sequences()
    result = masked(config)
    flags = chosen(result)
    shown, true = result.input_ids[flags], input_ids[flags]
    count = flags.sum()
    noise = 5 * np.sqrt(0.25 / count)
    assert abs((shown == MASK).mean() - 0.8) < noise
    is_random = (shown != MASK) & (shown != true)
    assert abs(is_random.mean() - 0.1 * (1 - 1 / 195)) < noise
    assert np.unique(shown[is_random]).size > 170  # of 195 ordinary tokens
    assert shown[is_random].min() == 5


def test_shares_of_0_and_1_are_exact() -> None:
    input_ids, _ = sequences()
    kept = masked(MaskingConfig(mask_share=0.0, random_share=0.0))
    assert np.array_equal(kept.input_ids, input_ids)
    all_masked = masked(MaskingConfig(mask_share=1.0, random_share=0.0))
    assert (all_masked.input_ids[chosen(all_masked)] == MASK).all()


def test_whole_words_are_chosen_all_or_none_and_never_overflow() -> None:
    input_ids, lengths = sequences()
    result = masked(WORDS)
    flags = chosen(result)
    for row, length, flag in zip(input_ids, lengths, flags, strict=True):
        words = words_of(row)
        slots = max(1, round(0.15 * int(length)))
        assert all(flag[word].all() or not flag[word].any() for word in words)
        assert flag.sum() == sum(flag[word].sum() for word in words) <= slots
        left = slots - flag.sum()  # no word that was passed over would still fit
        assert all(flag[word].all() or len(word) > left for word in words)


def test_a_word_ends_at_a_special_token_and_one_that_was_cut_begins_after_it() -> None:
    row = np.array([[CLS, 130, 131, SEP, 132, 133, UNK, 134, 10, 135, SEP]])
    lengths, zero = np.array([11]), np.array([0])
    seen = set()
    for epoch in range(60):
        arguments = (row, lengths, zero + epoch, zero)
        result = mask_sequences(*arguments, seed=1, vocabulary=VOCABULARY, config=WORDS)
        seen.add(tuple(result.positions[0][result.weights[0] == 1].tolist()))
    assert seen == {(1, 2), (4, 5), (7,), (8, 9)}


def test_a_sequence_without_candidates_leaves_its_slots_free() -> None:
    row, lengths, zero = np.array([[CLS, SEP, PAD, PAD]]), np.array([2]), np.array([0])
    for config in (TOKENS, WORDS):
        result = mask_sequences(row, lengths, zero, zero, seed=1, vocabulary=VOCABULARY, config=config)
        assert np.array_equal(result.input_ids, row)
        assert result.weights.sum() == 0


@pytest.mark.parametrize("config", [TOKENS, WORDS], ids=["tokens", "words"])
def test_masks_differ_between_epochs_seeds_and_sequences_and_do_not_depend_on_the_batch(config: MaskingConfig) -> None:
    first = masked(config)
    assert np.array_equal(chosen(first), chosen(masked(config)))
    for other in (masked(config, epoch=1), masked(config, seed=2)):
        overlap = (chosen(first) & chosen(other)).sum() / chosen(first).sum()
        assert overlap < 0.25  # about 0.16 by chance
    input_ids, lengths = sequences()
    rows = np.array([700, 3])
    alone = mask_sequences(
        input_ids[rows], lengths[rows], np.zeros(2, int), rows, seed=1, vocabulary=VOCABULARY, config=config
    )
    assert np.array_equal(alone.input_ids, first.input_ids[rows])
    assert np.array_equal(alone.positions, first.positions[rows])


def test_unknown_tokens_are_predicted_when_they_are_not_listed_as_special() -> None:
    input_ids, _ = sequences()
    result = masked(TOKENS, vocabulary=Vocabulary(VOCAB_SIZE, PAD, CLS, SEP, MASK))
    assert (input_ids[chosen(result)] == UNK).any()


def test_whole_word_masking_without_word_starts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"masking\.whole_word"):
        masked(WORDS, vocabulary=Vocabulary(VOCAB_SIZE, PAD, CLS, SEP, MASK))


def test_a_vocabulary_refuses_ids_and_word_starts_that_do_not_fit_it() -> None:
    with pytest.raises(ValueError, match="special id 10"):
        Vocabulary(10, 0, 1, 2, 10)
    with pytest.raises(ValueError, match="starts_word"):
        Vocabulary(10, 0, 1, 2, 3, starts_word=np.ones(9, dtype=bool))


def test_word_starts_of_wordpiece_are_the_tokens_without_prefix(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, ",": 3}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[MASK]"])
    assert word_starts(tokenizer).tolist() == [True, True, False, True, True]
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    assert word_starts(path).tolist() == word_starts(str(path)).tolist() == word_starts(tokenizer).tolist()
    other = tokenizers.Tokenizer(models.WordPiece({"a": 0, "@@b": 1}, unk_token="a", continuing_subword_prefix="@@"))
    assert word_starts(other).tolist() == [True, False]


@pytest.mark.parametrize("is_nested", [False, True])
def test_word_starts_of_byte_level_bpe_are_the_tokens_with_a_blank(is_nested: bool) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"Ġthe": 0, "ing": 1, "Ċ": 2, "Ġ": 3, "the": 4}, []))
    byte_level = pre_tokenizers.ByteLevel()
    split = pre_tokenizers.Digits()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if is_nested else byte_level
    assert word_starts(tokenizer).tolist() == [True, False, True, True, False]


def test_word_starts_of_metaspace_tokenizers_are_the_tokens_with_its_mark() -> None:
    unigram = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("ing", -2.0)], 0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    assert word_starts(unigram).tolist() == [False, True, False]
    bpe = tokenizers.Tokenizer(models.BPE({"▁the": 0, "ing": 1}, []))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert word_starts(bpe).tolist() == [True, False]


def test_other_tokenizers_are_refused_by_name() -> None:
    others: list[tuple[Any, str]] = [
        (models.WordLevel({"a": 0}, unk_token="a"), "WordLevel with Whitespace"),
        (models.BPE({"a": 0}, []), "BPE with Whitespace"),
    ]
    for model, name in others:
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.WordPiece()
        with pytest.raises(ConfigError, match=f"{name}; expected WordPiece, byte-level BPE or metaspace"):
            word_starts(tokenizer)
        assert json.loads(tokenizer.to_str())["model"]["type"] in name
