"""Tables of one's own: every format, the rules that find columns and kinds, and what is refused."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from sharebert.config import ConfigError, TaskConfig
from sharebert.data.format import DataError
from sharebert.finetune.own_table import read_own_table
from sharebert.finetune.tables import read_table

ROWS: list[dict[str, Any]] = [
    {"text": 'a "quoted word, and', "label": "good", "n": 1},
    {"text": "two", "label": "bad", "n": 2},
    {"text": "drei ü", "label": "good", "n": 3},
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """The rows in the format of the file's name."""
    kind = path.name.split(".")[1]
    names = list(rows[0])
    if kind == "tsv":
        lines = ["\t".join(names), *("\t".join(str(row[name]) for name in names) for row in rows)]
        data = ("\n".join(lines) + "\n").encode()
    elif kind == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        data = path.read_bytes()
    elif kind == "jsonl":
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        data = path.read_bytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def task(tmp_path: Path, train: list[dict[str, Any]], dev: list[dict[str, Any]] | None = None, **settings: Any) -> Any:
    """The task of these rows, as JSON lines."""
    files = {"train": train, "dev": train if dev is None else dev, "test": settings.pop("test", None)}
    paths = {name: str(write(tmp_path / f"{name}.jsonl", rows)) for name, rows in files.items() if rows is not None}
    return read_own_table(TaskConfig(**paths, **settings))


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.parquet", "a.tsv.gz", "a.parquet.gz"])
def test_every_format_gives_the_same_columns(tmp_path: Path, name: str) -> None:
    columns = read_table(write(tmp_path / name))
    assert list(columns) == ["text", "label", "n"]
    assert columns["text"] == [row["text"] for row in ROWS]
    assert [str(value) for value in columns["n"]] == ["1", "2", "3"]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.parquet"])
def test_a_task_is_the_same_from_every_format(tmp_path: Path, name: str) -> None:
    path = str(write(tmp_path / name))
    found = read_own_table(TaskConfig(train=path, dev=path))
    assert found.label_names == ("bad", "good")
    assert found.train is not None
    assert found.train.texts == ([row["text"] for row in ROWS],)
    assert found.train.labels.tolist() == [1.0, 0.0, 1.0]
    assert found.metrics == ("accuracy", "macro_f1", "mcc")


def test_a_csv_field_may_hold_commas_quotes_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,label\n"one, ""two""\nthree",x\n', encoding="utf-8")
    assert read_table(tmp_path / "a.csv") == {"text": ['one, "two"\nthree'], "label": ["x"]}


BAD_FILES = [
    ("a.tsv", b"", "no rows"),
    ("a.tsv", b"text\tlabel\n", "no rows"),
    ("a.tsv", b"text\tlabel\nx\ty\nz\n", "line 3: 1 fields; expected 2: text, label"),
    ("a.tsv", b"text\ttext\nx\ty\n", "line 1: a column name stands twice"),
    ("a.csv", b'text,label\n"open,x\n', "line 2: not CSV"),
    ("a.csv", b"text,label\nx,y,z\n", "line 2: 3 fields"),
    ("a.jsonl", b'{"text": "x"}\nnot json\n', "line 2: not JSON"),
    ("a.jsonl", b'{"text": "x"}\n[1]\n', "line 2: expected an object"),
    ("a.parquet", b"PAR1 nonsense", "damaged parquet"),
    ("a.tsv", b"text\tlabel\n\xff\xfe\tx\n", "cannot be read"),
    ("a.txt", b"text", "unknown kind"),
]


@pytest.mark.parametrize(("name", "data", "message"), BAD_FILES, ids=[entry[2] for entry in BAD_FILES])
def test_a_bad_file_is_refused_with_its_name_and_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as refusal:
        read_table(tmp_path / name)
    assert str(refusal.value).startswith(str(tmp_path / name))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "last"), [("a.tsv", "z\n"), ("a.tsv", "z\r\n\r\n"), ("a.csv", "z"), ("a.csv", "z\n\n")]
)
def test_a_blank_line_between_texts_is_an_empty_text(tmp_path: Path, name: str, last: str) -> None:
    (tmp_path / name).write_bytes(f"text\nx\n\n\n{last}".encode())
    assert read_table(tmp_path / name) == {"text": ["x", "", "", "z"]}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.tsv", "text\tlabel\nx\t1\n\ny\t2\n"),
        ("a.csv", "text,label\nx,1\n\ny,2\n"),
        ("a.jsonl", '{"text": "x", "label": "1"}\n \n\n{"text": "y", "label": "2"}\n'),
    ],
)
def test_a_blank_line_among_rows_of_several_fields_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, data: str
) -> None:
    (tmp_path / name).write_text(data)
    assert read_table(tmp_path / name) == {"text": ["x", "y"], "label": ["1", "2"]}
    assert f"the first is line {2 if name == 'a.jsonl' else 3}" in caplog.text


def test_rows_of_json_may_lack_keys_and_hold_lone_surrogates(tmp_path: Path) -> None:
    lines = [r'{"text": "a\ud800b \ud83d\ude00 \\ud800"}', r'{"label": 1, "text": "c"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read_table(tmp_path / "a.jsonl") == {"text": ["a b \U0001f600 \\ud800", "c"], "label": [None, 1]}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.tsv: cannot be read \(No such file"):
        read_table(tmp_path / "nothing.tsv")


# ---------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    ("columns", "texts", "label"),
    [
        (("text", "label", "doc"), ("text",), "label"),
        (("sentence1", "sentence2", "label", "kind"), ("sentence1", "sentence2"), "label"),
        (("premise", "hypothesis", "text", "class"), ("premise", "hypothesis"), "class"),
        (("Review", "Stars", "id"), ("Review",), "Stars"),
        (("something", "label"), ("something",), "label"),
        (("left", "right", "target"), ("left", "right"), "target"),
        (("ID", "tweet", "label"), ("tweet",), "label"),
        (("tweet", "likes", "label"), ("tweet",), "label"),
    ],
)
def test_columns_are_found_by_their_names(
    tmp_path: Path, columns: tuple[str, ...], texts: tuple[str, ...], label: str
) -> None:
    others = {label: "c", "likes": ""}
    rows = [{name: f"{others.get(name, f'{name} ')}{row}" for name in columns} for row in range(3)]
    found = task(tmp_path, rows)
    assert found.train.texts == tuple([f"{name} {row}" for row in range(3)] for name in texts)
    assert found.label_names == ("c0", "c1", "c2")


def test_columns_that_no_rule_finds_can_be_set(tmp_path: Path) -> None:
    rows = [{"a": f"x{row}", "b": f"y{row}", "c": f"z{row}", "d": str(row)} for row in range(3)]
    with pytest.raises(ConfigError, match=r"task\.label_column=None: expected .* one of: a, b, c, d"):
        task(tmp_path, rows)
    with pytest.raises(ConfigError, match=r"task\.text_columns=\[\]: expected .* among: a, b, c"):
        task(tmp_path, rows, label_column="d")
    with pytest.raises(ConfigError, match=r"task\.text_columns=\[\]: expected .* among: id"):
        task(tmp_path, [{"id": "a", "label": "x"}, {"id": "b", "label": "y"}])
    found = task(tmp_path, rows, label_column="d", text_columns=["c", "a"])
    assert found.train.texts == (["z0", "z1", "z2"], ["x0", "x1", "x2"])


def test_a_column_that_is_not_there_is_refused_with_the_near_match(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.label_column='lable': no such column \(did you mean 'label'\?\)"):
        task(tmp_path, ROWS, label_column="lable")
    with pytest.raises(ConfigError, match=r"task\.text_columns='txt': no such column"):
        task(tmp_path, ROWS, text_columns=["txt"])
    with pytest.raises(ConfigError, match="'label' is the label's column"):
        task(tmp_path, ROWS, text_columns=["label"])
    with pytest.raises(DataError, match=r"dev\.jsonl: no column 'label'"):
        task(tmp_path, ROWS, [{"text": "x"}])


# ---------------------------------------------------------------------- labels


def rows_of(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": f"t{index}", "label": label} for index, label in enumerate(labels)]


def test_numbers_are_classes_in_their_order_or_a_regression(tmp_path: Path) -> None:
    assert task(tmp_path, rows_of(10, 2, 2, 1)).label_names == ("1", "2", "10")
    assert task(tmp_path, rows_of(-1, 0, 1)).label_names == ("-1", "0", "1")
    assert task(tmp_path, rows_of(1.0, 2.0, "1")).label_names == ("1", "2")
    for regression in (task(tmp_path, rows_of(0.5, 1, 2)), task(tmp_path, rows_of(*range(30)), kind="regression")):
        assert regression.label_names == ()
        assert regression.metrics == ("pearson", "spearman")
    assert task(tmp_path, rows_of("none", "NA", "some")).label_names == ("NA", "none", "some")
    assert task(tmp_path, rows_of(1, "one"), kind="classification").label_names == ("1", "one")
    assert task(tmp_path, rows_of(*range(30)), kind="classification").label_names[:3] == ("0", "1", "2")
    assert task(tmp_path, rows_of(1, 2), kind="regression").train.labels.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("train", "dev", "settings", "message"),
    [
        (rows_of("a", "a"), None, {}, "train.jsonl: every row has the label 'a' in 'label'"),
        (rows_of("a", "b"), rows_of("a", "c"), {}, "dev.jsonl, row 2: label 'c'; expected one of the training labels"),
        (rows_of("a", ""), None, {}, "train.jsonl, row 2: no label"),
        (rows_of("a", "b"), rows_of(None), {}, "dev.jsonl, row 1: no label"),
        (rows_of(0.5, 1.5, "NA"), None, {}, "train.jsonl, row 3: no label in 'label', found 'NA'"),
        (rows_of(0, 1), rows_of(0, math.nan), {}, "dev.jsonl, row 2: no label in 'label', found nan"),
        ([*rows_of(1), {"text": "x"}], None, {}, "train.jsonl, row 2: no label in 'label', found None"),
        (rows_of("a", "b\tc"), None, {}, "train.jsonl, row 2: label 'b\\tc'; expected one without tabs"),
        (rows_of(1, 2.5), rows_of("x"), {}, "dev.jsonl, row 1: label 'x'; expected a number"),
        ([{"text": None, "label": 1}, {"text": "x", "label": 2}], None, {}, "row 1: None in column 'text'"),
    ],
)
def test_bad_labels_are_refused_with_file_and_row(
    tmp_path: Path, train: list[dict[str, Any]], dev: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as refusal:
        task(tmp_path, train, dev, **settings)
    assert message in str(refusal.value)


def test_words_are_no_regression(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.kind='regression': expected labels that are numbers, found 'good'"):
        task(tmp_path, ROWS, kind="regression")
    with pytest.raises(ConfigError, match=r"found 'inf' \(.*train\.jsonl, row 2\)"):
        task(tmp_path, rows_of(0.5, "inf"), kind="regression")


def test_what_may_be_classes_or_values_has_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"30 different whole numbers in 'label'; .*classification or task\.kind=regr"
    ):
        task(tmp_path, rows_of(*range(30)))
    with pytest.raises(ConfigError, match=r"train\.jsonl, row 2: label 'inf', while others are numbers; expected task"):
        task(tmp_path, rows_of(0.5, "inf"))
    rows = [{"text": "x", "label": "1.5"}, {"text": "y", "label": "null"}]
    path = str(write(tmp_path / "a.csv", rows))
    with pytest.raises(DataError, match=r"a\.csv, row 2 \(without the header\): no label"):
        read_own_table(TaskConfig(train=path, dev=path))


def test_a_test_file_needs_no_labels(tmp_path: Path) -> None:
    (split,) = task(tmp_path, ROWS, test=[{"text": "x"}]).test
    assert math.isnan(split.labels[0])
    (split,) = task(tmp_path, ROWS, test=rows_of("good", None)).test
    assert split.labels[0] == 1.0
    assert math.isnan(split.labels[1])
    (split,) = task(tmp_path, rows_of(0.5, 1), test=rows_of("N/A", 2)).test
    assert math.isnan(split.labels[0])
    assert split.labels[1] == 2.0


def test_test_labels_that_are_all_minus_one_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sharebert.finetune.own_table")
    for train in (rows_of(0.5, 1), rows_of("a", "b")):
        caplog.clear()
        (split,) = task(tmp_path, train, test=rows_of(-1, -1.0)).test
        assert np.isnan(split.labels).all()
        assert "every label is -1, which counts as none" in caplog.text
    (split,) = task(tmp_path, rows_of(-1, 1), test=rows_of(-1)).test
    assert split.labels.tolist() == [0.0]
    (split,) = task(tmp_path, rows_of(0.5, 1), test=rows_of(-1, 0)).test
    assert split.labels.tolist() == [-1.0, 0.0]
