"""The command line: takes the verb off the arguments, runs Hydra, converts once to dataclasses.

torch is imported by the verbs, not here: a wrong key is refused in well under two seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import sharebert
from sharebert import config as configuration
from sharebert.config import ConfigError, TrainConfig, check_world_size, from_dict, near_match
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USAGE, Ranks, detect_ranks
from sharebert.log import set_up_logging

logger = logging.getLogger(__name__)

HYDRA_VERBS = ("train", "prepare")
PLAIN_VERBS = ("evaluate", "inspect", "export")
MAX_FOLDER_LENGTH = 120

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
    if verb not in HYDRA_VERBS + PLAIN_VERBS:
        known = HYDRA_VERBS + PLAIN_VERBS
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
    """Compose, convert and run: once, or for each job of a multirun. The highest exit status counts."""
    as_json = "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--json"]
    if as_json and verb != "prepare":
        raise ConfigError(f"--json: sharebert {verb} has no such flag; expected it with prepare")
    is_multirun = any(argument in ("-m", "--multirun") for argument in arguments)
    if is_multirun and ranks.world_size > 1:
        raise ConfigError(
            f"-m: a sweep inside {ranks.world_size} ranks; expected one launch for each job, as in "
            "`torchrun ... -m sharebert train unshare.step=50`"
        )
    run: Callable[[TrainConfig, Path], int]
    run = (
        (lambda config, folder: _train(config, folder, ranks))
        if verb == "train"
        else (lambda config, folder: _prepare(config, as_json))
    )
    return _compose_and_run(verb, arguments, run)


def _compose_and_run(verb: str, arguments: list[str], run: Callable[[TrainConfig, Path], int]) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    configuration.register()
    OmegaConf.register_new_resolver("sharebert_run_name", _run_name, replace=True)
    statuses: list[int] = []

    def job(composed: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        if EXIT_STOPPED in statuses:
            return  # whoever stopped a job stopped the sweep; the same command goes on with it
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
        values["run_name"] = _run_name(values["run_name"], hydra_config.runtime.choices.get("experiment"))
        folder = Path(values["output_dir"]) / values["run_name"]
        if str(hydra_config.mode).endswith("MULTIRUN"):
            folder /= job_folder(list(hydra_config.overrides.task), arguments)
            logger.info("job %d: %s", hydra_config.job.num, folder)
        statuses.append(_guarded(verb, lambda: run(from_dict(TrainConfig, values), folder)))

    shows_all = os.environ.get("HYDRA_FULL_ERROR") == "1"
    with _hydra_reads([f"sharebert {verb}", *_flags_first(arguments)]):
        try:
            hydra.main(config_path="pkg://sharebert.conf", config_name="train", version_base="1.3")(job)()
        except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
            if shows_all or isinstance(error, BrokenPipeError):
                raise
            raise ConfigError(_explain(error)) from error
    return max(statuses, default=EXIT_FINISHED)


@contextlib.contextmanager
def _hydra_reads(argv: list[str]) -> Iterator[None]:
    """Let Hydra find its arguments in sys.argv, and raise its errors (it would print them and exit with status 1)."""
    before, setting = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, "1"
    try:
        yield
    finally:
        sys.argv = before
        if setting is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = setting


def _flags_first(arguments: Sequence[str]) -> list[str]:
    """Move flags before the settings: Hydra's parser refuses settings on both sides of a flag."""
    takes_value = {
        "--cfg",
        "--config-dir",
        "--config-name",
        "--config-path",
        "--package",
        "-c",
        "-cd",
        "-cn",
        "-cp",
        "-p",
    }
    flags: list[str] = []
    settings: list[str] = []
    previous = ""
    for argument in arguments:
        is_value = previous in takes_value
        (flags if argument.startswith("-") or is_value else settings).append(argument)
        previous = argument
    return flags + settings


def _run_name(given: str | None, experiment: str | None) -> str:
    """The run's name: as given, else the experiment's, else `run`."""
    return given or (experiment or "run").replace("/", "-")


def job_folder(overrides: Sequence[str], arguments: Sequence[str] = ()) -> str:
    """Name of a sweep's job below its run folder, from the job's overrides: no shell has to quote it.

    The same overrides give the same name whatever their order, so the same command finds its runs again. What is
    swept comes first: it has to stay readable where a long name is cut.

    Args:
        overrides: of this job.
        arguments: of the whole sweep; an override that is not among them is swept.

    >>> job_folder(["max_steps=150", "unshare.step=50"], ["max_steps=150", "unshare.step=50,100"])
    'unshare.step-50_max_steps-150'
    """
    is_named = any(override.startswith("run_name=") for override in overrides)
    in_path = ("run_name", "output_dir") if is_named else ("run_name", "output_dir", "experiment")
    named = [item for item in overrides if item.lstrip("+~").split("=")[0] not in in_path] or list(overrides)
    named.sort(key=lambda item: (item in arguments, item))
    text = "_".join(item.lstrip("+~") for item in named).replace("=", "-")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("-.")
    if len(name) > MAX_FOLDER_LENGTH or name != text:
        # Cut or replaced characters could make two jobs one.
        name = f"{name[:MAX_FOLDER_LENGTH]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


def _explain(error: BaseException) -> str:
    """One message for people from Hydra's or OmegaConf's error: the key, what came, what was expected."""
    cause = error.__cause__ if error.__cause__ is not None else error
    text = str(cause).split("\n    full_key:")[0].strip()
    key = str(getattr(cause, "full_key", "") or "")
    if re.search(r"Key '.*' (is )?not in", text):
        keys = configuration.flatten(configuration.to_dict(TrainConfig()))
        groups = [key.split(".")[0] for key in keys if "." in key]
        return f"{key}: no such key{near_match(key, [*keys, *groups])}"
    missing = re.search(
        r"Could not find '([^']+)'.*Available options in '([^']+)':\s*(.*?)(?:\n\n|Config search path|$)",
        text,
        re.DOTALL,
    )
    if missing:
        options = missing[3].split()
        wrong = missing[1].rsplit("/", 1)[-1]
        return f"{missing[2]}={wrong}: expected one of {', '.join(options)}{near_match(wrong, options)}"
    return f"{key}: {text}" if key and key not in text else text


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
