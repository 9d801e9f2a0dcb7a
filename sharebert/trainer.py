"""The training loop: updates, unsharing between them, and what happens at each boundary.

A *step* is a completed update. At a boundary the order is: count, log, evaluate, save. Unsharing is the first act of
the next update, so the checkpoint of step tau - 1 is still of the old phase.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from sharebert import distributed
from sharebert.config import TrainConfig
from sharebert.data.loader import Window
from sharebert.evaluate import Evaluator
from sharebert.launch import StopSignals
from sharebert.metrics import Recorder, row_is_regular
from sharebert.precision import Precision
from sharebert.train_state import TrainState
from sharebert.update import NonFiniteError, Update, Updater

logger = logging.getLogger(__name__)

LONG_UPDATE_SECONDS = 30.0
"""A stop request waits for the end of an update that is shorter, and for the end of a micro-batch otherwise."""


class Stopwatch:
    """Seconds that passed while it was not paused."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = time.perf_counter()  # None: paused

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens inside."""
        self._seconds, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = time.perf_counter()


@dataclass
class Trainer:
    """Runs the updates of one process; every rank runs the same loop."""

    config: TrainConfig
    state: TrainState
    precision: Precision
    evaluator: Evaluator
    recorder: Recorder
    save: Callable[[bool], None]
    """Saves a checkpoint; told whether it is the last one before unsharing."""
    stop: StopSignals
    flops_per_update: int
    peak_flops_per_second: float

    def __post_init__(self) -> None:
        self.model, self.sharing, self.policy = self.state.model, self.state.sharing, self.state.policy
        self.counters = self.state.counters
        self.device = next(self.model.parameters()).device
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._loss_sum += self.counters.loss_sum if distributed.rank() == 0 else 0.0
        self._grad_norm = torch.zeros((), device=self.device)
        self._nonfinite_update = torch.zeros((), dtype=torch.int64, device=self.device)
        self._update_seconds = self._save_seconds = 0.0
        self._unshared_at = 0
        self._watch, self._clock_mark = Stopwatch(), 0.0
        self._row_begin, self._row_updates = 0.0, 0
        self.updater = Updater(self.config, self.state, self.precision, self.stop_is_agreed)

    # ------------------------------------------------------------------ the loop

    def fit(self, windows: Iterable[Window]) -> bool:
        """Train to `max_steps`; returns whether it got there (False: a stop was asked for, and saved)."""
        goes_on = self._evaluate_when_due()
        if goes_on and self.counters.step == self.config.max_steps:
            self._save()  # a stop came in the last evaluation: its figures belong in the last checkpoint
        for window in windows if goes_on else ():
            self.maybe_unshare()
            goes_on = self.train_step(window) and self._cross_boundary()
            if not goes_on or (self.counters.step < self.config.max_steps and self.stop_is_agreed()):
                goes_on = False
                break
        if not goes_on and self._unshared_at <= self.counters.step:
            self._save()  # else layers were unshared for an update that was not completed: the save before that stands
        return goes_on

    def maybe_unshare(self) -> None:
        """Give layers weights of their own where the policy no longer wants them to share."""
        update = self.counters.step + 1
        groups = self.policy.groups_for(update)
        if groups == self.sharing.groups:
            return
        before = self.sharing.phase
        self.sharing.unshare(groups, self.state.optimizer, self.config.unshare.optimizer_state)
        self.updater.take_stock()
        self._unshared_at = update
        self.counters.unshared_at.append(update)
        logger.info("update %d: %s -> %s, %d groups of layers", update, before, self.sharing.phase, len(groups))

    def train_step(self, window: Window) -> bool:
        """One update from one window; False when a stop was agreed on before it was complete."""
        begin, number = time.perf_counter(), self.counters.step + 1
        self.updater.is_patient = self._update_seconds <= LONG_UPDATE_SECONDS
        is_check = self.policy.check_is_due(number)
        update = self.updater.run(window, is_check=is_check, measures_ratio=self._log_is_due(number))
        if update is None:
            return False
        if update.correlations is not None:
            # Rank 0's figures for all: a float that differs in its last bit must not split the ranks.
            measured = update.correlations.tolist()
            self.policy.observe(number, distributed.on_rank_zero(lambda: measured))
        self._count(update)
        self._update_seconds = time.perf_counter() - begin
        return True

    def _count(self, update: Update) -> None:
        """Add an update to the row, on the device, and note the first one that is not a number."""
        self._loss_sum += update.loss
        self._grad_norm = update.grad_norm
        self.counters.step += 1
        self.counters.loss_updates += 1
        self._row_updates += 1
        is_new = (self._nonfinite_update == 0) & ~(update.loss.isfinite() & update.grad_norm.isfinite())
        self._nonfinite_update += is_new * self.counters.step

    def stop_is_agreed(self) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank. Also agrees on an update's length."""
        wants_stop = self.stop.is_wanted(self._update_seconds + self._save_seconds)
        if distributed.world_size() == 1:
            return wants_stop
        votes = torch.tensor([float(wants_stop), self._update_seconds], dtype=torch.float64)
        stop, self._update_seconds = distributed.max_over_ranks(votes).tolist()
        return bool(stop)

    # ------------------------------------------------------------------ boundaries

    def _cross_boundary(self) -> bool:
        """Log, evaluate, save; False when a stop was agreed on meanwhile."""
        step, every = self.counters.step, self.config.checkpoint.every_steps
        self.recorder.progress.advance()
        if self._log_is_due(step):
            self._log()
        if not self._evaluate_when_due():
            return False
        if self._unshares_after(step) or step == self.config.max_steps or (every and step % every == 0):
            self._save()
        return True

    def _unshares_after(self, step: int) -> bool:
        return step < self.config.max_steps and self.policy.groups_for(step + 1) != self.sharing.groups

    def _log_is_due(self, step: int) -> bool:
        is_special = step == self._unshared_at or self.policy.check_is_due(step) or self._unshares_after(step)
        return row_is_regular(step, self.config) or is_special

    def _log(self) -> None:
        """A row of figures for the updates since the last one. Reads the device."""
        self._check_finite()
        counters, sequences = self.counters, self.config.global_batch_size
        counters.row_loss_sum = float(distributed.sum_over_ranks(self._loss_sum.clone()))
        counters.row_loss_updates = counters.loss_updates
        seconds = max(1e-9, self._watch.seconds - self._row_begin) / self._row_updates  # a clock may stand still
        values = {
            "train/loss": counters.row_loss_sum / counters.row_loss_updates,
            "train/lr": self.updater.rate,
            "train/grad_norm": float(self._grad_norm),
            "train/skipped_updates": counters.skipped_updates,
            "perf/tokens_per_second": sequences * self.config.data.seq_len / seconds,
            "perf/mfu": self.flops_per_update / seconds / self.peak_flops_per_second,
            "perf/training_seconds": self._advance_clock(),
            "share/phase": self.sharing.phase,
            "share/unique_parameters": self.state.unique_parameters(),
            "share/update_to_weight": self.updater.ratio.after(),
            **self.policy.figures(counters.step),
        }
        self.recorder.write(counters.step, values)
        self.recorder.progress.show(counters.step, values, self.policy.describe_check())
        self._loss_sum.zero_()
        counters.loss_updates = self._row_updates = 0
        self._row_begin = self._watch.seconds

    def _advance_clock(self) -> float:
        now = self._watch.seconds
        self.counters.training_seconds += now - self._clock_mark
        self._clock_mark = now
        return self.counters.training_seconds

    def _evaluate_when_due(self) -> bool:
        """Evaluate at step 0, every so often, and at the end; False when a stop was agreed on meanwhile."""
        counters, every = self.counters, self.config.evaluation.every_steps
        is_due = counters.step in (0, self.config.max_steps) or bool(every and counters.step % every == 0)
        if not is_due or not self.evaluator.has_targets or counters.evaluated_step == counters.step:
            return True
        self._check_finite()
        with self._watch.paused():
            figures = self.evaluator.evaluate(self.model, self.stop_is_agreed)
            if figures is None:
                return False
            counters.evaluated_step, counters.evaluation = counters.step, figures
            self.recorder.write(counters.step, figures)
            names = ("loss", "unigram_loss", "accuracy", "unigram_accuracy")
            logger.info(
                "step %d  held-out loss %.4f (unigram %.4f)  accuracy %.4f (most frequent token %.4f)",
                counters.step,
                *(figures[f"eval/{name}"] for name in names),
            )
        return True

    def _save(self) -> None:
        """Save; never after a loss or gradient norm that is not a number."""
        self._check_finite()
        with self._watch.paused():
            begin = time.perf_counter()
            self._advance_clock()
            self.counters.loss_sum = float(distributed.sum_over_ranks(self._loss_sum.clone()))
            self.save(self._unshares_after(self.counters.step))
            self._save_seconds = max(self._save_seconds, time.perf_counter() - begin)

    def _check_finite(self) -> None:
        update = int(distributed.max_over_ranks(self._nonfinite_update.clone()))
        if update:
            raise NonFiniteError(f"update {update}: the loss or the gradient norm is not a finite number")
