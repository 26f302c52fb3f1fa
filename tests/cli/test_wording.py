"""Texts of reports and errors name options of the command line, not arguments of the Python interface."""

from __future__ import annotations

import dataclasses

import pytest

from ampopt.cli.wording import in_options, told
from ampopt.document.model import Cell, Document, Facts, Points, Section, Table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 passes were not tried: budget_s=85 would do", "7 passes were not tried: --budget 85 would do"),
        (
            "accept it with tolerance=4.9e-2 or precision='amp'",
            "accept it with --tolerance 4.9e-2 or --precision amp",
        ),
        ("with tolerance=0.05.", "with --tolerance 0.05."),
        ("(precision='fp32,amp' searches it)", "(--precision fp32,amp searches it)"),
        ("start again with exclude=['compile']", "start again with --exclude compile"),
        ("could not judge it (cache=False looks again)", "could not judge it (--no-cache looks again)"),
        ('shape; nan="exact" forbids that', "shape; --nan exact forbids that"),
        ("give a larger tolerance= to accept that", "give a larger --tolerance to accept that"),
        ("hz=0: give a positive rate", "--hz 0: give a positive rate"),
        ("deadline_ms=-1: give a positive one", "--deadline-ms -1: give a positive one"),
        ("budget_s=inf: give a finite one", "--budget inf: give a finite one"),
        ("budget_s=-1: give a positive one", "--budget -1: give a positive one"),
        ("tolerance=inf: give a finite one", "--tolerance inf: give a finite one"),
        ("tolerance=-1e-09: give 0 or more", "--tolerance -1e-09: give 0 or more"),
        (
            "when 2 of 9 sizes were verified: raise budget_s",
            "when 2 of 9 sizes were verified: raise --budget",
        ),
        (
            "was 90 s, because it is slow: budget_s sets another",
            "was 90 s, because it is slow: --budget sets another",
        ),
        ("submodules: a larger budget_s tries both", "submodules: a larger --budget tries both"),
        ("no time left (budget_s=12 would do)", "no time left (--budget 12 would do)"),
        ("need 9 s: give a larger budget_s.", "need 9 s: give a larger --budget."),
        ("policy='O9': choose from amp, O1", "--policy O9: choose from amp, O1"),
        ("passes='degroup{': a value", "--passes degroup{: a value"),
        ("bake-autocast in passes= has a policy", "bake-autocast in --passes has a policy"),
        ("dynamic: there is no size 'depth'", "--dynamic: there is no size 'depth'"),
        ("dynamic= has no effect on this", "--dynamic has no effect on this"),
        ("give tolerance=, or leave it out", "give --tolerance, or leave it out"),
        ("force=True keeps it, marked", "--force keeps it, marked"),
        ("leave part='backbone' out", "leave --part backbone out"),
        ("the batch is dynamic: give one", "the batch is dynamic: give one"),
        ("tensor(1., device='cuda:0') is one", "tensor(1., device='cuda:0') is one"),
        ("or do without `verify_key`", "or do without --verify-key"),
        ("the budget is spent, and x=3 is no option", "the budget is spent, and x=3 is no option"),
    ],
)
def test_arguments_are_written_as_options(text: str, expected: str) -> None:
    assert in_options(text) == expected


def test_every_option_is_one_of_the_command_line() -> None:
    from typer.main import get_command

    from ampopt.cli.app import app

    (command,) = [c for name, c in get_command(app).commands.items() if name == "optimize"]  # type: ignore[attr-defined]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    names = ("budget_s=8", "tolerance=1", "precision='amp'", "exclude=['a']", "cache=False", 'nan="keep"')
    for text in (*names, "passes= has", "device= for"):
        assert in_options(text).split()[0] in known, text


def test_all_texts_of_a_report_are_told_so_and_nothing_else_changes() -> None:
    table = Table.of(("pass", "ms"), [("compile", Cell("budget_s=9 would do", 3.0))])
    parts = (table, Facts((("note", "tolerance=0.1"),)), Points(("cache=False looks again",)))
    document = Document("title", "budget_s=3", "", "plain", (Section("one", parts),), {"budget_s": 3})
    found = told(document)
    assert found.subtitle == "--budget 3"
    made = found.sections[0].parts
    assert made[0] == dataclasses.replace(
        table, rows=((table.rows[0][0], dataclasses.replace(table.rows[0][1], text="--budget 9 would do")),)
    )
    assert made[1:] == (Facts((("note", "--tolerance 0.1"),)), Points(("--no-cache looks again",)))
    assert found.data == {"budget_s": 3}
