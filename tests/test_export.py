"""Exported folders, as Transformers sees them."""

from __future__ import annotations

import ast
import copy
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Train
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from data_prep.clean import clean_text
from data_prep.encode import TextEncoder
from sharebert.checkpoint import read_meta
from sharebert.cli import main
from sharebert.compose import compose
from sharebert.config import TrainConfig
from sharebert.export.model_card import model_card
from sharebert.export.tokenizer import special_tokens, write_tokenizer
from sharebert.export.unshared import how_to_go_on
from sharebert.train_state import load_model

transformers = pytest.importorskip("transformers")

HARD_TEXT = [
    "Ünïcode, naïve café; the farmer's boat — 3.14% (e.g. this)",
    "tabs\tand\nlines\x00control\x07characters\u200bjoin\ufffdnothing",
    "漢字 and العربية, 'quotes' “curly”…",
    "   spaces   everywhere   ",
    "antidisestablishmentarianism" * 6,
    "ﬁne STRASSE Straße İstanbul ǅ ﬀ",
    "e\u0301tude a\u0323\u0302 \u00ad\u2028line\u2029par\x85nel\x0cfeed\ue000private\U000f0000plane",
    "🙂👍🏽 ½ ² ① x_1=[y]{z}~^`|<>",
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
    first, second = state["bert.embeddings.token_type_embeddings.weight"]
    assert torch.equal(first, second)
    assert not torch.equal(*model.embeddings.token_type.weight)


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
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["do_lower_case"], config["strip_accents"]) == (True, True)
    assert tokenizer.mask_token_id == special.mask
    pair = tokenizer("the farmer", "the river")
    assert sorted(set(pair["token_type_ids"])) == [0, 1]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("[MASK]") == special.mask


@pytest.mark.processes
def test_a_fresh_process_that_has_only_the_folders_gives_our_logits_and_fills_a_mask(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    ids = torch.randint(5, 140, (3, 16))
    torch.save(ids, "ids.pt")
    expected = {}
    options = ["max_steps=6", "evaluation.every_steps=null", "model.max_position_embeddings=32"]  # for the line to try
    folders = {"pre": 'it\'s "pre" $HOME', "post": "post"}
    for norm, folder in folders.items():
        assert train(f"run_name={norm}", f"model.norm={norm}", *options) == 0
        checkpoint = tmp_path / f"outputs/{norm}/checkpoints/latest"
        assert main(["export", str(checkpoint), folder]) == 0
        model, _, _ = load_model(checkpoint)
        with torch.no_grad():
            expected[norm] = model.eval()(ids, torch.arange(16).repeat(3, 1))[..., : model.vocab_size]
    shutil.rmtree(tmp_path / "outputs")
    printed = re.findall(r"^  (python -c .*)$", capsys.readouterr().out, re.MULTILINE)
    lines_to_try = "\n".join(shlex.split(command)[2] for command in printed)
    script = f"""
import sys, torch, transformers
for norm, folder in {folders}.items():
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.save(model(input_ids=torch.load("ids.pt")).logits, f"{{norm}}.pt")
    print(type(model).__name__)
{lines_to_try}
print("sharebert" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    first, second, *filled, has_ours = result.stdout.splitlines()
    assert (first, second, has_ours) == ("MegatronBertForMaskedLM", "BertForMaskedLM", "False")
    assert [len(ast.literal_eval(line)) for line in filled] == [5, 5]
    for norm, ours in expected.items():
        torch.testing.assert_close(torch.load(f"{norm}.pt"), ours, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("exported", KINDS[3:4], ids=IDS[3:4], indirect=True)
def test_the_model_card_says_how_it_was_made_and_what_it_reaches(exported: tuple[Path, Path]) -> None:
    checkpoint, folder = exported
    card, meta = (folder / "README.md").read_text(), read_meta(checkpoint)
    assert "| unsharing | fixed, at update 6, units of 1 layer(s) |" in card
    assert checkpoint.name in card
    assert f"| `eval/loss` | {meta['evaluation']['eval/loss']:.4f} |" in card
    assert f"| sha256 of tokens | {meta['corpus']['train']} |" in card
    assert "| sequences | of 16 tokens |" in card
    assert "| batch | 8 sequences an update, 96 seen |" in card
    assert f"| `eval/targets` | {meta['evaluation']['eval/targets']:.0f} |" in card
    assert "began from" not in card

    def card_with(**values: Any) -> str:
        changed = copy.deepcopy(meta)
        changed.update(values.pop("meta", {}))
        for group, changes in values.items():
            changed["config"][group] = {**changed["config"][group], **changes} if isinstance(changes, dict) else changes
        return model_card(checkpoint, changed, "BertForMaskedLM")

    watching = {"policy": "multi_step", "step": None}
    assert "multi_step, at update 4, 9, units" in card_with(meta={"unshared_at": [4, 9]}, unshare=watching)
    assert "multi_step, not yet, units" in card_with(meta={"unshared_at": [], "phase": "shared"}, unshare=watching)
    offline = {"unshared_from": {"checkpoint": "step-00000005-shared"}, "step": 5, "unshared_at": [4, 6]}
    shown = "| unshared offline from step-00000005-shared, after update 5 (in part at update 4), units of 1 layer(s) |"
    assert shown in card_with(meta=offline)
    assert "| text | text_files a.txt, c\\|d.txt |" in card_with(data={"files": ["/x/a.txt", "c|d.txt"]})
    assert "betas 0.9 and 0.999, weight decay 0.01, clip norm 1 |" in card
    assert "| seed | 1 |" in card
    assert "clip norm none |" in card_with(optim={"clip_norm": None})
    assert "fixed, at update 1, units" in card_with(meta={"unshared_at": []}, unshare={"step": 1})
    assert "| unsharing | none: the layers never shared |" in card_with(unshare={"policy": "never"})
    assert "(positions from 17 to 32 are untrained)" in card_with(model={"max_position_embeddings": 32})
    longer = {"model": {"max_position_embeddings": 32}, "init_from": "bert-base-uncased"}
    assert "(positions from 17 to 32 are those that it began from)" in card_with(**longer)
    began = card_with(meta={"init_from_sha256": "abc"}, init_from="bert-base-uncased")
    assert "| began from | bert-base-uncased, sha256 abc |" in began


@pytest.mark.parametrize("max_steps", [5, 9])
def test_a_printed_setting_is_read_as_the_path_it_names(max_steps: int, tmp_path: Path) -> None:
    folder = tmp_path / """it's a "new" [one], a=b \\ $HOME \\"""
    meta = {"step": 5, "config": {"max_steps": max_steps, "unshare": {"policy": "fixed", "step": 6}}}
    settings = shlex.split(how_to_go_on(meta, folder).splitlines()[-1])
    values = compose("train", "train", TrainConfig, settings).cells[0].values
    assert str(folder) == (values["checkpoint"]["resume"] if max_steps > 5 else values["init_from"])
    assert values["unshare"]["policy"] == ("fixed" if max_steps > 5 else "never")


@pytest.mark.parametrize("given", ["none", "byte level", "roberta"])
def test_a_given_tokenizer_frames_texts_as_in_training_whatever_it_did_before(given: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the farmer and the river"], trainer)
    if given == "byte level":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    elif given == "roberta":  # two </s> between two texts, and no token types
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 3), ("<s>", 2))
    one, two = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("the farmer", "the river"))
    write_tokenizer(tmp_path, tokenizer, special_tokens(tokenizer), 16)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pair = theirs("the farmer", "the river")
    assert theirs("the farmer")["input_ids"] == [2, *one, 3]
    assert pair["input_ids"] == [2, *one, 3, *two, 3]
    assert pair["token_type_ids"] == [0] * (len(one) + 2) + [1] * (len(two) + 1)


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
