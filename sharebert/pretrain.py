"""The verb `train`: every part of a pretraining run, put together in plain order, and closed whatever happens."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data_prep.same_tokenizer import refuse_other_tokenizer
from data_prep.tokenizer import load_given_tokenizer
from sharebert import checkpoint, distributed
from sharebert.allocator import prepare_memory
from sharebert.config import TrainConfig
from sharebert.curves import draw_curves
from sharebert.data.format import PreparedCorpus
from sharebert.data.loader import build_loader, evaluation_batches
from sharebert.data.masking import Vocabulary, build_vocabulary, num_slots
from sharebert.evaluate import Evaluator
from sharebert.flops import flops_per_update, measure_matmul_peak
from sharebert.launch import (
    EXIT_FINISHED,
    EXIT_STOPPED,
    Ranks,
    StopSignals,
    is_restart,
    stop_signals,
)
from sharebert.log import close_log_file, open_log_file
from sharebert.metrics import Progress, Recorder, build_sinks
from sharebert.origin import Origin, build_save, find_origin
from sharebert.precision import Precision, resolve_device
from sharebert.provenance import describe_origin
from sharebert.resolve import resolve
from sharebert.run_corpus import obtain_corpus
from sharebert.run_folder import (
    RunFolder,
    find_start,
    refuse_other_configuration,
    status_on_error,
)
from sharebert.run_memory import check_memory, explain_out_of_memory, phases_of
from sharebert.share_map import draw_share_map
from sharebert.train_state import TrainState, began_from, build_train_state, check_init_from, init_from_folder
from sharebert.trainer import Trainer
from sharebert.unshare_policy import describe_least_checks

logger = logging.getLogger(__name__)


def pretrain(config: TrainConfig, ranks: Ranks, folder: Path) -> int:
    """Run, or go on with, the run in `folder`; returns the exit status of the process.

    Args:
        config: the run.
        ranks: this process among those of the job.
        folder: the run folder; made when it is not there.

    Raises:
        ConfigError: the request is wrong, or does not fit what the run folder holds; no checkpoint was touched.
    """
    device = resolve_device(config.engine, ranks)
    run = RunFolder(folder)
    prepare_memory(device)
    with contextlib.ExitStack() as closing:
        closing.enter_context(distributed.process_group(ranks, device, config.engine.group_timeout_minutes))
        closing.callback(run.close)
        numbers = stop_signals(ranks, device.type)
        stop = closing.enter_context(StopSignals(numbers, config.max_run_minutes, is_announced=ranks.rank == 0))
        start, is_finished = distributed.on_rank_zero(lambda: _enter(run, config, device))
        if is_finished:
            logger.info("%s is finished (%d updates): nothing to do", folder, config.max_steps)
            return EXIT_FINISHED
        if ranks.rank == 0:
            open_log_file(folder / "log.txt")
            closing.callback(close_log_file)
            closing.push(status_on_error(run))
        corpus = obtain_corpus(config.data, ranks, stop)
        corpus.check_sequences(config.data.seq_len, config.global_batch_size)
        return _train(config, run, corpus, device, start, stop, closing)


def _enter(run: RunFolder, config: TrainConfig, device: torch.device) -> tuple[Path | None, bool]:
    """Rank 0: own the run folder; the checkpoint to go on from, and whether there is nothing left to do."""
    run.open(replace=config.checkpoint.resume == "never" and not is_restart())
    start, step = find_start(run, config.checkpoint.resume), 0
    if start is not None:
        meta = checkpoint.read_meta(start)
        resolved, _ = resolve(config, device, meta)
        saved = meta["config"]
        if config.init_from != saved["init_from"] and began_from(meta, config.init_from):
            saved = {**saved, "init_from": config.init_from}  # the weights may have moved meanwhile
        refuse_other_configuration(saved, resolved, run.path)
        step = meta["step"]
        if step >= config.max_steps and run.read_status().get("state") == "finished":
            return start, True
    elif config.init_from is not None:
        check_init_from(config)
        if config.data.tokenizer is not None:  # else there may be none before the data is prepared
            given = load_given_tokenizer(Path(config.data.tokenizer).expanduser(), config.data.lowercase)
            refuse_other_tokenizer(init_from_folder(config.init_from), given)
    run.write_status("running", step)
    return start, False


def _train(
    config: TrainConfig,
    run: RunFolder,
    corpus: PreparedCorpus,
    device: torch.device,
    start: Path | None,
    stop: StopSignals,
    closing: contextlib.ExitStack,
) -> int:
    """Build every part and train."""
    describe_origin()  # remembered: the commit of the code that runs, whatever is committed meanwhile
    config, precision = resolve(config, device, checkpoint.read_meta(start) if start is not None else None)
    if config.engine.compile == "true":  # else it would import the compiler, for seconds
        torch.compiler.reset()  # jobs of a sweep share the layers' code, and torch gives up after some recompilations
    origin = find_origin(config, run, corpus, device, start)
    closing.enter_context(_debug_modes(config))
    vocabulary = build_vocabulary(
        corpus.tokenizer_path, corpus.special_ids, corpus.vocab_size, config.masking.whole_word
    )
    memory = check_memory(config, corpus.vocab_size)
    state = build_train_state(config, corpus.vocab_size, device, precision, origin.start)
    sample_offset = origin.sample_offset(config.global_batch_size)
    windows = _build_windows(config, corpus, vocabulary, state.counters.step, sample_offset)
    evaluator = _build_evaluator(config, corpus, vocabulary, precision)
    distributed.on_rank_zero(lambda: _claim(run, config, state))
    recorder = _build_recorder(config, run, origin.last_step, origin.wandb_run_id(run))
    closing.callback(recorder.close)
    flops = _flops(config, corpus.vocab_size)
    peak = measure_matmul_peak(device, precision.dtype) * distributed.world_size()
    save = build_save(config, run, corpus, state, origin, recorder)
    trainer = Trainer(config, state, precision, evaluator, recorder, save, stop, flops, peak)
    if distributed.rank() == 0:
        _announce(config, state, corpus, origin)
    try:
        with explain_out_of_memory(memory, device):
            is_finished = trainer.fit(windows)
    except BaseException as error:
        if distributed.rank() == 0:
            run.write_failure(error, state.counters.step)
        raise
    if distributed.rank() == 0:
        _leave(run, trainer, is_finished, stop.received or "asked on another rank")
    return EXIT_FINISHED if is_finished else EXIT_STOPPED


def _leave(run: RunFolder, trainer: Trainer, is_finished: bool, stop_reason: str) -> None:
    """Rank 0: status, pictures and last words."""
    outcome, step = ("finished" if is_finished else "stopped"), trainer.counters.step
    unshare = trainer.config.unshare
    try:  # first: a run that is killed in here is not finished, and draws again
        draw_curves(run.path)
        draw_share_map(run.path, unshare.unit_layers, unshare.threshold)
    except Exception:  # a picture is not worth a failed run
        logger.exception("curves.png or share_map.png could not be drawn")
    run.write_status(outcome, step, "" if is_finished else stop_reason)
    if explanation := trainer.policy.explain(trainer.sharing.groups):
        logger.info(explanation)
    logger.info("%s at step %d of %d: %s", outcome, step, trainer.config.max_steps, run.path)


def _claim(run: RunFolder, config: TrainConfig, state: TrainState) -> None:
    """Rank 0: from here on the folder says that this run is running."""
    stays_shared = phases_of(config) == ("shared",)
    parameters = state.unique_parameters() if stays_shared else state.effective_parameters()
    checkpoint.check_free_space(run.path, 3 * 4 * parameters)  # fp32 weights and two moments
    run.write_config(config)
    run.write_status("running", state.counters.step)


def _build_windows(
    config: TrainConfig, corpus: PreparedCorpus, vocabulary: Vocabulary, first_update: int, sample_offset: int
) -> Any:
    assert config.engine.num_workers is not None
    return build_loader(
        corpus.train,
        vocabulary,
        seq_len=config.data.seq_len,
        masking=config.masking,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        first_update=first_update,
        num_updates=config.max_steps,
        num_workers=config.engine.num_workers,
        pin_memory=config.engine.device == "cuda",
        cross_document_attention=config.data.cross_document_attention,
        sample_offset=sample_offset,
    )


def _build_evaluator(
    config: TrainConfig, corpus: PreparedCorpus, vocabulary: Vocabulary, precision: Precision
) -> Evaluator:
    assert config.engine.micro_batch_size is not None
    batches = evaluation_batches(
        corpus.validation,
        vocabulary,
        seq_len=config.data.seq_len,
        masking=config.masking,
        max_sequences=config.evaluation.max_sequences,
        batch_size=config.engine.micro_batch_size,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        cross_document_attention=config.data.cross_document_attention,
    )
    return Evaluator(batches, corpus.vocab_size, precision)


def _build_recorder(config: TrainConfig, run: RunFolder, last_step: int, wandb_run_id: str | None) -> Recorder:
    is_first = distributed.rank() == 0
    sinks = build_sinks(run.path, config, last_step, wandb_run_id) if is_first else []
    return Recorder(sinks, Progress(max(0, last_step), config.max_steps, enabled=is_first))


def _flops(config: TrainConfig, vocab_size: int) -> int:
    slots = num_slots(config.data.seq_len, config.masking.probability)
    return flops_per_update(config.model, config.data.seq_len, slots, vocab_size, config.global_batch_size)


def _announce(config: TrainConfig, state: TrainState, corpus: PreparedCorpus, origin: Origin) -> None:
    """The lines a person wants to see before the first update."""
    tokens = corpus.train.num_tokens
    logger.info("data: %s training tokens, vocabulary %d (%s)", f"{tokens:,}", corpus.vocab_size, corpus.folder)
    logger.info(
        "model: %s, %s unique of %s parameters, %s",
        config.model.name,
        f"{state.unique_parameters():,}",
        f"{state.effective_parameters():,}",
        state.sharing.phase,
    )
    logger.info(
        "engine: %s, %s, %d process(es) of %d thread(s), %d x %d tokens an update in micro-batches of %d, compile %s",
        config.engine.device,
        config.engine.precision,
        distributed.world_size(),
        torch.get_num_threads(),
        config.global_batch_size,
        config.data.seq_len,
        config.engine.micro_batch_size,
        config.engine.compile,
    )
    meta = origin.meta
    if meta and (before := meta["config"]["global_batch_size"]) != config.global_batch_size:
        message = "global_batch_size: %d -> %d, from sample %d on; rate and unsharing still go by updates"
        logger.warning(message, before, config.global_batch_size, meta["samples_seen"])
    if config.optim.warmup_steps > config.max_steps:
        message = "optim.warmup_steps=%d is more than max_steps=%d: the rate will not reach optim.lr"
        logger.warning(message, config.optim.warmup_steps, config.max_steps)
    unshare = config.unshare
    if unshare.policy in ("adaptive", "multi_step") and phases_of(config) == ("shared",):
        assert unshare.check_every is not None, "checked by UnshareConfig"
        takes = describe_least_checks(unshare.patience, unshare.check_every, unshare.earliest_step)
        logger.warning("max_steps=%d is too few to unshare anything: that takes %s", config.max_steps, takes)
    begin = f"goes on from {origin.start}" if origin.start is not None else "starts"
    logger.info("%s at step %d of %d", begin, state.counters.step, config.max_steps)


@contextlib.contextmanager
def _debug_modes(config: TrainConfig) -> Iterator[None]:
    """Deterministic kernels and anomaly mode, as long as the run lasts."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
        torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(config.debug.detect_anomaly):
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
