"""The documentation's commands have options that there are, and its Python names what there is."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import ampopt
from ampopt.cli.app import app
from ampopt.deploy.runtime import OptimizedModule

ROOT = Path(__file__).parents[1]

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

THEIRS = {"RemoveDoubleRelu"}
"""What the reader of `writing-a-pass.md` adds to ampopt."""


def blocks() -> Iterator[tuple[str, str, str]]:
    """The page, the language and the text of each code block."""
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text()):
            yield page.name, language, text


PYTHON = [pytest.param(text, id=page) for page, language, text in blocks() if language == "python"]

COMMANDS = [
    pytest.param(line.removeprefix("$ "), id=line[:60])
    for _, language, text in blocks()
    if language in ("", "sh")
    for line in text.splitlines()
    if line.removeprefix("$ ").startswith("ampopt ")
]


def test_all_pages_are_read() -> None:
    assert len(PYTHON) > 10
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_has_options_that_there_are(line: str) -> None:
    _, name, *words = shlex.split(line, comments=True)
    group = typer.main.get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, words)  # raises what an unknown option, or a missing argument, raises


@pytest.mark.parametrize("text", PYTHON)
def test_a_piece_of_python_names_what_there_is(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "ampopt":
            for name in {each.name for each in node.names} - THEIRS:
                exec(f"from {node.module} import {name}", {})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            check_call(node, node.func)


def check_call(call: ast.Call, function: ast.Attribute) -> None:
    """What is called of the package, or of an optimized module, is there, and takes these keywords."""
    name = function.value.id if isinstance(function.value, ast.Name) else ""
    if (owner := {"ampopt": ampopt, "fast": OptimizedModule}.get(name)) is not None:
        known = inspect.signature(getattr(owner, function.attr)).parameters
        assert {each.arg for each in call.keywords} <= set(known), ast.unparse(call)
