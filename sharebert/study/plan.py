"""What the study runs: arms, seeds, and how long that takes."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.tokenizer import expected_vocab_size
from sharebert.compose import compose
from sharebert.config import ConfigError, TrainConfig, from_dict
from sharebert.run_folder import RunFolder
from sharebert.table import markdown_table
from sharebert.unshare_policy import resolve_unshare_step

EXPERIMENTS = {"cpu": "study/characters", "cuda": "study/wordpieces"}
SMALL = (
    *("max_steps=32", "global_batch_size=16", "optim.warmup_steps=4"),
    *("model.num_layers=4", "model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=64"),
    *("evaluation.every_steps=4", "evaluation.max_sequences=100", "logging.every_steps=2"),
)
"""Settings of the same pipeline at a size that says nothing."""
CHECKS = 40
"""Of the correlations, in a run of SWE-A or SWE-M (the paper: 500)."""


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    arm: str
    seed: int
    arguments: tuple[str, ...]
    """Of `sharebert train`."""
    config: TrainConfig
    folder: Path

    @property
    def is_finished(self) -> bool:
        """Whether its folder says so."""
        return RunFolder(self.folder).read_status().get("state") == "finished"

    @property
    def console(self) -> Path:
        """Where its output goes."""
        return self.folder.with_name(f"{self.folder.name}.out")


def study_folder(options: argparse.Namespace) -> Path:
    """Where the runs and the report go: by default a folder for each experiment and size."""
    name = Path(EXPERIMENTS[options.device]).name
    return options.output or Path("outputs/study") / (f"{name}-small" if options.steps == "small" else name)


def arms(max_steps: int) -> dict[str, tuple[str, ...]]:
    """Settings of each arm, for a baseline of `max_steps` updates; the others have half of them, as in the paper.

    SWE-F unshares after a tenth (`unshare.fraction`), as in the paper.
    """
    half = f"max_steps={max_steps // 2}"
    check = f"unshare.check_every={max(1, max_steps // 2 // CHECKS)}"
    return {
        "baseline": ("unshare=never", f"max_steps={max_steps}"),
        "baseline_half": ("unshare=never", half),
        "swe_f": ("unshare=fixed", half),
        "swe_a": ("unshare=adaptive", half, check),
        "swe_m": ("unshare=multi_step", half, check),
        "always": ("unshare=always", half),
    }


def read_arms(path: Path) -> dict[str, tuple[str, ...]]:
    """Settings of each arm in a file of lines `NAME: SETTINGS`; empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read, a line is no arm, or a name comes twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--arm-file={path}: {error}") from error
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, settings = _parse_arm(line, f"--arm-file: {path}, line {number}: {line!r}")
            if name in found:
                raise ConfigError(f"--arm-file: {path}, line {number}: the arm {name!r} stands above already")
            found[name] = settings
    if not found:
        raise ConfigError(f"--arm-file={path}: no arm in it, expected lines 'name: unshare=fixed max_steps=800'")
    return found


def _parse_arm(text: str, origin: str) -> tuple[str, tuple[str, ...]]:
    name, colon, settings = text.partition(":")
    if not (colon and name.strip()):
        raise ConfigError(f"{origin}: expected 'name: unshare=fixed max_steps=800 ...'")
    return name.strip(), tuple(settings.split())


def build_jobs(options: argparse.Namespace) -> list[Job]:
    """Every run, seed by seed, the longest of a seed first; all settings are checked before anything runs.

    Raises:
        ConfigError: a setting is wrong, or an arm is not known.
    """
    common = [f"+experiment={EXPERIMENTS[options.device]}", f"engine.device={options.device}"]
    if options.corpus:
        files = ",".join(f"'{name}'" for name in options.corpus)  # quoted: a name may hold commas or spaces
        common += ["data=text_files", f"data.files=[{files}]"]
    common += [*(SMALL if options.steps == "small" else ()), *options.settings]
    chosen = arms(_compose(common).max_steps) if options.arm_file is None else read_arms(options.arm_file)
    chosen |= dict(_parse_arm(text, f"--arm={text!r}") for text in options.arm)
    if options.arms:
        unknown = [name for name in options.arms if name not in chosen]
        if unknown:
            raise ConfigError(f"--arms: no arm {unknown[0]!r}; expected some of {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in options.arms}
    configs = {name: _compose([*common, *settings]) for name, settings in chosen.items()}
    jobs = []
    for seed in options.seeds or ((1, 2) if options.steps == "small" else (1, 2, 3)):
        for name in sorted(chosen, key=lambda name: -configs[name].max_steps):
            output, run_name = study_folder(options), f"{name}/seed-{seed}"
            where = (f"output_dir={output}", f"run_name={run_name}", f"seed={seed}")
            config = dataclasses.replace(configs[name], output_dir=str(output), run_name=run_name, seed=seed)
            jobs.append(Job(name, seed, (*common, *chosen[name], *where), config, output / run_name))
    return jobs


def _compose(arguments: Sequence[str]) -> TrainConfig:
    (cell,) = compose("train", "train", TrainConfig, arguments).cells
    return from_dict(TrainConfig, cell.values)


def seconds_per_update(config: TrainConfig, num_updates: int = 5) -> float | None:
    """Median of a few unshared updates on random tokens, with one thread on CPU; None without the device."""
    import torch

    from sharebert.bench.contestants import OurUpdate, phase_config, random_corpus
    from sharebert.resolve import resolve

    if config.engine.device == "cuda" and not torch.cuda.is_available():
        return None
    device, threads = torch.device(config.engine.device), torch.get_num_threads()
    config, precision = resolve(config, device, None)
    config = phase_config(config, "unshared", config.global_batch_size)
    tokens = 20 * config.global_batch_size * config.data.seq_len
    with tempfile.TemporaryDirectory() as scratch:
        corpus = random_corpus(Path(scratch), expected_vocab_size(config.data), tokens)
        ours = OurUpdate(config, corpus, device, precision)
        torch.set_num_threads(1 if config.engine.device == "cpu" else threads)
        try:
            ours.update()
            return statistics.median(ours.clock.time(ours.update)["update"] for _ in range(num_updates))
        finally:
            torch.set_num_threads(threads)


def _operations(config: TrainConfig) -> int:
    """Of an update."""
    from sharebert.data.masking import num_slots
    from sharebert.flops import flops_per_update  # imports torch

    slots = num_slots(config.data.seq_len, config.masking.probability)
    sizes = (config.data.seq_len, slots, expected_vocab_size(config.data), config.global_batch_size)
    return flops_per_update(config.model, *sizes)


def _describe(config: TrainConfig) -> str:
    unshare, step = config.unshare, resolve_unshare_step(config)
    checks = f", checks every {unshare.check_every}" if unshare.check_every else ""
    return f"{unshare.policy}{f' at {step:,}' if step else checks}"


def describe_plan(jobs: Sequence[Job], folder: Path, num_parallel: int, seconds: float | None) -> str:
    """What will be run, and for how long.

    Args:
        jobs: all of them.
        folder: of the study.
        num_parallel: jobs at a time.
        seconds: an update of the first job takes; those of others by their operations. None: unknown.
    """
    rows, left = [], 0.0
    for name in dict.fromkeys(job.arm for job in jobs):
        of_arm = [job for job in jobs if job.arm == name]
        config, finished = of_arm[0].config, sum(job.is_finished for job in of_arm)
        tokens = config.max_steps * config.global_batch_size * config.data.seq_len
        hours = (seconds or 0.0) * config.max_steps * _operations(config) / _operations(jobs[0].config) / 3600
        left += hours * (len(of_arm) - finished)
        cost = "?" if seconds is None else f"{hours:.2f}"
        seeds = ", ".join(str(job.seed) for job in of_arm)
        cells = [_describe(config), f"{config.max_steps:,}", f"{tokens:,}", cost, seeds, str(finished)]
        rows.append([name, *cells])
    table = markdown_table(["arm", "unshare", "updates", "tokens", "hours a run", "seeds", "finished"], rows)
    updates = sum(job.config.max_steps for job in jobs if not job.is_finished)
    if seconds is None:
        cost = "there is no CUDA device here, so nothing was timed"
    else:
        cost = f"{seconds:.3f} s an update, measured; {updates:,} updates to go, {num_parallel} run(s) at a time"
        cost += f": about {left / num_parallel:.2f} hours, evaluation and start-up not counted"
    return f"{table}\n\n{cost}\nruns and report: {folder}\n"
