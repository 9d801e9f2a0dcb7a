"""Exported folders, as Transformers sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Train
from safetensors.torch import load_file
from tokenizers import Tokenizer

from data_prep.clean import clean_text
from data_prep.encode import TextEncoder
from sharebert.cli import main
from sharebert.train_state import load_model

transformers = pytest.importorskip("transformers")

HARD_TEXT = [
    "Ünïcode, naïve café; the farmer's boat — 3.14% (e.g. this)",
    "tabs\tand\nlines\x00control\x07characters\u200bjoin\ufffdnothing",
    "漢字 and العربية, 'quotes' “curly”…",
    "   spaces   everywhere   ",
    "antidisestablishmentarianism" * 6,
]


@pytest.fixture
def exported(train: Train, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A checkpoint of a small run, and the folder it was exported to."""
    norm, name, policy = request.param
    assert train("run_name=a", f"model.norm={norm}", "evaluation.every_steps=null", *policy) == 0
    (checkpoint,) = (tmp_path / "outputs/a/checkpoints").glob(name)
    assert main(["export", str(checkpoint), str(tmp_path / "my-bert")]) == 0
    return checkpoint, tmp_path / "my-bert"


WATCHING = (
    "unshare=multi_step",
    "unshare.check_every=2",
    "unshare.threshold=0.998",
    "unshare.patience=1",
    "max_steps=3",
)
KINDS = [
    ("pre", "step-00000005-shared", ()),
    ("post", "step-00000005-shared", ()),
    ("pre", "step-00000003-partly-shared", (*WATCHING, "optim.lr=0.02")),
    ("pre", "step-00000012-unshared", ()),
    ("post", "step-00000012-unshared", ()),
]
IDS = [f"{norm}-{name[14:]}" for norm, name, _ in KINDS]


@pytest.mark.parametrize("exported", KINDS, ids=IDS, indirect=True)
def test_the_logits_of_the_exported_model_are_ours(exported: tuple[Path, Path]) -> None:
    checkpoint, folder = exported
    model, _, _ = load_model(checkpoint)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    ids = torch.randint(5, model.vocab_size, (3, 16))
    positions = torch.arange(16).repeat(3, 1)
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[1, 9:] = False
    with torch.no_grad():
        ours = model.eval()(ids, positions, mask)[..., : model.vocab_size]
        logits = theirs(input_ids=ids, attention_mask=mask.long(), token_type_ids=torch.ones_like(ids)).logits
    torch.testing.assert_close(logits[mask], ours[mask], rtol=0.0, atol=1e-5)
    assert logits.shape[-1] == model.vocab_size
    state = load_file(folder / "model.safetensors")
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)


@pytest.mark.parametrize("exported", KINDS[3:4], ids=IDS[3:4], indirect=True)
def test_the_exported_tokenizer_gives_our_ids_on_hard_text(exported: tuple[Path, Path]) -> None:
    checkpoint, folder = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = TextEncoder(checkpoint / "tokenizer.json")
    for text in HARD_TEXT:
        ours = encoder.encode([clean_text(text)]).ids.tolist()
        special = encoder.special_ids
        assert tokenizer(text)["input_ids"] == [special.cls, *ours, special.sep]
    assert tokenizer.model_max_length == 16
    assert tokenizer.padding_side == "right"
    assert tokenizer.mask_token_id == special.mask
    pair = tokenizer("the farmer", "the river")
    assert sorted(set(pair["token_type_ids"])) == [0, 1]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("[MASK]") == special.mask


@pytest.mark.processes
@pytest.mark.parametrize("exported", KINDS[3:5], ids=IDS[3:5], indirect=True)
def test_a_fresh_process_that_has_only_the_folder_fills_a_mask(exported: tuple[Path, Path], tmp_path: Path) -> None:
    _, folder = exported
    script = (
        "import sys, transformers\n"
        "fill = transformers.pipeline('fill-mask', sys.argv[1])\n"
        "print(len(fill('the farmer [MASK] the river.')), type(fill.model).__name__, 'sharebert' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    assert result.stdout.splitlines()[-1] == f"5 {architecture} False"


@pytest.mark.parametrize("exported", KINDS[3:4], ids=IDS[3:4], indirect=True)
def test_the_model_card_says_how_it_was_made_and_what_it_reaches(exported: tuple[Path, Path]) -> None:
    checkpoint, folder = exported
    card = (folder / "README.md").read_text()
    assert "fixed, at update 6" in card
    assert checkpoint.name in card
    assert "| `eval/loss` |" in card


@pytest.mark.parametrize("exported", KINDS[3:4], ids=IDS[3:4], indirect=True)
def test_a_folder_with_something_in_it_is_refused(
    exported: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, folder = exported
    before = sorted(path.name for path in folder.iterdir())
    assert main(["export", str(checkpoint), str(folder)]) == 2
    assert "expected a folder that is not there yet" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before
    assert main(["export", str(checkpoint.parent / "nothing"), str(folder / "x")]) == 1
