"""Where text comes from, and the rule for what text is."""

import errno
import gzip
import json
import os
import sys
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from data_prep import hf_dataset, python_docs
from data_prep.clean import clean_text
from data_prep.documents import SeenDocuments
from data_prep.sample import TextSample
from data_prep.sources import open_sources
from data_prep.text_files import find_files, read_documents
from sharebert.config import ConfigError, DataConfig
from sharebert.data.format import DataError


def documents(path, text_column="text"):
    return list(read_documents(path, text_column))


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def gzipped(path):
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


def test_blank_lines_separate_the_documents_of_a_txt_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\r\n \t\r\n\n\nthree\x0cstill three\n\nfour")
    assert documents(path) == ["one\ntwo", "three\x0cstill three", "four"]
    assert documents(gzipped(path)) == documents(path)


def test_unicode_line_separators_split_nothing(tmp_path):
    text = "one\u2028\u2028two\u2029\u2029three\x85\x85four\x0b\x0cfive"
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8", newline="")
    assert documents(path) == [text]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert documents(path) == [text]


def test_jsonl_documents_come_in_order_and_null_is_empty(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["first", None, "second\n\nwith a blank line"])
    assert documents(path) == ["first", "", "second\n\nwith a blank line"]
    assert documents(gzipped(path)) == documents(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "line 2: not valid JSON"),
        ('["text"]', "line 2: a JSON list, expected an object"),
        ('{"txt": "x"}', r"line 2: no key 'text' \(did you mean 'txt'\?\)"),
        ('{"text": 3}', "line 2: the text is of type int"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, {message}"):
        documents(path)


def test_invalid_utf8_is_named_with_its_byte_offset(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("é one\n\ntwo ".encode() + b"\xff\n")
    with pytest.raises(DataError, match=r"a\.txt: invalid UTF-8 at byte offset 12: byte 0xff"):
        documents(path)
    with pytest.raises(DataError, match=r"a\.txt\.gz: invalid UTF-8 at byte offset 12 \(unpacked\)"):
        documents(gzipped(path))


def test_damaged_gzip_and_parquet_are_named(tmp_path):
    packed = gzipped(write_jsonl(tmp_path / "a.jsonl", ["words"] * 100))
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: damaged gzip data"):
        documents(packed)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet"):
        documents(tmp_path / "a.parquet")


def test_a_parquet_file_is_not_held_in_memory_as_a_whole(tmp_path):
    path, megabyte = tmp_path / "a.parquet", 2**20
    rows = pyarrow.table({"text": [os.urandom(megabyte // 64).hex() for _ in range(64)]})
    with pyarrow.parquet.ParquetWriter(path, rows.schema, compression="none") as writer:
        for _ in range(16):
            writer.write_table(rows)
    del rows
    tracemalloc.start()  # what pyarrow reads from a Python file is held in Python's memory
    try:
        for _ in read_documents(path, "text"):
            pass
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 16 * megabyte, most / megabyte  # of 32; a row group is 2


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), pyarrow.ArrowMemoryError("full")])
def test_a_fault_of_the_disk_is_none_of_the_parquet_file(tmp_path, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", fail)
    with pytest.raises(type(error), match=r"stale|full"):  # tokens that are finished stay
        documents(tmp_path / "a.parquet")


def test_parquet_rows_are_documents(tmp_path):
    texts = [f"row {number}" for number in range(2500)] + [None]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": texts, "n": list(range(2501))}), path)
    assert documents(path, "body") == [*texts[:-1], ""]
    with pytest.raises(DataError, match=r"no column 'text'.*columns: body, n"):
        documents(path)
    with pytest.raises(DataError, match="row 1: the text is of type int"):
        documents(path, "n")


def test_globs_and_folders_name_files_in_a_fixed_order_each_once(tmp_path):
    for name in ("b/z.txt", "b/a.txt", "a.jsonl", "b/c/deep.txt.gz", "b/.hidden.txt", "b/notes.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    def found(*patterns):
        return [path.relative_to(tmp_path).as_posix() for path in find_files([f"{tmp_path}/{p}" for p in patterns])]

    assert found("b/*.txt", "a.jsonl") == ["b/a.txt", "b/z.txt", "a.jsonl"]
    assert found("a.jsonl", "**/*.txt*") == ["a.jsonl", "b/a.txt", "b/c/deep.txt.gz", "b/z.txt"]
    assert found("b") == ["b/a.txt", "b/c/deep.txt.gz", "b/z.txt"]
    assert found("b/z.txt", "b") == ["b/z.txt", "b/a.txt", "b/c/deep.txt.gz"]


def test_a_pattern_without_files_and_an_unknown_kind_are_named(tmp_path):
    (tmp_path / "notes.md").write_text("words")
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(ConfigError, match=r"data\.files: '.*nothing\*\.txt' matches no file"):
        find_files([f"{tmp_path}/a.txt", f"{tmp_path}/nothing*.txt"])
    with pytest.raises(ConfigError, match=r"notes\.md is of an unknown kind; expected \.txt"):
        find_files([f"{tmp_path}/*"])


def test_python_docs_are_english_text_in_a_fixed_order():
    folder = python_docs.standard_library()
    texts = list(python_docs.read_documents(folder))
    words = sum(len(text.split()) for text in texts)
    assert len(texts) > 1000
    assert words > 200_000
    assert any(text.startswith('The "assert" statement') for text in texts)
    assert python_docs.content_hash(folder) == python_docs.content_hash(folder)


def test_the_standard_library_is_parsed_and_never_imported(tmp_path):
    package = tmp_path / "package"
    for name in ("package", "package/test", "site-packages"):
        (tmp_path / name).mkdir()
    source = '"""Module words."""\ndef f():\n    """Function words."""\nclass C:\n    """Class words."""\n'
    source += '    def m(self):\n        """Method words."""\nraise SystemExit("imported")\n'
    (package / "documented_module.py").write_text(source)
    (package / "broken.py").write_text("def (")
    (package / "escapes.py").write_text('"""Old \\d words."""\n')
    (package / "test" / "test_x.py").write_text('"""Test words."""\n')
    (tmp_path / "site-packages" / "installed.py").write_text('"""Installed words."""\n')
    assert list(python_docs.read_documents(tmp_path)) == [
        "Module words.\n\nFunction words.",
        "Class words.\n\nMethod words.",
        "Old \\d words.",
    ]
    assert "documented_module" not in sys.modules


def test_a_python_without_sources_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"no \.py files; data\.source=python_docs needs them"):
        python_docs.content_hash(tmp_path)


def test_saved_datasets_and_folders_of_data_files_are_read(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    texts = ["one document", "another document", None]
    saved = datasets.Dataset.from_dict({"text": texts, "n": [1, 2, 3]})
    saved.save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "several"))
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", texts)
    for name in ("single", "several", "files"):
        (source,) = open_sources(DataConfig(source="hf_dataset", hf_path=str(tmp_path / name)))
        assert list(source.read()) == ["one document", "another document", ""], name
        assert len(source.sha256) == 64
    several = str(tmp_path / "several")
    with pytest.raises(ConfigError, match=r"data\.hf_split='trian'.*did you mean 'train'"):
        list(open_sources(DataConfig(source="hf_dataset", hf_path=several, hf_split="trian"))[0].read())
    with pytest.raises(ConfigError, match=r"data\.text_column='txt'.*did you mean 'text'"):
        list(open_sources(DataConfig(source="hf_dataset", hf_path=several, text_column="txt"))[0].read())
    with pytest.raises(ConfigError, match=r"data\.hf_path='/no/such': no such folder"):
        open_sources(DataConfig(source="hf_dataset", hf_path="/no/such"))


def test_control_characters_become_spaces_and_nothing_is_glued_or_cut():
    assert clean_text("a\x00b\x07c\x0cd\x85e\u200bf\ufffdg\ue000h\ud800i\r\nj\tk") == "a b c d e f g h i \nj\tk"
    kept = "soft\u00adhyphen, 한국어, e\u0301, 😀, \u2028, no\u00a0break"
    assert clean_text(kept) == kept


def test_seen_documents_are_known_again_after_growing():
    seen, keys = SeenDocuments(), [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(5000)]
    assert all(seen.add(key) for key in keys)
    assert not any(seen.add(key) for key in keys)


def test_the_sample_is_bounded_and_chosen_by_hash(tmp_path):
    keys = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(400)]
    sample = TextSample(tmp_path, limit=1000)
    for number, key in enumerate(keys):
        sample.add(f"text {number:05d}", key)  # 10 characters
    chosen = [f"text {number:05d}" for number, key in enumerate(keys) if key < sample._key_below]
    assert 300 <= sample.num_characters <= 1000
    assert list(sample.texts()) == list(sample.texts()) == chosen
    sample.close()
    assert not list(tmp_path.iterdir())


def test_streams_and_maps_give_the_same_documents(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    texts = [f"document {number}" for number in range(600)] + [None]
    saved = datasets.Dataset.from_dict({"text": texts, "n": list(range(601))})
    saved.save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "several"))
    for name in ("parquet", "jsonl"):
        (tmp_path / name).mkdir()
    saved.to_parquet(str(tmp_path / "parquet" / "train.parquet"))
    write_jsonl(tmp_path / "jsonl" / "train.jsonl", texts)
    for name in ("single", "several", "parquet", "jsonl"):
        for streaming in (False, True):
            config = DataConfig(source="hf_dataset", hf_path=str(tmp_path / name), hf_streaming=streaming)
            (source,) = open_sources(config)
            assert list(source.read()) == [*texts[:-1], ""], (name, streaming)
            wrong = DataConfig(**{**vars(config), "text_column": "txt"})
            with pytest.raises(ConfigError, match=r"data\.text_column='txt'.*did you mean 'text'"):
                list(open_sources(wrong)[0].read())


def test_a_stream_from_the_hub_is_named_by_its_commit(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    datasets = pytest.importorskip("datasets")
    asked, loaded = [], []
    commits = iter(["a" * 40, "a" * 40, "b" * 40])

    def dataset_info(self, name, revision):
        asked.append(revision)
        return SimpleNamespace(sha=next(commits))

    def load_dataset(name, configuration, **options):
        loaded.append(options["revision"])
        return datasets.Dataset.from_dict({"text": ["one", "two"]}).to_iterable_dataset()

    monkeypatch.setattr(hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig(source="hf_dataset", hf_path="someone/texts", hf_streaming=True, hf_revision="v1")
    (first,), (second,), (third,) = (open_sources(config) for _ in range(3))
    assert first.sha256 == second.sha256 != third.sha256
    assert first.num_bytes == 0
    assert asked == ["v1"] * 3
    loaded.clear()
    assert list(first.read()) == ["one", "two"]
    assert loaded == ["a" * 40]  # though the hub has a newer one by now


@pytest.mark.parametrize("error", [ConnectionError("no network"), "HTTPError"])
def test_without_a_connection_a_stream_needs_the_hash_of_a_commit(monkeypatch, error):
    hub = pytest.importorskip("huggingface_hub")
    datasets = pytest.importorskip("datasets")
    error = hub.errors.HTTPError("no network") if error == "HTTPError" else error

    def offline(*arguments, **options):
        raise error

    monkeypatch.setattr(hub.HfApi, "dataset_info", offline)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    config = DataConfig(source="hf_dataset", hf_path="someone/texts", hf_streaming=True)
    with pytest.raises(ConfigError, match=r"data\.hf_path='someone/texts', data\.hf_revision=None: no network"):
        open_sources(config)
    (source,) = open_sources(replace(config, hf_revision="c" * 40))  # enough to find a prepared corpus
    with pytest.raises(ConfigError, match="no network"):
        list(source.read())


def test_a_folder_on_disk_has_no_revision(tmp_path):
    config = DataConfig(source="hf_dataset", hf_path=str(tmp_path), hf_revision="v1")
    with pytest.raises(ConfigError, match=r"data\.hf_revision='v1' with the folder .*expected it with a name on"):
        open_sources(config)


def test_the_hash_of_a_folder_goes_by_what_rows_come_from(tmp_path):
    config = DataConfig(source="hf_dataset", hf_path=str(tmp_path))
    hashes = []
    for name in ("train.jsonl", ".cache/huggingface/train.metadata", ".git/HEAD", "tmp-part.jsonl", "cache-1.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
        hashes.append(hf_dataset.content_hash(config)[0])
    assert hashes[0] == hashes[1] == hashes[2]
    assert len({*hashes}) == 3  # the last two are data like any other
    (tmp_path / "state.json").write_text("{}")  # of save_to_disk, where they are not
    saved = hf_dataset.content_hash(config)[0]
    (tmp_path / "cache-1.parquet").write_text("other")
    assert hf_dataset.content_hash(config)[0] == saved


def test_files_are_read_after_a_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["of the dataset"]}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "book.txt").write_text("of a book")
    files = [str(tmp_path / "book.txt")]
    config = DataConfig(source="hf_dataset", hf_path=str(tmp_path / "saved"), files=files, repeats=[1, 3])
    sources = open_sources(config)
    assert [list(source.read()) for source in sources] == [["of the dataset"], ["of a book"]]
    assert [source.group for source in sources] == [0, 1]
