"""What a report says: its sections, tables and the words between them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sharebert.report.arms import Arm, common_unsharing, describe_usual
from sharebert.report.compare import (
    Reached,
    SpeedUp,
    Spread,
    final,
    find_goal,
    find_twin,
    first_at_or_below,
    paired_difference,
    speed_up,
    spread,
)
from sharebert.report.page import Section, Table
from sharebert.report.read import Evaluation, Run

NONE = "-"


def loss_of(point: Evaluation) -> float:
    """Held-out loss, nats."""
    return point.loss


def accuracy_of(point: Evaluation) -> float:
    """Masked-LM accuracy, percent."""
    return 100 * point.accuracy


def hours_of(point: Evaluation) -> float:
    """Hours in updates."""
    return point.hours


@dataclass(frozen=True)
class Comparison:
    """All that is compared."""

    runs: list[Run]
    arms: list[Arm]
    baseline: Arm | None
    remarks: list[str]
    """On runs that do not count."""

    def speed_ups(self) -> list[SpeedUp]:
        """Of every arm but the baseline; empty without one that has a complete run."""
        if self.baseline is None or not self.baseline.complete:
            return []
        return [speed_up(arm, self.baseline) for arm in self.arms if arm is not self.baseline]

    def reached(self, run: Run) -> Reached | None:
        """Where a run comes down to the baseline's final loss of its seed, complete or not."""
        goal = None if self.baseline is None else find_goal(run.settings.seed, self.baseline)
        return None if goal is None else first_at_or_below(run.evaluations, goal.loss)

    def references(self, arm: Arm) -> list[Arm]:
        """Arms that `arm` is compared with seed by seed: its twin that never shares, and the baseline."""
        found = {other.name: other for other in (find_twin(arm, self.arms), self.baseline) if other is not None}
        return [other for other in found.values() if other is not arm]


def show(spread: Spread | None, digits: int, sign: str = "") -> str:
    """``2.1034 ± 0.0021``; without the second part for one value."""
    if spread is None:
        return NONE
    mean = f"{spread.mean:{sign},.{digits}f}"
    return mean if spread.deviation is None else f"{mean} ± {spread.deviation:,.{digits}f}"


def show_hours(hours: Spread | None) -> str:
    """Three significant digits of the mean."""
    size = math.floor(math.log10(hours.mean)) if hours is not None and hours.mean > 0 else 0
    return show(hours, min(max(2 - size, 0), 6))


def show_updates(steps: Sequence[int]) -> str:
    """Some updates by number; of many the first and the last."""
    if len(steps) > 3:
        return f"{steps[0]:,} to {steps[-1]:,} ({len(steps)} times)"
    return ", ".join(f"{step:,}" for step in steps) or NONE


def show_unsharing(arm: Arm) -> str:
    """Mean over the complete runs of the update that unshares; of the first and the last where there are several."""
    points = [run.unshare_points for run in arm.complete if run.unshare_points]
    first, last = (show(spread(float(steps[place]) for steps in points), 0) for place in (0, -1))
    shown = first if all(len(steps) == 1 for steps in points) else f"{first} to {last}"
    return shown if len(points) in (0, len(arm.complete)) else f"{shown} ({len(points)} of {len(arm.complete)} seeds)"


def show_seeds(arm: Arm) -> str:
    """How many seeds are complete, and of how many where that is not all."""
    complete, begun = len(arm.complete), len(arm.runs)
    return str(begun) if complete == begun else f"{complete} of {begun}"


def summary(comparison: Comparison, is_named: bool) -> Section:
    """What was compared, by which rules, and what a reader has to be warned of."""
    runs, arms, baseline = comparison.runs, comparison.arms, comparison.baseline
    counted = sum(len(arm.runs) for arm in arms)
    text = [
        f"{count(len(runs), 'run')}, {counted} of them with held-out figures, in {count(len(arms), 'arm')}. "
        "Runs that are equal in all but the seed are one arm. A final figure is that of the evaluation after the last "
        "update of a finished run; means and sample standard deviations (±) are over the complete seeds. Runs in any "
        "other state do not count in a mean. A mean of hours is left out where one of the runs does not say its own.",
    ]
    if baseline is None:
        text.append("No baseline: no run has unshare=never. --baseline names another run or arm to measure against.")
    else:
        why = "as asked for" if is_named else "of those that never share, that with most updates; complete ones first"
        names = ", ".join(run.name + ("" if run.is_complete else " (not complete)") for run in baseline.runs)
        text.append(f"Baseline: {baseline.name} ({why}), from {names}.")
    if usual := describe_usual(arms):
        text.append(f"Where the name of an arm does not say otherwise: {usual}.")
    if importlib.util.find_spec("matplotlib") is None:
        text.append("The pictures are missing: they need matplotlib. pip install 'sharebert[plot]', and report again.")
    text += _warnings(comparison)
    return Section("What was compared", text)


def _warnings(comparison: Comparison) -> list[str]:
    found: dict[tuple[float, ...], list[str]] = {}
    for arm in comparison.arms:
        for run in arm.runs:
            if run.held_out:  # else it does not say
                found.setdefault(run.held_out, []).append(run.name)
    texts = []
    if len(found) > 1:
        groups = "; ".join(", ".join(names) for names in found.values())
        texts.append(
            f"Warning: these runs were not evaluated on the same held-out tokens, so their losses and "
            f"accuracies cannot be compared: {groups}."
        )
    if any(len(arm.complete) == 1 for arm in comparison.arms):
        texts.append("Warning: an arm of one seed has no spread; a difference from it may be chance.")
    return texts + [f"Note: {remark}." for remark in comparison.remarks]


def finals(comparison: Comparison) -> Table:
    """Final figures of every arm, with the effort they took."""
    head = ["arm", "seeds", "updates", "unshared at", "tokens", "FLOPs", "hours", "held-out loss", "accuracy %"]
    rows = []
    for arm in comparison.arms:
        run, updates = arm.runs[0], arm.config.max_steps
        tokens, flops = updates * run.tokens_per_update, updates * run.flops_per_update
        effort = [f"{updates:,}", show_unsharing(arm), f"{tokens:,}", f"{flops:.2e}", show_hours(final(arm, hours_of))]
        figures = [show(final(arm, loss_of), 4), show(final(arm, accuracy_of), 2)]
        rows.append([arm.name, show_seeds(arm), *effort, *figures])
    return Table(head, rows)


def speed_ups(comparison: Comparison) -> Section:
    """Updates and hours to the baseline's final loss."""
    title, baseline = "Speed-up", comparison.baseline
    if baseline is None:
        return Section(title, ["Nothing to measure against: there is no baseline."])
    if not baseline.complete:
        return Section(title, [f"No target yet: no run of {baseline.name} is complete."])
    text, found = _rules(baseline), comparison.speed_ups()
    alone = [race.run.name for item in found for race in item.races if not race.goal.is_of_seed]
    if alone:
        text.append(
            f"Note: {baseline.name} has no complete run of the seed of {', '.join(alone)}: their target is the mean of "
            "its final losses, and their ratios are of the mean of its updates and hours."
        )
    if not found:
        return Section(title, [*text, "No other arm."])
    if any(item.differs_in for item in found):
        text.append(
            "Note: where an arm differs from the baseline in more than unsharing and updates (last column), a ratio "
            "says nothing of sharing alone; with another model, batch or length, an update is not the same work, and "
            "with another text, vocabulary or masking, losses cannot be compared."
        )
    head = ["arm", "seeds", "get there", "updates", "times fewer", "hours", "times fewer hours", "short by (nats)"]
    return Section(title, text, Table([*head, "also differs in"], [_speed_up_row(item) for item in found]))


def _rules(baseline: Arm) -> list[str]:
    own = speed_up(baseline, baseline)
    return [
        f"Target of a run: the final held-out loss of the run of {baseline.name} with the same seed; their mean is "
        f"{show(final(baseline, loss_of), 4)} nats ({count(len(own.races), 'seed')}). A run gets there at its first "
        "evaluation at or below the target; between that evaluation and the one before, loss and hours are taken to be "
        f"linear in updates. By the same rule the baseline itself gets there at update {show(own.updates, 0)}, after "
        f"{show_hours(own.hours)} hours.",
        "Only complete runs count. Updates and hours are means over those that get there; short by is the final loss "
        "minus the target, over those that do not. A ratio is the baseline's effort over the run's, seed by seed, and "
        "is given only where every complete run gets there. Hours are those each run measured in its updates: they "
        "compare only where the machine and its load were the same.",
    ]


def _speed_up_row(item: SpeedUp) -> list[str]:
    complete = ", ".join(str(race.run.settings.seed) for race in item.races) or "none"
    others = ", ".join(str(run.settings.seed) for run in item.arm.runs if run not in item.arm.complete)
    seeds = f"{complete} (not complete: {others})" if others else complete
    there = f"{len(item.reached)} of {len(item.races)}" if item.races else NONE
    updates = show(item.updates, 0) if item.reached or not item.races else "not reached"
    ratios = [show(item.updates_ratio, 2), show(item.hours_ratio, 2)]
    effort = [updates, ratios[0], show_hours(item.hours), ratios[1], show(item.shortfall, 4)]
    return [item.arm.name, seeds, there, *effort, ", ".join(item.differs_in) or NONE]


def differences(comparison: Comparison) -> Section | None:
    """Final figures minus those of the twin and of the baseline, paired by seed."""
    rows = []
    for arm in comparison.arms:
        for reference in comparison.references(arm):
            loss = paired_difference(arm, reference, loss_of)
            if loss is not None:
                points = paired_difference(arm, reference, accuracy_of)
                rows.append([arm.name, reference.name, str(loss.count), show(loss, 4, "+"), show(points, 2, "+")])
    if not rows:
        return None
    text = [
        "Final figures minus those of the run with the same seed, and so with the same data order and masks: of the "
        "arm that never shares, equal in all else and in the number of updates, and of the baseline. Below zero in "
        "loss and above zero in accuracy is better than it."
    ]
    return Section("Differences by seed", text, Table(["arm", "minus", "seeds", "loss", "accuracy (points)"], rows))


def recipe(comparison: Comparison) -> Section:
    """Settings that a reader asks for first; where arms differ, every value."""
    runs = [run for arm in comparison.arms for run in arm.runs]
    lines: list[tuple[str, Callable[[Run], str]]] = [
        ("model", lambda run: _model(run)),
        (
            "text",
            lambda run: " ".join((run.settings.data.hf_path or run.settings.data.source, *run.settings.data.files)),
        ),
        ("vocabulary", lambda run: f"{run.vocab_size:,}"),
        ("batch", lambda run: f"{run.settings.global_batch_size} sequences of {run.settings.data.seq_len} tokens"),
        ("optimizer", lambda run: _optimizer(run)),
        ("held-out tokens predicted", lambda run: f"{run.held_out[0]:,.0f}" if run.held_out else NONE),
        ("arithmetic", lambda run: f"{run.settings.engine.precision} on {run.settings.engine.device}"),
        ("code", lambda run: run.commit[:12] + ("-dirty" if run.commit.endswith("-dirty") else "") or "unknown"),
    ]
    rows = [[name, "; ".join(_distinct(of(run) for run in runs))] for name, of in lines]
    common = common_unsharing(comparison.arms)
    same = ", ".join(f"{key} {'null' if value is None else value}" for key, value in common.items())
    rows.append(["unsharing", same or NONE])
    text = "Where the arms differ, every value that occurs; of unsharing, what all arms that look at it have in common."
    return Section("Recipe", [text], Table(["setting", "value"], rows))


def _model(run: Run) -> str:
    model = run.settings.model
    size = f"{model.num_layers} layers, width {model.hidden_size}, {model.num_heads} heads, {model.norm}-norm"
    return f"{model.name}: {size}, dropout {model.dropout:g}, initial std {model.initializer_range:g}"


def _optimizer(run: Run) -> str:
    optim = run.settings.optim
    return f"{optim.name}, peak rate {optim.lr:g}, warm-up {optim.warmup_steps:,}, {optim.schedule}"


def all_runs(comparison: Comparison) -> Table:
    """Every folder that was asked for, with its state."""
    head = ["run", "state", "arm", "seed", "step", "unshared at", "loss", "accuracy %", "hours", "target at update"]
    arms = {run.name: arm.name for arm in comparison.arms for run in arm.runs}
    rows = []
    for run in comparison.runs:
        figures = [show_updates(run.unshare_points), *[NONE] * 4]
        if run.evaluations:
            last, reached = run.evaluations[-1], comparison.reached(run) if run.name in arms else None
            hours, updates = show_hours(spread([last.hours])), f"{reached.updates:,.0f}" if reached else NONE
            figures[1:] = [f"{last.loss:.4f}", f"{accuracy_of(last):.2f}", hours, updates]
        seed = str(run.config.seed) if run.config is not None else NONE
        rows.append([run.name, run.state, arms.get(run.name, NONE), seed, f"{run.step:,}", *figures, run.note])
    return Table([*head, "note"], rows)


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def count(number: int, noun: str) -> str:
    """``3 runs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
