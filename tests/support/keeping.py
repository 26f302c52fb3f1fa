"""A model with many places to keep tensors in, and the comparison of its calls with those of a copy."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ampopt
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger
from tests.support.planted import captured_of

SIZE = 6


def inputs(count: int, rows: int = 2, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, SIZE, generator=generator) for _ in range(count)]


class Pair(NamedTuple):
    h: Tensor
    c: Tensor


class Keeping(nn.Module):
    """A linear layer and a recurrent cell, and a function with many places to remember tensors in."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.cell = nn.Linear(SIZE, SIZE), nn.GRUCell(SIZE, SIZE)
        self.lstm = nn.LSTMCell(SIZE, SIZE)
        self.function = function
        zeros = [torch.zeros(2, SIZE) for _ in range(12)]
        self.h, self.last, self.frames = zeros[0], zeros[1], zeros[2:5]
        self.window = collections.deque(zeros[5:8], maxlen=3)
        self.memory: dict[str, Any] = {"h": zeros[8], "deep": {"more": (zeros[9],)}, "gain": 0.5}
        self.pair, self.tuple = Pair(torch.ones(2, SIZE), torch.zeros(2, SIZE)), (zeros[10], zeros[11])
        self.twice = [torch.zeros(2, SIZE)] * 3
        base = torch.zeros(2, 2, SIZE)
        self.slices, self.learnt = list(base.unbind()), torch.zeros(2, SIZE, requires_grad=True)
        self.scratch: Any = None
        self.lazy: Any = None
        self.cache: dict[str, Any] = {}
        self.queue: collections.deque[Tensor] = collections.deque(maxlen=4)
        self.started, self.count, self.history = False, 0, list[Tensor]()
        self.inner = nn.Module()
        self.inner.h = torch.zeros(2, SIZE)
        self.inner.register_buffer("seen", torch.zeros(2, SIZE))
        self.shared_list = [torch.zeros(2, SIZE)]
        vars(self.inner)["frames"] = self.shared_list
        self.aside = [Own()]

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x, self.layer(x))


class Own(nn.Module):
    """A module that its owner keeps in a list, where nobody finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(())


def served(model: nn.Module, lane: Lane = FP32, x: Tensor | None = None) -> ampopt.OptimizedModule:
    """The model captured and served, with no pass that is timed."""
    original, captured = captured_of(model, inputs(1)[0] if x is None else x)
    program, recipe = lane.start(captured.program), Recipe(lane, (), 0.05)
    return ampopt.OptimizedModule(original, captured, program, recipe, Ledger("model", {}, ()))


def check(ours: Any, theirs: Any, limit: float = 1e-5) -> None:
    """Assert that two results have the same structure, and values within a relative error."""
    mine, spec = pytree.tree_flatten(ours)
    yours, other = pytree.tree_flatten(theirs)
    assert spec == other
    for a, b in zip(mine, yours, strict=True):
        assert a.shape == b.shape
        assert a.dtype is b.dtype
        assert float((a - b).norm()) <= limit * max(float(b.norm()), 1e-3)


def check_calls(fast: Any, twin: nn.Module, calls: list[Tensor], limit: float = 1e-5) -> None:
    """Assert that each of these successive calls is the original's."""
    for x in calls:
        with torch.no_grad():
            expected = pytree.tree_map(torch.clone, twin(x.clone()))
        check(fast(x), expected, limit)
