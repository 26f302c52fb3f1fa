"""Numbers of tensors, and what is computed from them, are the same in int64, or no place of a tensor."""

from __future__ import annotations

import operator
import random
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt.ir.graph import aten
from ampopt.ir.numbers_as_tensors import Exactness, NumbersAsTensors

OPERATORS: list[Any] = [
    *(operator.add, operator.sub, operator.mul, operator.neg),
    *(operator.floordiv, operator.mod, torch.sym_min, torch.sym_max),
]
CONSTANTS = (0, 1, 2, 3, 4, 7, 10, -1, -5, 2**31 - 1, 2**33, 2**61 + 1)
VALUES = {
    torch.int64: (0, 1, 5, -1, -7, 2**31, 2**62, 2**63 - 1, -(2**63), 2**63 - 6, -(2**62) - 3),
    torch.int32: (0, 1, 5, -1, -7, 2**31 - 1, -(2**31)),
    torch.uint8: (0, 1, 5, 127, 128, 255),
}


def _drawn(rng: random.Random, dtype: torch.dtype) -> tuple[fx.GraphModule, fx.Node, fx.Node]:
    """A graph with a number of a tensor, that number, and one that is computed from it in a few steps."""
    graph, mode = fx.Graph(), FakeTensorMode()
    given = graph.placeholder("k")
    with mode:
        given.meta["val"] = torch.zeros([1] * rng.randrange(3), dtype=dtype)
    item = graph.call_function(aten.item.default, (given,))
    numbers = [item]
    for _ in range(rng.randrange(1, 5)):
        target, first = rng.choice(OPERATORS), rng.choice(numbers)
        other: Any = rng.choice([*CONSTANTS, rng.choice(numbers)])
        args = (
            (first,) if target is operator.neg else (first, other) if rng.random() < 0.7 else (other, first)
        )
        numbers.append(graph.call_function(target, args))
    graph.output((numbers[-1],))
    return fx.GraphModule(torch.nn.Module(), graph), item, numbers[-1]


def _written(module: fx.GraphModule, item: fx.Node, number: fx.Node) -> bool:
    """Write the number as a tensor, where that is exact."""
    mode, info = item.args[0].meta["val"].fake_mode, torch.iinfo(item.args[0].meta["val"].dtype)  # type: ignore[union-attr]
    exactness = Exactness(list(module.graph.nodes), {item: (info.min, info.max)})
    if not exactness.is_no_place_around(number):
        return False
    tensor = NumbersAsTensors(module, mode, exactness).tensor(number)
    module.graph.output_node().replace_input_with(number, tensor)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    assert tensor.meta["val"].shape == ()
    assert tensor.meta["val"].dtype is torch.int64
    return True


def test_drawn_numbers_are_those_of_python_or_none_of_any_place() -> None:
    rng, seen = random.Random(0), Counter[str]()
    for _ in range(400):
        dtype = rng.choice(list(VALUES))
        module, item, number = _drawn(rng, dtype)
        theirs = fx.Interpreter(module)
        expected = {}
        for value in VALUES[dtype]:
            shape = item.args[0].meta["val"].shape  # type: ignore[union-attr]
            given = torch.full(shape, value, dtype=dtype)
            try:
                expected[value] = given, theirs.run(given)[0]
            except ZeroDivisionError:
                seen["raises"] += 1
                break
        if len(expected) < len(VALUES[dtype]) or not _written(module, item, number):
            seen["declined"] += 1
            continue
        for given, exact in expected.values():
            (found,) = fx.Interpreter(module).run(given)
            assert isinstance(found, Tensor)
            if -(2**63) <= exact < 2**63:
                assert found.item() == exact, module.graph
                seen["exact"] += 1
            else:
                assert abs(found.item()) >= 2**62, module.graph
                seen["around"] += 1
    assert min(seen[kind] for kind in ("declined", "exact", "around", "raises")) >= 20, seen


def test_what_may_divide_by_zero_or_by_less_stays_a_number() -> None:
    for compute in (lambda n: n % 0, lambda n: n // 0, lambda n: n % -3, lambda n: 6 // n, lambda n: n // n):
        graph = fx.Graph()
        given = graph.placeholder("k")
        item = graph.call_function(aten.item.default, (given,))
        number = compute(fx.Proxy(item)).node  # type: ignore[no-untyped-call]
        assert not Exactness(list(graph.nodes), {item: (0, 255)}).is_no_place_around(number)
