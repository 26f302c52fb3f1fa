"""What `ampopt passes` tells: a row for every pass, and one's proof with the defaults of its options."""

from __future__ import annotations

import dataclasses
import inspect
import json
from importlib.metadata import EntryPoint

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ampopt.cli import app
from ampopt.cli import passes as cli_passes
from ampopt.cli.passes import COLUMNS, details, page, rows, table
from ampopt.errors import InputError
from ampopt.passes import PIPELINE, BakeAutocast, Degroup, FoldConvBn


def test_a_passs_options_are_told_with_their_defaults() -> None:
    runner = CliRunner()
    assert runner.invoke(app.app, ["passes", "degroup"]).stdout.endswith(
        "  choices=none\n  least-gain=1.03\n"
    )
    found = json.loads(runner.invoke(app.app, ["passes", "degroup", "--json"]).stdout)
    assert found["options"] == {"choices": None, "least-gain": 1.03}
    assert runner.invoke(app.app, ["passes", "degrup"]).exit_code == 1


def test_every_pass_has_a_row_in_the_order_in_which_they_are_tried() -> None:
    found = rows()
    assert [row["name"] for row in found] == [step.name for step in PIPELINE]
    for row, step in zip(found, PIPELINE, strict=True):
        assert tuple(row) == COLUMNS
        assert row["portability"] == ("portable" if step.portable else "native")
        assert (row["family"], row["numerics"]) == (step.family.value, step.numerics.value)
        assert row["summary"] == step.summary
        assert row["summary"]


def test_passes_of_other_packages_come_last_and_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint(name, "no_such_module:Pass", "ampopt.passes") for name in ("zeta", "alpha")]
    mine = EntryPoint("fold-conv-bn", "no_such_module:Pass", "ampopt.passes")
    monkeypatch.setattr(cli_passes, "installed", lambda: {e.name: e for e in (*entries, mine)})
    found = rows()
    assert [row["name"] for row in found[len(rows()) - 2 :]] == ["alpha", "zeta"]
    assert len(found) == len(tuple(PIPELINE)) + 2  # ours keeps its name
    assert found[-1] == {
        "name": "zeta",
        "family": "",
        "numerics": "",
        "portability": "",
        "summary": "of no_such_module:Pass: tried where --passes names it",
    }


def test_the_table_has_every_row_whole() -> None:
    wide = Console(width=300, no_color=True)
    with wide.capture() as told:
        wide.print(table(rows()))
    lines = told.get().splitlines()
    assert lines[0].split() == list(COLUMNS)
    assert len(lines) == 1 + len(rows())
    for line, row in zip(lines[1:], rows(), strict=True):
        assert all(row[column] in line for column in COLUMNS)


def test_details_are_the_row_with_the_proof_and_the_options() -> None:
    found = details("degroup")
    assert found["proof"] == inspect.cleandoc(Degroup.__doc__ or "")
    assert "Correct because" in found["proof"]
    assert found["options"] == {"choices": None, "least-gain": 1.03}
    assert {column: found[column] for column in COLUMNS} in rows()
    json.dumps(found)


def test_a_page_is_what_there_is_to_read() -> None:
    text = page("bake-autocast")
    step = BakeAutocast()
    head, empty, *_ = text.splitlines()
    assert head == f"bake-autocast ({step.family.value}, {step.numerics.value}, native)"
    assert empty == ""
    assert inspect.cleandoc(BakeAutocast.__doc__ or "") in text
    assert text.endswith("\n\nOptions:\n  policy=amp")


def test_a_pass_without_options_says_so() -> None:
    assert not dataclasses.fields(FoldConvBn)
    assert page("fold-conv-bn").endswith("\n\nOptions:\n  none")


@pytest.mark.parametrize("ask", [details, page])
def test_a_pass_that_there_is_not_is_refused(ask: object) -> None:
    told = r"there is no pass degrup: choose from allow-tf32, .*; near it is degroup$"
    with pytest.raises(InputError, match=told):
        ask("degrup")  # type: ignore[operator]
