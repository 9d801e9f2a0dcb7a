"""The command line: takes the verb off the arguments, runs Hydra, converts once to dataclasses.

torch is imported by the verbs, not here: a wrong key is refused in well under two seconds.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import sharebert
from sharebert.compose import Cell, compose
from sharebert.config import ConfigError, TrainConfig, check_world_size, from_dict, near_match
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE, Ranks, detect_ranks
from sharebert.log import set_up_logging

logger = logging.getLogger(__name__)

HYDRA_VERBS: dict[str, tuple[str, type]] = {
    "train": ("train", TrainConfig),
    "prepare": ("train", TrainConfig),
}
"""Primary configuration file and schema of each verb that Hydra reads."""
JSON_VERBS = ("prepare",)
PLAIN_VERBS = ("evaluate", "inspect", "export")

NON_FINITE_ADVICE = (
    "Nothing was saved after it, so the same command goes on from the checkpoint before (see checkpoints/latest). "
    "Try a lower optim.lr, more optim.warmup_steps, optim.clip_norm, engine.precision=bf16 or fp32; "
    "debug.detect_anomaly=true names the operation that made it"
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
  evaluate   held-out loss and accuracy of a checkpoint on any text
               sharebert evaluate outputs/demo/checkpoints/latest --files 'corpus/*.txt'
  inspect    what a checkpoint holds: step, phase, groups of layers, hashes
               sharebert inspect outputs/demo/checkpoints/latest
  export     write a checkpoint as a folder that Hugging Face Transformers loads
               sharebert export outputs/demo/checkpoints/latest my-bert

  sharebert VERB --help       settings or flags of a verb
  sharebert --version

Exit status: 0 finished, 1 failed, 2 wrong request, 75 stopped by a signal and saved (run the same command again).
"""


def entry() -> NoReturn:
    """The program: runs :func:`main` and ends the process with its status."""
    status = main()
    if detect_ranks().launched:
        # Threads that the collectives' libraries leave behind can abort the interpreter on its way out, and a finished
        # rank would count as failed. All files are closed by now.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
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
            return _run_hydra(verb, rest, ranks)
        return _guarded(verb, lambda: _run_plain(verb, rest))
    except ConfigError as error:
        _refuse(verb, error)
        return EXIT_USAGE
    except BrokenPipeError:  # as in `sharebert train --help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINISHED


def _run_plain(verb: str, arguments: list[str]) -> int:
    if verb == "inspect":
        from sharebert.inspect import main as run
    elif verb == "export":
        from sharebert.export import main as run
    else:
        from sharebert.evaluate_text import main as run
    return run(arguments)


# ---------------------------------------------------------------------- verbs with a Hydra configuration


def _run_hydra(verb: str, arguments: list[str], ranks: Ranks) -> int:
    """Compose, convert and run: once, or each cell of a sweep. The highest exit status counts."""
    as_json = "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--json"]
    if as_json and verb not in JSON_VERBS:
        raise ConfigError(f"--json: sharebert {verb} has no such flag; expected it with {', '.join(JSON_VERBS)}")
    primary, kind = HYDRA_VERBS[verb]
    request = compose(verb, primary, kind, arguments)
    if request.is_multirun and ranks.world_size > 1:
        raise ConfigError(
            f"-m: a sweep inside {ranks.world_size} ranks; expected one launch for each job, as in "
            "`torchrun ... -m sharebert train unshare.step=50`"
        )
    statuses: list[int] = []
    for number, cell in enumerate(request.cells):
        if EXIT_STOPPED in statuses:
            break  # whoever stopped a job stopped the sweep; the same command goes on with it
        if request.is_multirun:
            logger.info("job %d: %s", number, cell.folder)
        statuses.append(_guarded(verb, lambda cell=cell: _run_cell(verb, cell, ranks, as_json)))  # type: ignore[misc]
    return max(statuses, default=EXIT_FINISHED)


def _run_cell(verb: str, cell: Cell, ranks: Ranks, as_json: bool) -> int:
    config = from_dict(TrainConfig, cell.values)
    return _train(config, cell.folder, ranks) if verb == "train" else _prepare(config, as_json)


def _guarded(verb: str, run: Callable[[], int]) -> int:
    """Run one job; an error is printed and becomes an exit status, so that a sweep goes on with its next job."""
    try:
        return run()
    except ConfigError as error:
        _refuse(verb, error)
        return EXIT_USAGE
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        logger.error("interrupted; nothing was lost, the same command goes on")
        return EXIT_INTERRUPTED
    except Exception as error:
        _report(error)
        return EXIT_FAILED


def _refuse(verb: str, error: ConfigError) -> None:
    """Say what is wrong with the request; once, not on every rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"sharebert {verb}: {error}", file=sys.stderr)


def _report(error: Exception) -> None:
    """Errors made for people as their message, a lost peer as a line, everything else with its traceback."""
    from sharebert.checkpoint import CheckpointError  # imports torch, which whoever failed here has done
    from sharebert.data.format import DataError
    from sharebert.distributed import RankZeroError, is_lost_peer
    from sharebert.update import NonFiniteError

    if isinstance(error, NonFiniteError):
        logger.error("%s. %s", error, NON_FINITE_ADVICE)
    elif isinstance(error, (CheckpointError, DataError)):
        logger.error("%s", error)
    elif isinstance(error, RankZeroError) or is_lost_peer(error):
        logger.error("ended because another rank did; the job's first error says why (%s)", error)
    else:
        traceback.print_exception(error)


def _train(config: TrainConfig, folder: Path, ranks: Ranks) -> int:
    """Refuse what can be refused without torch, then train."""
    check_world_size(config, ranks.world_size)
    from sharebert.metrics import check_extras

    check_extras(config.logging)
    from sharebert.pretrain import pretrain

    return pretrain(config, ranks, folder)


def _prepare(config: TrainConfig, as_json: bool) -> int:
    from data_prep.prepare import prepare_corpus

    corpus = prepare_corpus(config.data, progress=sys.stderr.isatty())
    if as_json:
        print(json.dumps({"folder": str(corpus.folder), **corpus.meta}))
    else:
        print(corpus.folder)
    return EXIT_FINISHED
