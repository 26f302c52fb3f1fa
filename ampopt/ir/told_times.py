"""Finds times that a model's code measures only to tell them: to a log, or to an attribute that none reads.

`began = perf_counter(); y = self.net(x); self.ms = 1e3 * (perf_counter() - began)` answers the same at any
time. That is shown by the source of the function that reads the clock, for every expression that a time is
in: it is made of times and constants alone, and assigned to a name of the function or to an attribute, or
given to `print` or a logger. A branch, a result or an argument that depends on a time is none of these.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from collections.abc import Collection, Iterator, Sequence, Set
from types import CodeType

from ampopt.ir.parts import words_in

_TELLING = frozenset({"debug", "info", "warning", "error", "critical", "exception"})
"""The methods of a logger."""

_OF_NUMBERS = frozenset({"round", "float", "int", "str", "abs", "format"})

Place = tuple[int | None, int | None, int | None, int | None]
"""Where an expression is in its file: first line, last line, first column, last column."""


def are_merely_told(reads: Collection[tuple[CodeType, int]], functions: Collection[CodeType]) -> bool:
    """Whether times are, each read by an instruction of some code; `functions` is all code of the model.

    They are not where the source, or the place of an instruction in it (before Python 3.11), is not known.
    """
    for code in {code for code, _ in reads}:
        function, places = _source_of(code), _places(code, [at for of, at in reads if of is code])
        if function is None or not places:
            return False
        times = _Times(places)
        if not times.are_told_by(function):
            return False
        others = (each for each in functions if each is not code)
        if any(not times.attributes.isdisjoint(_attributes_read(each)) for each in others):
            return False
    return True


class _Times:
    """The expressions of a function that are times; `reads` are the places of calls that read the clock."""

    def __init__(self, reads: Set[Place]) -> None:
        self._reads = reads
        self._names, self.attributes = set[str](), set[str]()

    def are_told_by(self, function: ast.FunctionDef) -> bool:
        """Whether the function does nothing with a time but tell it; `attributes` then has those it sets."""
        nodes = [*ast.walk(function)]
        if not self._reads <= {_place_of(node) for node in nodes if isinstance(node, ast.Call)}:
            return False  # the file is another by now
        if any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in nodes):
            return False
        known = -1
        while known < (known := len(self._names) + len(self.attributes)):
            self._follow(function)
        return all(self._is_telling(statement) for statement in function.body)

    def _follow(self, function: ast.FunctionDef) -> None:
        """Note the names and attributes that are assigned a time."""
        for node in ast.walk(function):
            targets = _targets(node)
            for target in targets if targets and self._is_in(node.value) else ():  # type: ignore[attr-defined]
                if isinstance(target, ast.Name):
                    self._names.add(target.id)
                elif isinstance(target, ast.Attribute):
                    self.attributes.add(target.attr)

    def _is_telling(self, statement: ast.stmt) -> bool:
        """Whether a statement, with those inside of it, holds no time, or assigns or tells it."""
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return not self._is_in(statement)
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and self._is_in(statement.value):
            simple = all(isinstance(each, (ast.Name, ast.Attribute)) for each in _targets(statement))
            return simple and self._is_one(statement.value)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            if any(map(self._is_in, given)):
                return _is_of_a_log(call.func) and all(not self._is_in(e) or self._is_one(e) for e in given)
        inner = [*_statements(statement)]
        own = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, _BLOCKS)]
        return not any(map(self._is_in, own)) and all(map(self._is_telling, inner))

    def _is_in(self, node: ast.AST | None) -> bool:
        return node is not None and any(map(self._is_read, ast.walk(node)))

    def _is_read(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return _place_of(node) in self._reads
        if isinstance(node, ast.Name):
            return isinstance(node.ctx, ast.Load) and node.id in self._names
        is_loaded = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        return is_loaded and node.attr in self.attributes  # type: ignore[attr-defined]

    def _is_one(self, node: ast.AST | None) -> bool:
        """Whether an expression is made of times and constants alone, or is a text with a time in it."""
        if node is None or isinstance(node, (ast.Constant, ast.JoinedStr)) or self._is_read(node):
            return True
        if isinstance(node, ast.BinOp):
            return self._is_one(node.left) and self._is_one(node.right)
        if isinstance(node, ast.UnaryOp):
            return self._is_one(node.operand)
        if isinstance(node, ast.Call):
            of = node.func
            is_named = isinstance(of, ast.Name) and of.id in _OF_NUMBERS
            is_method = isinstance(of, ast.Attribute) and self._is_one(of.value)
            return (is_named or is_method) and all(map(self._is_one, node.args)) and not node.keywords
        return isinstance(node, ast.Attribute) and self._is_one(node.value)


def _place_of(node: ast.Call) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def _statements(statement: ast.AST) -> Iterator[ast.stmt]:
    """The statements in the blocks of a statement; those of a handler or a case count as its own."""
    for node in ast.iter_child_nodes(statement):
        if isinstance(node, ast.stmt):
            yield node
        elif isinstance(node, _BLOCKS):
            yield from _statements(node)


def _targets(node: ast.AST) -> Sequence[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _is_of_a_log(function: ast.expr) -> bool:
    """Whether it is `print`, or a logger's method; a method of `self` is the model's own code."""
    if isinstance(function, ast.Attribute):
        is_own = isinstance(function.value, ast.Name) and function.value.id == "self"
        return function.attr in _TELLING and not is_own
    return isinstance(function, ast.Name) and function.id == "print"


def _source_of(code: CodeType) -> ast.FunctionDef | None:
    """The function that code was compiled from; None where its file cannot be read, and for a lambda."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return None
    found = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    return next(
        (each for each in found if each.name == code.co_name and _line(each) == code.co_firstlineno), None
    )


def _line(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _places(code: CodeType, instructions: Collection[int]) -> set[Place]:
    """The places in the source of instructions, which Python knows from 3.11 on."""
    if not hasattr(code, "co_positions"):
        return set()
    places = [*code.co_positions()]
    return {places[instruction // 2] for instruction in instructions}


def _attributes_read(code: CodeType) -> frozenset[str]:
    """The names of attributes that code reads, may read by `getattr`, or as a property's setter is given."""
    return _loaded_in(code) | words_in(code) | {code.co_name}


@functools.lru_cache(maxsize=4096)
def _loaded_in(code: CodeType) -> frozenset[str]:
    """The names of attributes that code, and the functions inside it, reads."""
    loads = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
    own = (str(each.argval) for each in dis.get_instructions(code) if each.opname in loads)
    inner = [_loaded_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(own).union(*inner)
