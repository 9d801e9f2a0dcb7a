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
from torch import Tensor, nn

from sharebert import distributed
from sharebert.config import TrainConfig
from sharebert.data.loader import Window
from sharebert.evaluate import Evaluator
from sharebert.launch import StopSignals
from sharebert.loss import loss_divisor, masked_lm_loss_sum
from sharebert.metrics import Recorder
from sharebert.optim import UpdateProbe, clip_gradients, set_learning_rate
from sharebert.precision import Precision
from sharebert.schedule import learning_rate
from sharebert.seeding import seed_dropout
from sharebert.train_state import TrainState

logger = logging.getLogger(__name__)

LONG_UPDATE_SECONDS = 30.0
"""A stop request waits for the end of an update that is shorter, and for the end of a micro-batch otherwise."""

MAX_CONSECUTIVE_SKIPS = 24
"""fp16 updates skipped in a row before the run gives up: by then the loss scale has fallen from 2^16 below 1."""

PROBED_GROUPS = 4
"""Groups of layers, evenly spaced, whose parameters are the sample behind `share/update_to_weight`."""


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is no longer a number."""


class Stopwatch:
    """Seconds that passed while it was not paused."""

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._seconds + time.perf_counter() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens inside."""
        self._seconds = self.seconds
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
        self.optimizer, self.scaler, self.counters = self.state.optimizer, self.state.scaler, self.state.counters
        self.device = next(self.model.parameters()).device
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._loss_sum += self.counters.loss_sum if distributed.rank() == 0 else 0.0
        self._grad_norm = torch.zeros((), device=self.device)
        self._nonfinite_update = torch.zeros((), dtype=torch.int64, device=self.device)
        self._loss_scale = self.scaler.get_scale()
        micro_batch_size = self.config.engine.micro_batch_size
        assert micro_batch_size is not None, "resolved before"
        self._micro_batch_size = micro_batch_size
        self._update_seconds = 0.0
        self._unshared_at = 0
        self._probe = UpdateProbe()
        self._watch, self._clock_mark = Stopwatch(), 0.0
        self._row_begin, self._row_updates = 0.0, 0
        self._take_stock()

    # ------------------------------------------------------------------ the loop

    def fit(self, windows: Iterable[Window]) -> bool:
        """Train to `max_steps`; returns whether it got there (False: a stop was asked for, and saved)."""
        goes_on = self._evaluate_when_due()
        for window in windows if goes_on else ():
            self.maybe_unshare()
            goes_on = self.train_step(window) and self._cross_boundary()
            if not goes_on or (self.counters.step < self.config.max_steps and self.stop_is_agreed()):
                goes_on = False
                break
        if not goes_on:
            self._save()
        return goes_on

    def maybe_unshare(self) -> None:
        """Give layers weights of their own where the policy no longer wants them to share."""
        update = self.counters.step + 1
        groups = self.policy.groups_for(update)
        if groups == self.sharing.groups:
            return
        before = self.sharing.phase
        self.sharing.unshare(groups, self.optimizer, self.config.unshare.optimizer_state)
        self._take_stock()
        self._unshared_at = update
        logger.info("update %d: %s -> %s, %d groups of layers", update, before, self.sharing.phase, len(groups))

    def train_step(self, window: Window) -> bool:
        """One update from one window; False when a stop was agreed on before it was complete.

        An fp16 update that overflows is not an update: the same window is tried again at half the loss scale.
        """
        begin = time.perf_counter()
        divisor = loss_divisor(window.predicted_tokens)
        for _ in range(MAX_CONSECUTIVE_SKIPS):
            loss = self._accumulate(window, divisor)
            if loss is None:
                self.optimizer.zero_grad(set_to_none=True)
                return False
            if self._apply_update():
                self._count(loss, time.perf_counter() - begin)
                return True
            self.counters.skipped_updates += 1
        raise self._nonfinite_error(self.counters.step + 1, f"{MAX_CONSECUTIVE_SKIPS} fp16 tries in a row overflowed")

    def stop_is_agreed(self) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank. Also agrees on an update's length."""
        if distributed.world_size() == 1:
            return self.stop.received is not None
        votes = torch.tensor([float(self.stop.received is not None), self._update_seconds], dtype=torch.float64)
        stop, self._update_seconds = distributed.max_over_ranks(votes).tolist()
        return bool(stop)

    # ------------------------------------------------------------------ one update

    def _accumulate(self, window: Window, divisor: int) -> Tensor | None:
        """Gradients of the whole window into ``.grad``; returns this rank's share of the loss, None when stopped."""
        is_long = self._update_seconds > LONG_UPDATE_SECONDS
        micro_batches = list(window.micro_batches(self._micro_batch_size))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(micro_batches):
            if is_long and self.stop_is_agreed():
                return None
            batch = batch.to(self.device, non_blocking=True)
            seed_dropout(self.config.seed, self.counters.step, index, distributed.rank())
            with self._gradients_travel(last=index == len(micro_batches) - 1):
                with self.precision.autocast():
                    logits = self.wrapped(batch.input_ids, batch.positions, batch.attention_mask)
                loss = masked_lm_loss_sum(logits, batch.labels, batch.weights) / divisor
                # DDP takes the mean over ranks; the divisor is already that of all ranks.
                self.scaler.scale(loss * distributed.world_size()).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _gradients_travel(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Under DDP, all-reduce in the last micro-batch only."""
        no_sync = getattr(self.wrapped, "no_sync", None)
        return contextlib.nullcontext() if last or no_sync is None else no_sync()

    def _apply_update(self) -> bool:
        """Unscale, mean over sharing layers, clip, step; False when the scaler skipped the step."""
        self.scaler.unscale_(self.optimizer)
        self.sharing.average_gradients()
        self._grad_norm = clip_gradients(self._parameters, self._copies, self.config.optim.clip_norm)
        set_learning_rate(self.optimizer, learning_rate(self.counters.step, self.config.optim, self.config.max_steps))
        if self._log_is_due(self.counters.step + 1):
            self._probe.before(self._probed_parameters)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if not self.scaler.is_enabled():
            return True
        before, self._loss_scale = self._loss_scale, self.scaler.get_scale()  # the one read of an fp16 update
        return self._loss_scale >= before

    def _count(self, loss: Tensor, seconds: float) -> None:
        """Add an update's loss to the row, on the device, and note the first one that is not a number."""
        self._loss_sum += loss
        self._update_seconds = seconds
        self.counters.step += 1
        self.counters.loss_updates += 1
        self._row_updates += 1
        is_new = (self._nonfinite_update == 0) & ~(loss.isfinite() & self._grad_norm.isfinite())
        self._nonfinite_update += is_new * self.counters.step

    def _take_stock(self) -> None:
        """Look up parameters and their counts anew and wrap the model for DDP; after any change of sharing."""
        self.wrapped: nn.Module = self.model  # lets go of the old reducer and its hooks before a new one comes
        self.wrapped = distributed.wrap(self.model)
        self._parameters = list(self.model.parameters())
        self._copies = self.sharing.copies()
        self._probed_parameters = self.sharing.sample_parameters(PROBED_GROUPS)

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
        is_regular = step % self.config.logging.every_steps == 0 or step == self.config.max_steps
        return is_regular or step == self._unshared_at or self._unshares_after(step)

    def _log(self) -> None:
        """A row of figures for the updates since the last one. Reads the device."""
        self._check_finite()
        counters, sequences = self.counters, self.config.global_batch_size
        loss = float(distributed.sum_over_ranks(self._loss_sum.clone())) / counters.loss_updates
        seconds = (self._watch.seconds - self._row_begin) / self._row_updates
        values = {
            "train/loss": loss,
            "train/lr": learning_rate(counters.step - 1, self.config.optim, self.config.max_steps),
            "train/grad_norm": float(self._grad_norm),
            "train/skipped_updates": counters.skipped_updates,
            "perf/tokens_per_second": sequences * self.config.data.seq_len / seconds,
            "perf/mfu": self.flops_per_update / seconds / self.peak_flops_per_second,
            "perf/training_seconds": self._advance_clock(),
            "share/phase": self.sharing.phase,
            "share/unique_parameters": self.state.unique_parameters(),
            "share/update_to_weight": self._probe.after(),
        }
        self.recorder.write(counters.step, values)
        self.recorder.progress.show(counters.step, values)
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
            counters.evaluated_step = counters.step
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
            self._advance_clock()
            self.counters.loss_sum = float(distributed.sum_over_ranks(self._loss_sum.clone()))
            self.save(self._unshares_after(self.counters.step))

    def _check_finite(self) -> None:
        update = int(distributed.max_over_ranks(self._nonfinite_update.clone()))
        if update:
            raise self._nonfinite_error(update, "the loss or the gradient norm is not a finite number")

    def _nonfinite_error(self, update: int, what: str) -> NonFiniteError:
        return NonFiniteError(
            f"update {update}: {what}. Nothing was saved after it; the same command goes on from the last checkpoint. "
            f"Try a lower optim.lr (now {self.config.optim.lr:g}), more optim.warmup_steps, optim.clip_norm, "
            f"engine.precision=bf16 or fp32, or debug.detect_anomaly=true to find the operation"
        )
