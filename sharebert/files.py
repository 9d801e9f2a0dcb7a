"""Files on disk: hashes, names, and writing that leaves the old content or the new one, never half of it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sharebert.config import ConfigError


def sha256_of_file(path: Path) -> str:
    """Hex sha256 of a file's bytes; constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Bring a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace the file as a whole: a reader sees the old text or the new one. For one writer at a time."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


@contextmanager
def appearing_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name `folder` when the block ends well: it appears as a whole.

    Raises:
        ConfigError: `folder` is there and not empty.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: expected a folder that is not there yet, or empty")
    temporary = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Paths from the deepest folder that holds them all."""
    parts = [folder.resolve().parts for folder in folders]
    shortest = min(len(part) for part in parts) - 1
    common = next((n for n in range(shortest) if len({part[n] for part in parts}) > 1), shortest)
    return ["/".join(part[common:]) for part in parts]
