"""The verb `finetune`: every part of a fine-tuning run, put together in plain order, and closed whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from sharebert import checkpoint, distributed
from sharebert.allocator import prepare_memory
from sharebert.checkpoint import FINETUNED, MODEL_FILE, TOKENIZER_FILE, CheckpointFolder, find_newest_good
from sharebert.config import ConfigError, EngineConfig, FinetuneConfig, to_dict
from sharebert.files import sha256_of_file
from sharebert.finetune import model as models
from sharebert.finetune.build import build_problem, source_hashes
from sharebert.finetune.loop import Loop, Schedule, build_schedule, state_tensors
from sharebert.finetune.problem import Problem
from sharebert.finetune.results import finish, read_results
from sharebert.launch import (
    EXIT_FINISHED,
    EXIT_STOPPED,
    Ranks,
    StopRequested,
    StopSignals,
    is_restart,
    stop_signals,
)
from sharebert.log import close_log_file, open_log_file
from sharebert.metrics import Progress, Recorder, build_sinks, check_extras
from sharebert.optim import build_optimizer, load_optimizer_state_by_name, optimizer_state_by_name
from sharebert.precision import Precision, resolve_device, resolve_precision
from sharebert.provenance import command_line, describe_origin
from sharebert.resolve import largest_micro_batch
from sharebert.run_folder import RunFolder, refuse_other_configuration, refuse_other_data, status_on_error
from sharebert.train_state import Counters

logger = logging.getLogger(__name__)


def finetune(config: FinetuneConfig, ranks: Ranks, folder: Path) -> int:
    """Run, or go on with, the run in `folder`; returns the exit status of the process.

    Args:
        config: the run.
        ranks: this process among those of the job.
        folder: the run folder; made when it is not there.

    Raises:
        ConfigError: the request is wrong, or does not fit what the run folder holds; nothing was touched.
        DataError: the task's data or the encoder is damaged, or not what was expected.
    """
    check_extras(config.logging)
    models.check_extra()
    encoder = models.read_encoder_config(models.encoder_folder(config))
    device = resolve_device(EngineConfig(device=config.engine.device), ranks)
    run = RunFolder(folder)
    prepare_memory(device)
    with contextlib.ExitStack() as closing:
        closing.enter_context(distributed.process_group(ranks, device, config.engine.group_timeout_minutes))
        closing.callback(run.close)
        numbers = stop_signals(ranks, device.type)
        stop = closing.enter_context(StopSignals(numbers, config.max_run_minutes, is_announced=ranks.rank == 0))
        start, is_finished = distributed.on_rank_zero(lambda: _enter(run, config, device))
        if is_finished:
            logger.info("%s is finished: nothing to do", folder)
            return EXIT_FINISHED
        if ranks.rank == 0:
            open_log_file(folder / "log.txt")
            closing.callback(close_log_file)
            closing.push(status_on_error(run))
        problem = build_problem(config, encoder)
        _leave_together(stop)
        return _train(config, run, problem, device, start, stop, closing)


def _leave_together(stop: StopSignals) -> None:
    """Leave when any rank was asked to stop meanwhile: one that left alone would be waited for.

    Raises:
        StopRequested: on every rank.
    """
    if any(distributed.gather(stop.is_wanted())):  # patient: ranks may have read and tokenised at different speed
        raise StopRequested(stop.received or "asked on another rank")


def _enter(run: RunFolder, config: FinetuneConfig, device: torch.device) -> tuple[Path | None, bool]:
    """Rank 0: own the run folder; the checkpoint to go on from, and whether there is nothing left to do."""
    run.open(replace=config.checkpoint.resume == "never" and not is_restart())
    start, step = find_newest_good(run.checkpoints), 0
    is_finished = run.read_status().get("state") == "finished"
    if start is not None or is_finished:
        saved = checkpoint.read_meta(start)["config"] if start is not None else _saved_config(run)
        resolved, _ = _resolve(config, device, saved)
        refuse_other_configuration(saved, resolved, run.path)
        if is_finished:
            _refuse_other_data(run, config)
            if not saved["checkpoint"]["keep_finished"]:
                _drop_checkpoints(run, config)  # a kill may have come just before it
            return start, True
    if start is not None:
        step = checkpoint.read_meta(start)["step"]
    run.write_status("running", step)
    return start, False


def _refuse_other_data(run: RunFolder, config: FinetuneConfig) -> None:
    """Refuse to call a run finished that was made from other data, or another encoder, under the same names."""
    results = read_results(run.path)
    weights = sha256_of_file(models.encoder_folder(config) / MODEL_FILE)
    refuse_other_data({"encoder": results["encoder_sha256"]}, {"encoder": weights}, run.path)
    before = results.get("data_sha256")  # not in those of the first version
    if before is None:
        return
    try:
        now = source_hashes(config)
    except ConfigError as error:
        logger.warning("%s: the data was not compared", error)  # a finished run needs no connection
        return
    refuse_other_data({**dict.fromkeys(now), **before}, now, run.path)


def _saved_config(run: RunFolder) -> dict[str, Any]:
    saved = OmegaConf.to_container(OmegaConf.load(run.path / "config.yaml"))
    assert isinstance(saved, dict)
    return {str(key): value for key, value in saved.items()}


def _resolve(
    config: FinetuneConfig, device: torch.device, saved: dict[str, Any] | None
) -> tuple[FinetuneConfig, Precision]:
    """Every `auto` and null made explicit; on a resume `auto` is what the run began with."""
    engine = config.engine
    name = saved["engine"]["precision"] if saved is not None and engine.precision == "auto" else engine.precision
    precision = resolve_precision(EngineConfig(precision=name), device)
    size = largest_micro_batch(config.global_batch_size, engine.micro_batch_size)
    engine = dataclasses.replace(engine, device=device.type, precision=precision.name, micro_batch_size=size)
    return dataclasses.replace(config, engine=engine), precision


def _train(
    config: FinetuneConfig,
    run: RunFolder,
    problem: Problem,
    device: torch.device,
    start: Path | None,
    stop: StopSignals,
    closing: contextlib.ExitStack,
) -> int:
    """Build every part, train and predict."""
    describe_origin()  # remembered: the commit of the code that runs, whatever is committed meanwhile
    meta = checkpoint.read_meta(start) if start is not None else {}
    config, precision = _resolve(config, device, meta.get("config"))
    folder = models.encoder_folder(config)
    hashes = {**problem.content_hashes(), "encoder": sha256_of_file(folder / MODEL_FILE)}
    hashes["tokenizer"] = sha256_of_file(folder / TOKENIZER_FILE)
    if meta:
        refuse_other_data(meta["corpus"], hashes, run.path)
    schedule = build_schedule(config, len(problem.train))
    if schedule.max_steps == 0:
        model = models.load_fine_tuned(folder, problem).to(device)
    else:
        model = models.build_model(folder, problem, config.seed, config.random_encoder, config.dropout).to(device)
    optimizer, counters = build_optimizer(model, schedule.optim), Counters()
    if start is not None:
        counters = _restore(model, optimizer, start)
    distributed.on_rank_zero(lambda: _claim(run, config, model, counters.step))
    recorder = _build_recorder(config, run, schedule, counters.step if meta else -1, meta.get("wandb_run_id"))
    closing.callback(recorder.close)
    checkpoints = CheckpointFolder(run.checkpoints, keep_last=1, keep_every=None)
    tokenizer = (folder / TOKENIZER_FILE).read_bytes()

    def write() -> None:
        checkpoints.save(
            tensors=state_tensors(model),
            training_state={"optimizer": optimizer_state_by_name(model, optimizer), "counters": dict(vars(counters))},
            tokenizer=tokenizer,
            meta=_describe(config, schedule, model, counters, hashes, recorder.wandb_run_id),
        )

    save = functools.partial(distributed.on_rank_zero, write)
    loop = Loop(config, schedule, problem, model, optimizer, counters, precision, recorder, save, stop)
    if distributed.rank() == 0:
        _announce(config, schedule, problem, model, counters, start)
    try:
        is_finished = loop.fit() and finish(loop, run, hashes["encoder"])
    except BaseException as error:
        if distributed.rank() == 0:
            run.write_failure(error, counters.step)
        raise
    if distributed.rank() == 0:
        _leave(run, loop, is_finished, stop.received or "asked on another rank")
    return EXIT_FINISHED if is_finished else EXIT_STOPPED


def _leave(run: RunFolder, loop: Loop, is_finished: bool, stop_reason: str) -> None:
    """Rank 0: the folder says how it ended."""
    outcome, step = "finished" if is_finished else "stopped", loop.counters.step
    run.write_status(outcome, step, "" if is_finished else stop_reason)
    logger.info("%s at step %d of %d: %s", outcome, step, loop.schedule.max_steps, run.path)
    if is_finished:
        _drop_checkpoints(run, loop.config)


def _drop_checkpoints(run: RunFolder, config: FinetuneConfig) -> None:
    """Of a finished run, unless they are asked for."""
    if not config.checkpoint.keep_finished:
        shutil.rmtree(run.checkpoints, ignore_errors=True)


def _claim(run: RunFolder, config: FinetuneConfig, model: torch.nn.Module, step: int) -> None:
    """Rank 0: from here on the folder says that this run is running."""
    checkpoint.check_free_space(run.path, 4 * 4 * sum(parameter.numel() for parameter in model.parameters()))
    run.write_config(config)
    run.write_status("running", step)


def _restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, start: Path) -> Counters:
    parameters, saved = dict(model.named_parameters()), checkpoint.load_training_state(start)
    with torch.no_grad():
        for name, tensor in checkpoint.load_tensors(start).items():
            parameters[name].copy_(tensor)
    load_optimizer_state_by_name(model, optimizer, saved["optimizer"])
    return Counters(**saved["counters"])


def _build_recorder(
    config: FinetuneConfig, run: RunFolder, schedule: Schedule, last_step: int, wandb_run_id: str | None
) -> Recorder:
    is_first = distributed.rank() == 0
    sinks = build_sinks(run.path, config, last_step, wandb_run_id) if is_first else []
    return Recorder(sinks, Progress(max(0, last_step), schedule.max_steps, enabled=is_first))


def _describe(
    config: FinetuneConfig,
    schedule: Schedule,
    model: torch.nn.Module,
    counters: Counters,
    hashes: dict[str, str],
    wandb_run_id: str | None,
) -> dict[str, Any]:
    """`meta.json` of a checkpoint."""
    return {
        "step": counters.step,
        "max_steps": schedule.max_steps,
        "phase": FINETUNED,
        "before_unsharing": False,
        "samples_seen": counters.step * config.global_batch_size,
        "evaluation": counters.evaluation,
        "evaluated_step": counters.evaluated_step,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "config": to_dict(config),
        "corpus": hashes,
        "world_size": distributed.world_size(),
        "wandb_run_id": wandb_run_id,
        "command_line": command_line(),
        **describe_origin(),
    }


def _announce(
    config: FinetuneConfig,
    schedule: Schedule,
    problem: Problem,
    model: torch.nn.Module,
    counters: Counters,
    start: Path | None,
) -> None:
    """The lines a person wants to see before the first update."""
    sizes = ", ".join(f"{len(split.sequences):,} of {split.name}" for split in problem.splits)
    logger.info("task: %s, %s sequences to train on, %s", config.task.name, f"{len(problem.train):,}", sizes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dropout = model.config.hidden_dropout_prob  # type: ignore[union-attr]
    logger.info("model: %s, %s parameters, dropout %s", type(model).__name__, f"{parameters:,}", dropout)
    if not dropout and config.dropout is None and schedule.max_steps > 0:
        logger.warning(
            "dropout is 0, as the encoder was pretrained; the paper fine-tunes with 0.1: dropout=0.1 sets it"
        )
    logger.info(
        "engine: %s, %s, %d process(es), %d sequences an update in micro-batches of %d; rate %g after %d updates",
        config.engine.device,
        config.engine.precision,
        distributed.world_size(),
        config.global_batch_size,
        config.engine.micro_batch_size,
        schedule.optim.lr,
        schedule.optim.warmup_steps,
    )
    begin = f"goes on from {start}" if start is not None else "starts"
    logger.info("%s at step %d of %d", begin, counters.step, schedule.max_steps)
