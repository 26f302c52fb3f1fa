"""What a document is made of."""

from __future__ import annotations

from ampopt.document.model import NOTHING, Table


def test_columns_that_say_nothing_are_not_on_the_page() -> None:
    rows = [("fp32", NOTHING, "", "1e-6"), ("amp", NOTHING, "fast", "2")]
    told = Table.of(("lane", "device ms", "why", "error"), rows).told
    assert [column.name for column in told.columns] == ["lane", "why", "error"]
    assert [[cell.text for cell in row] for row in told.rows] == [["fp32", "", "1e-6"], ["amp", "fast", "2"]]
    assert [column.is_number for column in told.columns] == [False, False, True]


def test_a_table_without_rows_keeps_its_columns() -> None:
    assert [column.name for column in Table.of(("a", "b"), []).told.columns] == ["a", "b"]
