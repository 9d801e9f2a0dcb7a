"""Cleaning, words without end, and what is dropped, repaired and counted on the way to documents."""

import json
import time
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from data_prep.clean import LONGEST_WORD_CHARACTERS, clean_and_count
from data_prep.documents import DocumentCounts, iterate_documents
from data_prep.faults import DROPPED, REPAIRED, Faults, in_words
from data_prep.sources import open_sources
from data_prep.text_files import read_documents
from sharebert.config import ConfigError, DataConfig
from sharebert.data.format import DataError


@pytest.fixture
def damaged(tmp_path):
    """Three files, each with faults."""
    (tmp_path / "a.txt").write_bytes(b"one\ntw\xffo\nthree\n\nfour\n")
    lines = [b'{"text": "good"}', b'{"text": "cut', b'{"text": "b\xffad"}', b'{"txt": "x"}', b'["x"]', b'{"text": 3}']
    (tmp_path / "b.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    column = pyarrow.array([b"fine", b"b\xffad", None], pyarrow.binary()).cast(pyarrow.large_binary())
    strings = pyarrow.Array.from_buffers(pyarrow.large_string(), 3, column.buffers())  # nobody checks
    pyarrow.parquet.write_table(pyarrow.table({"text": strings}), tmp_path / "c.parquet")
    return tmp_path


def read(path, policy):
    faults = Faults(policy)
    return list(read_documents(path, "text", faults=faults)), faults


def test_strict_names_the_place_of_each_fault(damaged):
    for name, message in {
        "a.txt": r"invalid UTF-8 at byte offset 6: byte 0xff; data\.errors=replace or skip would go on",
        "b.jsonl": "line 2: not valid JSON",
        "c.parquet": "row 2: invalid UTF-8 at byte offset 1 of the text: byte 0xff",
    }.items():
        with pytest.raises(DataError, match=rf"{name}.*{message}"):
            read(damaged / name, "strict")


def test_replace_mends_bytes_and_drops_lines_that_are_not_json(damaged):
    documents, faults = read(damaged / "a.txt", "replace")
    assert (documents, faults.repaired["invalid_utf8"]) == (["one\ntw\ufffdo\nthree", "four"], 1)
    documents, faults = read(damaged / "b.jsonl", "replace")
    assert documents == ["good", "b\ufffdad"]
    assert (faults.repaired["invalid_utf8"], faults.dropped["malformed"]) == (1, 4)
    documents, faults = read(damaged / "c.parquet", "replace")
    assert (documents, faults.repaired["invalid_utf8"]) == (["fine", "b\ufffdad", ""], 1)


def test_skip_drops_lines_and_counts_them(damaged):
    documents, faults = read(damaged / "a.txt", "skip")
    assert (documents, faults.dropped["invalid_utf8"]) == (["one\nthree", "four"], 1)
    documents, faults = read(damaged / "b.jsonl", "skip")
    assert (documents, faults.dropped["invalid_utf8"], faults.dropped["malformed"]) == (["good"], 1, 4)
    documents, faults = read(damaged / "c.parquet", "skip")
    assert (documents, faults.dropped["invalid_utf8"]) == (["fine", ""], 1)
    assert not any(faults.repaired.values())


def test_json_that_is_nested_too_deep_is_malformed(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(DataError, match="line 1: not valid JSON"):
        read(tmp_path / "a.jsonl", "strict")


def test_documents_are_dropped_by_length_and_counted(tmp_path):
    texts = ["x" * length for length in (0, 3, 4, 5, 6, 7)] + ["y" * 5, "x" * 5]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig(source="text_files", files=[f"{tmp_path}/a.jsonl"], min_characters=4, max_characters=6)
    counts = DocumentCounts()
    kept = [document.text for document in iterate_documents(open_sources(config), config, counts)]
    assert kept == ["xxxx", "xxxxx", "xxxxxx", "yyyyy", "xxxxx"]
    counts = DocumentCounts()
    config = replace(config, deduplicate=True)
    assert len(list(iterate_documents(open_sources(config), config, counts))) == 4
    assert [counts.dropped[reason] for reason in ("empty", "short", "long", "duplicate")] == [1, 1, 1, 1]
    assert counts.by_source == [8]


def test_settings_that_do_not_fit_are_refused_with_their_key():
    for settings, message in (
        ({"errors": "ignore"}, "data.errors='ignore': expected one of strict"),
        ({"txt_documents": "lines"}, r"data.txt_documents='lines': expected one of .*did you mean 'line'"),
        ({"min_characters": 9, "max_characters": 8}, "data.max_characters=8: expected at least data.min_characters=9"),
        ({"source": "text_files", "files": ["a", "b"], "repeats": [2]}, r"data.repeats=\[2\]: expected one .* of 2"),
        ({"source": "text_files", "files": ["a"], "repeats": [0]}, r"data.repeats=\[0\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataConfig(**settings)


def test_a_word_without_end_is_cut_and_counted_wherever_it_stands():
    longest = "x" * LONGEST_WORD_CHARACTERS
    for before, after in (("", ""), ("a ", " b"), ("é, ", ".\n c"), ("a" * 499 + " ", "\uff0c好")):
        kept = before + longest + after
        assert clean_and_count(kept) == (kept, 0, 0)
        assert clean_and_count(before + longest + "x" * 7 + after) == (kept, 0, 1)


def test_chinese_and_punctuation_end_a_word():
    for text in ("好" * 5000, "-" * 5000, "a.b/" * 2000, "word\n" * 2000, "“quoted”" * 1000):
        assert clean_and_count(text) == (text, 0, 0)


def test_megabytes_without_a_space_cost_linear_time():
    def seconds(characters):
        started = time.perf_counter()
        result = clean_and_count("x" * characters + " end")
        assert (len(result.text), result.long_words) == (LONGEST_WORD_CHARACTERS + 4, 1)
        return time.perf_counter() - started

    seconds(1_001)
    assert seconds(16_000_000) < 20 * max(seconds(2_000_000), 0.005)


def test_replaced_control_characters_are_counted():
    assert clean_and_count("a\x00b\x07c\td\n") == ("a b c\td\n", 2, 0)


def test_counts_are_told_in_words():
    assert in_words(dict.fromkeys(DROPPED, 0), DROPPED) == "nothing"
    assert in_words({"empty": 1200, "long": 1}, DROPPED).startswith("1,200 documents without text, 1 documents above")
    assert in_words({"long_words": 2}, REPAIRED) == "2 words without end"
