"""The picture of who shares with whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharebert.metrics import JsonLines
from sharebert.share_map import draw_share_map

pytest.importorskip("matplotlib")


def write_checks(run: Path, checks: dict[int, tuple[list[float | None], list[list[int]]]]) -> None:
    sink = JsonLines(run / "metrics.jsonl", 0)
    for step, (correlations, groups) in checks.items():
        sink.write(step, {"train/loss": 1.0})
        sink.write(step, {"share/correlations": correlations, "share/groups": groups})
    sink.close()


@pytest.mark.parametrize("steps", [[10], [10, 20, 30]])
def test_a_map_is_drawn_from_one_check_or_many(tmp_path: Path, steps: list[int]) -> None:
    write_checks(tmp_path, {step: ([0.9, None, -0.3], [[0, 2], [2, 4]]) for step in steps})
    draw_share_map(tmp_path, unit_layers=2, threshold=0.5)
    assert (tmp_path / "share_map.png").read_bytes().startswith(b"\x89PNG")


def test_without_checks_there_is_no_map(tmp_path: Path) -> None:
    write_checks(tmp_path, {})
    draw_share_map(tmp_path, unit_layers=1, threshold=0.5)
    assert not (tmp_path / "share_map.png").exists()
