"""Nothing but `atomic` replaces files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ampopt.system import atomic

ROOT = Path(__file__).parent.parent.parent
WRITERS = {"rename", "renames", "link", "mkstemp", "mkdtemp", "mktemp"}
"""Functions that put a file in its place, or make one that is meant for that."""


def writes(node: ast.AST) -> bool:
    """Whether this calls one of WRITERS, or the `replace` of `os` or a path, which has one argument."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    is_path = name == "replace" and len(node.args) == 1 and not node.keywords
    kept = any(each.arg in ("delete", "delete_on_close") for each in node.keywords)
    return name in WRITERS or is_path or ast.unparse(node.func) in ("os.replace", "shutil.move") or kept


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.replace(a, b)", True),
        ("made.replace(file)", True),
        ("shutil.move(a, b)", True),
        ("mkstemp(dir=folder)", True),
        ("NamedTemporaryFile(delete=False)", True),
        ("text.replace('a', 'b')", False),
        ("program.replace(graph=graph)", False),
        ("dataclasses.replace(row, name=name)", False),
        ("TemporaryDirectory()", False),
    ],
)
def test_writers_are_known_by_what_they_call(code: str, expected: bool) -> None:
    assert any(map(writes, ast.walk(ast.parse(code)))) == expected


def test_nothing_else_replaces_files() -> None:
    files = [
        file for name in ("ampopt", "passes", "benchmarks", "fuzz") for file in (ROOT / name).rglob("*.py")
    ]
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files
        if file != Path(atomic.__file__)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.expr) and writes(node)
    ]
    assert len(files) > 100
    assert found == []
