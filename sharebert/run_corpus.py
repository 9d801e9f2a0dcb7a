"""The prepared corpus of a run, on every rank, made now where it is not there.

Preparing can take hours, so nobody waits for it in a collective, which would run into the group's time limit and be
deaf to signals: the ranks leave each other messages and look for them.
"""

from __future__ import annotations

import sys
import time

from data_prep.cache import open_planned, plan_corpus
from data_prep.documents import CheckStop
from data_prep.prepare import prepare_corpus
from sharebert import distributed
from sharebert.config import DataConfig
from sharebert.data.format import DataError, PreparedCorpus
from sharebert.launch import Ranks, StopRequested, StopSignals

LOOK_SECONDS = 0.5
STOP, FAILED, READY = "corpus: stop", "corpus: failed", "corpus: ready on rank {}"


def obtain_corpus(config: DataConfig, ranks: Ranks, stop: StopSignals) -> PreparedCorpus:
    """The corpus, its files checked; the first rank of each machine makes it when it is not there.

    Raises:
        StopRequested: on every rank, when any of them was asked to stop meanwhile; what was finished is kept.
        RankZeroError: another rank could not make it.
    """
    if ranks.world_size == 1:
        return _prepare(config, ranks, stop.check)
    lookout = _Lookout(stop)
    try:
        corpus = _prepare(config, ranks, lookout.check) if ranks.local_rank == 0 else _wait(config, lookout)
        distributed.tell_all(READY.format(ranks.rank))
        while not distributed.was_told(*(READY.format(rank) for rank in range(ranks.world_size))):
            lookout.pause()
    except StopRequested:
        distributed.tell_all(STOP)
    except Exception:
        distributed.tell_all(FAILED)
        raise
    # Rank 0's view counts. Where it has not heard of a stop, all were ready, and the loop will stop at once.
    if distributed.on_rank_zero(lambda: distributed.was_told(STOP)):
        raise StopRequested(stop.received or "asked on another rank")
    return corpus


def _prepare(config: DataConfig, ranks: Ranks, check_stop: CheckStop) -> PreparedCorpus:
    corpus = prepare_corpus(config, progress=ranks.rank == 0 and sys.stderr.isatty(), check_stop=check_stop)
    try:
        corpus.verify()  # about 1 s per GB; training on damaged tokens would never show
    except DataError as error:
        raise DataError(f"{error}; delete {corpus.folder}, and the same command prepares it again") from error
    return corpus


def _wait(config: DataConfig, lookout: _Lookout) -> PreparedCorpus:
    plan = plan_corpus(config)
    while (corpus := open_planned(plan)) is None:
        lookout.pause()
    return corpus


class _Lookout:
    """Whether to stop: of this rank at every question, of the others every half second."""

    def __init__(self, stop: StopSignals) -> None:
        self._stop = stop
        self._looked_at = 0.0

    def check(self) -> None:
        """
        Raises:
            StopRequested: a stop is wanted on any rank.
            RankZeroError: another rank failed.
        """
        self._stop.check()
        if time.monotonic() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        if distributed.was_told(STOP):
            raise StopRequested("asked on another rank")
        if distributed.was_told(FAILED):
            raise distributed.RankZeroError("the data could not be prepared")

    def pause(self) -> None:
        """Wait a moment, and :meth:`check`."""
        time.sleep(LOOK_SECONDS)
        self.check()
