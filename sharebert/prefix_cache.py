"""Runs that are equal up to their first unsharing train that shared prefix once.

A cache is a folder of shared checkpoints, ``<folder>/<key>/step-00000029-shared/``, each with the figures up to its
step in `prefix.json`. Under one key lie those of runs that are equal in everything that makes a number of the shared
phase. A run starts from the newest one that it would have passed through itself, and leaves its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from sharebert import distributed
from sharebert.checkpoint import (
    TOKENIZER_FILE,
    CheckpointError,
    CheckpointFolder,
    link_checkpoint,
    list_checkpoints,
    load_tensors,
    load_training_state,
    read_meta,
    remove_leftovers,
    verify,
)
from sharebert.config import TrainConfig, to_dict
from sharebert.files import write_atomically
from sharebert.metrics import read_metrics, row_is_regular
from sharebert.prefix_plan import OFF, prefix_settings
from sharebert.provenance import command_line, describe_origin, source_hash
from sharebert.sharing import one_group
from sharebert.train_state import hash_init_from
from sharebert.unshare_policy import UnsharePolicy, build_policy

logger = logging.getLogger(__name__)

PREFIX_FILE = "prefix.json"
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class _History:
    """How a checkpoint came about."""

    trained_by: str
    """The run folder that left it."""
    rows: list[dict[str, Any]]
    """Rows of `metrics.jsonl` up to its step."""


class PrefixCache:
    """The checkpoints under one key. Rank 0 reads and writes; several processes may at once.

    Nothing in it is needed by anyone: what is damaged is passed over, what cannot be written is trained again.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.key = _checksum(self.settings)
        self.path = folder / self.key[:16]

    def keep(self, saved: Path, run: Path) -> None:
        """Keep `saved`, a checkpoint of `run`, where another run could start from it: shared, and one that stays.

        Those are the one before the first unsharing, the last one of a run that shares to its end, and those that
        `checkpoint.keep_every` keeps: as hard links they cost nothing while the run has them.
        """
        try:
            meta = read_meta(saved)
            config = meta["config"]
            every = config["checkpoint"]["keep_every"]
            stays = meta["before_unsharing"] or meta["step"] == config["max_steps"]
            if meta["phase"] != "shared" or not (stays or (every and meta["step"] % every == 0)):
                return
            self.path.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path / ".lock", timeout=LOCK_SECONDS):
                remove_leftovers(self.path)
                self._add(saved, run, meta["step"])
        except (OSError, Timeout, CheckpointError) as error:
            logger.warning("prefix cache: %s was not kept (%s); who needs it will train it again", saved, error)

    def _add(self, saved: Path, run: Path, step: int) -> None:
        try:
            verify(self.path / saved.name)
            _read_history(self.path / saved.name)
        except Exception:  # as a rule it is not there
            rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] <= step]
            history = {"trained_by": str(run), "rows": rows}
            text = json.dumps({**history, "sha256": _checksum(history)})
            link_checkpoint(saved, self.path, {PREFIX_FILE: text})
            write_atomically(self.path / "settings.json", json.dumps(self.settings, indent=2) + "\n")

    def fork(self, config: TrainConfig, run: Path) -> Path | None:
        """Put the newest checkpoint that `config` would have passed through into the run folder, as its own.

        The figures up to there come along. From then on the run needs the cache no more: it goes on as after a stop
        at this step.

        Args:
            config: the run, resolved.
            run: its folder, without a checkpoint.

        Returns:
            The checkpoint in the run folder, or None where the run has to start at step 0.
        """
        for entry in reversed(list_checkpoints(self.path)):
            policy = build_policy(config)
            if entry.phase != "shared" or not _all_share(policy, 1):
                continue
            try:
                history = _read_history(entry.path)
                if not replay(policy, history.rows, entry.step):
                    continue  # it unshares before this step
                if _row_is_due(config, policy, entry.step) and not _has_training_row(history.rows, entry.step):
                    continue  # the run would have written one there
                meta = verify(entry.path)
                tensors, state = load_tensors(entry.path), load_training_state(entry.path)
            except Exception as error:  # whatever is wrong with it, the run can do without
                logger.warning("prefix cache: %s is damaged and passed over: %s", entry.path, error)
                continue
            rows = history.rows
            if not _row_is_due(config, policy, entry.step):
                rows = _open_last_row(rows, state["counters"])
            write_atomically(run / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            checkpoints = CheckpointFolder(run / "checkpoints", keep_last=1, keep_every=None)
            path = checkpoints.save(
                tensors=tensors,
                training_state=state,
                tokenizer=(entry.path / TOKENIZER_FILE).read_bytes(),
                meta=_own_meta(config, policy, meta, history.trained_by),
            )
            message = "starts from the shared prefix of step %d (trained by %s): %d updates saved"
            logger.info(message, entry.step, Path(history.trained_by).name, entry.step)
            return path
        return None


def open_prefix_cache(
    config: TrainConfig, corpus_hashes: Mapping[str, str], device: torch.device
) -> PrefixCache | None:
    """The cache that the resolved `config` asks for, under the key of this run on this machine; None without one."""
    if config.unshare.prefix_cache in (None, OFF):
        return None
    is_cuda = device.type == "cuda"
    return PrefixCache(
        Path(str(config.unshare.prefix_cache)).expanduser(),
        {
            **prefix_settings(config, but=("data.", "init_from")),
            "data.seq_len": config.data.seq_len,
            "data.cross_document_attention": config.data.cross_document_attention,
            "corpus": dict(corpus_hashes),
            "init_from": config.init_from and hash_init_from(config.init_from),
            "world_size": distributed.world_size(),
            "machine": torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability(),
            "platform": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "code": source_hash(),
        },
    )


def replay(policy: UnsharePolicy, rows: list[dict[str, Any]], step: int) -> bool:
    """Show `policy` the checks among `rows` as if it had watched; whether all units would have shared up to `step`.

    `policy` then stands as it would after `step` updates; whether it unshares in the next one is its answer to that.
    The rows get the figures that depend on its threshold.

    Raises:
        ValueError: a check is missing.
    """
    checked = []
    for row in rows:
        if "share/correlations" in row:
            update = row["step"]
            checked.append(update)
            if not _all_share(policy, update):
                return False
            policy.observe(update, [math.nan if value is None else value for value in row["share/correlations"]])
            row.update(policy.figures(update))
    if checked != [update for update in range(1, step + 1) if policy.check_is_due(update)]:
        raise ValueError("its checks of the correlations are not complete")
    return step in checked or _all_share(policy, step)


def _all_share(policy: UnsharePolicy, update: int) -> bool:
    return policy.num_units > 1 and policy.groups_for(update) == one_group(policy.num_units)


def _splits_next(policy: UnsharePolicy, step: int, config: TrainConfig) -> bool:
    return step < config.max_steps and not _all_share(policy, step + 1)


def _row_is_due(config: TrainConfig, policy: UnsharePolicy, step: int) -> bool:
    return row_is_regular(step, config) or policy.check_is_due(step) or _splits_next(policy, step, config)


def _has_training_row(rows: list[dict[str, Any]], step: int) -> bool:
    return any("train/loss" in row for row in rows if row["step"] == step)


def _open_last_row(rows: list[dict[str, Any]], counters: dict[str, Any]) -> list[dict[str, Any]]:
    """`rows` without the one at the last step, written only because the other run unshared next; its sum goes on."""
    step = counters["step"]
    if _has_training_row(rows, step):
        counters["loss_sum"], counters["loss_updates"] = counters["row_loss_sum"], counters["row_loss_updates"]
    return [row for row in rows if row["step"] < step or "train/loss" not in row]


def _own_meta(config: TrainConfig, policy: UnsharePolicy, meta: dict[str, Any], trained_by: str) -> dict[str, Any]:
    """`meta.json` of the checkpoint in the run folder: what the run itself would have written, and where it is from."""
    return {
        **{key: value for key, value in meta.items() if key not in ("files", "format_version")},
        "policy_state": policy.state_dict(),
        "before_unsharing": _splits_next(policy, meta["step"], config),
        "config": to_dict(config),
        "wandb_run_id": None,
        "command_line": command_line(),
        **describe_origin(),
        "prefix_from": {"step": meta["step"], "run": trained_by},
    }


def _read_history(path: Path) -> _History:
    history = json.loads((path / PREFIX_FILE).read_text(encoding="utf-8"))
    expected = history.pop("sha256")
    if _checksum(history) != expected:
        raise CheckpointError(f"{path / PREFIX_FILE}: its checksum does not fit its content")
    return _History(**history)


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
