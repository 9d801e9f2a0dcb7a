"""What a run goes on from."""

from __future__ import annotations

from pathlib import Path

from sharebert.origin import Origin
from sharebert.run_folder import RunFolder


def test_only_a_runs_own_checkpoint_continues_its_wandb_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    for name in ("a", "b"):
        (tmp_path / name / "checkpoints/step-00000004-shared").mkdir(parents=True)
    meta = {"step": 4, "wandb_run_id": "abc"}
    (tmp_path / "a/checkpoints/latest").symlink_to("step-00000004-shared")
    for start, expected in (
        (run.checkpoints / "step-00000004-shared", "abc"),
        (run.checkpoints / "latest", "abc"),
        (tmp_path / "b/checkpoints/step-00000004-shared", None),
    ):
        assert Origin(start, meta, None).wandb_run_id(run) == expected
    assert Origin(None, {}, None).wandb_run_id(run) is None
