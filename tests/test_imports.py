"""Imports go down one list and never up, so that the program can be read from the bottom."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Top to bottom: command line; verbs; data preparation and the loop; what the loop needs; the method, the model and
# the data; the machine; the configuration.
LISTED = """
sharebert.__main__ sharebert.cli sharebert.compose
sharebert.pretrain sharebert.evaluate_text sharebert.inspect sharebert.export
data_prep.prepare data_prep.summary data_prep.token_files data_prep.cache data_prep.encode data_prep.documents
    data_prep.sources data_prep.hf_dataset data_prep.text_files data_prep.packed data_prep.faults
    data_prep.python_docs data_prep.tokenizer data_prep.sample data_prep.clean data_prep
    sharebert.trainer sharebert.update
sharebert.train_state sharebert.run_folder sharebert.checkpoint sharebert.evaluate
    sharebert.share_map sharebert.curves sharebert.metrics sharebert.resolve
sharebert.unshare_policy sharebert.gradient_probe sharebert.optim sharebert.sharing sharebert.loss sharebert.schedule
    sharebert.flops sharebert.model.convert sharebert.model.bert sharebert.model.layers sharebert.model.heads
    sharebert.model sharebert.data.loader sharebert.data.masking sharebert.data.sampler
    sharebert.data.format sharebert.data
sharebert.provenance sharebert.files sharebert.distributed sharebert.precision sharebert.launch
    sharebert.seeding sharebert.log
sharebert.config sharebert.config.schema sharebert.config.train sharebert.config.checks sharebert
"""
ORDER = LISTED.split()


def module_files() -> dict[str, Path]:
    """Every module of the two packages, by its dotted name."""
    files = [path for package in ("sharebert", "data_prep") for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imported_modules(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too; `from package import module` counts as the module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import; expected the full name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in ORDER else str(node.module) for name in names}
    return found


def test_every_module_has_its_place_in_the_list() -> None:
    assert sorted(ORDER) == sorted(module_files())


@pytest.mark.parametrize("module", ORDER)
def test_imports_only_go_down_the_list(module: str) -> None:
    below = ORDER[ORDER.index(module) + 1 :]
    ours = {
        name for name in imported_modules(module_files()[module]) if name.split(".")[0] in ("sharebert", "data_prep")
    }
    assert ours <= set(below), f"{module} imports what does not stand below it: {sorted(ours - set(below))}"


def test_the_configuration_needs_the_standard_library_and_hydra_only() -> None:
    files = (ROOT / "sharebert/config").glob("*.py")
    packages = {name.split(".")[0] for path in files for name in imported_modules(path)} - {"sharebert"}
    assert packages - set(sys.stdlib_module_names) <= {"hydra", "omegaconf"}
