"""The text of a pipeline: what is read is what was written, and what cannot be read says where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampopt.errors import InputError
from ampopt.ir.pass_text import parse, unparse

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,5}(-[a-z0-9]{1,4}){0,2}", fullmatch=True)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
OPTIONS = st.dictionaries(NAMES.map(lambda name: name.replace("-", "_")), VALUES, max_size=3)


def _none_inside(value: Any) -> bool:
    return isinstance(value, tuple) and any(v is None or _none_inside(v) for v in value)


@given(st.lists(st.tuples(NAMES, OPTIONS), max_size=3), st.sampled_from([",", ", ", " ", "\n"]))
def test_what_is_written_is_read_again(passes: list[tuple[str, dict[str, Any]]], between: str) -> None:
    assert parse(between.join(unparse(name, options) for name, options in passes)) == passes


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("", []),
        ("a", [("a", {})]),
        ("fold-conv-bn,degroup{least-gain=1.1}", [("fold-conv-bn", {}), ("degroup", {"least_gain": 1.1})]),
        ('a{x=1 y=none,z=[1, ["b"]]}', [("a", {"x": 1, "y": None, "z": (1, ("b",))})]),
        ('a{policy=O1} b{t="x y" u=true}', [("a", {"policy": "O1"}), ("b", {"t": "x y", "u": True})]),
    ],
)
def test_texts_and_what_they_say(text: str, passes: Any) -> None:
    assert parse(text) == passes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a;b", "a comma should stand at character 2, where ';b' is"),
        ("{", "the name of a pass should stand at character 1"),
        ("1a", "the name of a pass should stand at character 1"),
        ("a{", "option=value, or a closing brace should stand at character 3, where the end is"),
        ("a{x}", "option=value, or a closing brace should stand at character 3"),
        ("a{x=}", "a value, in JSON or a word should stand at character 5"),
        ("a{x=[1}", "a value, in JSON or a word should stand at character 5"),
        ("a{x=" + 100_000 * "[", "a value, in JSON or a word should stand at character 5"),
        ("a{x=1", "a closing brace should stand at character 6, where the end is"),
    ],
)
def test_what_cannot_be_read_says_where(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("{", r"\{").replace("[", r"\[")):
        parse(text)
