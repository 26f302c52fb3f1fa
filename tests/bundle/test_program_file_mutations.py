"""Random changes of a program's file: a BundleError, or a program that computes and nothing else."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampopt.bundle.program_file import write_program
from ampopt.errors import BundleError
from tests.support.program_sample import Data, check_code, read, sample_program, written_sample


def paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every part of a JSON value."""
    inner: list[tuple[Any, ...]] = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        inner += paths(part, (*path, key))
    return inner


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def hostile_values(canary: Path) -> list[Any]:
    code = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    strings = [
        code,
        f"x\n    {code}\n",
        f"x = {code} #",
        f"'+{code}+'",
        f"{{{code}}}",
        "torch",
        "self",
        "aten.from_file.default",
    ]
    tags = ["float", "dtype", "device", "node", "tuple", "memory_format", "layout", "eval", "input", "weight"]
    numbers = [0, 1, -1, 2, 3, 2**50, 2**63, -(2**63), 10**400, 0.5, float("nan"), float("inf")]
    plain: list[Any] = [None, True, False, [], {}, "", "x", "gelu", "getitem", "float16", "aten.relu.default"]
    return [*strings, *({tag: s} for tag in tags for s in [code, 1, None, "x"]), *numbers, *plain]


def mutate(data: Any, draw: random.Random, values: list[Any]) -> Any:
    """One random change: another value, another part of the same file, less, more, or another key."""
    path = draw.choice(paths(data)[1:])
    parent, key = at(data, path[:-1]), path[-1]
    kind = draw.randrange(6)
    if kind == 0:
        parent[key] = copy.deepcopy(draw.choice(values))
    elif kind == 1:
        parent[key] = copy.deepcopy(at(data, draw.choice(paths(data))))
    elif kind == 2:
        del parent[key]
    elif kind == 3 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(draw.choice([draw.choice(values), parent[key]])))
    elif kind == 3:
        parent[str(draw.choice(values))[:80]] = parent.pop(key)
    elif kind == 4 and type(parent[key]) is int:
        parent[key] += draw.choice([-1, 1, 7, 2**40])
    elif kind == 5 and isinstance(parent, list):
        draw.shuffle(parent)
    return data


@pytest.mark.parametrize("changes", [1, 2, 5])
def test_random_changes_give_a_bundle_error_or_a_program_that_only_computes(
    changes: int, tmp_path: Path
) -> None:
    program = sample_program()
    data, tensors = written_sample(program)
    canary = tmp_path / "canary"
    values = hostile_values(canary)
    outcomes = {"refused": 0, "read": 0, "without a file": 0}

    @settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**64))
    def check(seed: int) -> None:
        draw, changed = random.Random(seed), copy.deepcopy(data)
        for _ in range(changes):
            changed = mutate(changed, draw, values)
        try:
            got = read(changed, tensors, program)
        except BundleError as error:
            outcomes["refused" if str(error).startswith("program.json") else "without a file"] += 1
            return
        outcomes["read"] += 1
        got.graph.graph.lint()
        check_code(got.graph)
        again, _ = write_program(got)
        assert without_weights(again) == without_weights(changed)
        with contextlib.suppress(RuntimeError, IndexError):  # values that no operator can take
            got.run(*program.examples)

    check()
    assert not canary.exists(), "code of the file was executed"
    assert outcomes["refused"] > 50
    assert outcomes["read"] > 0 or changes > 1
    assert outcomes["without a file"] == 0


def without_weights(data: Data) -> Data:
    return {key: value for key, value in data.items() if key != "weights"}


def test_the_canary_would_be_seen(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    eval(hostile_values(canary)[0])
    assert canary.exists()
