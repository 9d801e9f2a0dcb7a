"""The command line: what it says, what it refuses and when, where runs go, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Train
from omegaconf import OmegaConf

import sharebert
from sharebert import cli
from sharebert.cli import main
from sharebert.compose import compose, job_folder, run_name
from sharebert.config import ConfigError, from_dict
from sharebert.launch import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE
from sharebert.update import Updater

CONF = Path(__file__).parent.parent / "conf"
VERBS = (
    "train",
    "prepare",
    "plan",
    "bench",
    "submit",
    "evaluate",
    "inspect",
    "export",
    "finetune",
    "report",
    "deep-linear",
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def status_of(arguments: list[str]) -> object:
    """The exit status; argparse and Hydra's help leave by SystemExit."""
    try:
        return main(arguments)
    except SystemExit as leaving:
        return leaving.code


# ---------------------------------------------------------------------- what it says


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_lists_every_verb_and_the_exit_statuses(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert re.findall(r"^  ([\w-]+)  ", shown, re.MULTILINE) == list(VERBS)
    assert "75" in shown


def test_no_verb_shows_the_help_and_is_a_wrong_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == EXIT_USAGE
    assert "usage: sharebert VERB" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == EXIT_FINISHED
    assert capsys.readouterr().out == f"sharebert {sharebert.__version__}\n"


def test_an_unknown_verb_suggests_the_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == EXIT_USAGE
    assert "unknown verb 'trian' (did you mean 'train'?)" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_help_of_a_verb_with_settings_shows_groups_and_settings(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of([verb, "--help"]) in (EXIT_FINISHED, None)
    shown = capsys.readouterr().out
    choices = sorted(path.stem for path in (CONF / "unshare").glob("*.yaml"))
    assert f"\nunshare: {', '.join(choices)}\n" in shown
    assert "global_batch_size:" in shown


@pytest.mark.parametrize("verb", ["evaluate", "inspect"])
def test_help_of_a_verb_with_flags_shows_its_flags(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of([verb, "--help"]) == EXIT_FINISHED
    assert "--json" in capsys.readouterr().out


def test_the_examples_of_the_help_are_accepted() -> None:
    texts = [cli.USAGE, *(path.read_text() for path in CONF.glob("*.yaml"))]
    lines = [line.strip().split("   ")[0] for text in texts for line in text.splitlines()]
    examples = [shlex.split(line) for line in lines if re.match(r"sharebert \S+ .*=", line)]
    assert len(examples) > 8
    for _, verb, *arguments in examples:
        if verb in cli.HYDRA_VERBS and not any(argument.startswith("+grid") for argument in arguments):
            primary, kind = cli.HYDRA_VERBS[verb]
            for cell in compose(verb, primary, kind, cli._own_flags(verb, arguments)[1]).cells:
                from_dict(kind, cell.values)


# ---------------------------------------------------------------------- what it refuses

REFUSED = [
    (["max_stepz=3"], "max_stepz: no such key (did you mean 'max_steps'?)"),
    (["unshare.polcy=never"], "unshare.polcy: no such key (did you mean 'unshare.policy'?)"),
    (["modl=bert_tiny"], "modl: no such key (did you mean 'model'?)"),
    (["unshare=fixd"], "(did you mean 'fixed'?)"),
    (["+experiment=dmo"], "experiment=dmo: expected one of"),
    (["max_steps=abc"], "max_steps: Value 'abc'"),
    (["max_steps=1.5"], "max_steps: Value '1.5'"),
    (["max_steps=null"], "max_steps"),
    (["optim.betas=[0.9]"], "optim.betas=[0.9]: expected two numbers"),
    (["data.seq_len=600"], "data.seq_len=600: expected at most model.max_position_embeddings=512"),
    (["model.hidden_size=250", "model.num_heads=4"], "model.hidden_size=250: expected a multiple of model.num_heads=4"),
    (["max_steps=10", "unshare.step=11"], "unshare.step=11: expected at most max_steps=10"),
    (["data=text_files"], "data.files=[]: expected at least one path"),
    (["max_steps"], "missing EQUAL"),
    (["--json"], "--json: sharebert train has no such flag"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_a_wrong_request_is_refused_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharebert.pretrain.pretrain", lambda *_: pytest.fail("work was begun"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert main(["train", *arguments]) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert shown.startswith("sharebert train: ")
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("arguments", [["max_stepz=3"], ["max_steps=10", "unshare.step=11"]], ids=str)
def test_a_refused_request_leaves_nothing_behind(
    arguments: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert main(["train", *arguments]) == EXIT_USAGE
    assert not list(here.iterdir())


def test_a_flag_may_stand_anywhere_among_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["train", "seed=3", "--cfg", "job", "max_steps=7"]) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert "seed: 3" in shown
    assert "max_steps: 7" in shown


def test_a_second_wrong_request_in_the_same_process_is_refused_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = dict(os.environ)
    for _ in range(2):
        assert main(["train", "max_stepz=3"]) == EXIT_USAGE
    assert dict(os.environ) == before


def test_a_global_batch_that_does_not_divide_over_the_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sharebert.pretrain.pretrain", lambda *_: pytest.fail("work was begun"))
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert main(["train", "global_batch_size=64"]) == EXIT_USAGE
    assert "global_batch_size=64: expected a multiple of the 3 processes" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("arguments", [["max_stepz=3"], ["max_steps=0"], ["global_batch_size=63"]], ids=str)
def test_what_every_rank_refuses_alike_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, arguments: list[str]
) -> None:
    for name, value in (("RANK", str(rank)), ("LOCAL_RANK", str(rank)), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main(["train", *arguments]) == EXIT_USAGE
    assert bool(capsys.readouterr().err) == (rank == 0)


def test_what_only_this_rank_refuses_is_said_by_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pretrain(*_: object) -> int:
        raise ConfigError("local rank 1: expected one GPU for each process, torch sees 1")

    monkeypatch.setattr("sharebert.pretrain.pretrain", pretrain)
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert main(["train"]) == EXIT_USAGE
    assert "sharebert train: rank 5: local rank 1: expected one GPU" in capsys.readouterr().err


def test_a_sweep_inside_several_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main(["train", "-m", "seed=1,2"]) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert "expected one launch for each job" in shown
    assert "\n  torchrun ... -m sharebert train seed=2 run_name=run/seed-2\n" in shown


def test_a_logger_whose_package_is_missing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["train", "logging.wandb=true"]) == EXIT_USAGE
    assert "pip install 'sharebert[wandb]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["inspect", "nowhere"], ["evaluate", "nowhere", "--files", "a.txt"]], ids=str)
def test_a_checkpoint_that_is_not_there_is_named_without_a_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) in (EXIT_FAILED, EXIT_USAGE)
    shown = capsys.readouterr().err
    assert "nowhere" in shown
    assert "Traceback" not in shown


@pytest.mark.processes
def test_a_contradiction_is_refused_within_seconds_and_without_importing_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from sharebert.cli import main; status = main(sys.argv[1:]);"
        "sys.exit(9 if 'torch' in sys.modules else status)"
    )
    command = [sys.executable, "-c", program, "train", "max_steps=10", "unshare.step=11"]
    begin = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert result.returncode == EXIT_USAGE, result.stderr
    assert result.stderr == "sharebert train: unshare.step=11: expected at most max_steps=10\n"
    assert time.monotonic() - begin < 10  # 0.4 s on an idle machine


# ---------------------------------------------------------------------- where runs go


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["unshare.step=50", "max_steps=150"], "max_steps-150_unshare.step-50"),
        (["max_steps=150", "unshare.step=50"], "max_steps-150_unshare.step-50"),
        (["output_dir=b", "+experiment=demo", "seed=1"], "seed-1"),
        (["+experiment/paper=table1_swe_f", "seed=1"], "seed-1"),
        (["run_name=a", "output_dir=b", "+experiment=demo", "seed=1"], "experiment-demo_seed-1"),
        (["optim.lr=1e-4"], "optim.lr-1e-4"),
    ],
)
def test_a_job_of_a_sweep_is_named_after_its_overrides(overrides: list[str], name: str) -> None:
    assert job_folder(overrides) == name


AWKWARD = [
    ["data.files=[a b.txt]"],
    ["data.files=[a/b.txt]"],
    ["optim.betas=[0.9,0.98]"],
    ["+experiment=demo"],
    ["run_name=../up"],
    ["data.files=[" + "long/" * 60 + "x.txt]"],
    ["data.files=[" + "long/" * 60 + "y.txt]"],
    ["+a=.hidden"],
    ["data.text_column=größe"],
]


def test_names_of_jobs_need_no_quoting_and_stay_apart() -> None:
    names = [job_folder(overrides) for overrides in AWKWARD]
    assert len(set(names)) == len(AWKWARD)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name)
        assert shlex.quote(name) == name
        assert len(name) < 140


@pytest.mark.parametrize(
    ("given", "choices", "name"),
    [
        ("mine", {"experiment": "demo"}, "mine"),
        (None, {"model": "bert_base", "experiment": "demo"}, "demo"),
        (None, {"experiment": "mine/first"}, "mine-first"),
        (None, {"experiment/mine": "first"}, "mine-first"),
        (None, {"model": "bert_base", "experiment": None}, "run"),
    ],
)
def test_a_run_is_named_as_given_else_after_its_experiment(
    given: str | None, choices: dict[str, str | None], name: str
) -> None:
    assert run_name(given, choices) == name


def test_a_run_lies_below_output_dir_and_nothing_else_is_left(train: Train, tmp_path: Path, here: Path) -> None:
    assert train("max_steps=2", "unshare.step=2") == EXIT_FINISHED
    run = tmp_path / "outputs/run"
    assert json.loads((run / "status.json").read_text()) == {"state": "finished", "step": 2, "reason": ""}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "latest",
        "step-00000001-shared",
        "step-00000002-unshared",
    ]
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["run"]
    assert not list(here.iterdir())


def test_an_experiment_names_its_run_and_its_files_may_lie_anywhere(train: Train, tmp_path: Path, here: Path) -> None:
    shutil.copytree(CONF / "experiment", tmp_path / "my_conf/experiment")
    (tmp_path / "my_conf/experiment/demo.yaml").rename(tmp_path / "my_conf/experiment/mine.yaml")
    options = ["+experiment=mine", "max_steps=2", "unshare.step=2", "--config-dir", f"{tmp_path}/my_conf"]
    assert train(*options) == EXIT_FINISHED
    assert (tmp_path / "outputs/mine/status.json").is_file()
    assert not list(here.iterdir())


def test_a_sweep_makes_one_folder_for_each_job_and_finds_it_again(
    train: Train, tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["+experiment=demo", "unshare.step=2,3", "max_steps=4", "-m"]
    assert train(*sweep) == EXIT_FINISHED
    runs = [path.parent for path in (tmp_path / "outputs/demo").glob("*/status.json")]
    assert all(shlex.quote(run.name) == run.name for run in runs)
    assert all(json.loads((run / "status.json").read_text())["state"] == "finished" for run in runs)
    assert sorted(OmegaConf.load(run / "config.yaml").unshare.step for run in runs) == [2, 3]
    capsys.readouterr()
    assert train(*sweep) == EXIT_FINISHED
    assert capsys.readouterr().err.count("is finished (4 updates): nothing to do") == 2
    assert not list(here.iterdir())


def test_a_refused_job_of_a_sweep_does_not_keep_the_others_from_running(train: Train, tmp_path: Path) -> None:
    assert train("unshare.step=2,9", "max_steps=3", "-m") == EXIT_USAGE
    states = [json.loads(path.read_text())["state"] for path in (tmp_path / "outputs/run").glob("*/status.json")]
    assert states == ["finished"]


# ---------------------------------------------------------------------- verbs on what a run left


def test_prepare_makes_the_corpus_that_train_then_finds(
    small_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option for option in small_run if "cache_dir" not in option] + [f"data.cache_dir={tmp_path}/cache"]
    assert main(["prepare", *options, "--json"]) == EXIT_FINISHED
    shown = json.loads(capsys.readouterr().out)
    assert Path(shown["folder"]).is_dir()
    assert shown["documents"] == 300
    assert main(["prepare", *options]) == EXIT_FINISHED
    assert capsys.readouterr().out.strip() == shown["folder"]


def test_inspect_and_evaluate_tell_a_checkpoint_for_people_and_for_programs(
    train: Train, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("max_steps=2", "unshare.step=2")
    checkpoints = tmp_path / "outputs/run/checkpoints"
    capsys.readouterr()
    for name, phase in (("step-00000001-shared", "shared"), ("latest", "unshared")):
        assert main(["inspect", f"{checkpoints}/{name}", "--json"]) == EXIT_FINISHED
        assert json.loads(capsys.readouterr().out)["phase"] == phase
    assert main(["inspect", f"{checkpoints}/latest"]) == EXIT_FINISHED
    assert re.search(r"phase\s+unshared", capsys.readouterr().out)
    assert main(["evaluate", f"{checkpoints}/latest", "--files", str(text_file), "--json"]) == EXIT_FINISHED
    figures = json.loads(capsys.readouterr().out)
    assert figures["eval/loss"] > 0
    assert figures["eval/targets"] > 0
    assert main(["evaluate", f"{checkpoints}/latest", "--files", str(text_file)]) == EXIT_FINISHED
    assert "eval/unigram_loss" in capsys.readouterr().out


def test_a_stopped_job_stops_its_sweep(train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = Updater._apply

    def apply(self: Updater, measures_ratio: bool) -> object:
        if self.state.counters.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, measures_ratio)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "_apply", apply)
        assert train("-m", "seed=1,2", "run_name=sweep") == EXIT_STOPPED
    assert [path.name for path in sorted(tmp_path.glob("outputs/sweep/*/status.json"))] == ["status.json"]
    assert train("-m", "seed=1,2", "run_name=sweep") == EXIT_FINISHED
    states = [json.loads(path.read_text())["state"] for path in tmp_path.glob("outputs/sweep/*/status.json")]
    assert states == ["finished", "finished"]
