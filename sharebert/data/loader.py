"""Masked sequences for training, one update window at a time, and for evaluation.

The window of update u on a rank is a pure function of u, so a resume is a counter and the number of workers
changes nothing.

Legend: n sequences of a window on this rank, B sequences of a micro-batch, T tokens, K prediction slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Optional

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sharebert.config import MaskingConfig
from sharebert.data.format import TokenStore, num_sequences, read_sequences
from sharebert.data.masking import MaskedSequences, Vocabulary, mask_sequences
from sharebert.data.sampler import locate, permuted_index, rank_samples
from sharebert.launch import leave_signals_to_parent
from sharebert.seeding import keyed_bits

_EVALUATION_SEED = 20211003
"""Key of the held-out choice and masks: the same in every run, whatever its seed, so that runs compare."""

_ROWS_PER_READ = 1024  # of the held-out corpus, when its sequences are hashed


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass needs."""

    input_ids: Tensor  # int64 (B, T)
    positions: Tensor  # int64 (B, K)
    labels: Tensor  # int64 (B, K)
    weights: Tensor  # float32 (B, K)
    attention_mask: Optional[Tensor]  # bool (B, T), true at real tokens; None: no padding
    documents: Optional[Tensor] = None  # int64 (B, T), number of each token's document; None: they do not matter

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """The same on `device`."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: t.to(device, non_blocking=non_blocking) for name, t in tensors.items() if t is not None}
        return replace(self, **moved)


@dataclass(frozen=True)
class Window:
    """This rank's share of one update, masked, on the CPU."""

    input_ids: Tensor  # int64 (n, T)
    lengths: Tensor  # int64 (n,)
    positions: Tensor  # int64 (n, K)
    labels: Tensor  # int64 (n, K)
    weights: Tensor  # float32 (n, K)
    predicted_tokens: int
    """True count of used slots on this rank."""
    is_padded: bool
    """Whether any sequence is shorter than T."""
    documents: Optional[Tensor] = None  # int64 (n, T), see :func:`document_numbers`; None: they do not matter

    def pin_memory(self) -> Window:
        """The same in page-locked memory (DataLoader calls this by its name)."""
        names = ("input_ids", "lengths", "positions", "labels", "weights", "documents")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: tensor.pin_memory() for name, tensor in tensors.items() if tensor is not None})

    def micro_batches(self, size: int) -> Iterator[MicroBatch]:
        """Slices of `size` sequences in order, the last one perhaps smaller; views, not copies."""
        T = self.input_ids.shape[1]
        for start in range(0, self.input_ids.shape[0], size):
            part = slice(start, start + size)
            lengths = self.lengths[part]
            mask = None
            if self.is_padded and int(lengths.min()) < T:  # on the CPU: no wait for a device
                mask = torch.arange(T) < lengths.unsqueeze(1)  # (B, T)
            documents = None if self.documents is None else self.documents[part]
            slots = (self.positions[part], self.labels[part], self.weights[part])
            yield MicroBatch(self.input_ids[part], *slots, mask, documents)


@dataclass(frozen=True)
class WindowDataset(Dataset[Window]):
    """Item u is the window of the 0-based update u for one rank; the fields are those of :func:`build_loader`."""

    store: TokenStore
    vocabulary: Vocabulary
    seq_len: int
    masking: MaskingConfig
    seed: int
    global_batch_size: int
    rank: int
    world_size: int
    cross_document_attention: bool = True
    sample_offset: int = 0

    def __getitem__(self, update: int) -> Window:
        shares = (self.global_batch_size, self.rank, self.world_size)
        samples = rank_samples(update, *shares, self.sample_offset)  # (n,)
        total = num_sequences(self.store.num_tokens, self.seq_len)
        epochs, positions = locate(samples, total)
        sequences = permuted_index(self.seed, epochs, positions, total)
        lengths, masked = _read_masked(
            self.store, self.vocabulary, sequences, epochs, self.seq_len, self.masking, self.seed
        )
        return _window(lengths, masked, None if self.cross_document_attention else self.vocabulary.sep_id)


def build_loader(
    store: TokenStore,
    vocabulary: Vocabulary,
    *,
    seq_len: int,
    masking: MaskingConfig,
    seed: int,
    global_batch_size: int,
    rank: int,
    world_size: int,
    first_update: int,
    num_updates: int,
    num_workers: int,
    pin_memory: bool,
    cross_document_attention: bool = True,
    sample_offset: int = 0,
) -> DataLoader[Window]:
    """A loader of the windows of updates first_update ... num_updates - 1 (counted from 0), for one rank.

    It draws from no global generator: making and reading it leaves torch's random state as it was.

    Args:
        store: the tokenised corpus.
        vocabulary: special tokens, and word starts for whole-word masking.
        seq_len: T.
        masking: which tokens are predicted.
        seed: the run's seed; keys order and masks.
        global_batch_size: sequences in an update, over all ranks.
        rank, world_size: this process, from 0, of how many.
        first_update: updates already completed.
        num_updates: updates in the whole run, the completed ones included.
        num_workers: processes that read ahead; 0: windows are made when asked for.
        pin_memory: page-locked windows; ignored without CUDA.
        cross_document_attention: false: windows say which document each token belongs to.
        sample_offset: not 0 where earlier updates had another size, see :func:`rank_samples`.
    """
    shares = (global_batch_size, rank, world_size)
    places = (*shares, cross_document_attention, sample_offset)
    dataset = WindowDataset(store, vocabulary, seq_len, masking, seed, *places)
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=range(first_update, num_updates),
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory and torch.cuda.is_available(),
        worker_init_fn=_start_worker,
        generator=torch.Generator(),
        persistent_workers=num_workers > 0,
    )


def evaluation_batches(
    store: TokenStore,
    vocabulary: Vocabulary,
    *,
    seq_len: int,
    masking: MaskingConfig,
    max_sequences: int,
    batch_size: int,
    rank: int,
    world_size: int,
    cross_document_attention: bool = True,
) -> list[MicroBatch]:
    """Held-out micro-batches, always the same sequences with the same masks, one rank's share of them.

    Sequence i of the chosen ones goes to rank i mod world; a rank of a tiny corpus may get none.
    Memory: about 8 bytes x max_sequences x seq_len. Time: one pass over the corpus when it holds more than
    `max_sequences`.
    """
    chosen = _lowest_by_content(store, vocabulary, seq_len, max_sequences)[rank::world_size]
    if not chosen.size:
        return []
    epochs = np.zeros_like(chosen)
    lengths, masked = _read_masked(store, vocabulary, chosen, epochs, seq_len, masking, _EVALUATION_SEED)
    sep_id = None if cross_document_attention else vocabulary.sep_id
    return list(_window(lengths, masked, sep_id).micro_batches(batch_size))


def _lowest_by_content(store: TokenStore, vocabulary: Vocabulary, seq_len: int, limit: int) -> NDArray[np.int64]:
    """Ascending indices of the `limit` sequences whose tokens hash lowest: growing the corpus moves few of them."""
    total = num_sequences(store.num_tokens, seq_len)
    indices = np.arange(total, dtype=np.int64)
    if total <= limit:
        return indices
    hashes = np.empty(total, dtype=np.uint64)
    special = (vocabulary.cls_id, vocabulary.sep_id, vocabulary.pad_id)
    for start in range(0, total, _ROWS_PER_READ):
        part = indices[start : start + _ROWS_PER_READ]
        input_ids, _ = read_sequences(store, part, seq_len, *special)
        bits = keyed_bits(_EVALUATION_SEED, "content", np.arange(seq_len), input_ids)  # (B, T)
        hashes[part] = np.bitwise_xor.reduce(bits, axis=1)
    return np.sort(np.argsort(hashes, kind="stable")[:limit])


def _read_masked(
    store: TokenStore,
    vocabulary: Vocabulary,
    sequences: NDArray[np.int64],
    epochs: NDArray[np.int64],
    seq_len: int,
    masking: MaskingConfig,
    seed: int,
) -> tuple[NDArray[np.int64], MaskedSequences]:
    """Lengths (B,) and the masked sequences (B, T)."""
    special = (vocabulary.cls_id, vocabulary.sep_id, vocabulary.pad_id)
    input_ids, lengths = read_sequences(store, sequences, seq_len, *special)
    masked = mask_sequences(input_ids, lengths, epochs, sequences, seed=seed, vocabulary=vocabulary, config=masking)
    return lengths, masked


def document_numbers(input_ids: NDArray[np.int64], sep_id: int) -> NDArray[np.int64]:
    """Number of the document that each token belongs to, from 0 in every row; (B, T).

    A document ends with its [SEP]; [CLS] belongs to the first one. Padding follows a [SEP] and so is by itself.
    Masking neither hides a [SEP] nor makes one, so this may be asked before or after it.
    """
    ends = input_ids == sep_id  # (B, T)
    return np.asarray(np.cumsum(ends, axis=1) - ends, dtype=np.int64)


def _window(lengths: NDArray[np.int64], masked: MaskedSequences, sep_id: Optional[int]) -> Window:
    documents = None if sep_id is None else torch.from_numpy(document_numbers(masked.input_ids, sep_id))
    return Window(
        input_ids=torch.from_numpy(masked.input_ids),
        lengths=torch.from_numpy(lengths),
        positions=torch.from_numpy(masked.positions),
        labels=torch.from_numpy(masked.labels),
        weights=torch.from_numpy(masked.weights),
        predicted_tokens=int(np.count_nonzero(masked.weights)),
        is_padded=bool((lengths < masked.input_ids.shape[1]).any()),
        documents=documents,
    )


def _as_it_is(window: Any) -> Any:
    return window


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    leave_signals_to_parent()  # which still needs windows to finish its update
