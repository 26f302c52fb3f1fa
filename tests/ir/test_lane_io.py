"""LaneIO: a model in one floating-point dtype, captured as the model inside with conversions as borders."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import InputError
from ampopt.ir.capture import capture
from ampopt.ir.lane_io import LaneIO, original_call, original_of, with_own_dtypes
from ampopt.ir.model_copy import note_writes, private_copy, working_copy
from tests.helpers import Model

LOW, CPU = torch.bfloat16, torch.device("cpu")


class Mixed(nn.Module):
    """Takes floats of two widths and integers; returns a dict with a count in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, weight: Tensor, index: Tensor) -> dict[str, Tensor]:
        assert (x.dtype, weight.dtype, index.dtype) == (torch.float32, torch.float64, torch.int64)
        y = self.layer(x)[index]
        return OrderedDict(y=y, sums=(y * weight).sum(0), count=index + 1)


X, WEIGHT, INDEX = torch.linspace(-1, 1, 12).reshape(3, 4), torch.rand(4).double(), torch.tensor([2, 0])


def mixed() -> LaneIO:
    return LaneIO.of_call(Mixed().eval(), (X,), {"weight": WEIGHT, "index": INDEX}, LOW)


def test_each_tensor_is_converted_to_the_dtype_of_its_own_place_and_back() -> None:
    model = mixed()
    args, kwargs = model.outside((X,), {"weight": WEIGHT, "index": INDEX})
    assert [t.dtype for t in (*args, *kwargs.values())] == [LOW, LOW, torch.int64]
    with torch.no_grad():
        found = model(*args, **kwargs)
        expected = model.model(args[0].float(), weight=kwargs["weight"].double(), index=INDEX)
    assert type(found) is OrderedDict
    assert [t.dtype for t in found.values()] == [LOW, LOW, torch.int64]
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in expected)


def test_a_call_of_another_structure_gets_the_widest_of_the_models_dtypes() -> None:
    model = LaneIO.of_call(Model(lambda m, *xs: torch.stack(xs).sum(0)), (X,), {}, LOW)
    assert model(X.to(LOW), X.to(LOW)).dtype is LOW
    entered, _ = model.entered((X.to(LOW), X.to(LOW)), {})
    assert [t.dtype for t in entered] == [torch.float32] * 2


def test_a_tensor_in_another_dtype_than_the_lanes_enters_as_it_is() -> None:
    model = mixed()
    with torch.no_grad():
        found = model(X, weight=WEIGHT, index=INDEX)
        expected = model.model(X, weight=WEIGHT, index=INDEX)
    assert torch.equal(found["y"], expected["y"].to(LOW))


@pytest.mark.parametrize(("dtype", "fits"), [(torch.float16, False), (torch.bfloat16, True)])
def test_examples_that_the_dtype_cannot_hold_are_refused(dtype: torch.dtype, fits: bool) -> None:
    x = torch.tensor([1.0, float("inf"), 1e5])
    model = LaneIO.of_call(nn.ReLU(), (x,), {}, dtype)
    if fits:
        assert model.outside((x,), {})[0][0].dtype is dtype
        return
    with pytest.raises(InputError, match=r"float16 cannot hold \(its largest number is 6\.55e\+04\)"):
        model.outside((x,), {})


def test_it_is_captured_as_its_model_with_the_conversions_at_the_border() -> None:
    model = mixed()
    args, kwargs = model.outside((X,), {"weight": WEIGHT, "index": INDEX})
    own = capture(model.model, (X,), {"weight": WEIGHT, "index": INDEX}, CPU)
    captured = capture(model, args, kwargs, CPU)
    program = captured.program
    assert program.graph.code == own.program.graph.code
    assert [t.dtype for t in program.examples] == [LOW, torch.int64, LOW]
    assert [b.dtype for b in program.entry] == [torch.float32, torch.int64, torch.float64]
    assert [b.dtype for b in program.exit] == [LOW, LOW, torch.int64]
    with torch.no_grad():
        found, expected = program.run(*program.examples), model(*args, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected.values(), strict=True))


class Smoothed(nn.Module):
    """Keeps a mean of its inputs in a buffer of an inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.inner.get_buffer("mean")
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - mean


def test_a_models_state_keeps_its_name_and_its_dtype() -> None:
    model = LaneIO.of_call(Smoothed().eval(), (X,), {}, LOW)
    captured = capture(model, (X.to(LOW),), {}, CPU)
    assert captured.state == ("inner.mean",)
    assert [b.dtype for b in captured.program.exit] == [LOW, torch.float32]
    assert [t.dtype for t in captured.program.examples] == [LOW, torch.float32]
    assert captured.lifted is not None
    captured.lifted.write(model, [torch.ones(4)])
    assert torch.equal(model.get_buffer("inner.mean"), torch.ones(4))
    assert torch.equal(model.model.get_buffer("inner.mean"), torch.ones(4))


def test_a_working_copy_shares_parameters_but_for_a_model_that_writes_to_them() -> None:
    def write(m: Any, x: Tensor) -> Any:
        m.layer.weight.data.add_(1)
        return m.layer(x)

    for function, shares in ((lambda m, x: m.layer(x), True), (write, False)):
        inside = private_copy(Model(function, layer=nn.Linear(4, 4)))
        called = private_copy(inside)
        called(X)
        note_writes(inside, called)
        model = LaneIO.of_call(inside, (X,), {}, LOW)
        copied = working_copy(model)
        assert isinstance(copied, LaneIO)
        assert copied.model is not inside
        mine, theirs = inside.get_parameter("layer.weight"), copied.model.get_parameter("layer.weight")
        assert (mine is theirs) is shares


def test_the_model_itself_is_found_and_called_in_its_own_dtypes() -> None:
    model = mixed()
    args, kwargs = model.outside((X,), {"weight": WEIGHT, "index": INDEX})
    inside, own_args, own_kwargs = original_call(model, args, kwargs)
    assert inside is original_of(model) is model.model
    assert own_args[0].dtype is torch.float32
    assert own_kwargs["weight"].dtype is torch.float64
    plain = nn.ReLU()
    assert original_of(plain) is plain
    assert original_call(plain, (X,), {}) == (plain, (X,), {})


@pytest.mark.parametrize(
    ("model", "expected"),
    [(nn.Linear(4, 4), torch.float32), (nn.Linear(4, 4).bfloat16(), LOW), (nn.ReLU(), LOW)],
)
def test_examples_in_the_lanes_dtype_are_brought_to_that_of_the_weights(
    model: nn.Module, expected: torch.dtype
) -> None:
    args, kwargs = with_own_dtypes(model, (X.to(LOW),), {"index": INDEX}, LOW)
    assert args[0].dtype is expected
    assert kwargs["index"] is INDEX
