"""The table of a fine-tuning sweep."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from finetuning import finetune, invented_rows, read_results, write_lines
from omegaconf import OmegaConf

from sharebert.compose import Cell, Request, compose
from sharebert.config import ConfigError, FinetuneConfig
from sharebert.finetune.summary import summarize

CONF = Path(__file__).parent.parent / "conf"


def cell(folder: Path, task: str, lr: float, seed: int, score: float | None, random_encoder: bool = False) -> Cell:
    """A cell, finished with this score; None: not finished."""
    values: dict[str, Any] = {
        "run_name": "sweep",
        "encoder": "my-bert",
        "random_encoder": random_encoder,
        "seed": seed,
        "task": {"name": task},
        "optim": {"lr": lr},
    }
    path = folder / f"{task}-{lr}-{seed}-{random_encoder}"
    path.mkdir(parents=True)
    if score is not None:
        figures = {"eval/f1": score, "eval/score": score, "eval/best_f1_threshold": -1.5}
        (path / "results.json").write_text(json.dumps({"figures": figures}))
    return Cell(values, path, ())


def sweep(folder: Path, task: str) -> list[Cell]:
    """Of the first rate one run is the best, of the second the mean is."""
    scores = {(1e-5, 1): 0.50, (1e-5, 2): 0.90, (2e-5, 1): 0.80, (2e-5, 2): 0.82}
    return [cell(folder, task, lr, seed, score) for (lr, seed), score in scores.items()]


def chosen_rates(folder: Path) -> list[str]:
    return [row["optim.lr"] for row in rows_of(folder) if row["chosen"] == "1"]


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("task", "chosen"), [("rte", "1e-05"), ("squad", "2e-05")])
def test_glue_takes_the_best_run_and_squad_the_best_mean(
    tmp_path: Path, task: str, chosen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summarize(Request(sweep(tmp_path, task), True))
    rows = rows_of(tmp_path)
    assert [row["optim.lr"] for row in rows if row["chosen"] == "1"] == [chosen]
    assert [float(row["eval/score_mean"]) for row in rows] == pytest.approx([0.70, 0.81])
    assert [float(row["eval/score_std"]) for row in rows] == pytest.approx([0.08**0.5, 0.0002**0.5])
    assert [(row["best_score"], row["best_seed"]) for row in rows] == [("0.9", "2"), ("0.82", "2")]
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "summary.md").read_text()
    assert "70.00 ± 28.28" in shown
    assert "threshold" not in shown
    expected = "- optim.lr=1e-05, seed=2: 90.00" if task == "rte" else "- optim.lr=2e-05: 81.00 ± 1.41 over 2 seeds"
    assert expected in shown


def test_what_is_compared_has_a_choice_of_its_own_and_missing_runs_are_counted(tmp_path: Path) -> None:
    cells = [
        *sweep(tmp_path, "rte"),
        cell(tmp_path, "rte", 2e-5, 1, 0.4, True),
        cell(tmp_path, "rte", 1e-5, 1, None, True),
    ]
    summarize(Request(cells, True))
    chosen = [(row["random_encoder"], row["optim.lr"]) for row in rows_of(tmp_path) if row["chosen"] == "1"]
    assert chosen == [("False", "1e-05"), ("True", "2e-05")]
    assert "1 of 6 runs are not finished" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize("task", ["rte", "squad"])
def test_of_equal_rates_the_better_mean_is_chosen_then_the_lower_rate(tmp_path: Path, task: str) -> None:
    scores = {(3e-5, 1): 0.8, (3e-5, 2): 0.6, (2e-5, 1): 0.6, (2e-5, 2): 0.8, (1e-5, 1): 0.8, (1e-5, 2): 0.5}
    cells = [cell(tmp_path, task, lr, seed, score) for (lr, seed), score in scores.items()]
    summarize(Request(cells, True))
    assert chosen_rates(tmp_path) == ["2e-05"]


def test_a_rate_whose_seeds_are_not_all_there_is_chosen_only_where_no_other_is(tmp_path: Path) -> None:
    scores = {(1e-5, 1): 0.9, (1e-5, 2): None, (2e-5, 1): 0.8, (2e-5, 2): 0.7}
    cells = [cell(tmp_path, "rte", lr, seed, score) for (lr, seed), score in scores.items()]
    summarize(Request(cells, True))
    assert chosen_rates(tmp_path) == ["2e-05"]
    assert [(row["seeds"], row["seeds_asked"]) for row in rows_of(tmp_path)] == [("1", "2"), ("2", "2")]
    (cells[2].folder / "results.json").unlink()
    summarize(Request(cells, True))
    assert chosen_rates(tmp_path) == ["1e-05"]
    shown = (tmp_path / "summary.md").read_text()
    assert "1 of 2" in shown
    assert "- provisional: optim.lr=1e-05, seed=1: 90.00" in shown


def test_runs_of_different_data_are_said(tmp_path: Path) -> None:
    cells = sweep(tmp_path, "rte")
    for number, one in enumerate(cells):
        results = {**read_results(one.folder), "encoder_sha256": "a", "data_sha256": {"task.dev": str(number // 3)}}
        (one.folder / "results.json").write_text(json.dumps(results))
    summarize(Request(cells, True))
    assert "were made from different data under the same names" in (tmp_path / "summary.md").read_text()
    (cells[3].folder / "results.json").unlink()
    summarize(Request(cells, True))
    assert "different data" not in (tmp_path / "summary.md").read_text()


def test_a_sweep_over_tasks_has_a_table_for_each_folder(tmp_path: Path) -> None:
    cells = [*sweep(tmp_path / "finetune-rte", "rte"), *sweep(tmp_path / "finetune-squad", "squad")]
    summarize(Request(cells, True))
    for task, chosen in (("rte", "1e-05"), ("squad", "2e-05")):
        rows = rows_of(tmp_path / f"finetune-{task}")
        assert [row["optim.lr"] for row in rows if row["chosen"] == "1"] == [chosen]
    together = [*sweep(tmp_path / "all", "rte"), *sweep(tmp_path / "all", "squad")]
    summarize(Request(together, True))
    chosen_rows = [(row["task.name"], row["optim.lr"]) for row in rows_of(tmp_path / "all") if row["chosen"] == "1"]
    assert chosen_rows == [("rte", "1e-05"), ("squad", "2e-05")]


def test_a_sweep_ends_with_the_table_and_skips_what_is_finished(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"task.{name}={write_lines(tmp_path / f'{name}.jsonl', invented_rows(8))}" for name in ("train", "dev")]
    settings = ["-m", "task=table", *files, "epochs=1", "optim.lr=1e-4,1e-3", "seed=1,2", "run_name=sweep"]
    assert finetune(tmp_path, encoder, *settings) == 0
    table = capsys.readouterr().out
    assert table == (tmp_path / "sweep/summary.md").read_text()
    runs = sorted((tmp_path / "sweep").glob("*/results.json"))
    assert len(runs) == 4
    scores = {
        (results["lr"], results["seed"]): results["figures"]["eval/score"]
        for results in map(read_results, [run.parent for run in runs])
    }
    for row in rows_of(tmp_path / "sweep"):
        mean = (scores[float(row["optim.lr"]), 1] + scores[float(row["optim.lr"]), 2]) / 2
        assert float(row["eval/score_mean"]) == pytest.approx(mean)
    assert finetune(tmp_path, encoder, *settings) == 0
    again = capsys.readouterr()
    assert again.err.count("is finished: nothing to do") == 4
    assert again.out == table


def test_the_grids_are_those_of_the_paper_and_can_be_narrowed() -> None:
    rates = {1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5, 5e-5, 7.5e-5, 1e-4, 1.2e-4}
    for grid, seeds in (("glue", 4), ("squad", 5)):
        swept = OmegaConf.load(CONF / f"grid/{grid}.yaml").hydra.sweeper.params
        assert {float(rate) for rate in swept["optim.lr"].split(",")} == rates
        assert [int(seed) for seed in swept["seed"].split(",")] == [*range(1, seeds + 1)]
    arguments = ["-m", "+grid=squad", "task=squad_v2", "encoder=x", "optim.lr=3e-5"]
    request = compose("finetune", "finetune", FinetuneConfig, arguments)
    found = [(cell.values["optim"]["lr"], cell.values["seed"]) for cell in request.cells]
    assert found == [(3e-5, seed) for seed in (1, 2, 3, 4, 5)]
    assert request.folder == Path("outputs/finetune-squad_v2")
    assert len({cell.folder for cell in request.cells}) == len(request.cells)
    with pytest.raises(ConfigError, match=r"[+]grid=squad .*: a sweep over optim.lr=1e-5,.*; give -m"):
        compose("finetune", "finetune", FinetuneConfig, arguments[1:])
