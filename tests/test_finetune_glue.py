"""The tasks of GLUE from invented rows: schemas, labels, and the files of a submission."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from finetuning import finetune, invented_rows, read_results, read_rows, write_lines

from sharebert.config import ConfigError, TaskConfig
from sharebert.data.format import DataError
from sharebert.finetune.classification import TextProblem
from sharebert.finetune.glue import read_glue, submission_file
from sharebert.finetune.sequences import load_tokenizer
from sharebert.finetune.tasks import GLUE, TextTask


def write_task(folder: Path, name: str, label: Any = 0) -> Path:
    """Files of every split of a task, two rows each, the second one without a label."""
    glue = GLUE[name]
    for split in ("train", *glue.dev_splits, *glue.test_splits):
        row = {column: f"{split} {column}" for column in glue.columns}
        write_lines(folder / f"{split}.jsonl", [{**row, "label": label, "idx": 0}, {**row, "label": -1, "idx": 1}])
    return folder


def read(folder: Path, name: str) -> TextTask:
    return read_glue(TaskConfig(name=name, path=str(folder)))


@pytest.mark.parametrize("name", GLUE)
def test_every_task_is_read_from_files_of_its_columns(tmp_path: Path, name: str) -> None:
    task = read(write_task(tmp_path, name), name)
    assert task.label_names == GLUE[name].label_names
    splits = [*([task.train] if task.train else []), *task.dev, *task.test]
    assert [split.name for split in splits] == [
        *(["train"] if GLUE[name].trains else []),
        *GLUE[name].dev_splits,
        *GLUE[name].test_splits,
    ]
    for split in splits:
        assert [texts[0] for texts in split.texts] == [f"{split.name} {column}" for column in GLUE[name].columns]
        assert split.labels[0] == 0.0
        assert math.isnan(split.labels[1])  # -1 is no label


SUBMITTED = {
    "cola": {"CoLA": ["0", "1"]},
    "sst2": {"SST-2": ["0", "1"]},
    "mrpc": {"MRPC": ["0", "1"]},
    "stsb": {"STS-B": ["0.000", "3.142", "5.000"]},
    "qqp": {"QQP": ["0", "1"]},
    "mnli": {"MNLI-m": ["entailment", "neutral"], "MNLI-mm": ["entailment", "neutral"]},
    "qnli": {"QNLI": ["entailment", "not_entailment"]},
    "rte": {"RTE": ["entailment", "not_entailment"]},
    "wnli": {"WNLI": ["0", "1"]},
    "ax": {"AX": ["entailment", "neutral"]},
}


@pytest.mark.parametrize("name", GLUE)
def test_a_submission_has_the_name_and_format_of_the_benchmark(tmp_path: Path, name: str) -> None:
    task = read(write_task(tmp_path, name), name)
    predictions = np.array([-0.2, 3.14159, 7.0]) if name == "stsb" else np.array([0.0, 1.0])
    files = {split.submission: submission_file(task, predictions) for split in task.test}
    assert all(not split.submission for split in task.dev)
    assert files == {
        file: "index\tprediction\n" + "".join(f"{index}\t{value}\n" for index, value in enumerate(values))
        for file, values in SUBMITTED[name].items()
    }


def saved_mnli(folder: Path, names: list[str]) -> Path:
    """MNLI as `save_to_disk` leaves it, its labels listed in the order of `names`."""
    features = datasets.Features(
        premise=datasets.Value("string"),
        hypothesis=datasets.Value("string"),
        label=datasets.ClassLabel(names=names),
        idx=datasets.Value("int32"),
    )
    splits = {}
    for split in ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched"):
        rows = [
            {
                "premise": row["sentence1"],
                "hypothesis": row["sentence2"],
                "label": -1 if split.startswith("test") else names.index(("entailment", "neutral")[row["label"]]),
                "idx": row["idx"],
            }
            for row in invented_rows(12 if split == "train" else 8)
        ]
        splits[split] = datasets.Dataset.from_list(rows, features=features)
    datasets.disable_progress_bars()
    datasets.DatasetDict(splits).save_to_disk(folder)
    return folder


def test_labels_that_a_dataset_lists_in_another_order_are_brought_to_ours(tmp_path: Path) -> None:
    usual = read(saved_mnli(tmp_path / "a", ["entailment", "neutral", "contradiction"]), "mnli")
    permuted = read(saved_mnli(tmp_path / "b", ["contradiction", "entailment", "neutral"]), "mnli")
    assert usual.train is not None
    assert permuted.train is not None
    assert set(usual.train.labels) == {0.0, 1.0}
    assert permuted.train.labels.tolist() == usual.train.labels.tolist()
    for ours, theirs in zip(usual.dev, permuted.dev, strict=True):
        assert ours.labels.tolist() == theirs.labels.tolist()


LABELS = [
    ("not_entailment", 1.0),
    ("1", 1.0),
    (0, 0.0),
    (None, math.nan),
    (1.0, 1.0),
    ("1.0", 1.0),
    (-1.0, math.nan),
    (math.nan, math.nan),
    ("", math.nan),
]


@pytest.mark.parametrize(("label", "expected"), LABELS)
def test_labels_may_be_written_as_names_or_numbers(tmp_path: Path, label: Any, expected: float) -> None:
    task = read(write_task(tmp_path, "rte", label), "rte")
    np.testing.assert_equal(task.dev[0].labels[0], expected)


def test_values_may_be_empty_but_not_infinite(tmp_path: Path) -> None:
    for empty in ("", math.nan, -1.0):
        assert math.isnan(read(write_task(tmp_path, "stsb", empty), "stsb").dev[0].labels[0])
    with pytest.raises(DataError, match="row 1: label 'inf'; expected a number"):
        read(write_task(tmp_path, "stsb", "inf"), "stsb")


def test_a_submission_is_numbered_by_idx_in_whatever_order_the_rows_stand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_task(tmp_path, "cola")

    def read_test(indices: list[Any]) -> Any:
        rows = [{"sentence": f"s{index}", "label": row % 2, "idx": index} for row, index in enumerate(indices)]
        write_lines(tmp_path / "test.jsonl", rows)
        return read(tmp_path, "cola").test[0]

    split = read_test([2, 0, "1"])
    assert split.texts == (["s0", "s1", "s2"],)
    assert split.labels.tolist() == [1.0, 0.0, 0.0]
    assert split.submission == "CoLA"
    split = read_test([3, 0, 1])
    assert split.texts == (["s3", "s0", "s1"],)
    assert split.submission == ""
    assert "1 of 4 idx are missing, the first is 2: no submission file" in caplog.text
    with pytest.raises(DataError, match=r"test\.jsonl, row 3: idx 1, which row 1 has"):
        read_test([1, 0, 1])
    with pytest.raises(DataError, match=r"test\.jsonl, row 2: idx None; expected a whole number"):
        read_test([0, None])


def test_test_labels_that_are_given_are_scored(encoder: Path, tmp_path: Path) -> None:
    problem = TextProblem(
        read(write_task(tmp_path, "wnli"), "wnli"), load_tokenizer(encoder / "tokenizer.json", 64), []
    )
    outputs = [np.array([2.0, 1.0], dtype=np.float32), np.array([0.0, 1.0], dtype=np.float32)]
    assert [(split.name, problem.figures(split, outputs)) for split in problem.splits] == [
        ("validation", {"accuracy": 1.0}),
        ("test", {"accuracy": 1.0}),  # of the first row: the second one has no label
    ]


def test_what_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.path='/nowhere': no such folder"):
        read(Path("/nowhere"), "rte")
    with pytest.raises(DataError, match="no split 'train'"):
        read(tmp_path, "rte")
    write_task(tmp_path, "rte", label="perhaps")
    with pytest.raises(DataError, match="row 1: label 'perhaps'; expected one of"):
        read(tmp_path, "rte")
    write_task(tmp_path, "sst2")
    with pytest.raises(DataError, match="no column 'sentence1'"):
        read(tmp_path, "rte")
    (tmp_path / "test.jsonl").unlink()
    assert read(tmp_path, "sst2").test == ()


def test_damaged_folders_and_shards_that_differ_are_named(tmp_path: Path) -> None:
    for number, names in enumerate((("sentence", "label"), ("sentence",))):
        table = pyarrow.table({name: ["x"] for name in names})
        pyarrow.parquet.write_table(table, tmp_path / f"train-0000{number}.parquet")
    with pytest.raises(DataError, match=r"train-00001\.parquet: columns sentence; expected those of train-00000"):
        read(tmp_path, "sst2")
    for content in ('{"splits": ["train"]}', "{}", "not JSON"):
        (tmp_path / "dataset_dict.json").write_text(content)
        with pytest.raises(DataError, match="expected what `save_to_disk` wrote, found it damaged"):
            read(tmp_path, "sst2")


# ---------------------------------------------------------------------- whole runs


def test_mnli_gives_both_dev_figures_and_submissions_and_its_model_predicts_ax(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_mnli(tmp_path / "mnli", ["contradiction", "neutral", "entailment"])
    settings = ["task=mnli", f"task.path={folder}", "epochs=2", "global_batch_size=4", "evaluation.batch_size=3"]
    assert finetune(tmp_path, encoder, *settings) == 0
    run = tmp_path / "finetune-mnli"
    figures = read_results(run)["figures"]
    assert figures["eval/score"] == pytest.approx((figures["eval/accuracy_m"] + figures["eval/accuracy_mm"]) / 2)
    assert set(figures) == {"eval/accuracy_m", "eval/accuracy_mm", "eval/score"}  # test rows are -1: never scored
    assert [row["step"] for row in read_rows(run) if "eval/score" in row] == [3, 6]
    assert sorted(path.name for path in (run / "submission").iterdir()) == ["MNLI-m.tsv", "MNLI-mm.tsv"]
    assert len((run / "submission/MNLI-mm.tsv").read_text().splitlines()) == 9
    config = json.loads((run / "model/config.json").read_text())
    assert config["id2label"] == {"0": "entailment", "1": "neutral", "2": "contradiction"}

    # A model whose classes stand in another order predicts the same.
    rows = [{"premise": "a", "hypothesis": "b", "label": "neutral"}, {"premise": "c", "hypothesis": "d", "label": -1}]
    write_lines(tmp_path / "ax/test.jsonl", rows)
    assert finetune(tmp_path, run / "model", "task=ax", f"task.path={tmp_path}/ax") == 0
    predicted = (tmp_path / "finetune-ax/submission/AX.tsv").read_text()
    assert "test/mcc" in read_results(tmp_path / "finetune-ax")["figures"]
    assert not (tmp_path / "finetune-ax/model").exists()
    permute(run / "model")
    assert finetune(tmp_path, run / "model", "task=ax", f"task.path={tmp_path}/ax", "run_name=permuted") == 0
    assert (tmp_path / "permuted/submission/AX.tsv").read_text() == predicted
    capsys.readouterr()
    assert finetune(tmp_path, encoder, "task=ax", f"task.path={tmp_path}/ax", "run_name=wrong") == 2
    assert "expected a model fine-tuned on entailment, neutral, contradiction" in capsys.readouterr().err


def permute(model: Path) -> None:
    """Let the classes of a model stand in the opposite order, in its names and in its last layer."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    names = [config["id2label"][str(number)] for number in range(3)][::-1]
    config["id2label"] = {str(number): name for number, name in enumerate(names)}
    config["label2id"] = {name: number for number, name in enumerate(names)}
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
