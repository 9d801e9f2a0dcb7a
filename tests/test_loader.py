import dataclasses
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sharebert.config import MaskingConfig
from sharebert.data.format import TokenStore, TokenStoreWriter
from sharebert.data.loader import MicroBatch, Window, build_loader, evaluation_batches
from sharebert.data.masking import Vocabulary

PAD, UNK, CLS, SEP, MASK = range(5)
VOCABULARY = Vocabulary(100, PAD, CLS, SEP, MASK, UNK)
SEQ_LEN = 20
NUM_SEQUENCES = 28  # 501 tokens: the last sequence is short


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("store")
    write(folder, np.random.default_rng(0).integers(5, 100, 500))
    return TokenStore(folder, 100)


def write(folder: Path, ids: np.ndarray) -> None:
    with TokenStoreWriter(folder, 100, SEP) as writer:
        writer.append(ids)


def loader(store: TokenStore, **changes: Any) -> DataLoader[Window]:
    arguments: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "masking": MaskingConfig(),
        "seed": 1,
        "global_batch_size": 6,
        "rank": 0,
        "world_size": 1,
        "first_update": 0,
        "num_updates": 12,
        "num_workers": 0,
        "pin_memory": False,
    }
    return build_loader(store, VOCABULARY, **(arguments | changes))


def evaluation(store: TokenStore, **changes: Any) -> list[MicroBatch]:
    arguments = {"max_sequences": 10, "batch_size": 4, "rank": 0, "world_size": 1}
    return evaluation_batches(store, VOCABULARY, seq_len=SEQ_LEN, masking=MaskingConfig(), **(arguments | changes))


def assert_equal(first: Any, second: Any) -> None:
    for field in dataclasses.fields(first):
        one, other = getattr(first, field.name), getattr(second, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, field.name


def unmasked(window: Window) -> torch.Tensor:
    """The input ids (n, T) before masking."""
    values = torch.where(window.weights > 0, window.labels, torch.gather(window.input_ids, 1, window.positions))
    return window.input_ids.scatter(1, window.positions, values)


@pytest.mark.processes
def test_windows_are_the_same_for_any_number_of_workers_and_leave_the_random_state_alone(store: TokenStore) -> None:
    before = torch.get_rng_state()
    windows = [list(loader(store, num_workers=workers)) for workers in (0, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(windows[0]) == 12
    for alone, with_workers in zip(*windows, strict=True):
        assert_equal(alone, with_workers)


def test_a_resume_is_a_counter(store: TokenStore) -> None:
    for whole, resumed in zip(list(loader(store))[7:], loader(store, first_update=7), strict=True):
        assert_equal(whole, resumed)


def test_each_epoch_holds_every_sequence_once_with_other_masks(store: TokenStore) -> None:
    rows = [(unmasked(w)[i], w.input_ids[i]) for w in loader(store, num_updates=28) for i in range(6)]
    assert len(rows) == 6 * NUM_SEQUENCES
    epochs = [rows[i : i + NUM_SEQUENCES] for i in range(0, len(rows), NUM_SEQUENCES)]
    contents = [{tuple(true.tolist()) for true, _ in epoch} for epoch in epochs]
    assert len(contents[0]) == NUM_SEQUENCES
    assert all(content == contents[0] for content in contents)
    shown = {tuple(masked.tolist()) for _, masked in rows}
    assert len(shown) > 0.95 * len(rows)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_see_what_one_process_sees(store: TokenStore, world_size: int) -> None:
    ranks = [loader(store, rank=rank, world_size=world_size) for rank in range(world_size)]
    for whole, *parts in zip(loader(store), *ranks, strict=True):
        assert sum(part.predicted_tokens for part in parts) == whole.predicted_tokens
        together = torch.stack([part.input_ids for part in parts], dim=1).flatten(0, 1)  # sample s: rank s mod world
        assert torch.equal(together, whole.input_ids)


def test_a_window_counts_its_predicted_tokens_and_knows_its_padding(store: TokenStore) -> None:
    windows = list(loader(store))
    for window in windows:
        assert window.predicted_tokens == int(window.weights.sum())
        assert window.is_padded == bool((window.lengths < SEQ_LEN).any())
        assert window.input_ids.dtype == window.positions.dtype == window.labels.dtype == torch.int64
    assert any(window.is_padded for window in windows)
    assert not all(window.is_padded for window in windows)


def test_micro_batches_cut_a_window_in_order_and_mask_padding_only_where_there_is_some(store: TokenStore) -> None:
    window = next(window for window in loader(store) if window.is_padded)
    parts = list(window.micro_batches(4))
    assert [len(part.input_ids) for part in parts] == [4, 2]
    assert torch.equal(torch.cat([part.labels for part in parts]), window.labels)
    masks = [part.attention_mask for part in parts if part.attention_mask is not None]
    assert len(masks) == 1
    assert masks[0].dtype == torch.bool
    assert masks[0].sum() == SEQ_LEN * (len(masks[0]) - 1) + window.lengths.min()
    moved = parts[0].to("cpu", non_blocking=True)
    assert_equal(moved, parts[0])


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="signals are blocked with sigwaitinfo")
def test_workers_outlive_the_signals_of_a_job(store: TokenStore) -> None:
    iterator = iter(loader(store, num_workers=2, num_updates=200))
    next(iterator)
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    assert len(workers) == 2
    sender = "import os, sys; [os.kill(int(pid), int(sys.argv[1])) for pid in sys.argv[2:]]"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):  # from a process other than ours
        subprocess.run([sys.executable, "-c", sender, str(int(number)), *(str(w.pid) for w in workers)], check=True)
    assert sum(1 for _ in iterator) == 199
    assert all(worker.is_alive() for worker in workers)
    workers[0].terminate()  # from the training process: it does end
    workers[0].join(10)
    assert workers[0].exitcode == 0


@pytest.mark.processes
def test_a_process_that_fails_while_workers_run_ends_in_seconds(tmp_path: Path) -> None:
    write(tmp_path, np.arange(5, 95))
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), os.getcwd()]!r}
from test_loader import TokenStore, loader
from pathlib import Path
iterator = iter(loader(TokenStore(Path({str(tmp_path)!r}), 100), num_workers=2, num_updates=10**6))
next(iterator)
raise RuntimeError("first real error")
"""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - start < 30
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("RuntimeError: first real error")


def test_evaluation_takes_the_same_sequences_wherever_they_stand(store: TokenStore, tmp_path: Path) -> None:
    def contents(batches: list[MicroBatch]) -> set[tuple[int, ...]]:
        rows = set()
        for batch in batches:
            values = torch.where(batch.weights > 0, batch.labels, torch.gather(batch.input_ids, 1, batch.positions))
            rows.update(tuple(row.tolist()) for row in batch.input_ids.scatter(1, batch.positions, values))
        return rows

    body = SEQ_LEN - 2
    whole = store.tokens[: 27 * body].astype(np.int64).reshape(27, body)  # full sequences only
    for name, rows in (("forwards", whole), ("backwards", whole[::-1])):
        write(tmp_path / name, rows.ravel()[:-1])
    chosen = [contents(evaluation(TokenStore(tmp_path / name, 100))) for name in ("forwards", "backwards")]
    assert len(chosen[0]) == 10
    assert len(chosen[0] & chosen[1]) >= 9  # the last token of each stream is a [SEP] instead


def test_evaluation_repeats_bit_for_bit_and_ranks_share_it(store: TokenStore) -> None:
    batches = evaluation(store)
    assert [len(batch.input_ids) for batch in batches] == [4, 4, 2]
    for first, second in zip(batches, evaluation(store), strict=True):
        assert_equal(first, second)
    ranks = [evaluation(store, rank=rank, world_size=3) for rank in range(3)]
    rows = sorted(tuple(r.tolist()) for b in itertools.chain.from_iterable(ranks) for r in b.input_ids)
    assert rows == sorted(tuple(row.tolist()) for batch in batches for row in batch.input_ids)


def test_evaluation_of_a_small_corpus_takes_all_of_it_and_a_rank_may_get_nothing(store: TokenStore) -> None:
    assert sum(len(batch.input_ids) for batch in evaluation(store, max_sequences=1000)) == NUM_SEQUENCES
    assert evaluation(store, max_sequences=2, rank=2, world_size=3) == []


def test_each_token_knows_its_document_when_documents_matter(tmp_path: Path) -> None:
    with TokenStoreWriter(tmp_path, 100, SEP) as writer:
        for length in (3, 30, 7, 2):
            writer.append(np.arange(5, 5 + length))
    store = TokenStore(tmp_path, 100)
    assert next(iter(loader(store))).documents is None
    (window,) = loader(store, cross_document_attention=False, num_updates=1)
    (micro_batch,) = window.micro_batches(6)
    for row, documents in zip(unmasked(window).tolist(), micro_batch.documents.tolist(), strict=True):
        expected, number = [], 0
        for token in row:
            expected.append(number)
            number += token == SEP
        assert documents == expected
    (held_out, *_) = evaluation(store, cross_document_attention=False)
    assert held_out.documents is not None
