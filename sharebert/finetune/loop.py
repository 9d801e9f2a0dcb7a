"""The training loop of a fine-tuning run.

Transformers' own Trainer is not used: it writes checkpoints in place and without checksums, forgets the losses since
the last row of figures when it resumes, and fills up the last batch of several processes with samples from the first.
What a run needs instead is there already: the parts of pretraining.

Samples are counted over the run: sample s is position s mod N of the shuffled epoch s div N, so a batch may span two
epochs and none is shorter. Order and dropout are functions of the seed and these counters: a resume is a counter.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sharebert import distributed
from sharebert.config import FinetuneConfig, OptimConfig
from sharebert.data.sampler import locate, permuted_index, rank_samples
from sharebert.finetune.evaluate import predict
from sharebert.finetune.problem import Outputs, Problem
from sharebert.launch import StopSignals
from sharebert.metrics import Recorder
from sharebert.optim import clip_gradients, set_learning_rate
from sharebert.precision import Precision
from sharebert.schedule import learning_rate
from sharebert.seeding import seed_dropout
from sharebert.train_state import Counters
from sharebert.update import NonFiniteError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """How long a run is, in updates."""

    max_steps: int
    epoch_ends: frozenset[int]
    """Steps after which an epoch is over, to the nearest update."""
    optim: OptimConfig
    """With the warm-up in updates."""


def build_schedule(config: FinetuneConfig, num_sequences: int) -> Schedule:
    """Updates of `config.epochs` passes over so many sequences; none for a task that only predicts."""
    per_epoch, optim = num_sequences / config.global_batch_size, config.optim
    max_steps = max(1, round(config.epochs * per_epoch)) if num_sequences else 0
    ends = {max(1, round(epoch * per_epoch)) for epoch in range(1, int(config.epochs) + 1)} | {max_steps}
    return Schedule(
        max_steps,
        frozenset(ends),
        OptimConfig(
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            clip_norm=optim.clip_norm,
            warmup_steps=round(optim.warmup_fraction * max_steps),
        ),
    )


@dataclass
class Loop:
    """Runs the updates of one process; every rank runs the same loop."""

    config: FinetuneConfig
    """Resolved, so that `engine.micro_batch_size` is a number."""
    schedule: Schedule
    problem: Problem
    model: nn.Module
    optimizer: torch.optim.Optimizer
    counters: Counters
    precision: Precision
    recorder: Recorder
    save: Callable[[], None]
    stop: StopSignals

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.final_outputs: dict[str, Outputs] = {}
        """Of the dev splits, by name, from the last evaluation of this process."""
        self._wrapped = distributed.wrap(self.model)
        self._parameters = list(self.model.parameters())
        self._pad_id = int(self.model.config.pad_token_id or 0)  # type: ignore[union-attr, arg-type]
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._loss_sum += self.counters.loss_sum if distributed.rank() == 0 else 0.0
        self._grad_norm = torch.zeros((), device=self.device)
        self._row_begin, self._row_tokens = time.perf_counter(), 0

    def fit(self) -> bool:
        """Train to the end; returns whether it got there (False: a stop was asked for, and saved)."""
        goes_on = self._evaluate_when_due()
        if goes_on and 0 < self.counters.step == self.schedule.max_steps:
            self._save()  # a stop came in the last evaluation: its figures belong in the last checkpoint
        while goes_on and self.counters.step < self.schedule.max_steps:
            begin = time.perf_counter()
            self._update()
            self.counters.training_seconds += time.perf_counter() - begin
            goes_on = self._cross_boundary()
            if self.counters.step < self.schedule.max_steps and self.stop_is_agreed():
                goes_on = False
        if not goes_on:
            self._save()
        return goes_on

    def stop_is_agreed(self) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank."""
        return bool(distributed.max_count(int(self.stop.is_wanted())))

    def _update(self) -> None:
        """One update: this rank's samples in micro-batches, clip, step."""
        config, step = self.config, self.counters.step
        size, world = config.engine.micro_batch_size, distributed.world_size()
        assert size is not None
        samples = rank_samples(step, config.global_batch_size, distributed.rank(), world)
        epochs, positions = locate(samples, len(self.problem.train))
        rows = permuted_index(config.seed, epochs, positions, len(self.problem.train))
        for index, first in enumerate(range(0, len(rows), size)):
            some = rows[first : first + size]
            batch = self.problem.train.batch(some, self._pad_id, self.device)
            targets = self.problem.targets(some).to(self.device)
            seed_dropout(config.seed, step, index, distributed.rank())
            with self._reduction(is_on=first + size >= len(rows)):
                with self.precision.autocast():
                    outputs = self.problem.outputs(self._wrapped(**batch), batch["attention_mask"])
                loss = self.problem.loss_sum(outputs, targets) / config.global_batch_size
                # DDP takes the mean over ranks; the divisor is already that of all ranks.
                (loss * world).backward()  # type: ignore[no-untyped-call]
            self._loss_sum += loss.detach()
            self._row_tokens += int(self.problem.train.lengths[some].sum())
        self._grad_norm = clip_gradients(self._parameters, {}, self.schedule.optim.clip_norm)
        set_learning_rate(self.optimizer, self._rate(step))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.counters.step += 1
        self.counters.loss_updates += 1

    def _rate(self, step: int) -> float:
        return learning_rate(step, self.schedule.optim, self.schedule.max_steps)

    def _reduction(self, is_on: bool) -> contextlib.AbstractContextManager[object]:
        """Under DDP, whether the backward pass inside all-reduces gradients."""
        no_sync = getattr(self._wrapped, "no_sync", None)
        return contextlib.nullcontext() if is_on or no_sync is None else no_sync()

    # ------------------------------------------------------------------ boundaries

    def _cross_boundary(self) -> bool:
        """Log, evaluate, save; False when a stop was agreed on meanwhile."""
        step, every = self.counters.step, self.config.checkpoint.every_steps
        self.recorder.progress.advance()
        if step % self.config.logging.every_steps == 0 or step == self.schedule.max_steps:
            self._log()
        if not self._evaluate_when_due():
            return False
        if step == self.schedule.max_steps or (every and step % every == 0):
            self._save()
        return True

    def _log(self) -> None:
        """A row of figures for the updates since the last one. Reads the device."""
        counters = self.counters
        loss, seconds = self._mean_loss(), max(1e-9, time.perf_counter() - self._row_begin)  # a clock may stand still
        tokens = distributed.sum_count(self._row_tokens)
        values = {
            "train/loss": loss,
            "train/lr": self._rate(counters.step - 1),
            "train/grad_norm": float(self._grad_norm),
            "perf/tokens_per_second": tokens / seconds,
            "perf/training_seconds": counters.training_seconds,
        }
        self.recorder.write(counters.step, values)
        self.recorder.progress.show(counters.step, values)
        self._loss_sum.zero_()
        counters.loss_updates = 0
        self._row_begin, self._row_tokens = time.perf_counter(), 0

    def _mean_loss(self) -> float:
        """Of the updates since the last row.

        Raises:
            NonFiniteError: it, or the gradient norm, is no longer a number.
        """
        total = float(distributed.sum_over_ranks(self._loss_sum.clone()))
        if not torch.isfinite(torch.tensor(total)) or not torch.isfinite(self._grad_norm):
            raise NonFiniteError(f"update {self.counters.step}: the loss or the gradient norm is not a finite number")
        return total / max(1, self.counters.loss_updates)

    def _evaluate_when_due(self) -> bool:
        """Score the dev set where it is due and was not yet; False when a stop was agreed on meanwhile."""
        counters, every = self.counters, self.config.evaluation.every_steps
        is_regular = counters.step % every == 0 if every else counters.step in self.schedule.epoch_ends
        is_due = counters.step > 0 and (is_regular or counters.step == self.schedule.max_steps)
        if not is_due or counters.evaluated_step == counters.step:
            return True
        self._mean_loss()  # never a score after a loss that is not a number
        begin, outputs = time.perf_counter(), self.predict_splits(is_dev=True)
        self._row_begin += time.perf_counter() - begin
        if outputs is None:
            return False
        self.final_outputs = outputs
        figures = distributed.on_rank_zero(lambda: self.figures(outputs))
        score = self.problem.score(figures)
        counters.evaluated_step, counters.evaluation = counters.step, {**figures, "score": score}
        values = {f"eval/{name}": value for name, value in counters.evaluation.items()}
        self.recorder.write(counters.step, values)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        logger.info("step %d of %d  dev: %s", counters.step, self.schedule.max_steps, shown)
        return True

    def predict_splits(self, is_dev: bool) -> dict[str, Outputs] | None:
        """Outputs of the dev splits, or of the others, by name; None when a stop was agreed on meanwhile."""
        found = {}
        for split in self.problem.splits:
            if split.is_dev == is_dev:
                size = self.config.evaluation.batch_size
                outputs = predict(self.model, self.problem, split.sequences, size, self.stop_is_agreed)
                if outputs is None:
                    return None
                found[split.name] = outputs
        return found

    def figures(self, outputs: dict[str, Outputs]) -> dict[str, float]:
        """Figures of these splits."""
        figures: dict[str, float] = {}
        for split in self.problem.splits:
            if split.name in outputs:
                figures |= self.problem.figures(split, outputs[split.name])
        return figures

    def _save(self) -> None:
        """Save; never after a loss or gradient norm that is not a number."""
        self._mean_loss()
        self.counters.loss_sum = float(distributed.sum_over_ranks(self._loss_sum.clone()))
        begin = time.perf_counter()
        self.save()
        self._row_begin += time.perf_counter() - begin


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of the model, on the host."""
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
