"""Preparation end to end: splits, keys, reuse, processes."""

import json
import logging
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from data_prep import prepare
from data_prep.cache import default_cache_dir, open_planned, plan_corpus
from data_prep.encode import TextEncoder
from data_prep.prepare import prepare_corpus, tokenize_files
from sharebert.config import ConfigError, DataConfig
from sharebert.data.format import DataError, PreparedCorpus

NOUNS = ["river", "boat", "miller", "bridge", "lantern", "garden", "letter", "stone", "orchard", "winter"]
VERBS = ["carried", "followed", "remembered", "crossed", "lost", "painted", "mended", "watched"]


def invented(number):
    noun, verb, other = NOUNS[number % 10], VERBS[number % 8], NOUNS[(number * 7 + 3) % 10]
    return f"The {noun} {verb} the {other}, and {number} days later nobody remembered the {noun}.\nIt was winter."


TEXTS = [invented(number) for number in range(300)]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "texts" / "all.jsonl"
    path.parent.mkdir()
    write(path, TEXTS)
    cache_dir = str(tmp_path / "cache")
    return DataConfig(source="text_files", files=[str(path)], vocab_size=170, cache_dir=cache_dir, num_proc=1)


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def decoded(corpus, store):
    """Texts of the documents of a store, lowercased, in order."""
    encoder = TextEncoder(corpus.tokenizer_path)
    return [encoder._tokenizer.decode(store.document(index).tolist()) for index in range(store.num_documents)]


def test_a_corpus_is_prepared_with_all_documents_in_their_split(config):
    corpus = prepare_corpus(config)
    train, validation = decoded(corpus, corpus.train), decoded(corpus, corpus.validation)
    assert len(train) + len(validation) == 300
    assert 4 <= len(validation) <= 40
    expected = [" ".join(text.lower().split()) for text in TEXTS]
    assert set(train) | set(validation) == set(expected)
    assert [text for text in expected if text in set(train)] == train
    corpus.verify()


def test_meta_counts_tokens_without_added_specials(config):
    corpus = prepare_corpus(replace(config, validation_fraction=0.1))
    meta = corpus.meta
    tokens = sum(store.num_tokens - store.num_documents for store in (corpus.train, corpus.validation))
    assert (meta["documents"], meta["tokens"], meta["skipped"]) == (300, tokens, [])
    assert not any(meta["dropped"].values())
    assert not any(meta["repaired"].values())
    assert meta["unknown_tokens"] == 0
    (source,) = meta["sources"]
    assert (source["name"], source["documents"]) == (config.files[0], 300)
    assert len(source["sha256"]) == len(meta["tokenizer_sha256"]) == 64
    encoded = TextEncoder(corpus.tokenizer_path).encode(TEXTS)
    assert len(encoded.ids) == tokens


def test_only_sep_is_added_to_the_stream(config):
    corpus = prepare_corpus(config)
    stream = corpus.train.tokens
    assert np.flatnonzero(stream == corpus.special_ids.sep).tolist() == [
        *(corpus.train.offsets[1:] - 1).tolist(),
        len(stream) - 1,
    ]
    special = corpus.special_ids
    assert not np.isin(stream, (special.pad, special.cls, special.mask)).any()


def test_the_second_run_does_no_work(config, monkeypatch):
    first = prepare_corpus(config)
    monkeypatch.setattr(prepare, "_build", lambda *arguments: pytest.fail("prepared again"))
    second = prepare_corpus(config)
    assert (second.folder, second.meta) == (first.folder, first.meta)
    assert open_planned(plan_corpus(config)).content_hashes == first.content_hashes


def test_nothing_is_found_before_preparation_and_no_folder_is_made(config, tmp_path):
    assert open_planned(plan_corpus(config)) is None
    assert not (tmp_path / "cache").exists()


def test_sequence_length_and_processes_are_not_part_of_the_key(config, tmp_path):
    same = replace(config, seq_len=512, num_proc=3, cache_dir=str(tmp_path / "elsewhere"))
    assert plan_corpus(same).key == plan_corpus(config).key


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 171},
        {"lowercase": False},
        {"validation_fraction": 0.2},
        {"deduplicate": True},
        {"text_column": "x"},
    ],
)
def test_options_that_change_the_result_change_the_key(config, change):
    assert plan_corpus(replace(config, **change)).key != plan_corpus(config).key


def test_a_changed_file_of_the_same_name_size_and_time_is_noticed(config):
    path, before = config.files[0], plan_corpus(config).key
    stat = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(11)
        file.write(b"X")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert os.stat(path).st_size == stat.st_size
    assert plan_corpus(config).key != before


def test_a_moved_file_of_the_same_content_is_the_same_corpus(config, tmp_path):
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((tmp_path / "texts" / "all.jsonl").read_bytes())
    assert plan_corpus(replace(config, files=[str(moved)])).key == plan_corpus(config).key


def test_options_of_a_trained_tokenizer_do_not_count_for_a_given_one(config):
    given = str(prepare_corpus(config).tokenizer_path)
    with_tokenizer = replace(config, tokenizer=given)
    assert plan_corpus(replace(with_tokenizer, vocab_size=999, lowercase=False)).key == plan_corpus(with_tokenizer).key
    assert prepare_corpus(with_tokenizer).train.tokens.tolist() == prepare_corpus(config).train.tokens.tolist()


@pytest.mark.processes
def test_several_processes_write_the_same_corpus_as_one(config, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.encode.BATCH_DOCUMENTS", 20)
    one = prepare_corpus(config)
    two = prepare_corpus(replace(config, num_proc=2, cache_dir=str(tmp_path / "two")))
    assert two.meta == one.meta
    for name in ("train/tokens.bin", "train/offsets.bin", "validation/tokens.bin", "tokenizer.json", "meta.json"):
        assert (two.folder / name).read_bytes() == (one.folder / name).read_bytes(), name


def _prepare_and_tell(config, builds):
    original = prepare._build

    def counted(*arguments):
        builds.put(os.getpid())
        return original(*arguments)

    prepare._build = counted
    prepare_corpus(config)


@pytest.mark.processes
def test_two_processes_at_once_do_the_work_once(config):
    context = multiprocessing.get_context("spawn")
    builds = context.Queue()
    processes = [context.Process(target=_prepare_and_tell, args=(config, builds)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert builds.get(timeout=5)
    assert builds.empty()
    open_planned(plan_corpus(config)).verify()


@pytest.mark.processes
def test_workers_do_not_import_torch():
    program = "import sys, data_prep.encode, data_prep.prepare\n"
    program += "print([name for name in ('torch', 'datasets', 'pyarrow') if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_equal_documents_are_dropped_only_when_asked(config, tmp_path):
    write(tmp_path / "texts" / "more.jsonl", [*TEXTS[:25], "a new one", "a new one", " \n ", ""])
    config = replace(config, files=[str(tmp_path / "texts" / "*.jsonl")])
    kept = prepare_corpus(config).meta
    assert (kept["documents"], kept["dropped"]["empty"], kept["dropped"]["duplicate"]) == (327, 2, 0)
    dropped = prepare_corpus(replace(config, deduplicate=True)).meta
    assert (dropped["documents"], dropped["dropped"]["empty"], dropped["dropped"]["duplicate"]) == (301, 2, 26)
    assert [source["documents"] for source in dropped["sources"]] == [300, 29]


def test_the_split_of_a_document_does_not_depend_on_the_others(config, tmp_path):
    corpus = prepare_corpus(config)
    before = set(decoded(corpus, corpus.validation))
    write(tmp_path / "texts" / "all.jsonl", [invented(number) for number in range(400, 500)] + TEXTS)
    corpus = prepare_corpus(config)
    after = set(decoded(corpus, corpus.validation))
    assert before <= after


def test_a_text_that_the_normaliser_leaves_nothing_of_is_counted_as_empty(config, tmp_path):
    write(tmp_path / "texts" / "all.jsonl", [*TEXTS, "\u00ad\u00ad", "\u0007"])
    meta = prepare_corpus(config).meta
    assert (meta["documents"], meta["dropped"]["empty"]) == (300, 2)


def test_an_empty_validation_split_is_an_error_with_the_numbers(config, tmp_path):
    write(tmp_path / "texts" / "all.jsonl", TEXTS[:3])
    small = replace(config, vocab_size=90, validation_fraction=0.0001)
    with pytest.raises(DataError, match=r"3 documents at data\.validation_fraction=0\.0001 .* none held out"):
        prepare_corpus(small)
    with pytest.raises(DataError, match=r"3 documents at data\.validation_fraction=1\.0 leave none for training"):
        prepare_corpus(replace(small, validation_fraction=1.0))
    nothing_held_out = prepare_corpus(replace(small, validation_fraction=0.0))
    assert (nothing_held_out.validation.num_tokens, nothing_held_out.train.num_documents) == (0, 3)


def test_an_empty_corpus_is_an_error_and_leaves_nothing_behind(config, tmp_path):
    write(tmp_path / "texts" / "all.jsonl", ["", "  \n "])
    with pytest.raises(DataError, match=r"all\.jsonl: no document with text among 2 \(dropped: 2 doc"):
        prepare_corpus(config)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_replaced(config):
    partial = plan_corpus(config).folder
    partial = partial.with_name(f"{partial.name}.partial")
    (partial / "train").mkdir(parents=True)
    (partial / "train" / "tokens.bin").write_bytes(b"half")
    prepare_corpus(config).verify()
    assert not partial.exists()


@pytest.mark.parametrize("error", [ConnectionError("no network"), FileNotFoundError("no network, says the hub")])
def test_tokens_stay_when_the_hub_does_not_answer(tmp_path, monkeypatch, error):
    datasets = pytest.importorskip("datasets")
    cache_dir = str(tmp_path / "cache")
    config = DataConfig(
        source="hf_dataset", hf_path="someone/texts", hf_streaming=True, hf_revision="a" * 40, cache_dir=cache_dir
    )

    def offline(*arguments, **options):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", offline)
    partial = plan_corpus(config).folder
    partial = partial.with_name(f"{partial.name}.partial")
    partial.mkdir(parents=True)
    with pytest.raises(ConfigError, match="no network"):
        prepare_corpus(config)
    assert partial.is_dir()


def test_a_damaged_corpus_is_named_and_prepared_again(config, caplog):
    good = prepare_corpus(config)
    path = good.folder / "train" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:100])
    assert open_planned(plan_corpus(config)) is None
    assert "tokens.bin" in caplog.text
    assert prepare_corpus(config).content_hashes == good.content_hashes


def test_people_read_documents_tokens_unknowns_dropped_and_seconds(config, caplog):
    with caplog.at_level(logging.INFO):
        meta = prepare_corpus(config).meta
    line = next(line for line in caplog.messages if line.startswith("corpus: 300 documents"))
    assert f"{meta['tokens']:,} tokens" in line
    assert "0.000% unknown, " in line
    assert {"corpus: dropped nothing", "corpus: repaired nothing"} <= set(caplog.messages)


def test_a_vocabulary_a_little_larger_than_the_text_supports_is_a_warning_with_both_numbers(config, caplog):
    corpus = prepare_corpus(replace(config, vocab_size=180))
    assert corpus.vocab_size < 180
    assert f"supports {corpus.vocab_size:,} wordpieces, data.vocab_size=180" in caplog.text
    with pytest.raises(DataError, match=rf"data\.vocab_size=5000: larger .*expected at most {corpus.vocab_size:,}"):
        prepare_corpus(replace(config, vocab_size=5000))


def test_a_tokenizer_that_is_not_there_is_named_before_any_work(config):
    with pytest.raises(ConfigError, match=r"data\.tokenizer='nowhere/vocab\.txt': no such file"):
        prepare_corpus(replace(config, tokenizer="nowhere/vocab.txt"))


def test_progress_bars_are_shown_when_asked(config, capsys):
    prepare_corpus(config, progress=True)
    assert "tokenising" in capsys.readouterr().err


def test_python_docs_are_prepared_and_found_again(tmp_path):
    config = DataConfig(vocab_size=512, cache_dir=str(tmp_path))
    corpus = prepare_corpus(config)
    assert corpus.meta["sources"][0]["name"] == "python_docs"
    assert corpus.train.num_tokens > 400_000
    assert corpus.validation.num_tokens > 10_000
    assert PreparedCorpus.open(corpus.folder).content_hashes == open_planned(plan_corpus(config)).content_hashes


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SHAREBERT_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert default_cache_dir() == tmp_path / "a"
    monkeypatch.delenv("SHAREBERT_CACHE")
    assert default_cache_dir() == tmp_path / "b" / "sharebert"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == tmp_path / "c" / ".cache" / "sharebert"


def test_any_files_can_be_tokenised_with_a_checkpoints_tokenizer(config, tmp_path):
    corpus = prepare_corpus(config)
    (tmp_path / "own.txt").write_text("The miller mended the bridge.\n\nNobody watched the [MASK].\n")
    own = DataConfig(source="text_files", files=[str(tmp_path / "own.txt")])
    store = tokenize_files(own, corpus.tokenizer_path, tmp_path / "store")
    assert decoded(corpus, store)[0] == "the miller mended the bridge."
    assert store.num_documents == 2
    assert corpus.special_ids.mask not in store.tokens
    with pytest.raises(ConfigError, match=r"--files: '.*none\.txt' matches no file"):
        tokenize_files(replace(own, files=[str(tmp_path / "none.txt")]), corpus.tokenizer_path, tmp_path / "store")


def test_what_was_dropped_repaired_and_skipped_stands_in_meta_and_log(config, tmp_path, caplog):
    folder = tmp_path / "texts"
    (folder / "more.jsonl").write_bytes(
        b'{"text": "b\xffad"}\n{"text": "cut\n{"text": "c\\u0007d ' + b"x" * 2000 + b'"}\n'
    )
    (folder / "silent.txt").write_text("\n \n")
    (folder / "notes.md").write_text("not read")
    config = replace(config, files=[str(folder)], errors="replace", max_characters=1500)
    with caplog.at_level(logging.INFO):
        meta = prepare_corpus(config).meta
    assert {reason: number for reason, number in meta["dropped"].items() if number} == {"malformed": 1}
    assert meta["repaired"] == {"invalid_utf8": 1, "control_characters": 2, "long_words": 1}
    assert meta["skipped"] == [{"name": str(folder / "notes.md"), "reason": "unknown kind of file"}]
    assert meta["documents"] == 302
    assert "corpus: dropped 1 lines that are not valid JSON with text" in caplog.messages
    assert f"corpus: skipped 1 files of an unknown kind ({folder / 'notes.md'})" in caplog.messages
    assert f"corpus: no document in {folder / 'silent.txt'}" in caplog.messages


def test_a_changed_policy_or_filter_is_another_corpus(config):
    keys = {plan_corpus(config).key}
    changes = [{"errors": "skip"}, {"min_characters": 1}, {"max_characters": 9}, {"txt_documents": "line"}]
    keys |= {plan_corpus(replace(config, **change)).key for change in [*changes, {"repeats": [2]}]}
    assert len(keys) == 6
    assert plan_corpus(replace(config, repeats=[1])).key == plan_corpus(config).key
