"""Small invented text, and runs of the real program on it, in this process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sharebert import pretrain as pretrain_module
from sharebert.cli import main

SUBJECTS = ["the farmer", "a quiet child", "our neighbour", "the old captain", "every teacher", "the tired baker"]
VERBS = ["watches", "remembers", "paints", "follows", "repairs", "forgets"]
OBJECTS = ["the river", "a wooden boat", "the long road", "seven yellow birds", "an empty house", "the morning train"]
ENDINGS = ["in the rain", "before breakfast", "without a word", "every winter", "near the harbour", "after the war"]

# Tiny tensors gain nothing from threads, which only wait for each other, for long on a busy machine.
torch.set_num_threads(1)


def invented_text(num_documents: int, seed: int = 0) -> str:
    """Documents of a few sentences of a small grammar, separated by blank lines."""
    draw = random.Random(seed)
    documents = []
    for number in range(num_documents):
        sentences = [
            f"{draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)} {draw.choice(ENDINGS)}."
            for _ in range(draw.randint(3, 8))
        ]
        documents.append(f"Story {number}.\n" + "\n".join(sentences))
    return "\n\n".join(documents) + "\n"


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of 300 short documents."""
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text(invented_text(300), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small_run(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run of 12 updates of a 4-layer model that takes about a second; shares until update 6."""
    cache = tmp_path_factory.mktemp("cache")
    return [
        "data=text_files",
        f"data.files=[{text_file}]",
        f"data.cache_dir={cache}",
        "data.vocab_size=150",
        "data.seq_len=16",
        "data.num_proc=1",
        "model.num_layers=4",
        "model.hidden_size=32",
        "model.num_heads=2",
        "model.intermediate_size=64",
        "model.max_position_embeddings=16",
        "global_batch_size=8",
        "max_steps=12",
        "unshare.step=6",
        "optim.warmup_steps=2",
        "checkpoint.every_steps=null",
        "evaluation.every_steps=5",
        "evaluation.max_sequences=16",
        "logging.every_steps=3",
        "engine.device=cpu",
        "engine.precision=fp32",
    ]


Train = Callable[..., int]


@pytest.fixture
def train(small_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """``train("key=value", ...)`` runs `sharebert train` with these over `small_run`, below tmp_path/outputs."""
    monkeypatch.setattr(pretrain_module, "measure_matmul_peak", lambda device, dtype: 1e12)
    monkeypatch.setattr(pretrain_module, "draw_curves", lambda run: None)
    monkeypatch.setattr(pretrain_module, "draw_share_map", lambda run, unit_layers, threshold: None)

    def run(*overrides: str) -> int:
        keys = {override.split("=")[0] for override in overrides}
        defaults = [override for override in small_run if override.split("=")[0] not in keys]
        return main(["train", f"output_dir={tmp_path}/outputs", *defaults, *overrides])

    return run


@pytest.fixture(scope="session")
def encoder(small_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported Pre-LN encoder of 3 layers and 64 positions."""
    from finetuning import export_encoders

    return export_encoders(small_run, tmp_path_factory.mktemp("encoder"), "pre")["unshared"]
