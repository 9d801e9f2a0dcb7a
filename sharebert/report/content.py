"""What a report says: its sections, tables and the words between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sharebert.report.arms import Arm
from sharebert.report.compare import (
    SpeedUp,
    Spread,
    final,
    find_twin,
    first_at_or_below,
    paired_difference,
    speed_up,
)
from sharebert.report.page import Section, Table
from sharebert.report.read import Evaluation, Run
from sharebert.report.similarity import LayerSimilarity

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

    @property
    def target(self) -> Spread | None:
        """The baseline's final loss."""
        return None if self.baseline is None else final(self.baseline, loss_of)

    def speed_ups(self) -> list[SpeedUp]:
        """Of every arm but the baseline; empty without a target."""
        if self.baseline is None or self.target is None:
            return []
        others = [arm for arm in self.arms if arm is not self.baseline]
        return [speed_up(arm, self.baseline, self.target.mean) for arm in others]


def show(spread: Spread | None, digits: int, sign: str = "") -> str:
    """``2.1034 ± 0.0021``; without the second part for one value."""
    if spread is None:
        return NONE
    mean = f"{spread.mean:{sign},.{digits}f}"
    return mean if spread.deviation is None else f"{mean} ± {spread.deviation:,.{digits}f}"


def show_hours(hours: float) -> str:
    """Three significant digits."""
    return NONE if hours != hours else f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


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
        "update; means and sample standard deviations (±) are over the seeds that are complete.",
    ]
    if baseline is None:
        text.append("No baseline: no run has unshare=never. --baseline names another run or arm to measure against.")
    else:
        why = "as asked for" if is_named else "the arm that never shares, with most updates"
        names = ", ".join(run.name for run in baseline.runs)
        text.append(f"Baseline: {baseline.name} ({why}), from {names}.")
    text += _warnings(comparison)
    return Section("What was compared", text)


def _warnings(comparison: Comparison) -> list[str]:
    found: dict[tuple[float, ...], list[str]] = {}
    for arm in comparison.arms:
        for run in arm.runs:
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
    head = ["arm", "seeds", "updates", "tokens", "FLOPs", "hours", "held-out loss", "accuracy %"]
    rows = []
    for arm in comparison.arms:
        run, updates, hours = arm.runs[0], arm.config.max_steps, final(arm, hours_of)
        tokens, flops = updates * run.tokens_per_update, updates * run.flops_per_update
        effort = [f"{updates:,}", f"{tokens:,}", f"{flops:.2e}", show_hours(hours.mean) if hours else NONE]
        rows.append(
            [arm.name, show_seeds(arm), *effort, show(final(arm, loss_of), 4), show(final(arm, accuracy_of), 2)]
        )
    return Table(head, rows)


def speed_ups(comparison: Comparison) -> Section:
    """Updates and hours to the baseline's final loss."""
    title, baseline, target = "Speed-up", comparison.baseline, comparison.target
    if baseline is None:
        return Section(title, ["Nothing to measure against: there is no baseline."])
    if target is None:
        return Section(title, [f"No target yet: no run of {baseline.name} is complete."])
    hours = final(baseline, hours_of)
    spent = f" and {show_hours(hours.mean)} hours" if hours else ""
    text = [
        f"Target: {target.mean:.4f} nats, the mean final held-out loss of {baseline.name} "
        f"({count(target.count, 'seed')}), after {baseline.config.max_steps:,} updates{spent}.",
        "A run reaches the target at its first evaluation at or below it; between that evaluation and the one before, "
        "loss and hours are taken to be linear in updates. A ratio (baseline's effort over the arm's mean) is given "
        "only where every run gets there. Hours are those each run measured in its updates: they compare only where "
        "the machine and its load were the same.",
    ]
    head = ["arm", "reached by", "updates", "times fewer", "hours", "times fewer hours", "short by (nats)"]
    rows = []
    for item in comparison.speed_ups():
        ratios = [NONE if ratio is None else f"{ratio:.2f}" for ratio in (item.updates_ratio, item.hours_ratio)]
        there = f"{item.updates.count if item.updates else 0} of {item.num_runs}"
        updates = show(item.updates, 0) if item.updates else "not reached"
        spent = show_hours(item.hours.mean) if item.hours else NONE
        rows.append([item.arm.name, there, updates, ratios[0], spent, ratios[1], show(item.shortfall, 4)])
    if not rows:
        return Section(title, [*text, "No other arm."])
    return Section(title, text, Table(head, rows))


def differences(comparison: Comparison) -> Section | None:
    """Final figures minus those of the baseline and of the twin, paired by seed."""
    head = ["arm", "minus", "seeds", "loss", "accuracy (points)"]
    rows = []
    for arm in comparison.arms:
        twin = find_twin(arm, comparison.arms)
        references = {other.name: other for other in (twin, comparison.baseline) if other is not None}
        for name, reference in references.items():
            loss = paired_difference(arm, reference, loss_of)
            if reference is not arm and loss is not None:
                points = paired_difference(arm, reference, accuracy_of)
                rows.append([arm.name, name, str(loss.count), show(loss, 4, "+"), show(points, 2, "+")])
    if not rows:
        return None
    text = [
        "Final figures minus those of the run with the same seed, and so with the same data order and masks, that "
        "never shares: with equally many updates, and of the baseline. Below zero in loss and above zero in accuracy "
        "is better than it."
    ]
    return Section("Differences by seed", text, Table(head, rows))


def similarity_table(found: Sequence[tuple[str, LayerSimilarity]]) -> Table:
    """The matrices in a few numbers."""
    head = ["arm", "cosine, neighbours", "cosine, all pairs", "lowest", "distance, neighbours", "distance, all pairs"]
    rows = []
    for name, item in found:
        cosine, distance = item.over_pairs(item.cosine), item.over_pairs(item.distance)
        means = (item.adjacent(item.cosine).mean(), cosine.mean(), cosine.min())
        distances = (item.adjacent(item.distance).mean(), distance.mean())
        rows.append([name, *(f"{value:.3f}" for value in (*means, *distances))])
    return Table(head, rows)


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
    return Section("Recipe", ["Where the arms differ, every value that occurs."], Table(["setting", "value"], rows))


def _model(run: Run) -> str:
    model = run.settings.model
    size = f"{model.num_layers} layers, width {model.hidden_size}, {model.num_heads} heads, {model.norm}-norm"
    return f"{model.name}: {size}, dropout {model.dropout:g}, initial std {model.initializer_range:g}"


def _optimizer(run: Run) -> str:
    optim = run.settings.optim
    return f"{optim.name}, peak rate {optim.lr:g}, warm-up {optim.warmup_steps:,}, {optim.schedule}"


def all_runs(comparison: Comparison) -> Table:
    """Every folder that was asked for, with its state."""
    head = ["run", "state", "arm", "seed", "step", "loss", "accuracy %", "hours", "target at update", "note"]
    arms = {run.name: arm.name for arm in comparison.arms for run in arm.runs}
    rows = []
    for run in comparison.runs:
        figures = [NONE] * 4
        if run.evaluations:
            last = run.evaluations[-1]
            figures = [f"{last.loss:.4f}", f"{accuracy_of(last):.2f}", show_hours(last.hours), NONE]
            if comparison.target is not None and run.name in arms:
                reached = first_at_or_below(run.evaluations, comparison.target.mean)
                figures[3] = f"{reached.updates:,.0f}" if reached else NONE
        seed = str(run.config.seed) if run.config is not None else NONE
        rows.append([run.name, run.state, arms.get(run.name, NONE), seed, f"{run.step:,}", *figures, run.note])
    return Table(head, rows)


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def count(number: int, noun: str) -> str:
    """``3 runs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
