"""SQuAD 1.1 and 2.0: questions about paragraphs longer than a sequence, as a problem.

A context is cut into windows that overlap, each [CLS] question [SEP] part of the context [SEP]. A window that does
not hold the whole answer has [CLS] as its answer, and so has a question without one. The answer to a question is the
best span of all its windows, cut out of the original text.

Legend: T tokens of a window, C of its part of the context.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sharebert.config import ConfigError, TaskConfig, near_match
from sharebert.data.format import DataError
from sharebert.files import write_atomically
from sharebert.finetune.problem import Outputs, Problem, ScoredSplit
from sharebert.finetune.sequences import Sequences, SequencesBuilder, encode_batches
from sharebert.finetune.splits import RawSplit, read_splits
from sharebert.finetune.squad_metrics import best_threshold, squad_figures
from sharebert.finetune.tables import as_texts, describe_row

logger = logging.getLogger(__name__)

HUB_PATHS = {"squad": "rajpurkar/squad", "squad_v2": "rajpurkar/squad_v2"}
DEV_SPLIT = "validation"
_WORST_SCORE = -1e9
"""Stands for that of the best answer in a context without tokens."""


@dataclass(frozen=True)
class Questions:
    """The questions of a split."""

    ids: list[str]
    questions: list[str]
    contexts: list[str]
    answers: list[list[tuple[int, str]]]
    """Of each question: where in its context each gold answer begins, and the answer; none: it has no answer."""


@dataclass(frozen=True)
class Windows:
    """The windows of a split's questions, in order."""

    sequences: Sequences
    question: NDArray[np.int64]
    """(windows,) number of the question."""
    spans: list[NDArray[np.int64]]
    """Of each window: (C, 2) first and last + 1 character of each of its tokens in the context."""

    def context_start(self, window: int) -> int:
        """Position in the window of the first token of the context."""
        return int(self.sequences.seconds[window])


class SquadProblem(Problem):
    """Windows, where their answers begin and end, and the official figures.

    Args:
        config: of the task.
        tokenizer: of the encoder, which cuts nothing.
        special_ids: of [CLS] and [SEP].
        max_length: tokens in a window.
    """

    model_class = "AutoModelForQuestionAnswering"

    def __init__(self, config: TaskConfig, tokenizer: Any, special_ids: tuple[int, int], max_length: int) -> None:
        self.config = config
        self._has_null = config.name == "squad_v2"
        found = read_splits(config, HUB_PATHS[config.name], None, ("train", DEV_SPLIT), ())
        questions = well_placed(read_questions(found["train"]), found["train"].source)
        windows = cut_windows(questions, tokenizer, special_ids, config, max_length)
        self.train, self._targets = windows.sequences, answer_positions(windows, questions)
        self.questions = read_questions(found[DEV_SPLIT])
        key, count = Counter(self.questions.ids).most_common(1)[0]
        if count > 1:  # an answer is kept for each id
            raise DataError(f"{found[DEV_SPLIT].source}: id {key!r} stands {count} times; expected it once")
        self.windows = cut_windows(self.questions, tokenizer, special_ids, config, max_length)
        self.splits = [ScoredSplit(DEV_SPLIT, True, self.windows.sequences)]
        known = ("exact", "f1")
        for name in config.score:
            if name not in known:
                raise ConfigError(f"task.score={config.score}: {name!r} is not exact or f1{near_match(name, known)}")

    def model_settings(self) -> dict[str, Any]:
        """Two outputs for each token: start and end."""
        return {"num_labels": 2}

    def outputs(self, model_output: Any, attention_mask: Tensor) -> Tensor:
        """(B, T, 2); minus infinity at padding, so that the loss does not depend on how much of it there is."""
        logits = torch.stack([model_output.start_logits, model_output.end_logits], dim=-1).float()
        return logits.masked_fill(attention_mask[..., None] == 0, -torch.inf)

    def targets(self, rows: NDArray[np.int64]) -> Tensor:
        """(B, 2) positions of the first and the last token of the answer."""
        return torch.from_numpy(self._targets[rows])

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean of the cross entropies of start and end, each over the T positions."""
        return functional.cross_entropy(outputs, targets, reduction="sum") / 2

    def figures(self, split: ScoredSplit, outputs: Outputs) -> dict[str, float]:
        """Exact match and F1, for 2.0 at the threshold that is set and at the best one."""
        golds = {
            key: [text for _, text in answers]
            for key, answers in zip(self.questions.ids, self.questions.answers, strict=True)
        }
        answers, null_odds = best_answers(self.windows, self.questions, outputs, self.config.max_answer_length)
        figures = squad_figures(golds, self._with_threshold(answers, null_odds))
        if self._has_null:
            for name in ("exact", "f1"):
                value, threshold = best_threshold(golds, answers, null_odds, name)
                figures |= {f"best_{name}": value}
                if np.isfinite(threshold):  # else best where nothing is answered
                    figures |= {f"best_{name}_threshold": threshold}
        return figures

    def _with_threshold(self, answers: dict[str, str], null_odds: dict[str, float]) -> dict[str, str]:
        if not self._has_null:
            return answers
        return {key: "" if null_odds[key] > self.config.null_threshold else text for key, text in answers.items()}

    def score(self, figures: dict[str, float]) -> float:
        """F1, as in the paper's table."""
        names = self.config.score or ["f1"]
        return sum(figures[name] for name in names) / len(names)

    def write_predictions(self, split: ScoredSplit, outputs: Outputs, folder: Path) -> None:
        """``predictions/validation.json`` as the official script reads it; for 2.0 also its `--na-prob-file`."""
        answers, null_odds = best_answers(self.windows, self.questions, outputs, self.config.max_answer_length)
        (folder / "predictions").mkdir(exist_ok=True)
        shown = {f"{split.name}.json": self._with_threshold(answers, null_odds)}
        if self._has_null:
            shown[f"{split.name}_null_odds.json"] = null_odds  # type: ignore[assignment]
        for name, values in shown.items():
            text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
            write_atomically(folder / "predictions" / name, text)


def read_questions(split: RawSplit) -> Questions:
    """The rows of a split with the columns `id`, `question`, `context` and `answers`.

    Raises:
        DataError: a column is missing, a value is not what it should be, or there are no rows.
    """
    contexts = as_texts(split.column("context"), split.source, "context")
    questions = [question.lstrip() for question in as_texts(split.column("question"), split.source, "question")]
    answers = [_answers(given, split.source, row) for row, given in enumerate(split.column("answers"), start=1)]
    if not contexts:
        raise DataError(f"{split.source}: no rows")
    return Questions([str(key) for key in split.column("id")], questions, contexts, answers)


def _answers(given: Any, source: str, row: int) -> list[tuple[int, str]]:
    starts: Any = given.get("answer_start") if isinstance(given, dict) else None
    texts: Any = given.get("text") if isinstance(given, dict) else None
    are_lists = isinstance(starts, list) and isinstance(texts, list)
    if are_lists and len(starts) == len(texts) and all(isinstance(text, str) for text in texts):
        return list(zip(starts, texts, strict=True))
    expected = "expected lists `answer_start` and `text`, equally long"
    raise DataError(f"{describe_row(source, row)}: answers {given!r}; {expected}")


def well_placed(questions: Questions, source: str) -> Questions:
    """Those to train on: whose first answer stands in the context where it is said to begin, or that have none.

    Scores do not ask where an answer begins.

    Raises:
        DataError: no answer stands where it should.
    """
    kept, wrong = [], ""
    for number, (context, answers) in enumerate(zip(questions.contexts, questions.answers, strict=True)):
        start, text = answers[0] if answers else (0, "")
        there = context[start : start + len(text)] if isinstance(start, int) and start >= 0 else None
        if there == text:
            kept.append(number)
        elif not wrong:
            where = describe_row(source, number + 1)
            wrong = f"{where}: expected {text!r} at character {start}, found {there!r}"
    if not wrong:
        return questions
    if not any(questions.answers[number] for number in kept):
        raise DataError(f"{wrong}; no other answer stands at its answer_start either")
    left_out = len(questions.ids) - len(kept)
    logger.warning("%d of %d training questions are left out; the first: %s", left_out, len(questions.ids), wrong)
    return Questions(**{name: [values[number] for number in kept] for name, values in vars(questions).items()})


def cut_windows(
    questions: Questions, tokenizer: Any, special_ids: tuple[int, int], config: TaskConfig, max_length: int
) -> Windows:
    """All windows of all questions.

    A question may take up half of a window, so that the context always has room. A window begins `config.stride`
    tokens after the one before, but no later than that one ends.
    """
    cls, sep = special_ids
    most = max(1, min(config.max_question_length, (max_length - 3) // 2))
    builder, owners, spans = SequencesBuilder(), [], []
    encodings = zip(
        encode_batches(tokenizer, (questions.questions,), with_specials=False),
        encode_batches(tokenizer, (questions.contexts,), with_specials=False),
        strict=True,
    )
    for number, (question, context) in enumerate(encodings):
        head = [cls, *question.ids[:most], sep]
        room = max_length - len(head) - 1
        offsets = np.array(context.offsets, dtype=np.int64).reshape(-1, 2)
        for first in window_starts(len(context.ids), room, config.stride):
            part = slice(first, first + room)
            builder.add([*head, *context.ids[part], sep], len(head))
            owners.append(number)
            spans.append(offsets[part])
    return Windows(builder.build(), np.array(owners, dtype=np.int64), spans)


def window_starts(length: int, room: int, stride: int) -> list[int]:
    """First tokens of the windows of `room` tokens over a context of `length`: the last one reaches its end."""
    step, starts = min(stride, room), [0]
    while starts[-1] + room < length:
        starts.append(starts[-1] + step)
    return starts


def answer_positions(windows: Windows, questions: Questions) -> NDArray[np.int64]:
    """(windows, 2) first and last token of the first gold answer; (0, 0), [CLS], where the window does not hold it."""
    positions = np.zeros((len(windows.question), 2), dtype=np.int64)
    for window, number in enumerate(windows.question):
        answers, spans = questions.answers[number], windows.spans[window]
        if not answers or not len(spans):
            continue
        start, stop = answers[0][0], answers[0][0] + len(answers[0][1])
        if spans[0, 0] <= start and stop <= spans[-1, 1]:
            first = int(np.searchsorted(spans[:, 1], start, side="right"))  # the first token that ends after it
            last = int(np.searchsorted(spans[:, 0], stop, side="left")) - 1  # the last one that begins before its end
            if first <= last:
                positions[window] = np.array([first, last]) + windows.context_start(window)
    return positions


def best_answers(
    windows: Windows, questions: Questions, outputs: Outputs, max_answer_length: int
) -> tuple[dict[str, str], dict[str, float]]:
    """For each question's id: its best answer that is not empty, and the score of no answer less that answer's.

    The score of a span is the sum of its start's and its end's; that of no answer is the least over the windows of
    the sum at [CLS].
    """
    best: dict[int, tuple[float, str]] = {}
    null: dict[int, float] = {}
    for window, number in enumerate(windows.question.tolist()):
        scores, start = outputs[window], windows.context_start(window)
        null[number] = min(null.get(number, np.inf), float(scores[0].sum()))
        spans = windows.spans[window]
        found = best_span(scores[start : start + len(spans)], max_answer_length)
        if found is not None and (number not in best or found[0] > best[number][0]):
            first, last = spans[found[1], 0], spans[found[2], 1]
            best[number] = (found[0], questions.contexts[number][first:last])
    found_any = [best.get(number, (_WORST_SCORE, "")) for number in range(len(questions.ids))]
    answers = {key: text for key, (_, text) in zip(questions.ids, found_any, strict=True)}
    odds = {key: null[number] - found_any[number][0] for number, key in enumerate(questions.ids)}
    return answers, odds


def best_span(scores: NDArray[np.float32], max_length: int) -> tuple[float, int, int] | None:
    """Score, first and last token of the best span of at most `max_length` tokens; None without tokens.

    All spans are tried, not only those of the best few starts and ends.

    Args:
        scores: (C, 2) of start and end.
    """
    best: tuple[float, int, int] | None = None
    for further in range(min(max_length, len(scores))):
        sums = scores[: len(scores) - further, 0] + scores[further:, 1]
        first = int(sums.argmax())
        if best is None or float(sums[first]) > best[0]:
            best = (float(sums[first]), first, first + further)
    return best
