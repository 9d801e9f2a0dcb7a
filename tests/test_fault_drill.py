"""A short form of `make fault-drill`, and whether the drill notices what it is there for."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from drill.__main__ import Drill, group, plan, summary
from drill.ending import differences, find_leftovers
from drill.faults import KINDS
from drill.processes import start_server

FEW = [("bit_flipped_checkpoint", 1), ("SIGTERM", 1)]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_runs_that_are_disturbed_end_equal_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # so that what the server needs is taken back
    start_server()
    drill = Drill(seed=1, root=tmp_path, jobs=1, variants=["multi_step"])
    assert drill.carry_out(plan(FEW, drill.draw, plain_share=0.0)) == []
    found = summary(drill.outcomes, Counter())
    assert all(outcome.is_good for outcome in drill.outcomes), capsys.readouterr().err
    assert found["faults"] == found["equal_to_undisturbed"] == len(FEW)
    assert found["leftovers"] == 0


def test_every_fault_comes_in_one_run_in_the_order_of_its_update() -> None:
    draw = random.Random(5)
    wanted = [(kind, processes) for kind in KINDS for processes in (1, 2) for _ in range(3)]
    runs = group(plan(wanted, draw), draw)
    assert Counter((fault.kind, fault.processes) for run in runs for fault in run) == Counter(wanted)
    for run in runs:
        assert len({fault.processes for fault in run}) == 1
        assert [fault.update for fault in run] == sorted(fault.update for fault in run)


def test_one_bit_and_one_name_more_or_less_are_noticed() -> None:
    ending = {"weight": torch.zeros(3), "row 0": {"step": 0}}
    assert differences(ending, {"weight": torch.zeros(3), "row 0": {"step": 0}}) == []
    assert differences(ending, {"weight": torch.tensor([0.0, 0.0, 1e-45]), "row 0": {"step": 0}}) == ["weight"]
    assert differences(ending, {**ending, "row 1": {"step": 1}}) == ["row 1"]
    assert differences(ending, {"weight": torch.zeros(3)}) == ["row 0"]


def test_what_is_left_and_what_is_missing_are_named(tmp_path: Path) -> None:
    for work in ("undisturbed", "disturbed"):
        (tmp_path / work / "outputs/run/checkpoints").mkdir(parents=True)
        (tmp_path / work / "outputs/run/config.yaml").write_text("")
    run = tmp_path / "disturbed/outputs/run"
    assert find_leftovers(tmp_path / "disturbed", tmp_path / "undisturbed") == []
    (run / "config.yaml").rename(run / ".config.yaml.new")
    for name in (".saving-step-00000006-shared", "step-00000006-shared", "step-00000012-shared.damaged-1"):
        (run / "checkpoints" / name).mkdir()
    found = find_leftovers(tmp_path / "disturbed", tmp_path / "undisturbed")
    assert found[:3] == [
        "outputs/run/.config.yaml.new is left",
        "outputs/run/config.yaml is missing",
        "checkpoints/.saving-step-00000006-shared is left",
    ]
    assert len(found) == 4
    assert "step-00000006-shared/meta.json" in found[3]
