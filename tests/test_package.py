"""What is installed: configuration files and data preparation are inside, whichever way the package came."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def relative_names(folder: Path, suffix: str) -> set[str]:
    """Files below `folder` that end in `suffix`."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob(f"*{suffix}")}


def configuration_names() -> set[str]:
    """What is configured, and the files that it names by `${conf_file:...}`."""
    return relative_names(ROOT / "conf", ".yaml") | relative_names(ROOT / "conf", ".txt")


def test_every_configuration_file_is_found_through_the_package() -> None:
    package = resources.files("sharebert.conf")
    names = configuration_names()
    assert len(names) > 20
    for name in names:
        assert package.joinpath(name).read_text() == (ROOT / "conf" / name).read_text()


@pytest.mark.slow
@pytest.mark.processes
def test_a_wheel_holds_the_configuration_and_data_preparation_and_no_tests(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building writes into the source tree
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("sharebert", "conf", "data_prep"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("sharebert-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"sharebert/conf/{name}" for name in configuration_names()} <= names
    assert {f"data_prep/{name}" for name in relative_names(ROOT / "data_prep", ".py")} <= names
    assert {f"sharebert/{name}" for name in relative_names(ROOT / "sharebert", ".py")} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sharebert", "data_prep"}
