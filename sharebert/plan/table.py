"""The plan of a run, and of a sweep, as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sharebert.files import short_names
from sharebert.run_memory import readable_bytes
from sharebert.table import markdown_table
from sharebert.unshare_policy import describe_least_checks

Plan = Mapping[str, Any]


def describe(plan: Plan) -> str:
    """The plan of one run."""
    where = f"{plan['processes']} process{'es' if plan['processes'] > 1 else ''} on {plan['device']}"
    title = f"{plan['model']}, {where}, {plan['precision']}: nothing was trained or written\n"
    rows = [
        ("unshares", describe_unsharing(plan)),
        *_memory_rows(plan),
        ("work", f"{_operations(plan['flops_per_update'])} an update, {_operations(plan['flops'])} in all"),
        *_time_rows(plan),
        *_data_rows(plan),
        *_file_rows(plan),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}".rstrip() for name, text in rows]
    return "\n".join([title, *_phase_lines(plan), "", *lines])


def _phase_lines(plan: Plan) -> list[str]:
    """One column for each phase."""
    phases = plan["phases"]
    updates = {"shared": plan["shared_updates"], "unshared": plan["max_steps"] - plan["shared_updates"]}
    signs = {"shared": "at least ", "unshared": "at most "} if plan["shared_updates_is_least"] else {}
    table = {
        "updates": [f"{signs.get(phase, '')}{updates[phase]:,}" for phase in phases],
        "unique parameters": [f"{plan['parameters'][f'unique_{phase}']:,}" for phase in phases],
    }
    all_reduce = "all-reduce an update" if plan["processes"] > 1 else "gradients"  # of one size
    device = "GPU" if plan["device"] == "cuda" else "process"
    names = (f"memory of a {device}", all_reduce, "checkpoint")
    for name, key in zip(names, ("memory_bytes_by_phase", "all_reduce_bytes", "checkpoint_bytes"), strict=True):
        table[name] = [readable_bytes(plan[key][phase]) for phase in phases]
    first = max(map(len, table))
    widths = [max(len(phase), *(len(cells[place]) for cells in table.values())) for place, phase in enumerate(phases)]

    def line(name: str, cells: list[str]) -> str:
        return f"{name:<{first}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    return [line("", phases), *(line(name, cells) for name, cells in table.items())]


def describe_unsharing(plan: Plan) -> str:
    """When the layers stop sharing."""
    policy, shared = plan["unshare_policy"], plan["shared_updates"]
    if plan["phases"] == ["unshared"]:
        return "nothing is shared" if policy == "never" else "from the first update on"
    if plan["phases"] == ["shared"]:
        if policy == "always":
            return "never: the layers share to the end"
        takes = describe_least_checks(plan["patience"], plan["check_every"], plan["earliest_step"])
        return f"never: that would take {takes}".replace(", none", ",\n          none")
    if policy == "fixed":
        return f"at update {shared + 1:,} ({shared / plan['max_steps']:.1%} of the updates are shared)"
    who = "all layers, when over half of the" if policy == "adaptive" else "group by group, where"
    latest = "" if plan["latest_step"] is None else f", at update {plan['latest_step']:,} at the latest"
    lines = [
        f"{who} adjacent layers' gradients correlate below {plan['threshold']:g}",
        f"in {plan['patience']} checks in a row, which come every {plan['check_every']:,} updates",
        f"not before update {shared + 1:,}{latest}",
    ]
    return "\n          ".join(lines)


def _memory_rows(plan: Plan) -> list[tuple[str, str]]:
    count = plan["micro_batches_per_update"]
    times = f"{count:,} x " if count > 1 else ""
    kept = ", activations recomputed" if plan["activation_checkpointing"] else ""
    used = f"{readable_bytes(plan['memory_bytes'])} with {times}{plan['micro_batch_size']:,} sequences an update{kept}"
    if plan["memory_limit_bytes"] is None:
        return [("memory", used), ("", "no GPU here to compare it with: say --memory-gib")]
    limit = readable_bytes(plan["memory_limit_bytes"]) + (" given" if plan["memory_limit_is_given"] else " free here")
    if plan["fits"]:
        return [
            ("memory", used),
            ("", f"fits into the {limit}; so does engine.micro_batch_size={plan['largest_micro_batch_size']:,}")
            if plan["largest_micro_batch_size"] > plan["micro_batch_size"]
            else ("", f"fits into the {limit}"),
        ]
    return [("memory", used), ("", f"DOES NOT FIT into the {limit}"), ("", plan["advice"])]


def _time_rows(plan: Plan) -> list[tuple[str, str]]:
    if plan["tokens_per_second"] is None:
        return [("time", "no GPU here to tell: say --tflops or --tokens-per-second (`sharebert bench` measures it)")]
    rate = f"{plan['tokens_per_second']:,.0f} tokens/s"
    if plan["rate_is_given"]:
        return [("time", f"{_cost(plan)} at the given {rate}")]
    share, peak = plan["assumed_peak_share"], plan["matmul_peak_gflops"]
    return [
        ("time", f"about {_cost(plan)} at an assumed {rate},"),
        ("", f"{share:.0%} of the matmul peak just measured here ({peak:,.0f} GFLOP/s){_share_of_peak(plan)};"),
        ("", "`sharebert bench` measures the rate itself, --tokens-per-second takes it"),
    ]


def _share_of_peak(plan: Plan) -> str:
    if plan["processes"] == 1:
        return ""
    return " in each process" if plan["device"] == "cuda" else f", which {plan['processes']} processes share"


def _data_rows(plan: Plan) -> list[tuple[str, str]]:
    batch = f"{plan['global_batch_size']:,} x {plan['seq_len']:,} tokens an update"
    rows = [("data", f"{batch}; {plan['sequences']:,} sequences, {plan['tokens']:,} tokens in all")]
    if plan["epochs"] is None:
        found = "not found prepared" if plan["corpus_was_looked_for"] else "not looked for, which may take long"
        return [*rows, ("", f"corpus {found}; vocabulary of {plan['vocab_size']:,} expected")]
    found = f"{plan['epochs']:,.1f} epochs of {plan['corpus_sequences']:,} sequences"
    return [*rows, ("", f"{found}, vocabulary {plan['vocab_size']:,}"), ("", plan["corpus"])]


def _file_rows(plan: Plan) -> list[tuple[str, str]]:
    kept, free, most = plan["checkpoints_kept"], plan["disk_free_bytes"], plan["disk_bytes_at_most"]
    figures = f"metrics.jsonl ({readable_bytes(plan['metrics_bytes'])})"
    space = f"{readable_bytes(most)} while the last is written, {readable_bytes(free)} free"
    rows = [
        ("writes", plan["run_folder"]),
        ("", f"{figures}, config.yaml, status.json, log.txt, curves.png, share_map.png"),
        ("", f"checkpoints: {kept:,} kept, {readable_bytes(plan['checkpoints_bytes'])}; {space}"),
    ]
    if most > free:
        rows.append(("", "TOO LITTLE: a smaller checkpoint.keep_last or larger checkpoint.keep_every keeps fewer"))
    if step := plan["continues_from_step"]:
        rows.insert(1, ("", f"holds a run: `train` goes on from step {step:,}"))
    return rows


def _cost(plan: Plan) -> str:
    """How long, and for all GPUs together."""
    text = duration(plan["hours"])
    several_gpus = plan["device"] == "cuda" and plan["processes"] > 1
    return f"{text}, {plan['device_hours']:,.0f} GPU-hours" if several_gpus else text


def duration(hours: float) -> str:
    """A time that people can imagine."""
    if hours < 1:
        return f"{max(1, round(hours * 60)):,} min"
    return f"{hours:,.1f} h" if hours < 48 else f"{hours:,.0f} h ({hours / 24:,.0f} days)"


def _operations(count: int) -> str:
    """Operations with a prefix."""
    power = min(6, int(math.log10(count)) // 3)
    return f"{count / 1000**power:,.1f} {['', 'K', 'M', 'G', 'T', 'P', 'E'][power]}FLOP"


def describe_sweep(sweep: Mapping[str, Any]) -> str:
    """A row for each run, and what a shared prefix saves."""
    prefix = sweep["prefix"]
    header = ["run", "parameters", "shared updates", "prefix", "memory", "time", "disk"]
    cells = sweep["cells"]
    names = _names([Path(plan["run_folder"]) for plan in cells])
    rows = [_cell_row(*cell) for cell in zip(names, cells, prefix["starts_from"], strict=True)]
    unfit = [f"{name}: {plan['advice']}" for name, plan in zip(names, cells, strict=True) if plan["advice"]]
    lines = [markdown_table(header, rows), "", _saving(prefix)]
    return "\n".join([*lines, *(f"does not fit: {text}" for text in unfit)])


def _names(folders: Sequence[Path]) -> list[str]:
    """What tells the runs apart: their last folder, or that of their experiment where the last is the same in all."""
    if len({folder.name for folder in folders}) == 1 < len({*folders}):
        return _names([folder.parent for folder in folders])
    return short_names(folders)


def _cell_row(name: str, plan: Plan, starts_from: int) -> list[str]:
    parameters = plan["parameters"]
    millions = [f"{parameters[f'unique_{phase}'] / 1e6:,.1f} M" for phase in plan["phases"]]
    least = "at least " if plan["shared_updates_is_least"] else ""
    return [
        name,
        " / ".join(millions),
        f"{least}{plan['shared_updates']:,} of {plan['max_steps']:,}",
        f"{starts_from:,}" if starts_from else "-",
        f"{readable_bytes(plan['memory_bytes'])}{'' if plan['fits'] is not False else ' !'}",
        "-" if plan["hours"] is None else _cost(plan),
        readable_bytes(plan["disk_bytes_at_most"]),
    ]


def _saving(prefix: Mapping[str, Any]) -> str:
    """What shared prefixes save, in one line."""
    saved, total = prefix["shared_updates_saved"], prefix["updates"]
    if not saved:
        return "no shared prefix in common: every run trains all of its updates"
    least = "at least " if prefix["is_least"] else ""
    text = f"shared prefixes are trained once: {least}{saved:,} of {total:,} updates saved ({saved / total:.1%})"
    if prefix["hours"] is None:
        return text
    return f"{text}, {duration(prefix['hours_saved'])} of {duration(prefix['hours'])}"
