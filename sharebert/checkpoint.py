"""Checkpoints that are whole or absent: atomic save, checksums, retention, and the search for the newest good one.

A checkpoint is a folder ``step-00049999-shared`` holding `model.safetensors` (each tensor once), `training_state.pt`
(optimizer state by parameter name; loads with ``weights_only=True``), `tokenizer.json` and `meta.json`. It is
written under a temporary name, synced, and renamed; only then is `latest` moved and anything older deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sharebert.files import sha256_of_file, sync

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MODEL_FILE, STATE_FILE, TOKENIZER_FILE, META_FILE = (
    "model.safetensors",
    "training_state.pt",
    "tokenizer.json",
    "meta.json",
)
_NAME = re.compile(r"step-(\d{8,})-(shared|partly-shared|unshared|finetuned)")
_TEMPORARY, _DELETED = ".saving-", ".deleting-"
FINETUNED = "finetuned"
"""The phase of a checkpoint of `sharebert finetune`: a model of Transformers, with a task's head."""
PHASES = ("shared", "partly-shared", "unshared", FINETUNED)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message names the file."""


class NewerFormatError(CheckpointError):
    """A checkpoint is not damaged, but written by a newer version."""


@dataclass(frozen=True)
class Entry:
    """A checkpoint folder, by its name only: nothing says yet that it is whole."""

    step: int
    phase: str
    path: Path


def list_checkpoints(folder: Path) -> list[Entry]:
    """Checkpoints below `folder`, oldest first. Folders of other names are none of ours."""
    if not folder.is_dir():
        return []
    entries = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            entries.append(Entry(int(match[1]), match[2], path))
    return sorted(entries, key=lambda entry: (entry.step, PHASES.index(entry.phase)))


def read_meta(path: Path) -> dict[str, Any]:
    """`meta.json` of a checkpoint, checked against its own checksum.

    Raises:
        CheckpointError: missing or damaged.
        NewerFormatError: written by a newer format.
    """
    file = path / META_FILE
    try:
        meta = cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))
        expected = meta.pop("meta_sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: expected a readable meta.json ({type(error).__name__}: {error})") from error
    if _meta_checksum(meta) != expected:
        raise CheckpointError(f"{file}: its checksum does not fit its content")
    if meta["format_version"] > FORMAT_VERSION:
        version = meta["format_version"]
        raise NewerFormatError(f"{file}: format version {version}; this sharebert reads up to {FORMAT_VERSION}")
    return meta


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against `meta.json` and return that. Reads all bytes once.

    Raises:
        CheckpointError: the first file that is missing or damaged.
    """
    meta = read_meta(path)
    for name, expected in meta["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            size = file.stat().st_size if file.is_file() else "no file"
            raise CheckpointError(f"{file}: expected {expected['bytes']} bytes, found {size}")
        if sha256_of_file(file) != expected["sha256"]:
            raise CheckpointError(f"{file}: its checksum does not fit its content")
    return meta


def find_newest_good(folder: Path) -> Path | None:
    """The checkpoint of the highest step that is whole. For the owner of the folder.

    Damaged ones are named and moved aside, as retention would count them in place of good ones; `latest` is mended.

    Raises:
        NewerFormatError: one was written by a newer version; to go on from an older one would be another history.
    """
    newest = None
    for entry in reversed(list_checkpoints(folder)):
        try:
            verify(entry.path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            logger.warning("checkpoint %s is damaged and passed over: %s", entry.path.name, error)
            with contextlib.suppress(OSError):  # a folder that cannot be written
                _move_aside(entry.path)
        else:
            newest = entry.path
            break
    with contextlib.suppress(OSError):
        _point_latest_to(newest, folder)
    return newest


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The unique tensors of the model, on the host, under the first of their names."""
    return cast("dict[str, Tensor]", load_file(path / MODEL_FILE))


def evaluated_at(meta: dict[str, Any]) -> str:
    """At which step the held-out figures of `meta` were measured, for people; empty where it does not say.

    That may be some updates before the save. Checkpoints of the first version do not say.
    """
    return f", at step {meta['evaluated_step']:,}" if meta.get("evaluated_step", -1) >= 0 else ""


def load_training_state(path: Path) -> dict[str, Any]:
    """Optimizer state by name, scaler and meters, on the host."""
    return cast("dict[str, Any]", torch.load(path / STATE_FILE, map_location="cpu", weights_only=True))


class CheckpointFolder:
    """The `checkpoints` folder of one run: rank 0 saves into it, every rank reads from it."""

    def __init__(self, path: Path, *, keep_last: int, keep_every: int | None) -> None:
        self.path = path
        self.keep_last = keep_last
        self.keep_every = keep_every

    def save(
        self, *, tensors: dict[str, Tensor], training_state: dict[str, Any], tokenizer: bytes, meta: dict[str, Any]
    ) -> Path:
        """Write a checkpoint and delete what retention no longer keeps; returns its folder.

        Args:
            tensors: unique tensors of the model by name.
            training_state: what resuming needs besides, loadable with ``weights_only=True``.
            tokenizer: content of the run's tokenizer.json, saved along so that a checkpoint is usable by itself.
            meta: at least `step`, `phase` and `before_unsharing`; format version and checksums are added.

        Raises:
            CheckpointError: the file system refused (full disk, no permission); older checkpoints are untouched.
        """
        name = f"step-{meta['step']:08d}-{meta['phase']}"
        target, temporary = self.path / name, self.path / f"{_TEMPORARY}{name}"
        old, doomed = _verified(target), self.path / f"{_DELETED}{name}"
        if old is not None and old.get("evaluation") == meta.get("evaluation"):
            return target
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write_files(temporary, tensors, training_state, tokenizer, meta)
            if old is not None:  # a stop came before its evaluation was complete
                shutil.rmtree(doomed, ignore_errors=True)
                target.rename(doomed)
            elif target.exists():
                _move_aside(target)
            temporary.rename(target)
            sync(self.path)
            _point_latest_to(target, self.path)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError on a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            if old is not None and doomed.exists() and not target.exists():
                with contextlib.suppress(OSError):  # else :func:`remove_leftovers` does
                    doomed.rename(target)
            raise CheckpointError(f"{target}: could not be written ({error}); older checkpoints are intact") from error
        if old is not None:
            shutil.rmtree(doomed, ignore_errors=True)
        self._delete_old(meta["step"])
        return target

    def _delete_old(self, step: int) -> None:
        """Delete what is older than the newest `keep_last` up to `step`.

        Whatever lies beyond `step` was damaged when the run went on from before it, and does not count.
        """
        entries = [entry for entry in list_checkpoints(self.path) if entry.step <= step]
        for entry in entries[: -self.keep_last]:
            if self.keep_every and entry.step % self.keep_every == 0:
                continue
            with contextlib.suppress(CheckpointError):  # a damaged one has no claim to be kept
                if read_meta(entry.path)["before_unsharing"]:
                    continue
            with contextlib.suppress(OSError):
                # Under its own name a checkpoint is whole at any moment, also while it is being deleted.
                doomed = entry.path.rename(self.path / f"{_DELETED}{entry.path.name}")
                shutil.rmtree(doomed, ignore_errors=True)


def write_files(
    folder: Path, tensors: dict[str, Tensor], training_state: dict[str, Any], tokenizer: bytes, meta: dict[str, Any]
) -> None:
    """Write the files of a checkpoint into the empty `folder`, and sync them; as :meth:`CheckpointFolder.save`."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / MODEL_FILE)
    torch.save(training_state, folder / STATE_FILE)
    (folder / TOKENIZER_FILE).write_bytes(tokenizer)
    files = {}
    for name in (MODEL_FILE, STATE_FILE, TOKENIZER_FILE):
        file = folder / name
        sync(file)
        files[name] = {"bytes": file.stat().st_size, "sha256": sha256_of_file(file)}
    meta = json.loads(json.dumps({**meta, "format_version": FORMAT_VERSION, "files": files}))
    meta["meta_sha256"] = _meta_checksum(meta)
    (folder / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    sync(folder / META_FILE)
    sync(folder)


def link_checkpoint(source: Path, folder: Path, texts: Mapping[str, str]) -> None:
    """The checkpoint `source` once more, below `folder` and under the same name: whole or absent, as by a save.

    Its files are hard links, which cost no space and outlive the source; copies where the file system has none. A
    checkpoint of that name is replaced. For one writer at a time in `folder`.

    Args:
        source: a checkpoint.
        folder: where it goes.
        texts: contents of further files in it, by name.

    Raises:
        OSError: the file system refused.
    """
    target, temporary = folder / source.name, folder / f"{_TEMPORARY}{source.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, text in texts.items():
        (temporary / name).write_text(text, encoding="utf-8")
        sync(temporary / name)
    for file in sorted(source.iterdir(), key=lambda file: file.name == META_FILE):  # with which it is whole
        try:
            (temporary / file.name).hardlink_to(file)
        except OSError:
            shutil.copyfile(file, temporary / file.name)
            sync(temporary / file.name)
    if target.exists():
        shutil.rmtree(target.rename(folder / f"{_DELETED}{source.name}"), ignore_errors=True)
    temporary.rename(target)
    sync(folder)


def _move_aside(damaged: Path) -> None:
    aside = free_name(damaged, "damaged")
    damaged.rename(aside)
    logger.warning("moved %s aside to %s", damaged, aside.name)


def _point_latest_to(newest: Path | None, folder: Path) -> None:
    """Make the link `latest` in `folder` name the checkpoint `newest`; None: there is none to name."""
    latest, link = folder / "latest", folder / f"{_TEMPORARY}latest"
    link.unlink(missing_ok=True)
    if newest is None:
        latest.unlink(missing_ok=True)
    elif not latest.is_symlink() or latest.readlink() != Path(newest.name):
        link.symlink_to(newest.name)
        link.replace(latest)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed save or a killed deletion left behind.

    Not what is whole where the checkpoint of its name is missing: a save was killed, or failed, about to give it that
    name, perhaps with the old one of that name taken away already. The newer one gets it, else the old one.
    """
    for prefix in (_TEMPORARY, _DELETED):
        for path in folder.glob(f"{prefix}step-*"):
            target = path.with_name(path.name.removeprefix(prefix))
            if not target.exists() and _verified(path) is not None:
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def free_name(path: Path, reason: str) -> Path:
    """``<name>.<reason>-<number>`` beside `path`, with the first number that is free."""
    number = 1
    while (target := path.with_name(f"{path.name}.{reason}-{number}")).exists():
        number += 1
    return target


def check_free_space(folder: Path, bytes_needed: int) -> None:
    """Refuse to start a run whose first checkpoint would not fit.

    Raises:
        CheckpointError: with both figures.
    """
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        needed = f"{bytes_needed / 1e9:.2f} GB for a checkpoint"
        raise CheckpointError(f"{folder}: {free / 1e9:.2f} GB free, expected at least {needed}")


def _verified(path: Path) -> dict[str, Any] | None:
    """`meta.json` of a checkpoint that is whole; None where there is none, or a damaged one."""
    try:
        return verify(path)
    except CheckpointError:
        return None


def _meta_checksum(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
