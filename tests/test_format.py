"""The on-disk corpus and the sequences read from it."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sharebert.data.format import (
    DataError,
    PreparedCorpus,
    SpecialIds,
    TokenStore,
    TokenStoreWriter,
    num_sequences,
    read_sequences,
    token_dtype,
    write_meta,
)
from sharebert.files import sha256_of_file

PAD, UNK, CLS, SEP, MASK = range(5)
DOCUMENTS = [[10, 11, 12], [13], [14, 15, 16, 17, 18, 19, 20]]
STREAM = [10, 11, 12, SEP, 13, SEP, 14, 15, 16, 17, 18, 19, 20, SEP]


def write_store(folder: Path, documents: list[list[int]] = DOCUMENTS, vocab_size: int = 100) -> dict:
    with TokenStoreWriter(folder, vocab_size, SEP) as writer:
        for document in documents:
            writer.append(np.array(document, dtype=np.int64))
    return writer.summary()


def write_corpus(folder: Path) -> Path:
    splits = {"train": write_store(folder / "train"), "validation": write_store(folder / "validation", [[30, 31]])}
    (folder / "tokenizer.json").write_text("{}")
    digest = sha256_of_file(folder / "tokenizer.json")
    meta = {"vocab_size": 100, "splits": splits, "tokenizer_sha256": digest}
    write_meta(folder / "meta.json", meta, SpecialIds(PAD, UNK, CLS, SEP, MASK))
    return folder


def test_a_store_holds_each_document_followed_by_one_sep(tmp_path):
    summary = write_store(tmp_path)
    store = TokenStore(tmp_path, vocab_size=100)
    assert store.tokens.tolist() == STREAM
    assert store.offsets.tolist() == [0, 4, 6]
    assert (store.num_tokens, store.num_documents) == (14, 3)
    assert (summary["tokens"], summary["documents"]) == (11, 3)
    assert [store.document(index).tolist() for index in range(3)] == DOCUMENTS
    assert summary["tokens_sha256"] == sha256_of_file(tmp_path / "tokens.bin")
    assert summary["offsets_sha256"] == sha256_of_file(tmp_path / "offsets.bin")


def test_documents_appended_together_are_written_as_one_by_one(tmp_path):
    one_by_one = write_store(tmp_path / "a")
    with TokenStoreWriter(tmp_path / "b", 100, SEP) as writer:
        writer.append(np.array(DOCUMENTS[0]))
        lengths = np.array([len(document) for document in DOCUMENTS[1:]])
        writer.append_documents(np.concatenate([np.array(document) for document in DOCUMENTS[1:]]), lengths)
    assert writer.summary() == one_by_one


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    with TokenStoreWriter(tmp_path, 100, SEP) as writer, pytest.raises(DataError, match="4 tokens in all, expected 3"):
        writer.append_documents(np.array([10, 11, 12]), np.array([2, 2]))


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    with TokenStoreWriter(tmp_path, 100, SEP) as writer, pytest.raises(DataError, match="100, expected below the voc"):
        writer.append(np.array([99, 100]))


def test_ids_take_two_bytes_up_to_65535_and_four_above(tmp_path):
    assert (token_dtype(65_535), token_dtype(65_536)) == ("uint16", "uint32")
    write_store(tmp_path / "wide", [[70_000]], vocab_size=80_000)
    assert TokenStore(tmp_path / "wide", 80_000).tokens.tolist() == [70_000, SEP]
    assert (tmp_path / "wide" / "tokens.bin").stat().st_size == 8


def test_an_empty_store_can_be_written_opened_and_read(tmp_path):
    write_store(tmp_path, [])
    store = TokenStore(tmp_path, vocab_size=100)
    assert (len(store.tokens), len(store.offsets), store.num_documents) == (0, 0, 0)
    assert num_sequences(store.num_tokens, 8) == 0
    input_ids, lengths = read_sequences(store, np.array([], dtype=np.int64), 8, CLS, SEP, PAD)
    assert (input_ids.shape, lengths.shape) == ((0, 8), (0,))


def test_the_number_of_sequences_is_rounded_up():
    assert [num_sequences(total, 8) for total in (0, 1, 6, 7, 12, 13)] == [0, 1, 1, 2, 2, 3]


def test_sequences_run_over_document_ends_and_only_the_last_is_short(tmp_path):
    write_store(tmp_path)
    store = TokenStore(tmp_path, vocab_size=100)
    input_ids, lengths = read_sequences(store, np.array([0, 2, 1]), 8, CLS, SEP, PAD)
    assert input_ids.dtype == lengths.dtype == np.int64
    assert input_ids.tolist() == [
        [CLS, *STREAM[0:6], SEP],
        [CLS, *STREAM[12:14], SEP, PAD, PAD, PAD, PAD],
        [CLS, *STREAM[6:12], SEP],
    ]
    assert lengths.tolist() == [8, 4, 8]


@pytest.mark.parametrize("seq_len", [8, 9, 16, 40])
def test_all_sequences_together_are_the_stream(tmp_path, seq_len):
    write_store(tmp_path)
    store = TokenStore(tmp_path, vocab_size=100)
    indices = np.arange(num_sequences(store.num_tokens, seq_len))
    input_ids, lengths = read_sequences(store, indices, seq_len, CLS, SEP, PAD)
    bodies = [row[1 : length - 1].tolist() for row, length in zip(input_ids, lengths, strict=True)]
    assert [token for body in bodies for token in body] == STREAM
    assert all(row[length - 1] == SEP for row, length in zip(input_ids, lengths, strict=True))


@pytest.mark.parametrize("index", [-1, 3])
def test_a_sequence_outside_the_stream_is_refused(tmp_path, index):
    write_store(tmp_path)
    with pytest.raises(IndexError, match="expected 0 to 2"):
        read_sequences(TokenStore(tmp_path, 100), np.array([0, index]), 8, CLS, SEP, PAD)


def test_a_corpus_opens_with_its_stores_and_special_ids(tmp_path):
    corpus = PreparedCorpus.open(write_corpus(tmp_path))
    assert corpus.special_ids == SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    assert corpus.train.tokens.tolist() == STREAM
    assert corpus.validation.tokens.tolist() == [30, 31, SEP]
    assert corpus.vocab_size == 100
    assert corpus.tokenizer_path == tmp_path / "tokenizer.json"
    assert set(corpus.content_hashes) == {"tokenizer", "train", "validation"}
    corpus.verify()


def test_a_pickled_corpus_carries_no_tokens_and_reads_the_same(tmp_path):
    write_store(tmp_path / "long", [list(range(5, 95))] * 1000)
    store = TokenStore(tmp_path / "long", 100)
    assert store.tokens[0] == 5
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).tokens, store.tokens)
    corpus = PreparedCorpus.open(write_corpus(tmp_path / "corpus"))
    assert pickle.loads(pickle.dumps(corpus)).train.tokens.tolist() == STREAM


def test_a_corpus_is_frozen(tmp_path):
    corpus = PreparedCorpus.open(write_corpus(tmp_path))
    assert replace(corpus, vocab_size=101).vocab_size == 101
    with pytest.raises(AttributeError):
        corpus.vocab_size = 101


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train/tokens.bin", "validation/offsets.bin"])
def test_a_missing_file_is_named(tmp_path, name):
    write_corpus(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name}.*no such file"):
        PreparedCorpus.open(tmp_path)


@pytest.mark.parametrize("name", ["train/tokens.bin", "train/offsets.bin"])
def test_a_cut_file_is_named_with_both_sizes(tmp_path, name):
    write_corpus(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=f"{name}.*expected .* as meta.json says"):
        PreparedCorpus.open(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{name}.*multiple of"):
        PreparedCorpus.open(tmp_path)


def test_changed_bytes_of_the_same_size_are_found_by_verify(tmp_path):
    write_corpus(tmp_path)
    path = tmp_path / "train" / "tokens.bin"
    path.write_bytes(b"\x07" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"tokens\.bin: sha256"):
        PreparedCorpus.open(tmp_path).verify()


def test_another_tokenizer_is_refused(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ }")
    with pytest.raises(DataError, match=r"tokenizer\.json: sha256"):
        PreparedCorpus.open(tmp_path)


def test_another_format_version_and_broken_json_are_refused(tmp_path):
    path = write_corpus(tmp_path) / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "format_version": 99}))
    with pytest.raises(DataError, match=r"meta\.json: format_version 99, expected 1"):
        PreparedCorpus.open(tmp_path)
    path.write_text(json.dumps({key: value for key, value in meta.items() if key != "splits"}))
    with pytest.raises(DataError, match=r"meta\.json: no key 'splits'"):
        PreparedCorpus.open(tmp_path)
    path.write_text("{")
    with pytest.raises(DataError, match=r"meta\.json: not valid JSON"):
        PreparedCorpus.open(tmp_path)


def test_reading_sequences_maps_no_page_of_the_file(tmp_path: Path) -> None:
    """A mapped page counts as memory of the process, and random access touches them all."""
    with TokenStoreWriter(tmp_path, 300, 3) as writer:
        writer.append(np.arange(5, 250))
    store = TokenStore(tmp_path, 300)
    input_ids, _ = read_sequences(store, np.array([2, 0]), 12, 2, 3, 0)
    assert store._tokens is None
    assert input_ids[0, 1:-1].tolist() == store.tokens[20:30].tolist()
    assert input_ids[1, 1:-1].tolist() == store.tokens[:10].tolist()
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.read(np.array([240]), 8) == [[245, 246, 247, 248, 249, 3, 0, 0]]).all()
