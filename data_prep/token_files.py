"""The token stores of both splits while they are written, with a journal by which a killed preparation goes on.

Tokens are appended to the final files. Every few million tokens both are brought to disk, and then the journal,
a small JSON file, is replaced by one that says how far they reach. Who comes after a kill cuts the files back to
what the journal says and goes on with the next document: the result is the same byte for byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.documents import Document
from data_prep.encode import EncodedBatch, TextEncoder
from sharebert.data.format import SPLITS, TokenStoreWriter, token_dtype

JOURNAL = "progress.json"

CHECKPOINT_TOKENS = 5_000_000
"""Tokens between two entries in the journal: some seconds of work."""

_COPIED_DOCUMENTS = 64
"""Documents held at once when training documents are written again."""


@dataclass
class Progress:
    """How far a preparation has come."""

    documents_done: int = 0
    """Documents of `iterate_documents` that are in the files, or that the normaliser left nothing of."""
    empty: int = 0
    """The latter."""
    stores: dict[str, tuple[int, int]] = field(default_factory=lambda: dict.fromkeys(SPLITS, (0, 0)))
    """(documents, tokens with [SEP]s) of each split."""
    unknown_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    group: int = 0
    """The entry of data.files whose documents come."""
    group_start: tuple[int, int] = (0, 0)
    """`stores["train"]` where they began."""
    group_unknown_tokens: int = 0
    """`unknown_tokens["train"]` where they began."""


class TokenFiles:
    """Writes documents into the split they belong to. Close it, or use it as a context."""

    def __init__(self, folder: Path, encoder: TextEncoder, repeats: Sequence[int], identity: Mapping[str, Any]) -> None:
        """Goes on with what is in `folder` if its journal is of the same `identity`, else starts over.

        Args:
            repeats: how often the training documents of each group are written; empty: once.
        """
        self._folder = folder
        self._journal = folder / JOURNAL
        self._encoder = encoder
        self._repeats = list(repeats)
        self._identity = dict(identity)
        self.progress = self._read_journal()
        size, sep_id = encoder.vocab_size, encoder.special_ids.sep
        self.writers = {
            split: TokenStoreWriter(folder / split, size, sep_id, self.progress.stores[split]) for split in SPLITS
        }
        self._tokens_at_checkpoint = self._num_tokens()

    def _read_journal(self) -> Progress:
        try:
            entry = json.loads(self._journal.read_text(encoding="utf-8"))
            if entry.pop("identity") != self._identity:
                return Progress()
            entry["stores"] = {split: tuple(reached) for split, reached in entry["stores"].items()}
            entry["group_start"] = tuple(entry["group_start"])
            return Progress(**entry)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return Progress()

    def _num_tokens(self) -> int:
        return sum(writer.num_tokens for writer in self.writers.values())

    def append(self, batch: Sequence[Document], tokens: EncodedBatch) -> None:
        """Append the documents of one group; those without a token are counted as empty."""
        progress = self.progress
        if batch[0].group != progress.group:
            self._end_group(batch[0].group)
        is_validation = np.array([document.is_validation for document in batch])
        for split, chosen in (("train", ~is_validation), ("validation", is_validation)):
            ids = append_chosen(self.writers[split], tokens, chosen)
            progress.unknown_tokens[split] += int((ids == self._encoder.special_ids.unk).sum())
        progress.empty += int((tokens.lengths == 0).sum())
        progress.documents_done += len(batch)
        if self._num_tokens() - self._tokens_at_checkpoint >= CHECKPOINT_TOKENS:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Bring what was appended to disk, and enter it in the journal."""
        for split, writer in self.writers.items():
            writer.flush()
            self.progress.stores[split] = (writer.num_documents, writer.num_tokens)
        written = self._journal.with_suffix(".new")
        with open(written, "w", encoding="utf-8") as file:
            json.dump({"identity": self._identity, **asdict(self.progress)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, self._journal)
        self._tokens_at_checkpoint = self._num_tokens()

    def _end_group(self, next_group: int) -> None:
        """Write the training documents of the group as often again as `repeats` says."""
        progress, train = self.progress, self.writers["train"]
        again = self._repeats[progress.group] - 1 if progress.group < len(self._repeats) else 0
        unknown = progress.unknown_tokens["train"] - progress.group_unknown_tokens
        first, stop = progress.group_start[0], train.num_documents
        for _ in range(again):
            self._write_again(first, stop)
        progress.unknown_tokens["train"] += again * unknown
        progress.group, progress.group_start = next_group, (train.num_documents, train.num_tokens)
        progress.group_unknown_tokens = progress.unknown_tokens["train"]

    def _write_again(self, first: int, stop: int) -> None:
        """Append documents `first` to `stop` - 1 of the training split once more; read from disk, never mapped."""
        train, folder, sep_id = self.writers["train"], self._folder / "train", self._encoder.special_ids.sep
        dtype = np.dtype(token_dtype(self._encoder.vocab_size))
        for start in range(first, stop, _COPIED_DOCUMENTS):
            train.flush()
            count = min(_COPIED_DOCUMENTS, stop - start)
            offsets = np.fromfile(folder / "offsets.bin", np.int64, count + 1, offset=8 * start)
            ends = offsets[1:] if len(offsets) > count else np.append(offsets[1:], train.num_tokens)
            num_tokens = int(ends[-1] - offsets[0])
            ids = np.fromfile(folder / "tokens.bin", dtype, num_tokens, offset=int(offsets[0]) * dtype.itemsize)
            train.append_documents(ids[ids != sep_id], ends - offsets[:count] - 1)

    def finish(self) -> None:
        """End the last group, and note in the journal that all is written; `writers` and `progress` hold the counts."""
        self._end_group(self.progress.group + 1)
        self.checkpoint()
        self.close()

    def close(self) -> None:
        """Close the files; calling it again does nothing."""
        for writer in self.writers.values():
            writer.close()

    def __enter__(self) -> TokenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def append_chosen(writer: TokenStoreWriter, tokens: EncodedBatch, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> Any:
    """Append the chosen documents (documents,) that have tokens; returns their ids."""
    chosen = chosen & (tokens.lengths > 0)
    ids = tokens.ids[np.repeat(chosen, tokens.lengths)]
    if chosen.any():
        writer.append_documents(ids, tokens.lengths[chosen])
    return ids
