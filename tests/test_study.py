"""The study's driver: its arms and plan, its runs side by side, and the whole of it at a size that says nothing."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import small_config
from omegaconf import OmegaConf

from data_prep.tokenizer import load_given_tokenizer, vocabulary_size
from sharebert import pretrain as pretrain_module
from sharebert.cli import main as sharebert
from sharebert.compose import compose
from sharebert.config import ConfigError, TrainConfig, flatten, from_dict, to_dict
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE
from sharebert.study import runs
from sharebert.study.__main__ import main, parse
from sharebert.study.plan import Job, arms, build_jobs, describe_plan, read_arms, seconds_per_update
from sharebert.study.runs import environment, run_jobs

ROOT = Path(__file__).parent.parent
REGIMES = sorted((ROOT / "conf/experiment/study").glob("*.yaml"))


def jobs_of(*arguments: str) -> list[Job]:
    """The jobs of a command line."""
    return build_jobs(parse(arguments))


# ---------------------------------------------------------------------- regimes


@pytest.mark.parametrize("path", REGIMES, ids=lambda path: path.stem)
def test_a_regime_opens_with_its_command_and_gives_way_to_every_choice(path: Path) -> None:
    first, second, *_ = path.read_text().splitlines()
    assert first == "# @package _global_"
    words = shlex.split(second.removeprefix("# "))
    assert words[:3] == ["sharebert", "train", f"+experiment=study/{path.stem}"]
    compose("train", "train", TrainConfig, words[2:])
    content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    assert all(key.startswith("override /") for default in content.pop("defaults") for key in default)
    for unshare, data in (("fixed", "text_files"), ("adaptive", "python_docs")):
        choices = [f"+experiment=study/{path.stem}", f"unshare={unshare}", f"data={data}", "data.files=[a.txt]"]
        (cell,) = compose("train", "train", TrainConfig, choices).cells
        config = from_dict(TrainConfig, cell.values)
        assert (config.unshare.policy, config.data.source) == (unshare, data)
        result = flatten(to_dict(config))
        assert {key: result[key] for key in flatten(content)} == pytest.approx(flatten(content))


def test_the_vocabulary_of_characters_is_found_from_anywhere_and_splits_words_into_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (job,) = jobs_of("--arms", "baseline", "--seeds", "1")
    tokenizer = load_given_tokenizer(Path(str(job.config.data.tokenizer)), lowercase=True)
    assert tokenizer.encode("It's 4 é", add_special_tokens=False).tokens == ["i", "##t", "'", "s", "4", "e"]
    assert vocabulary_size(tokenizer) == 5 + 26 + 10 + 32 + 36


# ---------------------------------------------------------------------- plan


@pytest.fixture(scope="module")
def all_jobs() -> list[Job]:
    """All arms and one more, two seeds."""
    return jobs_of("--seeds", "5", "7", "--arm", "late: unshare=fixed max_steps=800 unshare.step=400")


def test_runs_of_a_seed_differ_in_unsharing_and_updates_only(all_jobs: list[Job]) -> None:
    jobs = [job for job in all_jobs if job.arm != "late"]
    assert [job.seed for job in jobs] == [5] * 6 + [7] * 6
    assert [job.config.max_steps for job in jobs[:6]] == [1600, *[800] * 5]
    assert {job.arm for job in jobs} == set(arms(1600))
    free = ("unshare.", "max_steps", "run_name")
    settings = [
        {key: value for key, value in flatten(to_dict(job.config)).items() if not key.startswith(free)}
        for job in jobs[:6]
    ]
    assert all(other == settings[0] for other in settings)
    assert len({job.folder for job in jobs}) == 12
    assert jobs[0].folder == Path("outputs/study/characters/baseline/seed-5")


def test_what_a_job_runs_is_what_its_configuration_says(all_jobs: list[Job]) -> None:
    job = all_jobs[-1]
    (cell,) = compose("train", "train", TrainConfig, job.arguments).cells
    assert (from_dict(TrainConfig, cell.values), cell.folder) == (job.config, job.folder)


def test_arms_can_be_added_and_chosen(all_jobs: list[Job]) -> None:
    assert {job.config.unshare.step for job in all_jobs if job.arm == "late"} == {400}
    with pytest.raises(ConfigError, match="expected 'name: unshare=fixed"):
        jobs_of("--arm", ": unshare=fixed")
    with pytest.raises(ConfigError, match="no arm 'swef'; expected some of baseline, "):
        jobs_of("--arms", "swef")
    with pytest.raises(ConfigError, match="expected 'name: "):
        jobs_of("--arm", "late")


def test_arms_come_from_a_file_in_place_of_the_studys_own(tmp_path: Path) -> None:
    file = tmp_path / "arms.txt"
    file.write_text("# late\n\nearly: unshare=fixed unshare.step=5\n deep : unshare=never model.num_layers=24\n")
    jobs = jobs_of("--arm-file", str(file), "--arm", "late: unshare=fixed unshare.step=9", "--seeds", "4")
    assert {(job.arm, job.config.unshare.step, job.config.model.num_layers) for job in jobs} == {
        ("early", 5, 12),
        ("late", 9, 12),
        ("deep", None, 24),
    }
    assert {job.arm for job in jobs_of("--arm-file", str(file), "--arms", "deep", "--seeds", "4")} == {"deep"}
    for content, message in (
        ("a: unshare=never\nb unshare=never\n", r"arms.txt, line 2: 'b unshare=never': expected 'name: "),
        ("a: unshare=never\n\na: unshare=fixed\n", "line 3: the arm 'a' stands above already"),
        ("# nothing\n", "no arm in it"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            jobs_of("--arm-file", str(file))
    with pytest.raises(ConfigError, match=r"--arm-file=.*none\.txt: .*No such file"):
        jobs_of("--arm-file", str(tmp_path / "none.txt"))


def test_the_regimes_of_the_repository_are_arms() -> None:
    path = ROOT / "conf/experiment/study/regimes.txt"
    found = read_arms(path)
    assert len(found) > 30
    of_keys = {tuple(setting.split("=")[0] for setting in settings): name for name, settings in found.items()}
    jobs = jobs_of("--arm-file", str(path), "--seeds", "1", "--arms", *of_keys.values())  # one with the same keys
    assert len(jobs) == len(of_keys) > 8


def test_a_corpus_settings_and_the_device_reach_every_run() -> None:
    flags = ["--device", "cuda", "--corpus", "a.txt", "b.txt", "--arms", "baseline", "always", "--seeds", "1"]
    jobs = jobs_of(*flags, "--settings", "optim.lr=5e-4")
    for job in jobs:
        assert (job.config.data.files, job.config.optim.lr) == (["a.txt", "b.txt"], 5e-4)
        assert job.config.engine.device == "cuda"
    tokens = jobs[0].config.max_steps * jobs[0].config.global_batch_size * jobs[0].config.data.seq_len
    assert tokens == pytest.approx(1e8, rel=0.01)
    assert environment("cpu", {"A": "1"}) == {"A": "1", "OMP_NUM_THREADS": "1"}
    assert environment("cuda", {"A": "1"}) == {"A": "1"}


def test_the_plan_says_what_will_run_and_for_how_long(all_jobs: list[Job], tmp_path: Path) -> None:
    chosen = [job for job in all_jobs if job.arm in ("baseline", "swe_f", "swe_a")]
    jobs = [dataclasses.replace(job, folder=tmp_path / job.folder) for job in chosen]
    jobs[0].folder.mkdir(parents=True)
    (jobs[0].folder / "status.json").write_text('{"state": "finished", "step": 1600, "reason": ""}')
    text = re.sub(" +", " ", describe_plan(jobs, tmp_path, 2, seconds=0.9))
    assert "| baseline | never | 1,600 | 3,276,800 | 0.40 | 5, 7 | 1 |" in text
    assert "| swe_f | fixed at 80 | 800 | 1,638,400 | 0.20 | 5, 7 | 0 |" in text
    assert "| swe_a | adaptive, checks every 20 | 800 |" in text
    assert "4,800 updates to go, 2 run(s) at a time: about 0.60 hours" in text  # 1,600 + 4 x 800
    deep = dataclasses.replace(jobs[-1], arm="deep", config=jobs_of("--settings", "model.num_layers=24")[0].config)
    row = next(line for line in describe_plan([*jobs, deep], tmp_path, 2, 0.9).splitlines() if "| deep" in line)
    assert float(row.split("|")[5]) == pytest.approx(0.8, rel=0.1)  # 24 layers instead of 12
    assert "no CUDA device" in describe_plan(jobs, tmp_path, 1, seconds=None)


# ---------------------------------------------------------------------- runs side by side


def plain_jobs(folder: Path, *names: str) -> list[Job]:
    """A job for each name, in this order."""
    return [Job(name, seed, (), TrainConfig(), folder / name / f"{seed}") for seed, name in enumerate(names)]


def short_processes(monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]) -> list[str]:
    """Let each arm run a line of Python in place of `sharebert train`; the names of the jobs begun."""
    begun = []

    def start(job: Job, device: str) -> subprocess.Popen[bytes]:
        begun.append(f"{job.arm} {job.seed}")
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        job.console.write_text("first\nlast line\n")
        return subprocess.Popen([sys.executable, "-S", "-c", programs.get(job.arm, "")])

    monkeypatch.setattr(runs, "start", start)
    return begun


@pytest.mark.processes
def test_a_failed_run_is_shown_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = short_processes(monkeypatch, {"swe_f": "raise SystemExit(3)"})
    outcome = run_jobs(plain_jobs(tmp_path, "baseline", "swe_f", "baseline", "swe_f"), 2, "cpu")
    assert begun == ["baseline 0", "swe_f 1", "baseline 2", "swe_f 3"]
    assert [job.arm for job in outcome.failed] == ["swe_f", "swe_f"]
    assert not outcome.is_stopped
    shown = capsys.readouterr().out
    assert "swe_f seed 1: failed with status 3" in shown
    assert "last line" in shown
    assert shown.count("finished") == 2


@pytest.mark.processes
def test_a_stop_is_passed_on_and_nothing_else_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(60)"
    begun = short_processes(monkeypatch, {"baseline": stops})
    outcome = run_jobs(plain_jobs(tmp_path, "baseline", "always"), 1, "cpu")
    assert outcome.is_stopped
    assert begun == ["baseline 0"]


@pytest.mark.processes
def test_a_run_that_was_stopped_stops_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = short_processes(monkeypatch, {"baseline": f"raise SystemExit({EXIT_STOPPED})"})
    assert run_jobs(plain_jobs(tmp_path, "baseline", "always"), 1, "cpu").is_stopped
    assert begun == ["baseline 0"]


# ---------------------------------------------------------------------- all of it


@pytest.fixture(scope="module")
def small_jobs(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> list[Job]:
    """A tiny study of two arms and one seed."""
    folder = tmp_path_factory.mktemp("study")
    few = ["max_steps=8", "model.num_layers=2", "data.num_proc=1", f"data.cache_dir={folder}/cache"]
    flags = ["--steps", "small", "--seeds", "1", "--arms", "baseline_half", "swe_f", "--corpus", str(text_file)]
    return jobs_of(*flags, "--settings", *few)


@pytest.fixture
def here(small_jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder where the study runs in this process and draws nothing."""

    def start(job: Job, device: str) -> argparse.Namespace:
        assert device == "cpu"
        status = sharebert(["train", *job.arguments])
        return argparse.Namespace(poll=lambda: status, returncode=status)

    monkeypatch.setattr(runs, "start", start)
    monkeypatch.setattr("sharebert.study.__main__.build_jobs", lambda options: small_jobs)
    monkeypatch.setattr("sharebert.study.__main__.seconds_per_update", lambda config: 0.5)
    monkeypatch.setattr("sharebert.report.draw.new_figure", lambda *_: None)
    monkeypatch.setattr(pretrain_module, "measure_matmul_peak", lambda device, dtype: 1e12)
    monkeypatch.setattr(pretrain_module, "draw_curves", lambda run: None)
    monkeypatch.setattr(pretrain_module, "draw_share_map", lambda run, unit_layers, threshold: None)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_study_prints_its_plan_runs_reports_and_is_then_finished(
    here: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--steps", "small", "--valid", str(text_file)]
    assert main([*flags, "--dry-run"]) == EXIT_FINISHED
    assert "8 updates to go" in capsys.readouterr().out
    assert not (here / "outputs").exists()
    assert main(flags) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert shown.index("updates to go") < shown.index("baseline_half seed 1: finished")
    report = Path("outputs/study/characters-small/report")
    assert f"wrote {report}/index.html" in shown
    page = (here / report / "index.html").read_text(encoding="utf-8")
    assert "Other held-out text" in page
    assert "SWE-F τ=1" in page
    assert main(flags) == EXIT_FINISHED
    again = capsys.readouterr()
    assert "0 updates to go" in again.out
    assert again.err.count("nothing to do") == 2


def test_a_study_with_a_failed_run_ends_with_its_status(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Any = runs.start

    def start(job: Job, device: str) -> Any:
        if job.arm == "swe_f":
            job.console.parent.mkdir(parents=True, exist_ok=True)
            job.console.write_text("no memory\n")
            return argparse.Namespace(poll=lambda: 1, returncode=1)
        return begin(job, device)

    monkeypatch.setattr(runs, "start", start)
    assert main(["--steps", "small"]) == EXIT_FAILED
    assert "missing" in (here / "outputs/study/characters-small/report/report.md").read_text()


def test_a_wrong_setting_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--settings", "optim.lrr=1"]) == EXIT_USAGE
    assert "study: optim.lrr: no such key" in capsys.readouterr().err
    assert main(["--valid", "nothing.txt"]) == EXIT_USAGE
    assert "study: --valid: 'nothing.txt' matches no file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_time_of_an_update_is_measured() -> None:
    threads = torch.get_num_threads()
    seconds = seconds_per_update(small_config(), num_updates=2)
    assert seconds is not None
    assert 0 < seconds < 10
    assert torch.get_num_threads() == threads


def test_make_study_runs_the_driver() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^study:.*##.*\n\t\$\(BIN\)/python -m sharebert\.study ", makefile, re.MULTILINE)
