"""A part of a model answers for its submodule only while the model leaves that as it was."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import InputError, StrictError
from ampopt.search.partly_optimized import patched
from ampopt.search.served_part import ServedPart
from tests.support.planted import module_of

IS_NIGHT = False
FACTORS = {"night": 3.0}


class Box:
    """An object with a slot."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Head(nn.Module):
    """Scales by all that it can reach."""

    power = 1

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("scale", torch.ones(4))
        self.night = False
        self.template, self.older = torch.ones(4), [torch.ones(4)]
        self.gains, self.settings, self.box = [1.0, 1.0], {"gain": 1.0}, Box(1.5)
        self.table, self.bytes = array.array("d", [1.0]), bytearray([1])
        self.objects = np.array([1.0, [1.0]], dtype=object)
        gain = 1.0

        def own(y: Tensor, more: float | None = None) -> Tensor:
            nonlocal gain
            gain = gain if more is None else more
            return y * gain

        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        y: Tensor = self.inner(x) * self.scale * self.template * self.older[-1] * sum(self.gains)
        y = self.own(y) * self.settings["gain"] * self.box.value**self.power
        y = y * self.table[0] * self.bytes[0] * self.objects[0] * self.objects[1][0]
        return y * FACTORS["night"] if self.night or IS_NIGHT else y


class Around(nn.Module):
    """Writes to its head where the image is bright."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.head, self.write = Head(), write

    def forward(self, x: Tensor) -> Tensor:
        """The head's features."""
        if x.mean().item() > 3:
            self.write(self.head)
        return self.head(x)  # type: ignore[no-any-return]


def _replace(head: Any) -> None:
    head.inner[0].weight = nn.Parameter(head.inner[0].weight * 2)


WRITES: dict[str, Callable[[Any], object]] = {
    "in a buffer": lambda head: head.scale.fill_(4.0),
    "another weight": _replace,
    "another buffer": lambda head: setattr(head, "scale", head.scale * 5),
    "a flag": lambda head: setattr(head, "night", True),
    "another tensor": lambda head: setattr(head, "template", head.template * 2),
    "in a tensor": lambda head: head.template.fill_(2.0),
    "a list": lambda head: head.gains.append(1.0),
    "a number in a list": lambda head: head.gains.__setitem__(0, 5.0),
    "a tensor in a list": lambda head: head.older.__setitem__(0, head.older[0] * 2),
    "a list of tensors": lambda head: head.older.append(torch.full((4,), 7.0)),
    "a dict": lambda head: head.settings.update(gain=2.0),
    "a slot": lambda head: setattr(head.box, "value", 4.0),
    "what hides an attribute of its class": lambda head: setattr(head, "power", 2),
    "an array": lambda head: head.table.__setitem__(0, 4.0),
    "bytes": lambda head: head.bytes.__setitem__(0, 4),
    "an array of objects": lambda head: head.objects.__setitem__(0, 4.0),
    "what such an array holds": lambda head: head.objects[1].__setitem__(0, 4.0),
    "a closure": lambda head: head.own(torch.ones(1), 6.0),
    "another submodule": lambda head: setattr(head, "inner", nn.Tanh()),
    "a layer": lambda head: head.inner.__setitem__(1, nn.Identity()),
    "one more layer": lambda head: head.inner.append(nn.Tanh()),
    "a hook": lambda head: head.inner.register_forward_hook(lambda _m, _args, y: y + 1),
    "its class": lambda head: setattr(head.inner[1], "__class__", nn.Tanh),
    "its code": lambda head: setattr(head.inner[1], "forward", torch.tanh),
    "a new attribute": lambda head: setattr(head, "scale2", 1),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_the_model_writes_to_a_part_is_seen(what: str) -> None:
    torch.manual_seed(0)
    model, x = Around(WRITES[what]).eval(), torch.randn(2, 4)
    own = patched(model, {})
    program = module_of(model.head, x)
    served: Any = patched(model, {"head": program})
    with torch.no_grad():
        for image in (x, x + 10, x, x + 10):
            torch.testing.assert_close(served(image), own(image))
    part = served.head.forward.__self__
    assert isinstance(part, ServedPart)
    assert part._watch is not None
    assert not part._watch.is_unchanged()


class ByGlobals(Around):
    """Changes what is outside of its head, at night."""

    def forward(self, x: Tensor) -> Tensor:
        """The head's features."""
        self.write(x.mean().item() > 3)
        return self.head(x)  # type: ignore[no-any-return]


def _flag(night: bool) -> None:
    global IS_NIGHT
    IS_NIGHT = night


OUTSIDE: dict[str, Callable[[Any], object]] = {
    "a global variable": _flag,
    "a global dict": lambda night: FACTORS.update(night=6.0 if night else 3.0),
    "an attribute of a class": lambda night: setattr(Head, "power", 3 if night else 1),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_the_model_writes_outside_of_it_is_seen(what: str) -> None:
    torch.manual_seed(0)
    model, x = ByGlobals(OUTSIDE[what]).eval(), torch.randn(2, 4)
    model.head.night, model.head.box.value = what == "a global dict", 2.0
    own, served = patched(model, {}), patched(model, {"head": module_of(model.head, x)})
    try:
        with torch.no_grad():
            for image in (x, x + 10, x, x + 10):
                torch.testing.assert_close(served(image), own(image))
    finally:
        for write in OUTSIDE.values():
            write(False)


def test_what_is_written_again_with_the_same_value_is_no_change() -> None:
    model, x = Around(lambda head: _written_again(head)).eval(), torch.randn(2, 4)
    served: Any = patched(model, {"head": module_of(model.head, x)})
    served.head.forward.__self__._own = lambda *_: pytest.fail("its own code ran")
    with torch.no_grad():
        torch.testing.assert_close(served(x + 10), model(x + 10))


def _written_again(head: Any) -> None:
    head.gains, head.settings, head.night = [float("1"), 1.0], {"gain": float("1")}, False


class Updating(nn.Module):
    """Keeps an average of its features where it is asked to, and a table for each size."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.register_buffer("average", torch.ones(1))
        self.table: Tensor | None = None

    def forward(self, x: Tensor, update: bool = False) -> Tensor:
        """The features by their average, with the table added."""
        if self.table is None or self.table.shape[-1] != x.shape[-1]:
            self.table = torch.linspace(0, 1, x.shape[-1])
        y: Tensor = self.conv(x)
        if update:
            self.average.copy_(y.abs().mean())
        return y / self.average + self.table


class Keeping(nn.Module):
    """Reads what its head has written."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Updating()

    def forward(self, x: Tensor) -> Tensor:
        """Features of dark images, and of bright ones, which renew the average."""
        y = self.head(x, update=True) if x.mean().item() > 3 else self.head(x)
        assert self.head.table is not None
        return y * self.head.average * self.head.table  # type: ignore[no-any-return]


def test_what_a_part_s_own_code_writes_in_a_call_of_another_kind_reaches_the_model() -> None:
    torch.manual_seed(0)
    model, x = Keeping().eval(), torch.randn(1, 3, 8)
    with torch.no_grad():
        model(x)
        own, served = patched(model, {}), patched(model, {"head": module_of(model.head, x)})
        for image in (x, x + 10, x, x[..., :5], x[..., :5] + 10, x):
            torch.testing.assert_close(served(image), own(image))


def test_a_part_that_is_left_alone_is_answered_for() -> None:
    head, x = Head().eval(), torch.randn(2, 4)
    part = ServedPart(head, module_of(head, x))
    part._own = lambda *_: pytest.fail("its own code ran")
    with torch.no_grad():
        torch.testing.assert_close(part(x), head(x))
        torch.testing.assert_close(part(x + 1), head(x + 1))


def test_a_call_of_another_dtype_runs_the_part_s_own_code() -> None:
    model = nn.Sequential(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))).eval()
    x = torch.arange(6)
    program = module_of(model[0], x)
    with pytest.raises(InputError, match="int32"):
        program(x.int())
    refused, served = program.health.refusals, patched(model, {"0": program})
    with torch.no_grad():
        torch.testing.assert_close(served(x.int()), model(x))
        assert (program.health.served_by_original, program.health.refusals) == (1, refused)
        program.strict = True
        with pytest.raises(StrictError, match="int32"):
            served(x.int() + 0 * x.int()[:1])


def test_what_a_part_s_own_code_answers_is_counted_and_refused_where_that_is_asked_for() -> None:
    torch.manual_seed(0)
    model, x = Around(WRITES["a flag"]).eval(), torch.randn(2, 4)
    program = module_of(model.head, x)
    served = patched(model, {"head": program})
    with torch.no_grad():
        served(x)
        assert program.health.served_by_original == 0
        served(x + 10)
        served(x)
        assert program.health.served_by_original == 2
        program.strict = True
        with pytest.raises(StrictError, match="the model has written to this part of it"):
            served(x)


def test_a_model_in_parts_has_no_ranges_of_sizes() -> None:
    class Deciding(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2 if x.sum().item() > 0 else x

    fast = ampopt.optimize(
        Deciding().eval(),
        torch.ones(2, 3),
        dynamic={"batch": (1, 4)},
        budget_s=5,
        progress=False,
        cache=False,
    )
    assert fast.sizes == {}
