"""The on-disk corpus: what preparation writes and training reads.

A prepared corpus is a folder::

    meta.json                              what it was made from, counts, content hashes
    tokenizer.json                         the tokenizer it was made with
    train/tokens.bin, train/offsets.bin
    validation/tokens.bin, validation/offsets.bin

`tokens.bin` holds wordpiece ids with one [SEP] after each document and no other specials: uint16 for
vocabularies up to 65,535, else uint32. `offsets.bin` holds the start of each document in it, int64.

Shapes: B sequences of a batch, T tokens of a sequence (`seq_len`).
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sharebert.files import sha256_of_file

FORMAT_VERSION = 1
SPLITS = ("train", "validation")

Ids = npt.NDArray[Any]  # uint16 or uint32; any integer type before writing
Int64Array = npt.NDArray[np.int64]


class DataError(ValueError):
    """Data is damaged or not what was expected; the message names the file."""


def token_dtype(vocab_size: int) -> str:
    """`uint16` for vocabularies up to 65,535, else `uint32`."""
    return "uint16" if vocab_size <= 65_535 else "uint32"


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the five special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


class TokenStoreWriter:
    """Writes one token store, document after document; memory does not grow with what was written.

    With `keep`, (documents, tokens), it goes on after so much of a store that is already there.
    """

    def __init__(self, folder: Path, vocab_size: int, sep_id: int, keep: tuple[int, int] = (0, 0)) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.num_documents, self.num_tokens = keep
        """Written so far, [SEP]s included."""
        self._vocab_size = vocab_size
        self._dtype = np.dtype(token_dtype(vocab_size))
        self._sep_id = sep_id
        self._tokens, self._tokens_hash = _open_at(folder / "tokens.bin", self.num_tokens * self._dtype.itemsize)
        self._offsets, self._offsets_hash = _open_at(folder / "offsets.bin", self.num_documents * 8)

    def append(self, ids: Ids) -> None:
        """Append one document. `ids` (number of tokens,), without [SEP]."""
        self.append_documents(ids, np.array([len(ids)], dtype=np.int64))

    def append_documents(self, ids: Ids, lengths: Int64Array) -> None:
        """Append several documents. `ids` (sum of lengths,), their tokens end to end; `lengths` (documents,)."""
        _expect(int(lengths.sum()) == len(ids), "lengths", f"{lengths.sum()} tokens in all", f"{len(ids)} as in ids")
        highest = int(ids.max(initial=0))  # a larger id would wrap round silently
        _expect(highest < self._vocab_size, "ids", f"{highest}", f"below the vocabulary size {self._vocab_size}")
        ends = np.cumsum(lengths)
        stream = np.insert(ids.astype(self._dtype, copy=False), ends, self._sep_id)
        starts = self.num_tokens + ends - lengths + np.arange(len(lengths))  # one [SEP] for each document before
        for file, digest, data in (
            (self._tokens, self._tokens_hash, stream.tobytes()),
            (self._offsets, self._offsets_hash, starts.astype(np.int64).tobytes()),
        ):
            file.write(data)
            digest.update(data)
        self.num_tokens += len(stream)
        self.num_documents += len(lengths)

    def flush(self) -> None:
        """Bring all that was written to disk."""
        for file in (self._tokens, self._offsets):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Flush both files to disk and close them; calling it again does nothing."""
        if not self._offsets.closed:
            self.flush()
            self._tokens.close()
            self._offsets.close()

    def summary(self) -> dict[str, Any]:
        """The entry of this split in meta.json; `tokens` counts without the added [SEP]s."""
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens - self.num_documents,
            "tokens_sha256": self._tokens_hash.hexdigest(),
            "offsets_sha256": self._offsets_hash.hexdigest(),
        }

    def __enter__(self) -> TokenStoreWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _open_at(path: Path, num_bytes: int) -> tuple[BinaryIO, hashlib._Hash]:
    """`path`, cut to its first `num_bytes` and open for more, and the hash of these."""
    path.touch()
    size = path.stat().st_size
    _expect(size >= num_bytes, str(path), f"{size} bytes", f"at least the {num_bytes} that were written")
    os.truncate(path, num_bytes)
    digest = hashlib.sha256()
    file = open(path, "r+b")  # noqa: SIM115 (closed by TokenStoreWriter.close)
    while block := file.read(1 << 20):
        digest.update(block)
    return file, digest


class TokenStore:
    """Read-only view of one token store, opened at first use and anew in every process that gets a pickled copy."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self._dtype = np.dtype(token_dtype(vocab_size))
        self._tokens: Ids | None = None
        self._offsets: Int64Array | None = None
        self._descriptor: int | None = None
        self.num_tokens = _file_items(self.folder / "tokens.bin", self._dtype)
        """Tokens in the stream, [SEP]s included."""
        self.num_documents = _file_items(self.folder / "offsets.bin", np.dtype(np.int64))

    @property
    def tokens(self) -> Ids:
        """(num_tokens,) uint16 or uint32: the stream, each document followed by one [SEP]."""
        if self._tokens is None:
            self._tokens = _map(self.folder / "tokens.bin", self._dtype, self.num_tokens)
        return self._tokens

    @property
    def offsets(self) -> Int64Array:
        """(num_documents,) int64: where each document starts in the stream."""
        if self._offsets is None:
            self._offsets = _map(self.folder / "offsets.bin", np.dtype(np.int64), self.num_documents)
        return self._offsets

    def read(self, starts: Int64Array, count: int) -> Ids:
        """(B, count): `count` tokens from each of `starts` (B,); 0 beyond the end of the stream.

        Reads the file instead of the map. Every page of a map that was ever touched counts as memory of the process:
        with random access that would grow to the size of the corpus.
        """
        if self._descriptor is None:
            self._descriptor = os.open(self.folder / "tokens.bin", os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
        rows = np.zeros((len(starts), count), dtype=self._dtype)
        for row, start in zip(rows, starts.tolist(), strict=True):
            os.preadv(self._descriptor, [row.view(np.uint8)], start * self._dtype.itemsize)
        return rows

    def document(self, index: int) -> Ids:
        """The tokens of document `index`, without its [SEP]."""
        last = index + 1 == self.num_documents
        end = self.num_tokens if last else int(self.offsets[index + 1])
        return self.tokens[int(self.offsets[index]) : end - 1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None, "_offsets": None, "_descriptor": None}


def _file_items(path: Path, dtype: np.dtype[Any]) -> int:
    _expect(path.is_file(), str(path), "no such file", "a part of a prepared corpus")
    size = path.stat().st_size
    _expect(size % dtype.itemsize == 0, str(path), f"{size} bytes", f"a multiple of {dtype.itemsize} ({dtype})")
    return size // dtype.itemsize


def _map(path: Path, dtype: np.dtype[Any], items: int) -> npt.NDArray[Any]:
    if items == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    # A plain array over the map: slicing np.memmap itself costs a Python-level subclass hook every time.
    return np.memmap(path, dtype=dtype, mode="r", shape=(items,)).view(np.ndarray)


def _expect(condition: bool, name: str, came: object, expected: str) -> None:
    if not condition:
        raise DataError(f"{name}: {came}, expected {expected}")


@dataclass(frozen=True)
class PreparedCorpus:
    """A prepared corpus, open for reading. Cheap to open and to pickle, whatever its size."""

    folder: Path
    meta: dict[str, Any]
    """Content of meta.json."""
    train: TokenStore
    validation: TokenStore
    special_ids: SpecialIds
    vocab_size: int
    """One more than the highest id."""

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer.json that the corpus was made with."""
        return self.folder / "tokenizer.json"

    @property
    def content_hashes(self) -> dict[str, str]:
        """sha256 of the tokenizer and of both token files: equal hashes mean the same training data."""
        hashes = {"tokenizer": str(self.meta["tokenizer_sha256"])}
        return hashes | {split: str(self.meta["splits"][split]["tokens_sha256"]) for split in SPLITS}

    @classmethod
    def open(cls, folder: Path | str) -> PreparedCorpus:
        """Open `folder`, checking format version, file sizes and the tokenizer's hash.

        Raises:
            DataError: something is missing or does not fit meta.json; the message names the file.
        """
        folder = Path(folder)
        meta = read_meta(folder / "meta.json")
        vocab_size = int(meta["vocab_size"])
        stores = {split: TokenStore(folder / split, vocab_size) for split in SPLITS}
        for split, store in stores.items():
            counts = meta["splits"][split]
            expected = counts["documents"], counts["tokens"] + counts["documents"]
            path, wanted = store.folder / "offsets.bin", f"{expected[0]} as meta.json says"
            _expect(store.num_documents == expected[0], str(path), f"{store.num_documents} documents", wanted)
            path, wanted = store.folder / "tokens.bin", f"{expected[1]} as meta.json says"
            _expect(store.num_tokens == expected[1], str(path), f"{store.num_tokens} tokens", wanted)
        _expect_hash(folder / "tokenizer.json", meta["tokenizer_sha256"])
        special_ids = SpecialIds(**meta["special_ids"])
        return cls(folder, meta, stores["train"], stores["validation"], special_ids, vocab_size)

    def check_sequences(self, seq_len: int, global_batch_size: int) -> None:
        """Refuse a corpus that does not fill one global batch.

        Raises:
            DataError: fewer sequences for training than `global_batch_size`; the message gives both numbers.
        """
        found = num_sequences(self.train.num_tokens, seq_len)
        if found < global_batch_size:
            came = f"{self.train.num_tokens:,} tokens make {found:,} training sequences at data.seq_len={seq_len}"
            raise DataError(f"{self.folder}: {came}, expected at least global_batch_size={global_batch_size:,}")

    def verify(self) -> None:
        """Compare the hash of every token and offset file with meta.json; reads all of them, about 1 s per GB.

        Raises:
            DataError: a file has changed since it was written; the message names it.
        """
        for split in SPLITS:
            for name in ("tokens", "offsets"):
                _expect_hash(self.folder / split / f"{name}.bin", self.meta["splits"][split][f"{name}_sha256"])


def _expect_hash(path: Path, expected: str) -> None:
    _expect(path.is_file(), str(path), "no such file", "a part of a prepared corpus")
    came = sha256_of_file(path)
    _expect(came == expected, str(path), f"sha256 {came}", f"{expected} as meta.json says")


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json as a dictionary, with the keys that reading needs.

    Raises:
        DataError: no such file, not JSON, another format version, or a key is missing.
    """
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected a folder that `sharebert prepare` wrote") from None
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    version = meta.get("format_version") if isinstance(meta, dict) else None
    _expect(version == FORMAT_VERSION, str(path), f"format_version {version!r}", f"{FORMAT_VERSION}; prepare it again")
    for key in ("vocab_size", "splits", "special_ids", "tokenizer_sha256"):
        _expect(key in meta, str(path), f"no key {key!r}", "it, as `sharebert prepare` writes it")
    return dict(meta)


def write_meta(path: Path, meta: Mapping[str, Any], special_ids: SpecialIds) -> None:
    """Write meta.json with the format version and special ids, flushed to disk."""
    content = {"format_version": FORMAT_VERSION, **meta, "special_ids": asdict(special_ids)}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def num_sequences(total_tokens: int, seq_len: int) -> int:
    """Sequences in a stream of `total_tokens`, [SEP]s included: each takes seq_len - 2 of them."""
    return -(-total_tokens // (seq_len - 2))


def read_sequences(
    store: TokenStore, indices: npt.NDArray[Any], seq_len: int, cls_id: int, sep_id: int, pad_id: int
) -> tuple[Int64Array, Int64Array]:
    """Sequence k is [CLS] + stream[k (seq_len - 2) : (k + 1) (seq_len - 2)] + [SEP], across document ends.

    Args:
        indices: (B,) sequence numbers from 0 below `num_sequences`.

    Returns:
        input_ids (B, T) int64, and lengths (B,) int64 with [CLS] and [SEP]; only the last sequence of the
        stream can be shorter than T, and is padded.

    Raises:
        IndexError: a number outside the stream.
    """
    body, total = seq_len - 2, store.num_tokens
    starts = np.asarray(indices, dtype=np.int64) * body  # (B,)
    if len(starts) and not (starts.min() >= 0 and starts.max() < total):
        raise IndexError(f"{store.folder}: sequences {indices}, expected 0 to {num_sequences(total, seq_len) - 1}")
    positions = starts[:, None] + np.arange(body)  # (B, T - 2)
    input_ids = np.full((len(starts), seq_len), pad_id, dtype=np.int64)  # (B, T)
    if len(starts):
        input_ids[:, 1:-1] = np.where(positions < total, store.read(starts, body), pad_id)
    lengths = np.minimum(body, total - starts) + 2  # (B,)
    input_ids[:, 0] = cls_id
    input_ids[np.arange(len(starts)), lengths - 1] = sep_id
    return input_ids, lengths
