"""Where text comes from: one `Source` for each file or dataset, with its content hash and its documents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data_prep import hf_dataset, python_docs, text_files
from sharebert.config import DataConfig
from sharebert.data.format import sha256_of_file


@dataclass(frozen=True)
class Source:
    """One file or dataset. `read()` starts again from its first document each time."""

    name: str
    """Path or name, for people."""
    kind: str
    """How its bytes are read: `txt`, `jsonl`, `parquet`, `python_docs` or `hf_dataset`."""
    sha256: str
    """Hash of its content; with `kind`, all that the documents depend on besides the options."""
    num_bytes: int
    """Size on disk."""
    read: Callable[[], Iterator[str]]


def open_sources(config: DataConfig) -> list[Source]:
    """Find and hash what `config` names; no document is read. About 1 s per GB and core.

    Raises:
        ConfigError: a file, folder or dataset that is not there; the message names the key.
    """
    if config.source == "text_files":
        return open_files(config.files, config.text_column)
    if config.source == "hf_dataset":
        digest, num_bytes = hf_dataset.content_hash(config)
        name = " ".join(part for part in (config.hf_path, config.hf_name, config.hf_split) if part)
        read = functools.partial(hf_dataset.read_documents, config)
        return [Source(name, "hf_dataset", digest, num_bytes, read)]
    folder = python_docs.standard_library()
    digest, num_bytes = python_docs.content_hash(folder)
    read = functools.partial(python_docs.read_documents, folder)
    return [Source("python_docs", "python_docs", digest, num_bytes, read)]


def open_files(patterns: Iterable[str], text_column: str, key: str = "data.files") -> list[Source]:
    """A source for each file that the paths, folders and globs name; `key` is named in errors."""
    paths = text_files.find_files(patterns, key)
    with ThreadPoolExecutor() as pool:  # hashing runs outside the interpreter lock
        hashes = list(pool.map(sha256_of_file, paths))
    return [_file_source(path, digest, text_column) for path, digest in zip(paths, hashes, strict=True)]


def _file_source(path: Path, digest: str, text_column: str) -> Source:
    kind = text_files.file_format(path) or ""
    read = functools.partial(text_files.read_documents, path, text_column)
    return Source(str(path), kind, digest, path.stat().st_size, read)
