"""The verb `plan`: its figures are those of the run that follows, and it leaves nothing behind."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import Train

from data_prep.tokenizer import expected_vocab_size
from sharebert.checkpoint import list_checkpoints, read_meta
from sharebert.cli import main
from sharebert.config import DataConfig, TrainConfig, from_dict
from sharebert.launch import EXIT_FINISHED, EXIT_USAGE
from sharebert.plan import run as plan_run
from sharebert.plan.files import kept_checkpoints
from sharebert.plan.table import duration

CONF = Path(__file__).parent.parent / "conf"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder; a matmul peak and a free memory that do not depend on the machine."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(plan_run, "measure_matmul_peak", lambda device, dtype: 1e12)
    monkeypatch.setattr(plan_run, "free_bytes", lambda device: 64 * 2**30)
    return folder


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What `plan --json` prints."""
    assert main(["plan", "--json", *arguments]) == EXIT_FINISHED
    return json.loads(capsys.readouterr().out)


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `plan` prints; it has to fit into a terminal."""
    assert main(["plan", *arguments]) == EXIT_FINISHED
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    return shown


def test_bert_base_has_the_figures_of_the_paper(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    plan = planned(capsys, "+experiment=bert_base_half")
    assert plan["parameters"] == {
        "unique_shared": 31_552_314,
        "unique_unshared": 109_518_906,
        "effective": 109_518_906,
    }
    assert plan["unshare_step"] == 50_000
    assert (plan["shared_updates"], plan["max_steps"]) == (49_999, 500_000)
    assert plan["all_reduce_bytes"] == {"shared": 4 * 31_552_314, "unshared": 4 * 109_518_906}
    assert plan["checkpoint_bytes"]["shared"] == pytest.approx(12 * 31_552_314, rel=0.01)
    assert plan["flops_per_update"] == pytest.approx(1.45e14, rel=0.08)
    assert plan["flops"] == 500_000 * plan["flops_per_update"]
    assert plan["tokens"] == 500_000 * 512 * 512
    assert plan["memory_bytes"] == max(plan["memory_bytes_by_phase"].values())
    assert plan["corpus"] is None  # would have to ask the hub
    assert not list(here.iterdir())


def test_the_plan_of_a_run_is_what_the_run_then_does(
    train: Train, small_run: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = [*small_run, f"output_dir={tmp_path}/outputs"]
    checkpointing = ["checkpoint.every_steps=2", "checkpoint.keep_every=4"]
    assert train(*checkpointing, "checkpoint.every_steps=2") == EXIT_FINISHED
    settings = [item for item in settings if not item.startswith("checkpoint.")]
    plan = planned(capsys, *settings, *checkpointing)
    run = tmp_path / "outputs" / "run"
    checkpoints = list_checkpoints(run / "checkpoints")
    assert plan["run_folder"] == str(run)
    assert plan["continues_from_step"] == 12
    assert plan["checkpoints_kept"] == len(checkpoints)
    for entry in checkpoints:
        meta = read_meta(entry.path)
        assert meta["parameters"]["unique"] == plan["parameters"][f"unique_{entry.phase}"]
        assert meta["parameters"]["effective"] == plan["parameters"]["effective"]
        written = sum(file.stat().st_size for file in entry.path.iterdir())
        assert written == pytest.approx(plan["checkpoint_bytes"][entry.phase], rel=0.05)
    assert plan["vocab_size"] == meta["vocab_size"]
    assert plan["sequences"] == meta["samples_seen"]
    assert plan["epochs"] == plan["sequences"] / plan["corpus_sequences"]
    assert plan["metrics_bytes"] == pytest.approx(4 * 420)


def test_nothing_is_prepared_and_nothing_written(
    small_run: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, here: Path
) -> None:
    cache = tmp_path / "no-cache"
    settings = [item for item in small_run if not item.startswith("data.cache_dir")]
    plan = planned(capsys, *settings, f"data.cache_dir={cache}")
    assert plan["epochs"] is None
    assert not cache.exists()
    assert not list(here.iterdir())


def test_the_table_says_what_a_person_asks(capsys: pytest.CaptureFixture[str]) -> None:
    shown = table(capsys, "+experiment=bert_base_half", "--memory-gib", "20", "engine.device=cpu")
    assert "109,518,906" in shown
    assert "at update 50,000 (10.0% of the updates are shared)" in shown
    assert "DOES NOT FIT into the 20.00 GiB given" in shown
    assert "engine.micro_batch_size=" in shown
    assert "65% of the matmul peak just measured here (1,000 GFLOP/s)" in shown
    assert "outputs/bert_base_half" in shown


def test_policies_that_watch_say_when_they_look(capsys: pytest.CaptureFixture[str]) -> None:
    shown = table(capsys, "+experiment=paper/table1_swe_a", "engine.device=cpu", "unshare.latest_step=9000")
    assert "correlate below 0.5\n          in 3 checks in a row, which come every 1,000 updates\n" in shown
    assert "not before update 3,001, at update 9,000 at the latest" in shown
    assert "at least 3,000" in shown
    assert "group by group" in table(capsys, "+experiment=paper/table1_swe_m", "engine.device=cpu")
    few = ["unshare=adaptive", "max_steps=3000", "engine.device=cpu"]
    shown = table(capsys, *few)
    assert "never: that would take 3 checks in a row, one every 1,000 updates, and then an update" in shown
    assert "updates,\n          none before update 900, and then" in table(capsys, *few, "unshare.earliest_step=900")
    assert "nothing is shared" in table(capsys, "unshare=never")
    assert "to the end" in table(capsys, "unshare=always")


def test_flags_describe_machines_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = ["+experiment=bert_base_half", "engine.device=cuda", "--processes", "8"]
    plan = planned(capsys, *elsewhere, "--memory-gib", "80", "--tokens-per-second", "1e6")
    assert (plan["device"], plan["precision"], plan["processes"]) == ("cuda", "bf16", 8)
    assert (plan["memory_limit_bytes"], plan["fits"]) == (80 * 2**30, True)
    assert plan["micro_batch_size"] == 64
    assert plan["hours"] == pytest.approx(500_000 * 512 * 512 / 1e6 / 3600)
    shown = table(capsys, *elsewhere, "--tokens-per-second", "1e6")
    assert "36.4 h, 291 GPU-hours at the given 1,000,000 tokens/s" in shown
    by_tflops = planned(capsys, *elsewhere, "--tflops", "125")
    assert by_tflops["device_hours"] == pytest.approx(plan["flops"] / 125e12 / 3600)
    assert by_tflops["hours"] == pytest.approx(by_tflops["device_hours"] / 8)


def test_processes_on_a_cpu_share_its_cores(capsys: pytest.CaptureFixture[str]) -> None:
    alone, both = (planned(capsys, "engine.device=cpu", "--processes", number) for number in ("1", "2"))
    assert alone["hours"] == both["hours"]
    assert "(1,000 GFLOP/s), which 2 processes share;" in table(capsys, "engine.device=cpu", "--processes", "2")


def test_a_corpus_that_takes_long_to_look_for_is_not_called_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "corpus not looked for, which may take long;" in table(capsys, "+experiment=bert_base_half")


def test_a_gpu_that_is_not_here_and_of_unknown_memory_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_run, "free_bytes", lambda device: None)
    monkeypatch.setattr(plan_run, "_is_here", lambda config: False)
    shown = table(capsys, "engine.device=cuda")
    assert "say --memory-gib" in shown
    assert "say --tflops or --tokens-per-second" in shown


def test_a_sweep_has_a_row_for_each_run_and_the_saving_of_the_shared_prefix(
    small_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [item for item in small_run if not item.startswith("unshare.step")]
    sweep = planned(capsys, "-m", *settings, "unshare.step=9,5")
    assert [cell["unshare_step"] for cell in sweep["cells"]] == [9, 5]
    prefix = sweep["prefix"]
    assert prefix["order"] == [1, 0]
    assert (prefix["shared_updates"], prefix["shared_updates_trained"], prefix["shared_updates_saved"]) == (12, 8, 4)
    assert (prefix["updates"], prefix["updates_trained"]) == (24, 20)
    assert prefix["hours_saved"] == pytest.approx(prefix["hours"] * 4 / 24)
    shown = table(capsys, "-m", "+experiment=demo", "unshare.step=50,100")
    assert "unshare.step-50 " in shown
    assert "49 of 1,600 updates saved (3.1%)" in shown
    assert "no shared prefix in common" in table(capsys, "-m", "+experiment=demo", "seed=1,2")
    assert table(capsys, "-m", "+experiment=demo", "seed=1,1").count("seed-1 ") == 2


def test_the_rows_of_several_experiments_have_names_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "-m", "+experiment=demo,bert_base_half", "engine.device=cpu", "--tflops", "1"]) == EXIT_FINISHED
    )
    shown = capsys.readouterr().out
    assert re.findall(r"^\| (\S+) +\|", shown, re.MULTILINE)[-2:] == ["demo", "bert_base_half"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "3"], "global_batch_size=64: expected a multiple of the 3 processes"),
        (["--processes", "0"], "processes=0: expected a number above 0"),
        (["--memory-gib", "-1"], "memory_gib=-1.0: expected a number above 0"),
        (["data.tokenizer=no.json"], "data.tokenizer='no.json': no such file"),
        (["--tflops", "1", "--tokens-per-second", "1"], "both give the rate; expected one of them"),
        (["-m", "+experiment=glob(nothing*)"], "the sweep has no runs"),
        (["max_stepz=3"], "did you mean 'max_steps'?"),
    ],
)
def test_a_wrong_request_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_every_row_of_the_paper_is_an_experiment_with_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    page = (CONF / "experiment/paper/README.md").read_text()
    rows = re.findall(r"^\|[^|]*\| `(paper/\S+)` \|[^|]*\| ([\d.]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    names = sorted(path.stem for path in (CONF / "experiment/paper").glob("*.yaml"))
    assert sorted({name for name, _, _ in rows}) == [f"paper/{name}" for name in names]
    assert len(rows) == 5 + 4 + 7 + 6  # Tables 1 to 4
    (command,) = re.findall(r"^sharebert (plan .*)$", page, re.MULTILINE)
    assert main([*shlex.split(command), "--json"]) == EXIT_FINISHED
    hours = {
        cell["run_folder"].split("paper-")[1].split("/")[0]: cell["device_hours"]
        for cell in json.loads(capsys.readouterr().out)["cells"]
    }
    for name, accuracy, cost in rows:
        text = (CONF / f"experiment/{name}.yaml").read_text()
        assert f"Expected there: masked-LM accuracy {accuracy}%" in text, name
        assert f"{hours[name.removeprefix('paper/')]:,.0f}" == cost, name


def test_the_vocabulary_is_that_of_the_given_tokenizer(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n")
    assert expected_vocab_size(DataConfig(tokenizer=str(vocabulary))) == 6
    assert expected_vocab_size(DataConfig(vocab_size=77)) == 77


@pytest.mark.parametrize(
    ("checkpoint", "unshare", "expected"),
    [
        ({"every_steps": 10}, {"step": 25}, {"shared": 1, "unshared": 2}),  # 24; 90 and 100
        ({"every_steps": 10, "keep_every": 20}, {"step": 25}, {"shared": 2, "unshared": 5}),  # and 20, 40, 60, 80
        ({"every_steps": None}, {"step": 25}, {"shared": 1, "unshared": 1}),
        ({"every_steps": 10}, {"policy": "always"}, {"shared": 2, "unshared": 0}),
        ({"every_steps": 10}, {"policy": "never"}, {"shared": 0, "unshared": 2}),
    ],
)
def test_checkpoints_that_stay_are_counted(
    checkpoint: dict[str, Any], unshare: dict[str, Any], expected: dict[str, int]
) -> None:
    config = from_dict(TrainConfig, {"max_steps": 100, "checkpoint": checkpoint, "unshare": unshare})
    assert kept_checkpoints(config) == expected


def test_a_time_is_one_that_people_can_imagine() -> None:
    shown = [duration(hours) for hours in (0.001, 0.5, 36.44, 480.0)]
    assert shown == ["1 min", "30 min", "36.4 h", "480 h (20 days)"]
