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
sharebert.study.__main__ sharebert.study.runs sharebert.study.held_out sharebert.study.plan sharebert.study
sharebert.__main__ sharebert.cli sharebert.submit sharebert.sweep sharebert.plan.run sharebert.plan.table
    sharebert.plan.files sharebert.plan sharebert.finetune.summary sharebert.compose
sharebert.pretrain sharebert.origin sharebert.run_memory sharebert.run_corpus sharebert.evaluate_text sharebert.inspect
    sharebert.export sharebert.export.model_card sharebert.export.tokenizer sharebert.export.unshared
    sharebert.report.run sharebert.report.draw sharebert.report.content sharebert.report.similarity
    sharebert.report.page sharebert.report.compare sharebert.report.arms sharebert.report.read sharebert.report
    sharebert.deep_linear.run sharebert.deep_linear.draw sharebert.deep_linear.table sharebert.deep_linear.experiments
    sharebert.deep_linear.descent sharebert.deep_linear.flow sharebert.deep_linear.bounds
    sharebert.deep_linear.targets sharebert.deep_linear.network sharebert.deep_linear
sharebert.finetune.run sharebert.finetune.build sharebert.finetune.classification sharebert.finetune.squad
    sharebert.finetune.squad_metrics sharebert.finetune.metrics sharebert.finetune.glue sharebert.finetune.splits
    sharebert.finetune.own_table sharebert.finetune.tables sharebert.finetune.tasks sharebert.finetune.results
    sharebert.finetune.model sharebert.finetune.loop sharebert.finetune.evaluate sharebert.finetune.problem
    sharebert.finetune.sequences sharebert.finetune
sharebert.bench.run sharebert.bench.memory sharebert.bench.contestants sharebert.bench.clock sharebert.bench
    data_prep.prepare data_prep.summary data_prep.token_files data_prep.cache data_prep.encode data_prep.documents
    data_prep.sources data_prep.hf_dataset data_prep.text_files data_prep.packed data_prep.faults
    data_prep.python_docs data_prep.same_tokenizer data_prep.tokenizer data_prep.sample data_prep.clean data_prep
    sharebert.trainer sharebert.update
sharebert.prefix_cache sharebert.train_state sharebert.run_folder sharebert.checkpoint sharebert.evaluate
    sharebert.share_map sharebert.curves sharebert.metrics sharebert.resolve
sharebert.prefix_plan sharebert.unshare_policy sharebert.gradient_probe sharebert.optim sharebert.sharing
    sharebert.memory sharebert.loss sharebert.schedule sharebert.flops sharebert.model.pretrained
    sharebert.model.convert sharebert.model.bert sharebert.model.layers sharebert.model.attention
    sharebert.model.dropout sharebert.model.heads sharebert.model sharebert.data.loader sharebert.data.masking
    sharebert.data.sampler sharebert.data.format sharebert.data
sharebert.provenance sharebert.allocator sharebert.files sharebert.table sharebert.distributed sharebert.precision
    sharebert.launch sharebert.seeding sharebert.log
sharebert.config sharebert.config.schema sharebert.config.deep_linear sharebert.config.finetune sharebert.config.train
    sharebert.config.checks sharebert
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
