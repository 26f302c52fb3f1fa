"""The key of a call, and the border between nested results and flat tensors."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampopt.errors import InputError
from ampopt.ir.signature import (
    call_key,
    check_same_call,
    copied,
    describe,
    flatten_call,
    flatten_outputs,
    map_tensors,
    recognizer,
    tensor_key,
)

X, Y = torch.zeros(2, 3), torch.ones(2, 3)


class Stranger:
    """A class that is flattened into lists that are made for it, the first of which comes twice."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


def _in_lists(stranger: Stranger) -> tuple[list[list[Any]], None]:
    first = [stranger.x]
    return ([first, [stranger.y, stranger.x]] if stranger.y is not None else [first, first]), None


def _of_lists(parts: Any, _: None) -> Stranger:
    x, y = parts
    return Stranger(x[0], y[0])


pytree.register_pytree_node(Stranger, _in_lists, _of_lists)


class _Named(torch.Tensor):
    """A tensor of another class."""


A_LIST = [1]


def key(*args: Any, strides: bool = True, **kwargs: Any) -> object:
    return call_key(*flatten_call(args, kwargs), strides=strides)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X,), (torch.zeros(3, 2),)),
        ((X,), (X.double(),)),
        ((X,), (torch.zeros(3, 2).t(),)),
        ((X,), (X.to("meta"),)),
        ((X, 1), (X, 2)),
        ((X, 1), (X, True)),
        ((X, 1), (X, 1.0)),
        ((X, 0.0), (X, -0.0)),
        ((X, None), (X,)),
        (([X],), ((X,),)),
        (({"a": X, "b": 1},), ({"a": X, "c": 1},)),
        (({"a": X, "b": 1},), ({"b": 1, "a": X},)),
        ((OrderedDict(a=X, b=X),), (OrderedDict(b=X, a=X),)),
        ((OrderedDict(a=X),), ({"a": X},)),
        ((defaultdict(list, a=X, b=1),), (defaultdict(list, b=1, a=X),)),
        (([X, X],), ([X, X, X],)),
        ((X, X), (X, X.clone())),
        ((X, X, Y), (X, Y, X)),
        ((X, X, Y, Y), (X, X, Y, Y + 1)),
        (([X], {"a": X}), ([X], {"a": X + 1})),
        ((X, None), (X, X)),
        ((X, 3), (X, torch.tensor(3))),
        ((X, 3.0), (X, np.float64(3.0))),
        ((X, 3), (X, np.int64(3))),
        ((X, 0j), (X, complex(0.0, -0.0))),
        ((X,), (nn.Parameter(X),)),
        ((X,), (X.as_subclass(_Named),)),
        ((X, "a"), (X, "b")),
        ((X, A_LIST, A_LIST), (X, A_LIST, [1])),
        (([X], A_LIST, [1]), ([X], A_LIST, A_LIST)),
        ((X, [A_LIST, [1], A_LIST]), (X, [A_LIST, A_LIST, [1]])),
    ],
)
def test_calls_that_may_need_another_program_have_another_key(one: Any, other: Any) -> None:
    assert key(*one) != key(*other)


def test_equal_calls_have_one_key() -> None:
    assert key(X, flag=True, scale=2) == key(X + 1, flag=True, scale=2)
    assert hash(key(X, flag=True, scale=2)) == hash(key(X + 1, flag=True, scale=2))
    assert key(X, X + 1, None, None) == key(X + 1, X, None, None)
    assert key([X, X], X + 1) == key([Y, Y], X) != key([X, Y], X + 1)
    assert key(X, float("nan")) == key(X, float("nan")), "every call with NaN would be captured anew"


def test_the_order_of_keywords_is_kept() -> None:
    assert key(flag=True, scale=2) != key(scale=2, flag=True)
    leaves, spec = flatten_call((), {"b": 1, "a": 2})
    assert list(pytree.tree_unflatten(leaves, spec)[1]) == ["b", "a"]


def test_a_tensor_that_is_given_twice_is_mapped_once() -> None:
    made: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor + 1)
        return made[-1]

    args, kwargs = map_tensors(noted, (X, [X, 3]), {"b": X + 1, "a": X})
    assert len(made) == 2
    assert args[0] is args[1][0] is kwargs["a"] is made[0]
    assert kwargs["b"] is made[1]
    assert (args[1][1], list(kwargs)) == (3, ["b", "a"])


def test_a_list_that_is_given_twice_stays_one_list() -> None:
    (first, (second, other)), kwargs = map_tensors(copied, ([X], [A_LIST, [1]]), {"a": A_LIST})
    assert second is kwargs["a"]
    assert second is not A_LIST
    assert other == second == [1]
    assert other is not second
    assert first[0] is not X


def test_a_call_that_is_built_again_has_a_list_for_each_place() -> None:
    leaves, spec = flatten_call((X, A_LIST, {"a": A_LIST}), {})
    (x, one, of_dict), _ = pytree.tree_unflatten(leaves, spec)
    assert x is X
    assert one == of_dict["a"] == A_LIST
    assert one is not of_dict["a"]


def test_a_copy_is_its_own_and_has_no_gradients() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    made = copied(tensor)
    assert not made.requires_grad
    assert made.data_ptr() != tensor.data_ptr()


def test_a_keyword_is_not_a_position() -> None:
    assert key(X, 1) != key(X, flag=1)


def test_strides_can_be_left_out() -> None:
    assert key(X, strides=False) == key(torch.zeros(3, 2).t(), strides=False)
    assert key(X, strides=False) != key(torch.zeros(3, 2), strides=False)


def test_what_cannot_be_hashed_stands_by_its_identity() -> None:
    one, other = {1}, {1}
    assert key(X, one) == key(X, one)
    assert key(X, one) != key(X, other)


def test_a_tensor_is_described_in_a_few_characters() -> None:
    assert describe(X.half()) == "float16[2, 3] on cpu"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layout: pickle.loads(pickle.dumps(layout))])
def test_a_layout_survives_copies(duplicate: Any) -> None:
    result = {"a": (X, None), "b": [X + 1, 3]}
    tensors, layout = flatten_outputs(result)
    again = duplicate(layout).restore(tensors)
    assert list(again) == ["a", "b"]
    assert again["a"][0] is tensors[0]
    assert again["a"][1] is None
    assert again["b"] == [tensors[1], 3]


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    "result",
    [
        X,
        (),
        (X,),
        [X, X + 1],
        (X, (X + 1,)),
        {"b": X, "a": X + 1},
        OrderedDict(b=X, a=X + 1),
        {"a": X, "b": None},
        Pair(X, X + 1),
        [{"a": X}],
        defaultdict(None, a=X),
    ],
    ids=repr,
)
def test_a_result_of_any_structure_is_put_together_again(result: Any) -> None:
    tensors, layout = flatten_outputs(result)
    for _ in range(2):
        again = layout.restore(tuple(tensors))
        assert type(again) is type(result)
        assert pytree.tree_structure(again) == pytree.tree_structure(result)
        assert all(a is b for a, b in zip(pytree.tree_leaves(again), pytree.tree_leaves(result), strict=True))
        if isinstance(again, dict):
            assert list(again) == list(result)
            again.clear()  # it is the caller's


def test_another_dtype_or_device_is_refused_with_what_was_expected() -> None:
    check_same_call([X, 3], [X + 1, 4], X.device)
    with pytest.raises(InputError, match=r"tensor 0 of the call is float64\[2, 3\] on cpu; .*float32 on cpu"):
        check_same_call([X], [X.double()], X.device)
    with pytest.raises(InputError, match=r"tensor 1 of the call is float32\[2, 3\] on meta; .*on cpu"):
        check_same_call([X, X], [X, X.to("meta")], X.device)
    with pytest.raises(InputError, match=r"tensor 1 of the call is float64.*float64 on cpu"):
        check_same_call([], [X, None, X.double().to("meta")], X.device)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ([X, None, X], [X, X.bool(), X]),
        ([X, X.bool(), X], [X, None, X]),
        ([2, X], [torch.tensor(3), X]),
        ([], [X, X.double()]),
    ],
)
def test_what_has_become_a_tensor_or_none_is_compared_with_nothing(expected: Any, actual: Any) -> None:
    check_same_call(expected, actual, X.device)


EXAMPLES = {"full": X, "empty": torch.zeros(0, 3), "on meta": X.to("meta"), "a parameter": nn.Parameter(X)}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_a_recognizer_tells_what_class_and_key_of_a_tensor_tell(example: torch.Tensor) -> None:
    others = [
        *EXAMPLES.values(),
        X.clone(),
        X.double(),
        X.t(),
        torch.zeros(3, 2).t(),
        torch.zeros(3, 2),
        torch.zeros(2, 3, 1),
        torch.zeros(2, 0),
        torch.zeros(0, 3, dtype=torch.float64),
        X.as_subclass(_Named),
    ]
    same = recognizer(example)
    kind = type(example), tensor_key(example)
    assert [same(other) for other in others] == [(type(o), tensor_key(o)) == kind for o in others]
    assert not any(map(same, [3, None, "x", [example]]))


def test_a_recognizer_tells_bits_and_modes_apart() -> None:
    same = recognizer(X)
    assert same(X.clone())
    assert not same(torch._neg_view(X))
    assert not recognizer(X * 1j)((X * 1j).conj())
    with torch.inference_mode():
        assert not same(X)
        assert recognizer(X)(X)


def test_lists_that_a_flattening_makes_are_none_that_came_before() -> None:
    values = [Stranger(torch.full((2,), float(i)), torch.zeros(2)) for i in range(40)]
    plain = pytree.tree_flatten(((values,), {}))[1]
    for _ in range(20):
        assert flatten_call((values,), {})[1] == plain
        mapped = map_tensors(lambda tensor: tensor + 1, (values,), {})[0][0]
        assert [float(each.x[0]) for each in mapped] == [i + 1.0 for i in range(40)]


def test_a_class_that_takes_no_mark_is_flattened_without_one() -> None:
    value = Stranger(X, None)
    assert flatten_call((value,), {})[1] == pytree.tree_flatten(((value,), {}))[1]
