"""A table is aligned as text and valid as Markdown."""

from __future__ import annotations

from sharebert.table import markdown_table


def test_columns_are_as_wide_as_their_widest_cell_and_bars_are_escaped() -> None:
    assert markdown_table(["key", "n"], [["a|b", "1"], ["longer", "100"]]) == (
        "| key    | n   |\n"
        "| ------ | --- |\n"
        "| a\\|b   | 1   |\n"
        "| longer | 100 |"
    )  # fmt: skip


def test_a_table_may_be_empty() -> None:
    assert markdown_table(["a"], []).splitlines()[0] == "| a   |"
