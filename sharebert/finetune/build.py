"""Which problem a task is, and the hashes of what it is made from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data_prep.hf_dataset import hub_errors
from data_prep.tokenizer import find_special_ids
from sharebert.checkpoint import TOKENIZER_FILE
from sharebert.config import ConfigError, FinetuneConfig, TaskConfig
from sharebert.config.finetune import GLUE_TASKS, SQUAD_TASKS
from sharebert.files import sha256_of_file
from sharebert.finetune.classification import TextProblem
from sharebert.finetune.glue import HUB_PATH, read_glue
from sharebert.finetune.model import encoder_folder
from sharebert.finetune.own_table import read_own_table
from sharebert.finetune.problem import Problem
from sharebert.finetune.sequences import load_tokenizer
from sharebert.finetune.squad import DEV_SPLIT, HUB_PATHS, SquadProblem
from sharebert.finetune.tasks import GLUE, TextTask
from sharebert.model.convert import SEQ_LEN_KEY

logger = logging.getLogger(__name__)


def build_problem(config: FinetuneConfig, encoder: Mapping[str, Any]) -> Problem:
    """The task's rows as token sequences.

    Args:
        config: names the task and the encoder, whose tokenizer is used.
        encoder: the encoder's `config.json`.
    """
    task, file, positions = (
        config.task,
        encoder_folder(config) / TOKENIZER_FILE,
        int(encoder["max_position_embeddings"]),
    )
    max_length = min(task.max_length, positions)
    if max_length < task.max_length:
        logger.info("task.max_length=%d: the encoder has %d positions, which are used", task.max_length, positions)
    sources = source_hashes(config)  # before the rows are read: a change meanwhile shows later
    problem: Problem
    if task.name in SQUAD_TASKS:
        special = find_special_ids(Tokenizer.from_file(str(file)))
        squad = SquadProblem(task, load_tokenizer(file, None), (special.cls, special.sep), max_length)
        problem, labels = squad, {f"{DEV_SPLIT} labels": _sha256(dataclasses.asdict(squad.questions))}
    else:
        rows = read_glue(task) if task.name in GLUE_TASKS else read_own_table(task)
        problem, labels = TextProblem(rows, load_tokenizer(file, max_length), task.score), _label_hashes(rows)
    problem.source_hashes, problem.label_hashes = sources, labels
    if not config.random_encoder:
        _warn_of_untrained_positions(problem, encoder.get(SEQ_LEN_KEY))
    return problem


def _warn_of_untrained_positions(problem: Problem, trained: int | None) -> None:
    """Say where sequences are longer than those of pretraining.

    Args:
        problem: with its sequences.
        trained: the length of those; None: the encoder's folder does not say it.
    """
    lengths = [sequences.lengths for sequences in (problem.train, *(split.sequences for split in problem.splits))]
    longest = max(int(of_split.max(initial=0)) for of_split in lengths)
    if trained is not None and longest > trained:
        number = sum(int((of_split > trained).sum()) for of_split in lengths)
        logger.warning(
            "%s sequences (up to %d tokens) are longer than in pretraining (%d): the positions beyond begin untrained. "
            "task.max_length=%d avoids it, or an encoder that was pretrained at a greater length",
            f"{number:,}",
            longest,
            trained,
            trained,
        )


def _label_hashes(task: TextTask) -> dict[str, str]:
    splits = [*([task.train] if task.train is not None else []), *task.dev, *task.test]
    return {f"{split.name} labels": _sha256([task.label_names, split.labels.tolist()]) for split in splits}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def source_hashes(config: FinetuneConfig) -> dict[str, str]:
    """sha256 of each file that rows and tokens come from, by its key or its name below `task.path`.

    Cheap beside reading and tokenising them. Of a dataset of the hub, that of the rows of each split. A file that
    is not there is left out: reading it says so.

    Raises:
        ConfigError: the dataset does not come from the hub.
    """
    task = config.task
    if task.name == "table":
        paths = {f"task.{name}": getattr(task, name) for name in ("train", "dev", "test")}
        files = {key: Path(path).expanduser() for key, path in paths.items() if path}
    elif task.path is not None:
        files = _files_of_splits(task, Path(task.path).expanduser())
    else:
        files = {}
    files["tokenizer"] = encoder_folder(config) / TOKENIZER_FILE
    hashes = {name: sha256_of_file(file) for name, file in files.items() if file.is_file()}
    return {**(_hub_hashes(task) if task.name != "table" and task.path is None else {}), **hashes}


def _files_of_splits(task: TaskConfig, folder: Path) -> dict[str, Path]:
    """Files of the task's splits, or in a folder of such a name, where `save_to_disk` puts them."""
    glue = GLUE.get(task.name)
    names = ("train", *glue.dev_splits, *glue.test_splits) if glue is not None else ("train", DEV_SPLIT)
    is_of_split = re.compile(rf"({'|'.join(names)})([.-].*)?").fullmatch
    files = {path.relative_to(folder): path for pattern in ("*", "*/*") for path in sorted(folder.glob(pattern))}
    return {
        name.as_posix(): path
        for name, path in files.items()
        if path.is_file() and is_of_split(name.parts[0]) and not name.name.startswith("cache-")  # of `datasets`
    }


def _hub_hashes(task: TaskConfig) -> dict[str, str]:
    import datasets

    path, name = (HUB_PATHS[task.name], None) if task.name in SQUAD_TASKS else (HUB_PATH, task.name)
    try:
        found = datasets.load_dataset(path, name)
    except hub_errors() as error:
        came = f"task={task.name}: {path} did not come from the hub ({error})"
        raise ConfigError(f"{came}; expected a connection, or a folder as task.path") from error
    return {f"{path}, {split}": _sha256_of_rows(rows) for split, rows in found.items()}


def _sha256_of_rows(rows: Any) -> str:
    """Of the rows themselves; `datasets`' own fingerprint changes with any commit to the dataset's README."""
    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(batch_size=1000):
        digest.update(json.dumps(batch.to_pylist(), sort_keys=True).encode())
    return digest.hexdigest()
