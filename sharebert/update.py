"""One update: forward and backward over a window, mean over sharing layers, clip, step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sharebert import distributed
from sharebert.config import TrainConfig
from sharebert.data.loader import Window
from sharebert.gradient_probe import GradientProbe
from sharebert.loss import loss_divisor, masked_lm_loss_sum
from sharebert.optim import UpdateProbe, clip_gradients, set_learning_rate
from sharebert.precision import Precision
from sharebert.schedule import learning_rate
from sharebert.seeding import seed_dropout
from sharebert.train_state import TrainState

MAX_CONSECUTIVE_SKIPS = 24
"""fp16 tries of one update before the run gives up: by then the loss scale has fallen from 2^16 far below 1."""

PROBED_GROUPS = 4
"""Groups of layers, evenly spaced, whose parameters are the sample behind `share/update_to_weight`."""


Clock = Callable[[str], contextlib.AbstractContextManager[object]]
"""Given the name of a part of an update, what is around that part."""


def untimed(part: str) -> contextlib.AbstractContextManager[object]:
    """The clock of training: none."""
    return contextlib.nullcontext()


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is no longer a number."""


@dataclass(frozen=True)
class Update:
    """What one update leaves behind, on the device."""

    loss: Tensor
    """This rank's share of the mean loss, fp64."""
    grad_norm: Tensor
    """Global gradient norm before clipping."""
    correlations: Tensor | None
    """(U - 1,) between adjacent units, at a check; else None."""


class Updater:
    """Carries out updates of one process; every rank does the same.

    Args:
        config: resolved, so that `engine.micro_batch_size` is a number.
        state: is changed by every update; `counters.step` is not, that is for the caller.
        precision: autocast of the forward pass.
        should_stop: asked before each micro-batch when `is_patient` is off; the same answer on every rank.
        clock: around "forward" and "backward" of each micro-batch, and "optimizer".
    """

    def __init__(
        self,
        config: TrainConfig,
        state: TrainState,
        precision: Precision,
        should_stop: Callable[[], bool],
        clock: Clock = untimed,
    ) -> None:
        assert config.engine.micro_batch_size is not None, "resolve() sets it"
        self.config = config
        self.state = state
        self.ratio = UpdateProbe()
        self.is_patient = True
        """Whether an update is short enough to be finished once a stop is asked for."""
        self.rate = 0.0
        """Learning rate of the last update."""
        self._micro_batch_size = config.engine.micro_batch_size
        self._precision = precision
        self._should_stop = should_stop
        self._clock = clock
        self._device = next(state.model.parameters()).device
        self._loss_scale = state.scaler.get_scale()
        self.take_stock()

    def take_stock(self) -> None:
        """Look up parameters and their counts anew and wrap the model for DDP; after any change of sharing."""
        self._wrapped: nn.Module = self.state.model  # lets go of the old reducer and its hooks first
        self._wrapped = distributed.wrap(self.state.model)
        self._parameters = list(self.state.model.parameters())
        self._copies = self.state.sharing.copies()
        self._probed_parameters = self.state.sharing.sample_parameters(PROBED_GROUPS)

    def run(self, window: Window, *, is_check: bool, measures_ratio: bool) -> Update | None:
        """One update from one window; None when a stop was agreed on before it was complete.

        An fp16 update that overflows is not an update: the same window is tried again at half the loss scale.

        Args:
            window: this rank's sequences.
            is_check: also measure the correlations of adjacent units.
            measures_ratio: leave `share/update_to_weight` in `ratio`.

        Raises:
            NonFiniteError: no loss scale makes the fp16 gradients finite.
        """
        divisor = loss_divisor(window.predicted_tokens)
        for _ in range(MAX_CONSECUTIVE_SKIPS):
            correlations = None
            if is_check:
                loss, correlations = self._accumulate_apart(window, divisor)
            else:
                loss = self._accumulate(window, divisor, synchronises=True)
            if loss is None:
                self.state.optimizer.zero_grad(set_to_none=True)
                return None
            with self._clock("optimizer"):
                grad_norm, was_applied = self._apply(measures_ratio)
            if was_applied:
                return Update(loss, grad_norm, correlations)
            self.state.counters.skipped_updates += 1
        step = self.state.counters.step + 1
        raise NonFiniteError(f"update {step}: {MAX_CONSECUTIVE_SKIPS} fp16 tries in a row overflowed")

    def _accumulate(self, window: Window, divisor: int, synchronises: bool) -> Tensor | None:
        """Gradients of the whole window into ``.grad``; returns this rank's share of the loss, None when stopped."""
        config, step = self.config, self.state.counters.step
        micro_batches = list(window.micro_batches(self._micro_batch_size))
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(micro_batches):
            if not self.is_patient and self._should_stop():
                return None
            batch = batch.to(self._device, non_blocking=True)
            seed_dropout(config.seed, step, index, distributed.rank())
            is_last = index == len(micro_batches) - 1
            with self._reduction(synchronises and is_last):
                with self._clock("forward"):
                    with self._precision.autocast():
                        logits = self._wrapped(batch.input_ids, batch.positions, batch.attention_mask, batch.documents)
                    loss = masked_lm_loss_sum(logits, batch.labels, batch.weights) / divisor
                with self._clock("backward"):
                    # DDP takes the mean over ranks; the divisor is already that of all ranks.
                    self.state.scaler.scale(loss * distributed.world_size()).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _accumulate_apart(self, window: Window, divisor: int) -> tuple[Tensor | None, Tensor | None]:
        """The same at a check, with the gradient of each unit for itself first; loss and correlations."""
        with GradientProbe(self.state.sharing) as probe:
            loss = self._accumulate(window, divisor, synchronises=False)
            if loss is None:
                return None, None
            others = [p.grad for p in self._parameters if p.grad is not None]
            distributed.mean_over_ranks([*probe.gradients(), *others])
            correlations = probe.correlations()
            probe.merge()
        return loss, correlations

    def _reduction(self, is_on: bool) -> contextlib.AbstractContextManager[object]:
        """Under DDP, whether the backward pass inside all-reduces gradients."""
        no_sync = getattr(self._wrapped, "no_sync", None)
        return contextlib.nullcontext() if is_on or no_sync is None else no_sync()

    def _apply(self, measures_ratio: bool) -> tuple[Tensor, bool]:
        """Unscale, mean over sharing layers, clip, step; the norm, and whether the scaler let the step happen."""
        optimizer, scaler, optim = self.state.optimizer, self.state.scaler, self.config.optim
        scaler.unscale_(optimizer)
        self.state.sharing.average_gradients()
        grad_norm = clip_gradients(self._parameters, self._copies, optim.clip_norm)
        self.rate = learning_rate(self.state.counters.step, optim, self.config.max_steps)
        if self.state.sharing.phase != "unshared":
            self.rate *= self.config.unshare.shared_lr_factor
        set_learning_rate(optimizer, self.rate)
        if measures_ratio:
            self.ratio.before(self._probed_parameters)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if not scaler.is_enabled():
            return grad_norm, True
        before, self._loss_scale = self._loss_scale, scaler.get_scale()  # the one read of an fp16 update
        return grad_norm, self._loss_scale >= before
