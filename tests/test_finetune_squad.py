"""SQuAD: windows, answers at every place, the official figures, and whole runs on invented paragraphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetuning import finetune, read_results, write_lines

from sharebert.config import ConfigError, TaskConfig
from sharebert.data.format import DataError
from sharebert.finetune.sequences import encode, load_tokenizer
from sharebert.finetune.splits import RawSplit
from sharebert.finetune.squad import (
    Questions,
    SquadProblem,
    Windows,
    answer_positions,
    best_answers,
    best_span,
    cut_windows,
    read_questions,
    well_placed,
    window_starts,
)
from sharebert.finetune.squad_metrics import best_threshold, exact_match, f1, normalize_answer, squad_figures

CONTEXT = "the farmer watches the river. a quiet child paints a wooden boat. our neighbour follows the long road."
CLS, SEP = 2, 3


def question(number: int, answer: str | None, context: str = CONTEXT, **others: Any) -> dict[str, Any]:
    """A row as the hub has it; the answer is found in the context."""
    found = {"text": [answer], "answer_start": [context.index(answer)]} if answer else {"text": [], "answer_start": []}
    return {"id": f"q{number}", "title": "", "question": "who paints?", "context": context, "answers": found, **others}


def split(*rows: dict[str, Any]) -> RawSplit:
    return RawSplit("rows", {key: [row[key] for row in rows] for key in rows[0]}, {})


def windows_of(encoder: Path, questions: Questions, max_length: int = 24, **settings: Any) -> Windows:
    config = TaskConfig(name="squad", **{"stride": 8, **settings})
    return cut_windows(questions, load_tokenizer(encoder / "tokenizer.json", None), (CLS, SEP), config, max_length)


@pytest.mark.parametrize(
    ("length", "room", "stride", "starts"),
    [(0, 10, 4, [0]), (10, 10, 4, [0]), (11, 10, 4, [0, 4]), (18, 10, 4, [0, 4, 8]), (25, 10, 99, [0, 10, 20])],
)
def test_windows_overlap_and_reach_the_end(length: int, room: int, stride: int, starts: list[int]) -> None:
    assert window_starts(length, room, stride) == starts
    assert starts[-1] + room >= length


def test_a_window_is_question_and_context_with_their_types(encoder: Path) -> None:
    questions = read_questions(split(question(0, "our neighbour"), question(1, None, context="the river")))
    windows = windows_of(encoder, questions)
    tokenizer = load_tokenizer(encoder / "tokenizer.json", None)
    asked = tokenizer.encode("who paints?", add_special_tokens=False).ids
    context = tokenizer.encode(CONTEXT, add_special_tokens=False).ids
    room = 24 - len(asked) - 3
    assert windows.question.tolist() == [0] * len(window_starts(len(context), room, 8)) + [1]  # shorter than the stride
    lengths, start = windows.sequences.lengths, 0
    for window, first in enumerate(window_starts(len(context), room, 8)):
        ids = windows.sequences.ids[start : start + lengths[window]].tolist()
        start += lengths[window]
        assert ids == [CLS, *asked, SEP, *context[first : first + room], SEP]
        assert windows.context_start(window) == len(asked) + 2
        assert len(windows.spans[window]) == len(context[first : first + room])


def texts_at(positions: np.ndarray, windows: Windows, questions: Questions) -> list[str | None]:
    """What the target positions of each window cut out of the original text; None for [CLS]."""
    found: list[str | None] = []
    for window, (first, last) in enumerate(positions.tolist()):
        if (first, last) == (0, 0):
            found.append(None)
            continue
        spans, start = windows.spans[window], windows.context_start(window)
        context = questions.contexts[windows.question[window]]
        found.append(context[spans[first - start, 0] : spans[last - start, 1]])
    return found


@pytest.mark.parametrize("answer", ["the farmer", "the", "a wooden boat", "road", "long road."])
def test_targets_cut_the_answer_out_of_the_original_text(encoder: Path, answer: str) -> None:
    questions = read_questions(split(question(0, answer)))  # "the farmer" begins at character 0
    windows = windows_of(encoder, questions)
    found = texts_at(answer_positions(windows, questions), windows, questions)
    assert set(found) - {None} == {answer}
    if answer.endswith("road."):
        assert found[-1] == answer
        assert found[0] is None
    if answer == "the farmer":
        assert found[0] == answer
        assert found[-1] is None


def test_an_answer_that_a_window_splits_is_not_its_target(encoder: Path) -> None:
    answer = CONTEXT[4 : CONTEXT.index(" long")]
    questions = read_questions(split(question(0, answer)))
    windows = windows_of(encoder, questions)
    assert answer_positions(windows, questions).tolist() == [[0, 0]] * len(windows.question)
    whole = windows_of(encoder, questions, max_length=200)
    assert texts_at(answer_positions(whole, questions), whole, questions) == [answer]


def test_a_question_without_an_answer_has_cls_as_target(encoder: Path) -> None:
    questions = read_questions(split(question(0, None)))
    windows = windows_of(encoder, questions)
    assert not answer_positions(windows, questions).any()


def test_a_long_question_leaves_half_of_the_window_to_the_context(encoder: Path) -> None:
    questions = read_questions(split(question(0, "road", question="who paints " * 50)))
    windows = windows_of(encoder, questions, max_length=20)
    assert windows.context_start(0) == 2 + 8
    assert windows.sequences.lengths.max() == 20
    assert set(texts_at(answer_positions(windows, questions), windows, questions)) == {None, "road"}


def test_rows_that_do_not_fit_are_refused() -> None:
    row = question(0, "road")
    for answers in (
        None,
        {"text": ["road"]},
        {"text": ["road"], "answer_start": []},
        {"text": [1], "answer_start": [0]},
    ):
        with pytest.raises(DataError, match=r"row 1: answers .*; expected lists"):
            read_questions(split({**row, "answers": answers}))
    for column in ("context", "question"):
        with pytest.raises(DataError, match=f"rows, row 2: None in column '{column}'; expected a text"):
            read_questions(split(row, {**row, column: None}))


def test_misplaced_answers_are_left_out_of_training_only(caplog: pytest.LogCaptureFixture) -> None:
    rows = [question(row, "road" if row else None) for row in range(4)]
    rows[1]["answers"]["answer_start"] = [0]
    rows[3]["answers"]["answer_start"] = [None]
    questions = read_questions(split(*rows))
    assert well_placed(questions, "rows").ids == ["q0", "q2"]
    assert "2 of 4 training questions are left out" in caplog.text
    assert "rows, row 2: expected 'road' at character 0, found 'the '" in caplog.text
    assert [text for answers in questions.answers for _, text in answers] == ["road"] * 3
    with pytest.raises(DataError, match="row 2: expected 'road' at character 0, found 'the '; no other"):
        well_placed(read_questions(split(*rows[:2])), "rows")


def test_text_that_spells_a_special_token_is_text(encoder: Path) -> None:
    tokenizer = load_tokenizer(encoder / "tokenizer.json", 64)
    spelled, apart = (
        encode(tokenizer, (["the [SEP] river", "[CLS]"], ["a [MASK]", "[PAD] boat"])),
        encode(tokenizer, (["the [ SEP ] river", "[ CLS ]"], ["a [ MASK ]", "[ PAD ] boat"])),
    )
    assert spelled.digest() == apart.digest()
    assert spelled.ids.tolist().count(CLS) == 2
    assert spelled.ids.tolist().count(SEP) == 4
    questions = read_questions(split(question(0, "[SEP] road", context="the [SEP] road", question="who [MASK]?")))
    windows = windows_of(encoder, questions)
    assert windows.sequences.ids.tolist().count(SEP) == 2
    assert texts_at(answer_positions(windows, questions), windows, questions) == ["[SEP] road"]


# ---------------------------------------------------------------------- from outputs to answers


def outputs_for(windows: Windows, spans: dict[int, tuple[int, int, float]], null: float) -> list[np.ndarray]:
    """Outputs that are low everywhere, `null` at [CLS], and high at (first, last, score) of some windows."""
    made = []
    for window, length in enumerate(windows.sequences.lengths.tolist()):
        scores = np.full((length, 2), -10.0, dtype=np.float32)
        scores[0] = null / 2
        if window in spans:
            first, last, score = spans[window]
            scores[first, 0], scores[last, 1] = score / 2, score / 2
        made.append(scores)
    return made


def test_the_best_span_of_all_windows_is_cut_out_of_the_original_text(encoder: Path) -> None:
    context = "The  FARMER\twatches — the\u00a0River. " + CONTEXT
    questions = read_questions(split(question(0, "FARMER", context=context), question(1, None, context="Road")))
    windows = windows_of(encoder, questions)
    assert windows.question.tolist().count(0) > 2
    start = windows.context_start(0)
    answers, odds = best_answers(
        windows, questions, outputs_for(windows, {0: (start, start + 1, 4), 1: (0, 0, 9)}, 1), 30
    )
    spans = windows.spans[0]
    assert answers["q0"] == context[spans[0, 0] : spans[1, 1]]
    assert answers["q0"].startswith("The")
    assert odds["q0"] == pytest.approx(1 - 4)
    assert odds["q1"] == pytest.approx(1 - (-20))
    last = int(np.flatnonzero(windows.question == 0)[-1])
    end = windows.context_start(last) + len(windows.spans[last]) - 1
    answers, _ = best_answers(windows, questions, outputs_for(windows, {last: (end, end, 4)}, 1), 30)
    assert answers["q0"] == "."  # the last token of the last window


def test_a_span_neither_runs_backwards_nor_is_too_long() -> None:
    scores = np.zeros((6, 2), dtype=np.float32)
    scores[4, 0], scores[1, 1] = 5, 5  # the end before the start
    scores[0, 0], scores[5, 1] = 3, 4
    assert best_span(scores, 6) == (9.0, 4, 5)
    scores[5, 1] = 0
    assert best_span(scores, 1) == (5.0, 1, 1)
    assert best_span(scores, 2) == (8.0, 0, 1)
    scores[:] = 0
    scores[0, 0], scores[5, 1] = 3, 3
    assert best_span(scores, 6) == (6.0, 0, 5)
    assert best_span(scores, 5) == (3.0, 0, 0)
    assert best_span(scores[:0], 5) is None


# ---------------------------------------------------------------------- official figures


def test_answers_are_normalised_as_the_official_script_does() -> None:
    assert normalize_answer("The  Cat's, a\tHAT!") == "cats hat"
    assert exact_match("the farmer.", "Farmer") == 1.0
    assert exact_match("farmer", "farmers") == 0.0


def test_figures_are_those_computed_by_hand() -> None:
    assert f1("the quiet child", "a quiet boat") == pytest.approx(2 * (1 / 2) * (1 / 2) / 1)
    assert f1("one two three", "two three") == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert f1("one one", "one") == pytest.approx(2 / 3)
    assert f1("one", "two") == 0.0
    assert f1("", "") == 1.0
    assert f1("", "two") == 0.0
    golds = {"a": ["one two", "one"], "b": [], "c": ["three"], "d": []}
    figures = squad_figures(golds, {"a": "the one", "b": "", "c": "three four", "d": "five"})
    assert figures == pytest.approx({"exact": 2 / 4, "f1": (1 + 1 + 2 / 3 + 0) / 4})


def test_the_best_threshold_is_found_as_by_trying_all() -> None:
    golds = {"a": ["one"], "b": [], "c": ["three"], "d": [], "e": ["six"]}
    answers = {"a": "one", "b": "two", "c": "three four", "d": "five", "e": "seven"}
    odds = {"a": -3.0, "b": -2.0, "c": -1.0, "d": 0.5, "e": 2.0}
    for figure in ("exact", "f1"):
        tried = {
            threshold: squad_figures(golds, {key: "" if odds[key] > threshold else answers[key] for key in golds})[
                figure
            ]
            for threshold in (-9.0, *odds.values())
        }
        value, threshold = best_threshold(golds, answers, odds, figure)
        assert value == pytest.approx(max(tried.values()))
        assert tried[threshold] == pytest.approx(value)
    value, threshold = best_threshold({"b": []}, answers, odds, "f1")
    assert (value, threshold) == (1.0, float("-inf"))


@pytest.mark.parametrize(("threshold", "answered"), [(-25.0, 0), (-15.0, 3), (0.0, 5), (15.0, 6)])
def test_a_question_is_answered_up_to_the_threshold(
    encoder: Path, folder: Path, tmp_path: Path, threshold: float, answered: int
) -> None:
    config = TaskConfig(name="squad_v2", path=str(folder), max_length=64, null_threshold=threshold)
    problem = SquadProblem(config, load_tokenizer(encoder / "tokenizer.json", None), (CLS, SEP), 64)
    nulls = [-20.0, -20.0, -20.0, -5.0, -5.0, 10.0]  # and 0 for the best answer, so these are the odds
    firsts = [problem.windows.context_start(window) for window in range(6)]
    spans = {window: (first, first, 0.0) for window, first in enumerate(firsts)}
    assert len(problem.windows.question) == 6
    outputs = [outputs_for(problem.windows, spans, null)[window] for window, null in enumerate(nulls)]
    problem.write_predictions(problem.splits[0], outputs, tmp_path)
    answers = json.loads((tmp_path / "predictions/validation.json").read_text())
    assert [key for key in answers if answers[key]] == [f"q{row}" for row in range(answered)]
    pairs = zip(problem.questions.ids, problem.questions.answers, strict=True)
    golds = {key: [text for _, text in golds] for key, golds in pairs}
    figures = problem.figures(problem.splits[0], outputs)
    assert figures["exact"] == squad_figures(golds, answers)["exact"]


def test_an_id_stands_once_in_the_dev_set(encoder: Path, folder: Path) -> None:
    write_lines(folder / "validation.jsonl", [question(1, "road"), question(1, None)])
    with pytest.raises(DataError, match=r"validation\.jsonl: id 'q1' stands 2 times"):
        SquadProblem(
            TaskConfig(name="squad", path=str(folder)), load_tokenizer(encoder / "tokenizer.json", None), (CLS, SEP), 64
        )


# ---------------------------------------------------------------------- whole runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset in two splits, some of its questions without an answer."""
    answers = ["the farmer", "a wooden boat", None, "the long road", None, "our neighbour"]
    for name, number in (("train", 12), ("validation", 6)):
        write_lines(tmp_path / f"squad/{name}.jsonl", [question(row, answers[row % 6]) for row in range(number)])
    return tmp_path / "squad"


def test_squad_v2_reports_the_set_and_the_best_threshold(encoder: Path, folder: Path, tmp_path: Path) -> None:
    settings = [f"task.path={folder}", "task.max_length=24", "task.stride=6", "epochs=1", "global_batch_size=8"]
    assert finetune(tmp_path, encoder, "task=squad_v2", *settings) == 0
    run = tmp_path / "finetune-squad_v2"
    figures = read_results(run)["figures"]
    assert {"eval/exact", "eval/f1", "eval/best_exact", "eval/best_f1", "eval/score"} <= figures.keys()
    assert figures["eval/best_f1"] >= figures["eval/f1"] == figures["eval/score"]
    answers = json.loads((run / "predictions/validation.json").read_text())
    odds = json.loads((run / "predictions/validation_null_odds.json").read_text())
    assert answers.keys() == odds.keys() == {f"q{row}" for row in range(6)}
    assert all((answers[key] == "") == (odds[key] > 0) for key in odds)
    assert all(text in CONTEXT for text in answers.values())
    golds = {
        f"q{row}": question(row, text)["answers"]["text"]
        for row, text in enumerate(["the farmer", "a wooden boat", None, "the long road", None, "our neighbour"])
    }
    assert squad_figures(golds, answers)["f1"] == pytest.approx(figures["eval/f1"])
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForQuestionAnswering.from_pretrained(run / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert type(model).__name__ == "MegatronBertForQuestionAnswering"


def test_squad_always_answers(encoder: Path, folder: Path, tmp_path: Path) -> None:
    settings = [f"task.path={folder}", "epochs=0.5", "evaluation.batch_size=5"]
    assert finetune(tmp_path, encoder, "task=squad", *settings) == 0  # 384 tokens, cut to the encoder's 64
    run = tmp_path / "finetune-squad"
    assert set(read_results(run)["figures"]) == {"eval/exact", "eval/f1", "eval/score"}
    assert all(json.loads((run / "predictions/validation.json").read_text()).values())
    assert not (run / "predictions/validation_null_odds.json").exists()


def test_padding_takes_no_part_in_the_loss(encoder: Path, folder: Path) -> None:
    import torch

    config = TaskConfig(name="squad", path=str(folder), max_length=24, stride=6, score=["exact"])
    problem = SquadProblem(config, load_tokenizer(encoder / "tokenizer.json", None), (CLS, SEP), 24)
    logits = torch.randn(1, 6, 2)
    output = type("Output", (), {"start_logits": logits[..., 0], "end_logits": logits[..., 1]})
    padded = problem.outputs(output, torch.tensor([[1, 1, 1, 1, 0, 0]]))
    target = torch.tensor([[1, 3]])
    expected = torch.nn.functional.cross_entropy(logits[:, :4], target, reduction="sum") / 2
    torch.testing.assert_close(problem.loss_sum(padded, target), expected)
    assert problem.score({"exact": 0.25, "f1": 0.5}) == 0.25
    with pytest.raises(ConfigError, match="'bleu' is not exact or f1"):
        SquadProblem(
            TaskConfig(name="squad", path=str(folder), score=["bleu"]),
            load_tokenizer(encoder / "tokenizer.json", None),
            (CLS, SEP),
            24,
        )
