"""A model's signature comes back from JSON, and nothing else can come out of it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import json
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.bundle.call_file import read_call, write_call
from ampopt.errors import BundleError, ExportError
from ampopt.ir.capture import Captured, capture
from ampopt.ir.signature import OutputLayout, call_key
from tests.helpers import Model

CPU = torch.device("cpu")


class Pair(NamedTuple):
    """A result with names."""

    low: Tensor
    high: Tensor


def captured_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    class Takes(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return capture(Takes().eval(), args, kwargs, CPU)


def stored_and_read(captured: Captured, *types: type) -> Captured:
    text = json.dumps(write_call(captured), allow_nan=False)
    return read_call(json.loads(text), captured.program, types)


def check_round_trip(captured: Captured, *types: type) -> Captured:
    read = stored_and_read(captured, *types)
    assert call_key(read.leaves, read.spec) == call_key(captured.leaves, captured.spec)
    assert [type(leaf) for leaf in read.leaves] == [type(leaf) for leaf in captured.leaves]
    assert read.layout.spec == captured.layout.spec
    assert len(read.layout.template) == len(captured.layout.template)
    for a, b in zip(read.layout.template, captured.layout.template, strict=True):
        assert a is b if b is OutputLayout.TENSOR else (type(a), repr(a)) == (type(b), repr(b))
    return read


X = torch.arange(6.0).view(2, 3)

CALLS: dict[str, Callable[[], Captured]] = {
    "one tensor": lambda: captured_of(lambda x: x + 1, X),
    "keywords": lambda: captured_of(lambda x, b, a: {"y": x + b, "x": x * a}, X, b=X, a=2),
    "nested": lambda: captured_of(
        lambda x: [x["a"][0] + x["b"]["c"], (x["a"][1], [x["d"]])],
        {"a": (X, X), "b": collections.OrderedDict(c=X), "d": X},
    ),
    "constants": lambda: captured_of(
        lambda x, *rest: (x + 1, *rest),
        X,
        7,
        -0.0,
        math.inf,
        True,
        None,
        "a 'b'\n",
    ),
    "a size": lambda: captured_of(lambda x: (x + 1, x.shape), X),
    "torch's own result": lambda: captured_of(lambda x: torch.max(x, 1), X),
    "an ordered dict": lambda: captured_of(lambda x: collections.OrderedDict(out=x + 1, aux=x), X),
    "numbers as keys": lambda: captured_of(lambda x: {0: x + 1, "0": x}, X),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_result_come_back(name: str) -> None:
    captured = CALLS[name]()
    read = check_round_trip(captured)
    outputs = captured.program.run(*captured.program.examples)
    here, there = captured.layout.restore(outputs), read.layout.restore(outputs)
    assert pytree.tree_structure(here) == pytree.tree_structure(there)


def test_an_order_of_keyword_arguments_that_the_model_sees_is_kept() -> None:
    read = check_round_trip(captured_of(lambda **kwargs: torch.cat([*kwargs.values()]), z=X, a=X + 1))
    assert list(pytree.tree_unflatten(list(read.leaves), read.spec)[1]) == ["z", "a"]
    assert not read.by_name


class _Named(nn.Module):
    def forward(self, z: Tensor, a: Tensor, **rest: Tensor) -> Tensor:
        return torch.cat([z, a, *rest.values()])


@pytest.mark.parametrize("rest", [{}, {"b": X - 1}])
def test_an_order_of_keyword_arguments_that_it_does_not_see_is_none(rest: dict[str, Tensor]) -> None:
    captured = capture(_Named().eval(), (), {"z": X, "a": X + 1, **rest}, CPU)
    data = write_call(captured)
    assert "dict" in data["arguments"]["tuple"][1], "as in the bundles that there are"
    assert check_round_trip(captured).by_name == {"z", "a", *rest}


def test_names_and_an_order_that_is_seen_are_kept_together() -> None:
    captured = capture(_Named().eval(), (), {"y": X, "z": X + 1, "b": X, "a": X + 2}, CPU)
    read = check_round_trip(captured)
    assert list(pytree.tree_unflatten(list(read.leaves), read.spec)[1]) == ["a", "z", "y", "b"]
    assert read.by_name == {"a", "z"}


def test_that_no_tensor_may_be_given_twice_is_kept() -> None:
    captured = dataclasses.replace(captured_of(lambda x: x + 1, X), all_differ=True)
    assert check_round_trip(captured).all_differ
    data = write_call(captured)
    for word in (False, 1, "yes"):
        with pytest.raises(BundleError, match="expected an object of arguments, result"):
            read_call({**data, "all_differ": word}, captured.program)
    assert "all_differ" not in write_call(captured_of(lambda x: x + 1, X))


def test_values_that_export_does_not_take_come_back_too() -> None:
    captured = captured_of(lambda x: x + 1, X)
    leaves, spec = pytree.tree_flatten(((X, torch.float16, CPU, torch.channels_last, math.nan), {}))
    check_round_trip(Captured(captured.program, spec, tuple(leaves), captured.layout))


def test_a_namedtuple_comes_back_as_the_callers_own_where_it_is_given() -> None:
    captured = captured_of(lambda x: Pair(x + 1, x * 2), X)
    read = check_round_trip(captured, Pair)
    assert type(read.layout.restore([X, X])) is Pair


def test_a_namedtuple_that_nobody_gives_is_one_with_the_same_fields() -> None:
    captured = captured_of(lambda x: Pair(x + 1, x * 2), X)
    first, second = (stored_and_read(captured).layout for _ in range(2))
    result = first.restore([X, X + 1])
    assert (type(result).__name__, result._fields) == ("Pair", ("low", "high"))
    assert torch.equal(result.high, X + 1)
    assert first.spec == second.spec


def test_a_namedtuple_with_other_fields_is_not_taken_for_it() -> None:
    class Other(NamedTuple):
        first: Tensor
        second: Tensor

    Other.__name__ = "Pair"
    read = stored_and_read(captured_of(lambda x: Pair(x + 1, x * 2), X), Other)
    assert read.layout.restore([X, X])._fields == ("low", "high")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (1j, "complex"),
        (b"x", "bytes"),
        ({1, 2}, "set"),
        (2**63, "int"),
        (slice(1), "slice"),
        (X.numpy(), "ndarray"),
    ],
)
def test_values_that_a_file_cannot_hold_are_refused_by_their_type(value: object, what: str) -> None:
    captured = captured_of(lambda x: x + 1, X)
    leaves, spec = pytree.tree_flatten(((X, value), {}))
    odd = Captured(captured.program, spec, tuple(leaves), captured.layout)
    with pytest.raises(ExportError, match=rf"manifest\.json, call, arguments.*{what}"):
        write_call(odd)


def test_containers_that_a_file_cannot_hold_are_refused_by_their_type() -> None:
    captured = captured_of(lambda x: collections.defaultdict(list, a=x + 1), X)
    with pytest.raises(ExportError, match=r"result: a file cannot hold a defaultdict: a wrapper .* a dict, "):
        write_call(captured)


def test_keys_that_a_file_cannot_hold_are_refused() -> None:
    captured = captured_of(lambda x: {(1, 2): x + 1}, X)
    with pytest.raises(ExportError, match=r"result.*dict key \(1, 2\)"):
        write_call(captured)


T = {"tensor": None}
CODE = "__import__('os').system('touch CANARY')"
ATTACKS: dict[str, object] = {
    "nothing": None,
    "a number": 1,
    "another tag": {"eval": CODE},
    "a tensor with something in it": {"tensor": CODE},
    "two tags": {"tensor": None, "list": []},
    "a list that is none": {"list": CODE},
    "a dict that is none": {"dict": {"a": T}},
    "a pair of one": {"dict": [["a"]]},
    "a key that is none": {"dict": [[["a"], T]]},
    "a key twice": {"dict": [["a", T], ["a", None]]},
    "a size of texts": {"size": ["x"]},
    "a size of tensors": {"size": [T]},
    "an unknown result of torch": {"torch": ["__class__", [T]]},
    "too few results": {"torch": ["max", [T]]},
    "code for a name": {"namedtuple": [CODE, [["a", T]]]},
    "code for a field": {"namedtuple": ["A", [[CODE, T]]]},
    "a keyword for a field": {"namedtuple": ["A", [["class", T]]]},
    "a private field": {"namedtuple": ["A", [["_make", T]]]},
    "a field twice": {"namedtuple": ["A", [["a", T], ["a", None]]]},
    "a field of another alphabet": {"namedtuple": ["A", [["\uff41", T]]]},
    "a class of a module": {"namedtuple": ["os.stat_result", [["a", T]]]},
    "an unknown dtype": {"list": [T, {"dtype": "os"}]},
    "too many tensors": {"list": [T, T]},
    "too few tensors": {"list": []},
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("part", ["arguments", "result"])
def test_an_attack_is_refused(part: str, attack: str) -> None:
    captured = captured_of(lambda x: x + 1, X)
    data = write_call(captured)
    value = ATTACKS[attack]
    data[part] = value if part == "result" else {"tuple": [{"tuple": [value]}, {"dict": []}]}
    with pytest.raises(BundleError, match=rf"^manifest\.json, call, {part}: "):
        read_call(data, captured.program)


@pytest.mark.parametrize(
    "arguments",
    [
        T,
        {"tuple": []},
        {"tuple": [T]},
        {"tuple": [{"tuple": []}]},
        {"tuple": [{"list": [T]}, {"dict": []}]},
        {"tuple": [{"tuple": [T]}, {"ordered_dict": []}]},
        {"tuple": [{"tuple": [T]}, {"dict": []}, {"list": []}]},
        {"tuple": [{"tuple": [T]}, {"dict": [[1, T]]}, {"dict": []}]},
        {"tuple": [{"tuple": [T]}, {"dict": []}, {"dict": []}, {"dict": []}]},
    ],
)
def test_arguments_that_are_not_positional_and_keyword_are_refused(arguments: object) -> None:
    captured = captured_of(lambda x: x + 1, X)
    with pytest.raises(BundleError, match="expected positional and keyword arguments"):
        read_call({"arguments": arguments, "result": T}, captured.program)


def test_an_argument_with_two_values_is_refused() -> None:
    captured = captured_of(lambda x: x + 1, X)
    twice = [{"dict": [["a", T]]}, {"dict": [["a", T]]}]
    with pytest.raises(BundleError, match="two values"):
        read_call({"arguments": {"tuple": [{"tuple": []}, *twice]}, "result": T}, captured.program)


def test_containers_nested_without_end_are_refused() -> None:
    captured = captured_of(lambda x: x + 1, X)
    data = write_call(captured)
    for _ in range(200):
        data["result"] = {"list": [data["result"]]}
    with pytest.raises(BundleError, match="nested deeper"):
        read_call(data, captured.program)


def test_random_changes_give_a_bundle_error_or_a_call_that_is_written_the_same() -> None:
    captured = captured_of(
        lambda x, y, mode: (Pair(x[0] + 1, y), {"a": [x[1]], "m": mode}, torch.max(y, 1)),
        (X, X),
        y=X,
        mode="fast",
    )
    data = write_call(captured)
    pool = [*ATTACKS.values(), *data.values(), {"float": 0.5}, "x", 10**400, [], {}, {"tuple": []}]

    @settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**64))
    def check(seed: int) -> None:
        draw, changed = random.Random(seed), copy.deepcopy(data)
        for _ in range(draw.choice([1, 2, 4])):
            _mutate(changed, draw, pool)
        try:
            read = read_call(changed, captured.program)
        except BundleError:
            return
        assert read_call(write_call(read), captured.program).layout == read.layout

    check()


def _mutate(data: Any, draw: random.Random, pool: list[Any]) -> None:
    """Walk down a random way and change what is there."""
    while True:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        key = draw.choice(keys) if keys else None
        if key is None:
            return
        if not isinstance(data[key], (dict, list)) or draw.random() < 0.2:
            break
        data = data[key]
    if draw.random() < 0.3:
        del data[key]
    else:
        data[key] = copy.deepcopy(draw.choice(pool))


def test_models_that_return_constants_only_have_a_signature() -> None:
    captured = capture(Model(lambda m, x: (x.relu(), 3)), (X,), {}, CPU)
    assert stored_and_read(captured).layout.restore([X])[1] == 3
