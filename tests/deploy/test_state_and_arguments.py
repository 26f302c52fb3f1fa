"""A model that keeps a state is called as its code can tell calls apart: order, identity, kinds, faults."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import CaptureError, KindError
from ampopt.ir.lanes import FP32
from ampopt.ir.signature import copied, map_tensors
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger
from tests.support.planted import captured_of, keep_the_patched, optimize

SIZE = 6


def inputs(count: int, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, SIZE, generator=generator) for _ in range(count)]


class Keeping(nn.Module):
    """A linear layer, some places to remember tensors in, and a function of all arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(SIZE, SIZE), function
        self.frames = [torch.zeros(2, SIZE) for _ in range(3)]
        self.h, self.lazy = torch.zeros(2, SIZE), None
        self.eval()

    def forward(self, a: Tensor, b: Tensor, reset: bool = False) -> Any:
        return self.function(self, a, b, reset)


class Sensors(Keeping):
    """Sees the order of its sensors."""

    def forward(self, **sensors: Tensor) -> Tensor:  # type: ignore[override]
        for weight, sensor in enumerate(sensors.values(), start=1):
            self.frames = [*self.frames[1:], weight * self.layer(sensor)]
        return torch.cat(self.frames)


def _frames(m: Any, a: Tensor, b: Tensor, reset: bool) -> Any:
    m.frames = [*m.frames[1:], m.layer(a)]
    return torch.stack(m.frames).mean(0) - 2 * m.layer(b)


def _lazily(m: Any, a: Tensor, b: Tensor, reset: bool) -> Any:
    m.lazy = m.layer(a) if m.lazy is None else 0.5 * m.lazy + m.layer(b)
    return m.lazy + a


def _asks(m: Any, a: Tensor, b: Tensor, reset: bool) -> Any:
    m.h = 0.5 * m.h + m.layer(a) * (2 if a is b else 3)
    return m.h + b


def _asks_for_later(m: Any, a: Tensor, b: Tensor, reset: bool) -> Any:
    out = m.frames[0] + m.layer(b)
    m.frames = [*m.frames[1:], m.layer(a) * (2 if a is b else 3)]
    return out


def _asks_once_begun(m: Any, a: Tensor, b: Tensor, reset: bool) -> Any:
    m.lazy = m.layer(a) if m.lazy is None else m.lazy + m.layer(b) * (2 if a is b else 3)
    return a + b


def _both(m: Any, a: Tensor, b: Tensor, reset: bool) -> Any:
    out = m.layer(a) + m.frames[0] + 2 * m.frames[1]
    if reset:
        m.frames[0].zero_()
    else:
        m.frames = [a, b, m.frames[2]]
    return out


def served(model: nn.Module, *args: Any, **kwargs: Any) -> OptimizedModule:
    """The model captured and served, with no pass that is timed."""
    original, captured = captured_of(model, *args, **kwargs)
    return OptimizedModule(original, captured, captured.program, Recipe(FP32, ()), Ledger("m", {}, ()))


def check(fast: Any, twin: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The call is answered as the model, in the state that its calls have left, answers it."""
    theirs = map_tensors(copied, args, kwargs)  # which it may keep, and write to later
    with torch.no_grad():
        expected = twin(*theirs[0], **theirs[1]).clone()
    torch.testing.assert_close(fast(*args, **kwargs), expected, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("function", [_frames, _lazily])
@pytest.mark.parametrize("first_is_twice", [False, True])
def test_a_state_goes_on_where_a_tensor_is_given_twice(
    function: Callable[..., Any], first_is_twice: bool
) -> None:
    model = Keeping(function)
    x, y, z, w = inputs(4)
    fast, twin = served(model, x, x if first_is_twice else y), copy.deepcopy(model)
    for a, b in ((x, x), (x, y), (z, z), (w, x), (w, w), (y, z)):
        check(fast, twin, a, b)
    assert fast.health.late_captures == 0
    assert fast.health.served_by_original == (function is _lazily)


@pytest.mark.parametrize("function", [_asks, _asks_for_later, _asks_once_begun, _both])
def test_a_state_that_depends_on_identity_is_never_answered_wrongly(function: Callable[..., Any]) -> None:
    model = Keeping(function)
    x, y, z, w = inputs(4)
    fast, twin = served(model, x, y), copy.deepcopy(model)
    for a, b in ((x, y), (x, x), (z, w), (w, w), (y, z), (z, y), (x, w)):
        try:
            check(fast, twin, a, b)
        except KindError:
            assert a is b
            return
    assert fast.health.served_by_original >= 2


def test_what_a_call_writes_to_all_places_of_one_tensor_is_not_lost() -> None:
    model = Keeping(_both)
    x, y, z, w = inputs(4)
    fast, twin = served(model, x, y), copy.deepcopy(model)
    first = ((x, y, False), (y, x, True), (z, z, False), (w, w, True))
    for a, b, reset in (*first, (w, w, False), (z, y, True), (x, y, False)):
        given = a.clone()  # it may be kept, and written to
        try:
            check(fast, twin, given, given if a is b else b.clone(), reset)
        except KindError:
            return


def test_a_state_that_depends_on_identity_is_no_graph_of_such_a_call() -> None:
    x, _ = inputs(2)
    with pytest.raises(CaptureError, match="which of its arguments are the same tensor"):
        captured_of(Keeping(_asks_for_later), x, x)


def test_a_state_depends_on_the_order_of_keyword_arguments() -> None:
    model = Sensors(_frames)
    x, y, z, w = inputs(4)
    fast, twin = served(model, rgb=x, depth=y), copy.deepcopy(model)
    for a, b in ((x, y), (z, w), (z, z)):
        check(fast, twin, rgb=a, depth=b)
        check(fast, twin, depth=a, rgb=b)
    check(fast, twin, only=x)
    assert fast.health.late_captures == 2
    assert not fast.health.served_by_original


def test_named_arguments_in_another_order_are_the_same_call_of_a_state() -> None:
    model = Keeping(_frames)
    x, y, z, w = inputs(4)
    fast, twin = served(model, b=y, a=x), copy.deepcopy(model)
    check(fast, twin, a=x, b=y)
    check(fast, twin, b=z, a=w)
    check(fast, twin, b=z, a=z)
    assert not fast.health.late_captures
    assert not fast.health.served_by_original


def test_a_parameter_is_kept_as_any_other_tensor() -> None:
    model = Keeping(_frames)
    x, y = inputs(2)
    fast, twin = served(model, x, y), copy.deepcopy(model)
    for _ in range(4):
        check(fast, twin, nn.Parameter(x, requires_grad=False), y)
    assert not fast.health.served_by_original


def test_new_calls_of_a_state_may_come_in_inference_mode() -> None:
    model = Keeping(_asks)
    x, y, z = inputs(3)
    fast, twin = served(model, x, y), copy.deepcopy(model)
    with torch.inference_mode():
        inside = x.clone()
        for a, b in ((x, y), (inside, inside), (z, inside), (x, x)):
            check(fast, twin, a, b)
    check(fast, twin, x, y)


def test_nan_goes_into_a_state_and_stays_as_long_as_the_originals() -> None:
    model = Keeping(_frames)
    x, y, z = inputs(3)
    fast, twin = served(model, x, y), copy.deepcopy(model)
    spoilt = x.clone()
    spoilt[0, 0] = math.nan
    for a, b in ((x, y), (spoilt, y), (x, x), (y, z), (z, y), (x, y)):
        check(fast, twin, a, b)
    assert torch.isfinite(fast(x, y)).all()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("nan", ["exact", "keep"])
def test_a_state_that_holds_nan_is_optimized_with_its_faults(nan: Any) -> None:
    model = Keeping(_frames)
    x, y, z = inputs(3)
    fast, twin = optimize(model, (x, y), nan=nan), copy.deepcopy(model)
    spoilt = z.clone()
    spoilt[1, 2] = math.nan
    for a, b in ((x, y), (spoilt, y), (x, x), (z, z), (y, x)):
        check(fast, twin, a, b)
    fast.reset_state()
    check(fast, copy.deepcopy(model), x, y)


def _word(m: Any, a: Tensor, b: Tensor, reset: bool) -> Any:
    m.h = 0.5 * m.h + m.layer(a)
    return m.h + b, f"{float(a.mean()):.3f}"


def test_a_word_that_depends_on_values_is_no_constant_beside_a_state() -> None:
    x, y = inputs(2)
    with pytest.raises(CaptureError, match="no tensor and depends on the inputs' values"):
        captured_of(Keeping(_word), x, y)


class Around(nn.Module):
    """No single graph: a submodule that keeps a list of frames, and one that keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, SIZE))
        self.keeping = Keeping(_frames)

    def forward(self, x: Tensor) -> Tensor:
        y = self.plain(x)
        y = y * 2 if y.sum().item() > 1e6 else y
        out: Tensor = self.keeping(y, y) + y
        return out


@pytest.mark.usefixtures("quick")
def test_a_submodule_with_a_state_is_no_part_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_patched(monkeypatch)
    model = Around().eval()
    x, y, z, w = inputs(4)
    fast, twin = optimize(model, (x,), precision="fp32"), copy.deepcopy(model)
    assert "plain" in fast.report.regions
    assert not any(name.startswith("keeping") and "." not in name for name in fast.report.regions)
    for each in (x, y, z, w, x):
        check(fast, twin, each)
    fast.reset_state()
    check(fast, copy.deepcopy(model), z)
    assert all(torch.equal(frame, torch.zeros(2, SIZE)) for frame in model.keeping.frames)
