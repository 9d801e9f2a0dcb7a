"""Which problem a task is."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenizers import Tokenizer

from data_prep.tokenizer import find_special_ids
from sharebert.checkpoint import TOKENIZER_FILE
from sharebert.config import FinetuneConfig
from sharebert.config.finetune import GLUE_TASKS, SQUAD_TASKS
from sharebert.finetune.classification import TextProblem
from sharebert.finetune.glue import read_glue
from sharebert.finetune.own_table import read_own_table
from sharebert.finetune.problem import Problem
from sharebert.finetune.sequences import load_tokenizer
from sharebert.finetune.squad import SquadProblem

logger = logging.getLogger(__name__)


def build_problem(config: FinetuneConfig, positions: int) -> Problem:
    """The task's rows as token sequences.

    Args:
        config: names the task and the encoder, whose tokenizer is used.
        positions: the most tokens that the encoder takes.
    """
    task, file = config.task, Path(str(config.encoder)) / TOKENIZER_FILE
    max_length = min(task.max_length, positions)
    if max_length < task.max_length:
        logger.info("task.max_length=%d: the encoder has %d positions, which are used", task.max_length, positions)
    if task.name in SQUAD_TASKS:
        special = find_special_ids(Tokenizer.from_file(str(file)))
        return SquadProblem(task, load_tokenizer(file, None), (special.cls, special.sep), max_length)
    rows = read_glue(task) if task.name in GLUE_TASKS else read_own_table(task)
    return TextProblem(rows, load_tokenizer(file, max_length), task.score)
