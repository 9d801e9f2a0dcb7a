"""A killed preparation goes on where it was; repeats; what a changed option builds again."""

import itertools
import json
import logging
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from data_prep import prepare, token_files
from data_prep.cache import plan_corpus
from data_prep.prepare import prepare_corpus
from sharebert.config import DataConfig
from sharebert.data.format import DataError

FILES = ("train/tokens.bin", "train/offsets.bin", "validation/tokens.bin", "validation/offsets.bin")


def invented(number):
    nouns, verbs = ["river", "boat", "miller", "bridge", "garden"], ["carried", "followed", "crossed", "lost"]
    return f"The {nouns[number % 5]} {verbs[number % 4]} the {nouns[number // 3 % 5]}, {number} days later."


@pytest.fixture
def config(tmp_path, monkeypatch):
    for name, numbers in (("a", range(150)), ("b", range(150, 220)), ("c", range(220, 300))):
        lines = [json.dumps({"text": invented(number)}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, '{"text": " "}', lines[0]]) + "\n")
    shrink(monkeypatch)
    files = [f"{tmp_path}/{name}.jsonl" for name in "abc"]
    options = {"vocab_size": 100, "num_proc": 1, "deduplicate": True, "validation_fraction": 0.1}
    return DataConfig(source="text_files", files=files, cache_dir=str(tmp_path / "cache"), **options)


def shrink(monkeypatch):
    monkeypatch.setattr(token_files, "CHECKPOINT_TOKENS", 200)
    monkeypatch.setattr("data_prep.encode.BATCH_DOCUMENTS", 10)


def content(corpus):
    return {name: (corpus.folder / name).read_bytes() for name in (*FILES, "tokenizer.json")}


def documents(corpus, split="train"):
    store = getattr(corpus, split)
    return [tuple(store.document(index).tolist()) for index in range(store.num_documents)]


def stop_after(monkeypatch, batches, stop):
    """Let `stop` be called instead of the append of batch number `batches`."""
    original, calls = token_files.TokenFiles.append, iter(range(10**6))

    def append(self, batch, tokens):
        if next(calls) == batches:
            stop()
        original(self, batch, tokens)

    monkeypatch.setattr(token_files.TokenFiles, "append", append)


def prepare_interrupted(config, monkeypatch, batches):
    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stop_after(patch, batches, interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(config)


@pytest.mark.parametrize("repeats", [[], [1, 3, 2]])
@pytest.mark.parametrize("batches", [0, 1, 7, 16, 20, 28])
def test_an_interrupted_preparation_goes_on_and_ends_the_same(config, tmp_path, monkeypatch, caplog, batches, repeats):
    config = replace(config, repeats=repeats)
    whole = prepare_corpus(replace(config, cache_dir=str(tmp_path / "whole")))
    prepare_interrupted(config, monkeypatch, batches)
    encoded = []
    original = prepare.encode_documents
    monkeypatch.setattr(prepare, "_train_tokenizer", lambda *arguments: pytest.fail("trained again"))
    monkeypatch.setattr(
        prepare, "encode_documents", lambda docs, *rest: original((encoded.append(d) or d for d in docs), *rest)
    )
    with caplog.at_level(logging.INFO):
        resumed = prepare_corpus(config)
    assert content(resumed) == content(whole)
    assert resumed.meta == whole.meta
    resumed.verify()
    assert len(encoded) == 300 if batches < 2 else len(encoded) < 300 - 7 * batches
    assert ("going on after" in caplog.text) == (batches >= 2)
    assert [path.name for path in resumed.folder.iterdir() if path.name.startswith("progress")] == []


def _prepare_and_die(config, batches):
    patch = pytest.MonkeyPatch()
    shrink(patch)
    stop_after(patch, batches, lambda: os.kill(os.getpid(), signal.SIGKILL))
    prepare_corpus(config)


def test_what_is_complete_is_not_written_again(config, tmp_path, monkeypatch):
    config = replace(config, repeats=[1, 3, 2])

    def fail(*arguments):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_meta", fail)
        with pytest.raises(OSError, match="disk full"):
            prepare_corpus(config)
    monkeypatch.setattr(token_files.TokenFiles, "append", lambda *arguments: pytest.fail("written again"))
    resumed = prepare_corpus(config)
    monkeypatch.undo()  # of the small batches too, which change nothing in the result
    whole = prepare_corpus(replace(config, cache_dir=str(tmp_path / "whole")))
    assert (content(resumed), resumed.meta) == (content(whole), whole.meta)


@pytest.mark.processes
def test_a_killed_preparation_goes_on_and_ends_the_same(config, tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_prepare_and_die, args=(config, 17))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    plan = plan_corpus(config)
    partial = plan.folder.with_name(f"{plan.folder.name}.partial")
    done = json.loads((partial / "progress.json").read_text())["documents_done"]
    assert 100 < done <= 170
    resumed = prepare_corpus(config)
    assert content(resumed) == content(prepare_corpus(replace(config, cache_dir=str(tmp_path / "whole"))))
    assert not partial.exists()


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("rename", [0, 1, 2])
def test_a_kill_at_a_rename_leaves_nothing_in_the_end(config, tmp_path, monkeypatch, rename):
    other = replace(config, cache_dir=str(tmp_path / "other"))
    expected = content(prepare_corpus(other))
    original, calls = os.replace, itertools.count()

    def kill(*arguments):
        if next(calls) == rename:
            raise Killed
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        with pytest.raises(Killed):
            prepare_corpus(config)
    assert content(prepare_corpus(config)) == expected
    names = [
        sorted(path.relative_to(folder) for path in folder.rglob("*"))
        for folder in map(Path, (other.cache_dir, config.cache_dir))
    ]
    assert names[0] == names[1]


def test_what_other_libraries_or_an_unreadable_journal_left_is_not_used(config, tmp_path, monkeypatch):
    whole = prepare_corpus(replace(config, cache_dir=str(tmp_path / "whole")))
    plan = plan_corpus(config)
    journal = plan.folder.with_name(f"{plan.folder.name}.partial") / "progress.json"
    for damage in (lambda text: text.replace('"tokenizers": "', '"tokenizers": "0.'), lambda text: text[:40]):
        prepare_interrupted(config, monkeypatch, 12)
        journal.write_text(damage(journal.read_text()))
        prepare_interrupted(config, monkeypatch, 0)
    assert content(prepare_corpus(config)) == content(whole)


def test_files_shorter_than_the_journal_says_are_named(config, monkeypatch):
    prepare_interrupted(config, monkeypatch, 12)
    plan = plan_corpus(config)
    tokens = plan.folder.with_name(f"{plan.folder.name}.partial") / "train" / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:20])
    with pytest.raises(DataError, match=r"train/tokens\.bin: 20 bytes, expected at least the \d+ that were written"):
        prepare_corpus(config)
    prepare_corpus(config).verify()


def test_training_documents_are_repeated_by_entry_and_held_out_ones_are_not(config):
    once = prepare_corpus(config)
    mixed = prepare_corpus(replace(config, repeats=[1, 3, 2]))
    parts = [prepare_corpus(replace(config, files=[file], tokenizer=str(once.tokenizer_path))) for file in config.files]
    a, b, c = (documents(part) for part in parts)
    assert documents(once) == a + b + c
    assert documents(mixed) == a + b * 3 + c * 2
    assert documents(mixed, "validation") == documents(once, "validation")
    assert mixed.meta["documents"] == len(a + b * 3 + c * 2) + once.validation.num_documents
    assert [source["repeats"] for source in mixed.meta["sources"]] == [1, 3, 2]
    assert [source["documents"] for source in mixed.meta["sources"]] == [152, 72, 82]
    assert mixed.meta["dropped"] == once.meta["dropped"]
    mixed.verify()


def test_unknown_tokens_are_counted_as_often_as_they_are_written(config, tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river"]))
    corpus = prepare_corpus(replace(config, tokenizer=str(vocabulary), repeats=[2, 1, 3]))
    counted = sum(int((store.tokens == 1).sum()) for store in (corpus.train, corpus.validation))
    assert corpus.meta["unknown_tokens"] == counted > 1000


def test_the_tokenizer_is_kept_when_nothing_it_depends_on_changes(config, monkeypatch):
    first = prepare_corpus(config)
    trained = []
    original = prepare._train_tokenizer
    monkeypatch.setattr(prepare, "_train_tokenizer", lambda *arguments: trained.append(1) or original(*arguments))
    for changes in ({"repeats": [2, 2, 1]}, {"num_proc": 2, "seq_len": 128}):
        assert (
            prepare_corpus(replace(config, **changes)).content_hashes["tokenizer"] == first.content_hashes["tokenizer"]
        )
    assert not trained
    for number, changes in enumerate(({"validation_fraction": 0.2}, {"vocab_size": 101}, {"min_characters": 5}), 1):
        prepare_corpus(replace(config, **changes))
        assert len(trained) == number


def test_a_damaged_tokenizer_is_trained_again(config, caplog):
    first = prepare_corpus(config)
    path = plan_corpus(config).tokenizer_path
    path.write_bytes(path.read_bytes()[:100])
    again = prepare_corpus(replace(config, repeats=[1, 2, 1]))
    assert again.content_hashes["tokenizer"] == first.content_hashes["tokenizer"]
    assert f"damaged and will be trained again: {path}" in caplog.text


def test_fewer_sequences_than_a_global_batch_are_refused_with_both_numbers(config):
    corpus = prepare_corpus(config)
    available = -(-corpus.train.num_tokens // 62)
    corpus.check_sequences(64, available)
    expected = rf"make {available:,} training sequences at data\.seq_len=64, expected at least global_batch_size=1,000"
    with pytest.raises(DataError, match=expected):
        corpus.check_sequences(64, 1000)
