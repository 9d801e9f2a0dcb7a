"""Where text comes from: one `Source` for each file or dataset, with its content hash and its documents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data_prep import hf_dataset, python_docs, text_files
from data_prep.faults import Faults
from sharebert.config import DataConfig
from sharebert.files import sha256_of_file


@dataclass(frozen=True)
class Source:
    """One file or dataset."""

    name: str
    """Path or name, for people."""
    kind: str
    """How its bytes are read: `txt`, `jsonl.gz` and the like, `python_docs` or `hf_dataset`."""
    sha256: str
    """Hash of its content; with `kind`, all that the documents depend on besides the options."""
    num_bytes: int
    """Size on disk; 0 where it is not known."""
    open: Callable[[Faults], Iterator[str]]
    """Starts to read."""
    group: int = 0
    """Number of the entry of data.files that named it (counted from 1 after a dataset); see `DataConfig.repeats`."""

    def read(self, faults: Faults | None = None) -> Iterator[str]:
        """The documents, from the first one each time; what is wrong with them is counted in `faults`."""
        return self.open(faults or Faults())


def open_sources(config: DataConfig) -> list[Source]:
    """Find and hash what `config` names; no document is read. About 1 s per GB and core.

    Raises:
        ConfigError: a file, folder or dataset that is not there; the message names the key.
    """
    if config.source == "text_files":
        return open_files(config.files, config)
    if config.source == "hf_dataset":
        pinned = hf_dataset.at_commit(config)
        digest, num_bytes = hf_dataset.content_hash(pinned)
        name = " ".join(part for part in (config.hf_path, config.hf_name, config.hf_split) if part)
        dataset = Source(name, "hf_dataset", digest, num_bytes, lambda _: hf_dataset.read_documents(pinned))
        return [dataset, *open_files(config.files, config, first_group=1)]
    folder = python_docs.standard_library()
    digest, num_bytes = python_docs.content_hash(folder)
    return [Source("python_docs", "python_docs", digest, num_bytes, lambda _: python_docs.read_documents(folder))]


def open_files(
    patterns: Iterable[str], config: DataConfig, key: str = "data.files", first_group: int = 0
) -> list[Source]:
    """A source for each file that the paths, folders and globs name; `key` is named in errors.

    A file that several patterns name belongs to the first.
    """
    groups: dict[Path, int] = {}
    for group, pattern in enumerate(patterns, start=first_group):
        for path in text_files.find_files([pattern], key):
            groups.setdefault(path, group)
    with ThreadPoolExecutor() as pool:  # hashing runs outside the interpreter lock
        hashes = list(pool.map(sha256_of_file, groups))
    pairs = zip(groups.items(), hashes, strict=True)
    return [_file_source(path, digest, config, group) for (path, group), digest in pairs]


def _file_source(path: Path, digest: str, config: DataConfig, group: int) -> Source:
    read = functools.partial(text_files.read_documents, path, config.text_column, config.txt_documents)
    kind = text_files.file_format(path) or ""
    return Source(str(path), kind, digest, path.stat().st_size, read, group)
