"""Texts name an argument as the caller writes it, in Python or as an option; nothing else in them changes."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import ampopt
from ampopt.system.wording import OPTIONS, argument, in_options

PACKAGE = Path(ampopt.__file__).parent

WRITTEN = re.compile(rf"\b({'|'.join(OPTIONS)})=|\b(budget_s|deadline_ms|verify_key)\b")
"""An argument as Python writes it."""

OF_OTHERS = (
    "model.to_empty(device='cpu')",
    ".to(device=",
    "optimizer=torch.optim.AdamW",
    "torch.compile(..., dynamic=False)",
)
"""Arguments of PyTorch's functions, and one whose value no option can give."""


@pytest.mark.parametrize(
    ("named", "in_python", "as_option"),
    [
        (("budget_s", 60), "budget_s=60", "--budget 60"),
        (("budget_s", 0.5), "budget_s=0.5", "--budget 0.5"),
        (("budget_s",), "budget_s", "--budget"),
        (("tolerance=",), "tolerance=", "--tolerance"),
        (("tolerance", 0.049), "tolerance=0.049", "--tolerance 0.049"),
        (("tolerance", float("inf")), "tolerance=inf", "--tolerance inf"),
        (("precision", "fp32,amp"), "precision='fp32,amp'", "--precision fp32,amp"),
        (("exclude", ["compile"]), "exclude=['compile']", "--exclude compile"),
        (("exclude", ("a", "b")), "exclude=('a', 'b')", "--exclude a --exclude b"),
        (("cache", False), "cache=False", "--no-cache"),
        (("force", True), "force=True", "--force"),
        (("hz", 0.0), "hz=0.0", "--hz 0"),
        (("deadline_ms", -1), "deadline_ms=-1", "--deadline-ms -1"),
        (("verify_key",), "verify_key", "--verify-key"),
        (("passes", "degroup{"), "passes='degroup{'", "--passes degroup{"),
        (("part", "budget_s=3"), "part='budget_s=3'", "--part budget_s=3"),
        (("dynamic",), "dynamic", "--dynamic"),
        (("metric", None), "metric=None", "metric=None"),
        (("outputs=",), "outputs=", "outputs="),
    ],
)
def test_an_argument_is_named_as_the_caller_writes_it(
    named: tuple[str, object], in_python: str, as_option: str
) -> None:
    assert argument(*named) == in_python
    with in_options():
        assert argument(*named) == as_option
    assert argument(*named) == in_python


def test_options_are_named_in_one_thread_and_until_an_error_ends_the_block() -> None:
    told: list[str] = []

    def fail() -> NoReturn:
        with in_options():
            thread = threading.Thread(target=lambda: told.append(argument("budget_s")))
            thread.start()
            thread.join()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [*told, argument("budget_s")] == ["budget_s", "budget_s"]


def _texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a module that are neither documentation nor the names that `argument` takes."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    named = {
        id(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "argument"
        for name in node.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documentation | named:
            yield str(node.value)


def test_no_text_has_an_argument_that_the_command_line_could_not_tell_as_its_option() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}: {text}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for text in _texts(ast.parse(file.read_text()))
        if WRITTEN.search(text) and text not in OPTIONS and not any(other in text for other in OF_OTHERS)
    ]
    assert not found
