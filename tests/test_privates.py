"""No module of ampopt reaches into another's privates: what others need is public, with a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import ampopt

ROOT = Path(ampopt.__file__).parent.parent

TORCHS = {*dir(torch.Tensor), *vars(nn.Module()), *vars(nn.Module().state_dict())}
"""Names that may be PyTorch's although a file of ours has the same."""


def is_private(name: str) -> bool:
    """Whether a name is its module's own; `__version__` and the like are everybody's."""
    return name.startswith("_") and not name.startswith("__")


def defined(nodes: Sequence[ast.AST]) -> set[str]:
    """The private names that a module gives to functions, classes, variables, and attributes of objects."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner, _, name = ast.unparse(node).rpartition(".")
            if owner in ("", "self", "cls"):
                found.add(name)
    return set(filter(is_private, found)) - TORCHS


def uses(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of every attribute that is read or set, by `getattr` and the like too."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def intrusions(sources: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """For each file, by its path, the names that are another one's privates, and the line of one use.

    A name is another's where another file defines it and this one does not. So `torch._C` is none, for no
    file of ampopt defines it; a subclass's use of what its base class keeps to itself in another file is.
    """
    modules = {path: list(ast.walk(ast.parse(source))) for path, source in sources.items()}
    privates = {path: defined(nodes) for path, nodes in modules.items()}
    found: dict[str, dict[str, int]] = {}
    for path, nodes in modules.items():
        others = set().union(*(names for each, names in privates.items() if each != path)) - privates[path]
        used = {name: line for line, name in uses(nodes) if name in others}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ampopt":
                used |= {each.name: node.lineno for each in node.names if is_private(each.name)}
        if used:
            found[path] = used
    return found


def test_no_module_reaches_into_anothers_privates() -> None:
    files = [file for room in ("ampopt", "passes") for file in (ROOT / room).rglob("*.py")]
    sources = {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for file in files
        if not file.relative_to(ROOT).is_relative_to("ampopt/passes")  # the link to passes
    }
    assert len(sources) > 100
    found = intrusions(sources)
    assert not found, found


OWNER = "class Owner:\n    def __init__(self):\n        self._own = 1\n    def _do(self): ...\n"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("x._own", {"_own"}),
        ("x.y._do()", {"_do"}),
        ("x._own = 2", {"_own"}),
        ("getattr(x, '_own', None)", {"_own"}),
        ("class Heir(Owner):\n    def f(self): return self._own", {"_own"}),
        ("from ampopt.owner import _other", {"_other"}),
        ("from ampopt.version import __version__", set()),
        ("from torch.utils import _pytree", set()),
        ("torch._C._own_of_torch()", set()),
        ("class Mine:\n    def f(self, other):\n        self._own = other._own", set()),
    ],
)
def test_the_check_knows_what_is_anothers(code: str, names: set[str]) -> None:
    found = intrusions({"owner.py": OWNER, "other.py": code})
    assert set(found.get("other.py", ())) == names
