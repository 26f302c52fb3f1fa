"""Random models that move tensors between places: served as the original answers, or refused, never wrong."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ampopt
from ampopt.errors import CaptureError, KindError
from ampopt.ir.lanes import FP32
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger
from tests.support.planted import captured_of

Step = tuple[str, str, str]

PLACES = ("attribute", "lazy", "buffer", "inner", "first", "last", "dict", "tuple", "queue")
WAYS = ("mix", "mix", "move", "swap", "in place", "row", "input", "zero", "read", "read", "forget")


class Machine(nn.Module):
    """What a call of two rows does, and what one of more rows does, each a few steps between places."""

    def __init__(self, few: list[Step], many: list[Step]) -> None:
        super().__init__()
        self.layer, self.kinds = nn.Linear(4, 4), (few, many)
        self.attribute, self.frames = torch.randn(2, 4), [torch.zeros(2, 4) for _ in range(3)]
        self.lazy: Any = None
        self.memory = {"h": torch.zeros(2, 4), "deep": (torch.ones(2, 4), 0.5)}
        self.window = collections.deque([torch.zeros(2, 4)] * 2, maxlen=2)
        self.register_buffer("buffer", torch.zeros(2, 4))
        self.inner = nn.Module()
        self.inner.register_buffer("inner", torch.ones(2, 4))

    def read(self, place: str) -> Tensor:
        """The tensor at a place."""
        found: dict[str, Callable[[], Any]] = {
            "attribute": lambda: self.attribute,
            "lazy": lambda: torch.zeros(2, 4) if self.lazy is None else self.lazy,
            "buffer": lambda: self.buffer,
            "inner": lambda: self.inner.inner,
            "first": lambda: self.frames[0],
            "last": lambda: self.frames[-1],
            "dict": lambda: self.memory["h"],
            "tuple": lambda: self.memory["deep"][0],  # type: ignore[index]
            "queue": lambda: self.window[0],
        }
        return found[place]()  # type: ignore[no-any-return]

    def write(self, place: str, value: Any) -> None:
        """Let a place hold a tensor."""
        if place in ("attribute", "lazy", "buffer"):
            setattr(self, place, value)
        elif place == "inner":
            self.inner.inner = value
        elif place == "first":
            self.frames[0] = value
        elif place == "last":
            self.frames = [*self.frames[1:], value]
        elif place == "queue":
            self.window.append(value)
        else:
            self.memory["h" if place == "dict" else "deep"] = value if place == "dict" else (value, 0.5)

    def forward(self, x: Tensor) -> Any:
        y, steps = self.layer(x)[:2], self.kinds[len(x) > 2]
        for way, place, other in steps:
            if way == "mix":
                self.write(place, torch.tanh(0.5 * self.read(other) + y))
            elif way == "move":
                self.write(place, self.read(other))
            elif way == "swap":
                one, two = self.read(place), self.read(other)
                self.write(place, two)
                self.write(other, one)
            elif way == "in place":
                self.read(place).mul_(0.5).add_(0.3 * self.read(other) + 0.1)
            elif way == "row":
                self.read(place)[0] = y[0]
            elif way == "input":
                self.write(place, x[:2])
            elif way == "zero":
                self.write(place, torch.zeros(2, 4))
            elif way == "read":
                y = y + self.read(place)
            else:
                self.lazy = None
        return y, self.read(steps[0][1])


def outcome(
    few: list[Step], many: list[Step], seed: int, kinds: tuple[int, ...], *, late: bool = True
) -> str:
    """Call a machine and its copy served, in turn, and assert that no answer is wrong; what came of it."""
    torch.manual_seed(seed)
    model, order = Machine(few, many).eval(), random.Random(seed)
    try:
        original, captured = captured_of(model, torch.randn(2, 4))
    except CaptureError:
        return "refused"
    program, recipe = FP32.start(captured.program), Recipe(FP32, (), 0.01)
    fast = ampopt.OptimizedModule(original, captured, program, recipe, Ledger("model", {}, ()))
    fast._new.captures = 0 if late else fast._new.max_captures  # or no program is made for another kind
    twin = copy.deepcopy(model)
    for number in range(12):
        x = torch.randn(order.choice(kinds), 4)
        if number == 6:
            fast = copy.deepcopy(fast)
        if number == 9:
            fast.reset_state()
            twin = copy.deepcopy(model)
        with torch.no_grad():
            expected = pytree.tree_map(torch.clone, twin(x.clone()))
        try:
            found = fast(x)
        except KindError:
            return "kinds"
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4), (few, many, number)
    return "lifted" if captured.lifted else "stateless"


steps = st.lists(
    st.tuples(st.sampled_from(WAYS), st.sampled_from(PLACES), st.sampled_from(PLACES)), min_size=1, max_size=4
)


@settings(
    max_examples=20,
    derandomize=True,
    phases=(Phase.generate,),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(few=steps, many=steps, kinds=st.sampled_from([(2,), (2, 5)]), late=st.booleans())
def test_no_machine_is_served_wrongly(
    few: list[Step], many: list[Step], kinds: tuple[int, ...], late: bool
) -> None:
    outcome(few, many, 3, kinds, late=late)


READS: list[Step] = [("read", "attribute", "attribute")]
SUMS: list[Step] = [("mix", "attribute", "attribute")]


@pytest.mark.parametrize(
    ("few", "many", "expected"),
    [
        (SUMS, READS, "lifted"),
        (SUMS, [("zero", "attribute", "first"), *READS], "lifted"),
        ([("input", "buffer", "first")], [("swap", "queue", "buffer")], "lifted"),
        ([("mix", "lazy", "lazy")], [("forget", "lazy", "lazy")], "lifted"),
        (READS, SUMS, "kinds"),
        ([("zero", "attribute", "first"), *READS], SUMS, "kinds"),
        ([("in place", "first", "last")], [("move", "first", "last")], "lifted"),
        ([("row", "queue", "queue")], READS, "refused"),
        ([("move", "first", "last"), ("in place", "last", "dict")], READS, "refused"),
    ],
)
def test_calls_of_two_kinds_share_their_state_or_are_refused(
    few: list[Step], many: list[Step], expected: str
) -> None:
    assert outcome(few, many, 3, (2, 5)) == expected
