"""The command line: takes the verb off the arguments, runs Hydra, converts once to dataclasses.

torch is imported by the verbs, not here: a wrong key is refused in well under two seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import sharebert
from sharebert.compose import Cell, Request, compose
from sharebert.config import (
    ConfigError,
    DeepLinearConfig,
    FinetuneConfig,
    TrainConfig,
    check_complete,
    check_world_size,
    from_dict,
    near_match,
)
from sharebert.launch import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_USAGE,
    Ranks,
    StopRequested,
    StopSignals,
    detect_ranks,
    leave_at_once,
    set_threads,
)
from sharebert.log import set_up_logging

logger = logging.getLogger(__name__)

HYDRA_VERBS: dict[str, tuple[str, type]] = {
    "train": ("train", TrainConfig),
    "prepare": ("train", TrainConfig),
    "plan": ("train", TrainConfig),
    "bench": ("train", TrainConfig),
    "finetune": ("finetune", FinetuneConfig),
    "deep-linear": ("deep_linear", DeepLinearConfig),
}
"""Primary configuration file and schema of each verb that Hydra reads."""
JSON_VERBS = ("prepare", "plan", "bench")
PLAIN_VERBS = ("submit", "evaluate", "inspect", "export", "report")

NON_FINITE_ADVICE = (
    "Nothing was saved after it, so the same command goes on from the checkpoint before (see checkpoints/latest). "
    "Try a lower optim.lr, a longer warm-up, optim.clip_norm, engine.precision=bf16 or fp32; "
    "with train, debug.detect_anomaly=true names the operation that made it"
)

USAGE = f"""\
sharebert {sharebert.__version__}: pretrain BERT by sharing one set of weights across all layers, then unsharing.

usage: sharebert VERB [arguments]

  train      prepare the data when it is not there yet, pretrain, resume
               sharebert train
               sharebert train +experiment=bert_base_half
               sharebert train -m +experiment=demo unshare.step=50,100
  prepare    tokenizer and tokenised corpus only
               sharebert prepare data=text_files 'data.files=[corpus/*.jsonl.gz]'
  plan       what a run would take: parameters, memory and the batch that fits, hours, files
               sharebert plan +experiment=bert_base_half --memory-gib 80 --processes 8 --tokens-per-second 1e6
               sharebert plan -m +experiment=demo unshare.step=50,100
  bench      tokens/s, share of the machine's peak and memory, shared and unshared, beside Transformers
               sharebert bench +experiment=bert_base_half
  submit     run another verb as a job that resumes by itself, on Slurm or here
               sharebert submit --time 4:00:00 --gpus-per-node 8 train +experiment=bert_base_half
  evaluate   held-out loss and accuracy of a checkpoint on any text
               sharebert evaluate outputs/demo/checkpoints/latest --files 'corpus/*.txt'
  inspect    what a checkpoint holds: step, phase, groups of layers, hashes
               sharebert inspect outputs/demo/checkpoints/latest
  export     write a checkpoint as a folder that Hugging Face Transformers loads
               sharebert export outputs/demo/checkpoints/latest my-bert
             with --unshare: as a checkpoint to train on from, with weights of its own for every layer
               sharebert export --unshare outputs/demo/checkpoints/step-00000149-shared unshared-at-150
  finetune   train an exported encoder on GLUE, SQuAD or a table of your own; score, predict
               sharebert finetune task=mnli encoder=my-bert
               sharebert finetune -m +grid=glue task=rte encoder=my-bert
  report     compare runs: curves, tables and the speed-up, as one page
               sharebert report outputs/* --output report
  deep-linear  the paper's theory on deep linear networks, run and plotted in half a minute
               sharebert deep-linear run_name=theory

  sharebert VERB --help       settings or flags of a verb
  sharebert --version

Exit status: 0 finished, 1 failed, 2 wrong request, 75 stopped by a signal or a time limit and saved (run the same
command again).
"""


def entry() -> NoReturn:
    """The program: runs :func:`main` and ends the process with its status."""
    with contextlib.suppress(ConfigError):  # main says it
        set_threads(detect_ranks())
    status = main()
    if detect_ranks().launched:
        leave_at_once(status)
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return EXIT_FINISHED if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"sharebert {sharebert.__version__}")
        return EXIT_FINISHED
    verb, rest = arguments[0], arguments[1:]
    if verb not in HYDRA_VERBS and verb not in PLAIN_VERBS:
        known = (*HYDRA_VERBS, *PLAIN_VERBS)
        print(
            f"sharebert: unknown verb {verb!r}{near_match(verb, known)}; expected one of {', '.join(known)}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    try:
        ranks = detect_ranks()
        set_up_logging(ranks.rank)
        if verb in HYDRA_VERBS:
            reads_own_files = any(word.startswith(("--config-dir", "-cd", "--config-path", "-cp")) for word in rest)
            with contextlib.nullcontext() if reads_own_files else _alike_on_all_ranks(ranks):
                return _run_hydra(verb, rest, ranks)
        return _guarded(verb, lambda: _run_plain(verb, rest))
    except _SaidByRankZeroError:
        return EXIT_USAGE
    except ConfigError as error:
        _refuse(verb, error)
        return EXIT_USAGE
    except BrokenPipeError:  # as in `sharebert train --help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINISHED


def _run_plain(verb: str, arguments: list[str]) -> int:
    if verb == "submit":
        from sharebert.submit import main as submit

        verbs = {verb: kinds for verb, kinds in HYDRA_VERBS.items() if verb != "plan"}  # which takes no time
        return submit(arguments, verbs, run_job)
    if verb == "inspect":
        from sharebert.inspect import main as run
    elif verb == "export":
        from sharebert.export import main as run
    elif verb == "report":
        from sharebert.report.run import main as run
    else:
        from sharebert.evaluate_text import main as run
    return run(arguments)


# ---------------------------------------------------------------------- verbs with a Hydra configuration


def _run_hydra(verb: str, arguments: list[str], ranks: Ranks) -> int:
    """Compose, convert and run: once, or each cell of a sweep. The highest exit status counts."""
    flags, arguments = _own_flags(verb, arguments)
    primary, kind = HYDRA_VERBS[verb]
    request = compose(verb, primary, kind, arguments)
    if request.is_multirun and ranks.world_size > 1:
        raise _refuse_sweep(verb, request, ranks)
    if verb == "train" and request.is_multirun and request.cells:
        from sharebert.sweep import run_sweep

        return run_sweep(request, lambda config, folder: _train(config, folder, ranks), lambda job: _guarded(verb, job))
    if verb == "plan" and request.cells:
        return _guarded(verb, lambda: _plan(request, flags, ranks))
    statuses: list[int] = []
    for number, cell in enumerate(request.cells):
        if EXIT_STOPPED in statuses:
            break  # whoever stopped a job stopped the sweep; the same command goes on with it
        if request.is_multirun:
            logger.info("job %d: %s", number, cell.folder)
        statuses.append(_guarded(verb, lambda cell=cell: _run_cell(verb, cell, ranks, flags)))  # type: ignore[misc]
    if verb == "finetune" and request.is_multirun and EXIT_FINISHED in statuses:
        from sharebert.finetune.summary import summarize

        summarize(request)
    return max(statuses, default=EXIT_FINISHED)


def _refuse_sweep(verb: str, request: Request, ranks: Ranks) -> ConfigError:
    """A sweep inside ranks: the launches that make it instead; `sharebert VERB -m` finds their runs again."""
    commands = []
    for cell in request.cells:
        settings = [item for item in cell.overrides if not item.startswith("run_name=")]
        name = f"run_name={cell.folder.parent.name}/{cell.folder.name}"
        commands.append(f"  torchrun ... -m sharebert {verb} {shlex.join([*settings, name])}")
    return ConfigError(
        f"-m: a sweep inside {ranks.world_size} ranks; expected one launch for each job (on Slurm, "
        f"`sharebert submit ... {verb} -m ...` makes them):\n" + "\n".join(commands)
    )


def run_job(verb: str, cell: Cell) -> int:
    """Run a cell that was submitted, in a process of its own; returns the exit status."""
    ranks = detect_ranks()
    set_threads(ranks)
    set_up_logging(ranks.rank)
    return _guarded(verb, lambda: _run_cell(verb, cell, ranks, _own_flags(verb, [])[0]))


def _own_flags(verb: str, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of a verb that are not Hydra's, and the arguments that are left for it."""
    if "--json" in arguments and verb not in JSON_VERBS:
        raise ConfigError(f"--json: sharebert {verb} has no such flag; expected it with {', '.join(JSON_VERBS)}")
    parser = argparse.ArgumentParser(prog=f"sharebert {verb}", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    if verb == "plan":
        parser.add_argument("--memory-gib", type=float)
        parser.add_argument("--processes", type=int)
        parser.add_argument("--tokens-per-second", type=float)
        parser.add_argument("--tflops", type=float)
    if verb == "bench":
        parser.add_argument("--sequences", type=int)
        parser.add_argument("--seconds", type=float, default=60.0)
    return parser.parse_known_args(arguments)


def _run_cell(verb: str, cell: Cell, ranks: Ranks, flags: argparse.Namespace) -> int:
    with _alike_on_all_ranks(ranks):
        config: TrainConfig | FinetuneConfig | DeepLinearConfig = from_dict(HYDRA_VERBS[verb][1], cell.values)
    if isinstance(config, FinetuneConfig):
        return _finetune(config, cell.folder, ranks)
    if isinstance(config, DeepLinearConfig):
        from sharebert.deep_linear.run import run

        return run(config, cell.folder)
    if verb == "bench":
        with _alike_on_all_ranks(ranks):
            check_world_size(config, ranks.world_size)
        from sharebert.bench.run import bench

        return bench(config, ranks, as_json=flags.json, sequences=flags.sequences, seconds=flags.seconds)
    assert verb in ("train", "prepare"), verb
    return _train(config, cell.folder, ranks) if verb == "train" else _prepare(config, flags.json)


def _guarded(verb: str, run: Callable[[], int]) -> int:
    """Run one job; an error is printed and becomes an exit status, so that a sweep goes on with its next job."""
    try:
        return run()
    except _SaidByRankZeroError:
        return EXIT_USAGE
    except ConfigError as error:
        _refuse(verb, error)
        return EXIT_USAGE
    except BrokenPipeError:
        raise
    except StopRequested as reason:
        logger.warning("stopped (%s); what is finished is kept, the same command goes on", reason)
        return EXIT_STOPPED
    except KeyboardInterrupt:
        logger.error("interrupted; nothing was lost, the same command goes on")
        return EXIT_INTERRUPTED
    except Exception as error:
        _report(error)
        return EXIT_FAILED


class _SaidByRankZeroError(Exception):
    """A request that every rank refuses alike, on a rank that need not say so."""


@contextlib.contextmanager
def _alike_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """What is refused inside depends on the request alone, not on this rank's machine: rank 0 says it."""
    try:
        yield
    except ConfigError:
        if ranks.rank > 0:
            raise _SaidByRankZeroError from None
        raise


def _refuse(verb: str, error: ConfigError) -> None:
    """Say what is wrong with the request, or with what it names on this rank's machine."""
    try:
        rank = detect_ranks().rank
    except ConfigError:
        rank = 0
    print(f"sharebert {verb}: {f'rank {rank}: ' if rank > 0 else ''}{error}", file=sys.stderr)


def _report(error: Exception) -> None:
    """Errors made for people as their message, a lost peer as a line, everything else with its traceback."""
    from sharebert.checkpoint import CheckpointError  # imports torch, which whoever failed here has done
    from sharebert.data.format import DataError
    from sharebert.distributed import RankZeroError, is_lost_peer
    from sharebert.run_memory import OutOfDeviceMemoryError
    from sharebert.update import NonFiniteError

    if isinstance(error, NonFiniteError):
        logger.error("%s. %s", error, NON_FINITE_ADVICE)
    elif isinstance(error, (CheckpointError, DataError, OutOfDeviceMemoryError)) or _is_of_the_disk(error):
        logger.error("%s", error)
    elif isinstance(error, RankZeroError) or is_lost_peer(error):
        logger.error("ended because another rank did; the job's first error says why (%s)", error)
    else:
        traceback.print_exception(error)


def _is_of_the_disk(error: Exception) -> bool:
    """Whether a file could not be written for a reason that lies outside the program; the error names both."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
    return isinstance(error, OSError) and error.errno in numbers


def _train(config: TrainConfig, folder: Path, ranks: Ranks) -> int:
    """Refuse what can be refused without torch, then train."""
    with _alike_on_all_ranks(ranks):
        check_world_size(config, ranks.world_size)
    from sharebert.metrics import check_extras

    check_extras(config.logging)
    from sharebert.pretrain import pretrain

    return pretrain(config, ranks, folder)


def _plan(request: Request, flags: argparse.Namespace, ranks: Ranks) -> int:
    from sharebert.plan.run import Circumstances, plan

    processes = ranks.world_size if flags.processes is None else flags.processes
    with _alike_on_all_ranks(ranks):
        circumstances = Circumstances(processes, flags.memory_gib, flags.tokens_per_second, flags.tflops)
        return plan(request, circumstances, as_json=flags.json)


def _finetune(config: FinetuneConfig, folder: Path, ranks: Ranks) -> int:
    with _alike_on_all_ranks(ranks):
        check_complete(config)
        check_world_size(config, ranks.world_size)
    from sharebert.finetune.run import finetune

    return finetune(config, ranks, folder)


def _prepare(config: TrainConfig, as_json: bool) -> int:
    from data_prep.prepare import prepare_corpus

    with StopSignals(max_run_minutes=config.max_run_minutes, is_announced=True) as stop:
        corpus = prepare_corpus(config.data, progress=sys.stderr.isatty(), check_stop=stop.check)
    if as_json:
        print(json.dumps({"folder": str(corpus.folder), **corpus.meta}))
    else:
        print(corpus.folder)
    return EXIT_FINISHED
