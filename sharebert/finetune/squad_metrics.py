"""The official figures of SQuAD: exact match and F1 on the original text, and the best threshold for no answer.

As in the evaluation script of SQuAD 2.0 (Rajpurkar, Jia, Liang 2018), whose figures for questions that all have an
answer are those of the script of 1.1. From 0 to 1, not in percent.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> float:
    """1 where both are the same after normalisation."""
    return float(normalize_answer(gold) == normalize_answer(predicted))


def f1(gold: str, predicted: str) -> float:
    """F1 of the words; where either side has none, whether both have none."""
    gold_words, predicted_words = normalize_answer(gold).split(), normalize_answer(predicted).split()
    common = sum((Counter(gold_words) & Counter(predicted_words)).values())
    if not gold_words or not predicted_words:
        return float(gold_words == predicted_words)
    # 2pr / (p + r) with p = common / predicted and r = common / gold
    return 2 * common / (len(gold_words) + len(predicted_words))


def best_over_golds(measure: Callable[[str, str], float], golds: Sequence[str], predicted: str) -> float:
    """The best figure over the gold answers; no gold answer: the empty one is right."""
    answers = [gold for gold in golds if normalize_answer(gold)] or [""]
    return max(measure(gold, predicted) for gold in answers)


def squad_figures(golds: Mapping[str, Sequence[str]], predicted: Mapping[str, str]) -> dict[str, float]:
    """Mean exact match and F1 over the questions.

    Args:
        golds: gold answers of each question's id.
        predicted: one answer for each of the same ids, "" for none.
    """
    return {
        name: sum(best_over_golds(measure, golds[key], predicted[key]) for key in golds) / len(golds)
        for name, measure in (("exact", exact_match), ("f1", f1))
    }


def best_threshold(
    golds: Mapping[str, Sequence[str]], answers: Mapping[str, str], null_odds: Mapping[str, float], figure: str
) -> tuple[float, float]:
    """The best value of a figure over the thresholds, and its threshold: no answer where the odds are above it.

    As the official script does, questions are answered one after the other, by rising odds, and the best value so far
    is kept. Among questions of exactly the same odds that may be after some of them, where no threshold stops.

    Args:
        golds: gold answers of each question's id.
        answers: the best answer that is not empty of each.
        null_odds: score of no answer less that of the best answer.
        figure: `exact` or `f1`.
    """
    measure = exact_match if figure == "exact" else f1
    # At a threshold below all odds nothing is answered.
    current = float(sum(not any(map(normalize_answer, golds[key])) for key in golds))
    best, threshold = current, float("-inf")
    for key in sorted(golds, key=lambda key: null_odds[key]):
        current += best_over_golds(measure, golds[key], answers[key]) - best_over_golds(measure, golds[key], "")
        if current > best:
            best, threshold = current, null_odds[key]
    return best / len(golds), threshold
