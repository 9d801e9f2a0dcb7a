"""What README.md and GUIDE.md say is so: commands run; files, settings, experiments and figures exist."""

from __future__ import annotations

import glob
import gzip
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from sharebert import cli
from sharebert.cli import main
from sharebert.config import FinetuneConfig, TrainConfig, flatten, from_dict, to_dict
from sharebert.launch import EXIT_FINISHED

ROOT = Path(__file__).parent.parent
README, GUIDE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "GUIDE.md"))
PAGES = README + GUIDE
PROSE = re.sub(r"^```.*?^```$", "", PAGES, flags=re.MULTILINE | re.DOTALL)
SPANS = re.findall(r"`([^`\n]+)`", PROSE)
LONG_RUN = 200
"""Updates above which a command is shortened; smaller numbers run as they stand."""

MADE_BY_A_RUN = {
    "config.yaml",
    "status.json",
    "metrics.jsonl",
    "curves.png",
    "share_map.png",
    "log.txt",
    "checkpoints/",
}
MADE_BY_OTHER_VERBS = {
    *("sweep.csv", "sweep.md", "jobs/", "report/index.html"),
    *("report.md", "arms.csv", "curves.csv", "runs.csv", "speed_up.csv", "differences.csv"),
    *("depth.png", "table.md", "results.json"),
    *("model/", "predictions/", "submission/", "summary.md", "summary.csv"),
}
OF_THE_USER = {"tokenizer.json", "vocab.txt", ".txt", ".jsonl", ".parquet"}

FIGURES = re.findall(r"`((?:train|eval|perf|share)/\w+)`", PAGES)


def fenced(language: str, page: str = PAGES) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def commands(page: str = PAGES) -> list[list[str]]:
    """Every command of every bash block, as words."""
    lines = "".join(fenced("bash", page)).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def shrink(values: dict[str, Any], small_run: list[str]) -> dict[str, Any]:
    """A composed configuration at a tiny size; what is small already, and text of the user's own, stays."""
    tiny = OmegaConf.to_container(
        OmegaConf.from_dotlist([option for option in small_run if option != "data=text_files"])
    )
    assert isinstance(tiny, dict)
    if values["data"]["source"] == "text_files":
        del tiny["data"]["files"]
    tiny["data"]["source"] = "text_files"
    if values["max_steps"] <= LONG_RUN:
        del tiny["max_steps"], tiny["unshare"]
        tiny["evaluation"]["every_steps"] = 50
    tiny["unshare"] = {**tiny.get("unshare", {}), "check_every": values["unshare"]["check_every"] and 4}
    merged = OmegaConf.to_container(OmegaConf.merge(values, tiny))
    assert isinstance(merged, dict)
    return merged  # type: ignore[return-value]


@pytest.fixture
def user_folder(tmp_path: Path, text_file: Path, small_run: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a corpus, as the commands expect it, where whatever they compose runs at a tiny size."""
    (tmp_path / "corpus").mkdir()
    shutil.copy(text_file, tmp_path / "corpus")
    documents = text_file.read_text().split("\n\n")
    with gzip.open(tmp_path / "corpus/stories.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": document}) + "\n" for document in documents)
    monkeypatch.chdir(tmp_path)
    for split in ("train", "dev"):
        rows = [f"{document.splitlines()[1]}\t{len(document) % 2}" for document in documents[:40]]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    for module in ("pretrain", "plan.run", "bench.run"):
        monkeypatch.setattr(f"sharebert.{module}.measure_matmul_peak", lambda device, dtype: 1e12)
    monkeypatch.setattr("sharebert.bench.run.measure_peak_memory", lambda config, vocab_size, device: 2**30)
    monkeypatch.setattr("sharebert.bench.run.has_transformers", lambda: False)
    monkeypatch.setattr("sharebert.report.draw.new_figure", lambda *_, **__: None)  # else 4 s of drawing

    def tiny_from_dict(kind: Any, values: dict[str, Any]) -> Any:
        return from_dict(kind, shrink(values, small_run) if kind is TrainConfig else values)

    monkeypatch.setattr(cli, "from_dict", tiny_from_dict)
    monkeypatch.setattr("sharebert.sweep.from_dict", tiny_from_dict)
    return tmp_path


SMALLER = {
    "bench": ["--seconds", "0"],
    "submit": ["--dry-run"],
    "deep-linear": [
        *("dimension=2", "num_layers=2", "end_time=2", "bound_depths=[2,3]", "bound_updates=20", "depths=[2,3]"),
    ],
}
"""What a verb is given besides, so that it takes moments and needs no cluster."""


def run_command(words: list[str]) -> None:
    """Run a command of the pages in this process; what needs a cluster or the hub is read and composed only."""
    program, *arguments = words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{arguments[0]}:.* ## ", makefile, re.MULTILINE), "no such target"
        if arguments == ["demo"]:  # what the target runs is checked below
            assert main(["train", "+experiment=demo"]) == EXIT_FINISHED
        return
    composes_only = program in ("torchrun", "srun")
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(arguments)
        assert (options.module, options.training_script) == (True, "sharebert")
        arguments = options.training_script_args
    elif program == "srun":
        arguments = arguments[arguments.index("sharebert") + 1 :]
    else:
        assert program == "sharebert", "neither make, torchrun, srun nor sharebert"
    if arguments[0] == "finetune" and not any(word.startswith("task.train=") for word in arguments):
        composes_only = True
    if composes_only:
        arguments = [*(word for word in arguments if word != "-m"), "--cfg", "job"]
    at_tiny_size = "step-00000005-shared"
    arguments = [word.replace("step-00000149-shared", at_tiny_size) for word in arguments]
    if arguments[0] == "report":  # as a shell does it
        arguments = [path for word in arguments for path in (sorted(glob.glob(word)) if "*" in word else [word])]
    before = len(arguments) if arguments[0] != "submit" else 1
    smaller = [] if composes_only else [word for word in SMALLER.get(arguments[0], []) if word not in arguments]
    assert main([*arguments[:before], *smaller, *arguments[before:]]) == EXIT_FINISHED


def test_every_command_runs(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the pages, each once."""
    for words in map(list, dict.fromkeys(map(tuple, commands()))):
        try:
            run_command(words)
        except (AssertionError, SystemExit) as error:
            raise AssertionError(f"{shlex.join(words)}: {error}\n{capsys.readouterr().err[-2000:]}") from error
    check_what_the_runs_left(user_folder)


def check_what_the_runs_left(folder: Path) -> None:
    """The files, folders and figures that the page promises."""
    run = folder / "outputs/demo"
    assert {name for name in MADE_BY_A_RUN if not (run / name).exists()} == {"share_map.png"}  # it made no checks
    assert (folder / "outputs/diagnostic/share_map.png").exists()
    promised = [span for span in SPANS if span.startswith("outputs/") and "<" not in span]
    assert len(promised) >= 3
    assert [name for name in promised if not (folder / name).exists()] == []
    lines = [path.read_text().splitlines() for path in folder.glob("outputs/[!f]*/metrics.jsonl")]  # not finetune-
    rows = [json.loads(line) for part in lines for line in part]
    written = {name for row in rows for name in row} - {"step"}
    assert written - set(FIGURES) == set(), "written and not explained"
    made = {path.name for path in folder.iterdir()} - {"corpus", "train.tsv", "dev.tsv"}
    assert made == {"outputs", "my-bert", "report", "unshared"}


def test_make_demo_runs_the_experiment_of_that_name() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo:.*\n\t\S*sharebert train \+experiment=demo$", makefile, re.MULTILINE)


def test_set_up_takes_two_commands() -> None:
    assert [words for words in commands(README) if words[0] == "make"] == [["make", "demo"], ["make", "test"]]


def test_every_file_that_is_named_exists() -> None:
    is_path = re.compile(r"[\w.-]*(/[\w.-]+)*(/|\.(py|yaml|toml|md|cff|txt|json|jsonl|png))")
    names = {span for span in SPANS if is_path.fullmatch(span) or span in ("LICENSE", "Makefile")}
    assert len(names) > 15
    named = names - MADE_BY_A_RUN - MADE_BY_OTHER_VERBS - OF_THE_USER
    missing = {name for name in named if not (ROOT / name).exists()}
    assert {name for name in missing if not name.startswith("outputs/")} == set()


def test_every_setting_that_is_named_exists() -> None:
    settings = flatten(to_dict(TrainConfig())) | flatten(to_dict(FinetuneConfig()))
    known = {*settings, *(path.name for path in (ROOT / "conf").iterdir() if path.is_dir())}
    groups = {key.split(".")[0] for key in settings if "." in key}
    named = {span.split("=")[0] for span in SPANS if re.fullmatch(r"[a-z_]+(\.\w+)*=\S*|(\w+)\.\w+", span)}
    named = {name for name in named if "." not in name or name.split(".")[0] in groups}
    named = {name for name in named if not (ROOT / name).exists() and name not in MADE_BY_A_RUN}
    assert len(named) >= 6
    assert named - known == set()


def test_the_table_of_experiments_is_complete() -> None:
    table = README.split("## Experiments", 1)[1].split("## ", 1)[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
    named = set(re.findall(r"\+experiment=([\w/]+)", PAGES))
    assert {name for name in named if not (ROOT / f"conf/experiment/{name}.yaml").exists()} == set()


def test_the_explained_experiment_says_what_the_file_says() -> None:
    (block,) = fenced("yaml")
    shown, file = OmegaConf.create(block), OmegaConf.load(ROOT / "conf/experiment/bert_base_half.yaml")
    assert block.startswith("# @package _global_\n")
    assert {key: file[key] for key in shown} == {key: shown[key] for key in shown}


def test_every_figure_that_is_explained_exists() -> None:
    source = "".join(path.read_text() for path in (ROOT / "sharebert").rglob("*.py"))
    assert {name for name in FIGURES if f'"{name}"' not in source} == set()


def test_every_verb_is_shown_and_every_shown_verb_exists() -> None:
    verbs = {words[1] for words in commands() if words[0] == "sharebert"}
    verbs |= set(re.findall(r"`sharebert ([\w-]+)", PROSE)) - {"VERB"}
    assert verbs == {*cli.HYDRA_VERBS, *cli.PLAIN_VERBS}


class ResidualNetwork(nn.Module):
    """A model that is not ours, for the loop on the page."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs


def test_the_loop_of_the_library_shares_unshares_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (loop,) = fenced("python")
    torch.manual_seed(0)
    model, rotation = ResidualNetwork(), torch.linalg.qr(torch.randn(8, 8)).Q
    inputs = torch.randn(256, 8)
    names = {"model": model, "batches": [(inputs, inputs @ rotation)] * 400, "loss_function": nn.MSELoss()}
    before = names["loss_function"](model(inputs), inputs @ rotation).item()
    exec(loop, names)
    assert names["loss_function"](model(inputs), inputs @ rotation).item() < 0.3 * before
    shown = capsys.readouterr().out
    assert "40 shared tensor([" in shown
    assert "50 unshared tensor([" in shown
    assert model.blocks[0][0].weight is not model.blocks[1][0].weight
