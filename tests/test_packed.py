"""Packed files are read as what they hold, and cut ones are errors."""

import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep.text_files import file_format, find_files, passed_over, read_documents
from sharebert.data.format import DataError

TEXTS = [f"document {number} of the story" for number in range(3000)]


def parquet_bytes():
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), file)
    return file.getvalue()


CONTENTS = {
    "txt": "\n\n".join(TEXTS).encode(),
    "jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode(),
    "parquet": parquet_bytes(),
}
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("kind", CONTENTS)
def test_every_kind_is_read_plain_and_packed(tmp_path, kind, packing):
    path = tmp_path / f"a.{kind}{packing}"
    path.write_bytes(PACK[packing](CONTENTS[kind]))
    assert file_format(path) == f"{kind}{packing}"
    assert list(read_documents(path, "text")) == TEXTS
    assert find_files([str(tmp_path)]) == [path]


def test_several_frames_one_after_the_other_are_one_file(tmp_path):
    half = len(CONTENTS["jsonl"]) // 2
    parts = CONTENTS["jsonl"][:half], CONTENTS["jsonl"][half:]
    for packing in (".gz", ".zst"):
        path = tmp_path / f"a.jsonl{packing}"
        path.write_bytes(b"".join(PACK[packing](part) for part in parts))
        assert list(read_documents(path, "text")) == TEXTS


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_cut_or_damaged_packed_file_is_named(tmp_path, kind, packing):
    path, packed = tmp_path / f"a.{kind}{packing}", PACK[packing](CONTENTS[kind])
    for content in (packed[:-12], packed[: len(packed) // 2], b"not packed at all"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.{kind}\{packing}: damaged (gzip|Zstandard) data"):
            list(read_documents(path, "text"))


def test_each_line_of_a_txt_file_is_a_document_when_asked(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n\n \nthree\x0cstill three\n")
    assert list(read_documents(path, "text", "line")) == ["one", "two", "three\x0cstill three"]


def test_files_of_another_kind_in_a_folder_are_told(tmp_path):
    for name in ("a.txt", "notes.md", ".hidden.md"):
        (tmp_path / name).write_text("words")
    assert passed_over([str(tmp_path), f"{tmp_path}/*.txt"]) == [tmp_path / "notes.md"]
