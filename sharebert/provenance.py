"""Where a result comes from: code, command line, libraries. Goes into every checkpoint."""

from __future__ import annotations

import functools
import hashlib
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sharebert
from sharebert.files import sha256_of_file

LIBRARIES = ("torch", "numpy", "tokenizers", "datasets", "safetensors", "hydra-core", "omegaconf")


def command_line() -> str:
    """The command that runs, as a shell would take it."""
    return " ".join([sys.argv[0], *map(shlex.quote, sys.argv[1:])])


@functools.cache
def describe_origin() -> dict[str, Any]:
    """Version and git commit of sharebert, and the versions of what it stands on.

    As at the first call: what runs is what was imported, whatever is committed meanwhile.
    """
    return {
        "sharebert_version": sharebert.__version__,
        "git_commit": _git_commit(),
        "library_versions": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
    }


@functools.cache
def source_hash() -> str:
    """sha256 over the modules of this package: equal hashes, equal arithmetic. As at the first call."""
    root = Path(sharebert.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()} {sha256_of_file(path)}\n".encode())
    return digest.hexdigest()


def _git_commit() -> str | None:
    """Commit of the source tree this runs from, with `-dirty` after it; None for an installed wheel."""
    root = Path(sharebert.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
