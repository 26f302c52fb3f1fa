"""Models whose first call sets what later ones read: no program answers what an earlier call decides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampopt.deploy.sized_program import NoSizedProgramError
from ampopt.errors import KindError
from tests.helpers import Model
from tests.support.planted import module_of
from tests.support.sized import sized_module


def image(batch: int = 4, size: int = 8) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch + size))


def once(function: Callable[[Any, Tensor], Any]) -> nn.Module:
    """A convolution and a place for what the first call sets."""
    torch.manual_seed(0)
    model: Any = Model(function, conv=nn.Conv2d(3, 4, 3, padding=1)).eval()
    model.first = None
    return model  # type: ignore[no-any-return]


def _capacity(m: Any, x: Tensor) -> Any:
    m.first = x.shape[0] if m.first is None else m.first
    return m.conv(x), torch.full((x.shape[0],), m.first)


def _scale(m: Any, x: Tensor) -> Any:
    m.first = 1.0 / x.shape[2] if m.first is None else m.first
    return m.conv(x) * m.first


def _size(m: Any, x: Tensor) -> Any:
    m.first = x.shape[2:] if m.first is None else m.first
    return F.interpolate(m.conv(x), size=m.first)


def _refusal(m: Any, x: Tensor) -> Any:
    m.first = x.shape[2:] if m.first is None else m.first
    if x.shape[2:] != m.first:
        raise ValueError("the camera has changed")
    return m.conv(x)


@pytest.mark.parametrize("function", [_capacity, _scale, _size, _refusal])
def test_a_range_is_not_for_a_model_whose_first_call_fixes_a_size(function: Any) -> None:
    name = "batch" if function is _capacity else "height"
    with pytest.raises(NoSizedProgramError, match="after a call of another size the model answers otherwise"):
        sized_module(once(function), image(), dynamic={name: (2, 12)})


def test_a_range_is_for_a_model_whose_first_call_sets_what_no_size_decides() -> None:
    def ready(m: Any, x: Tensor) -> Any:
        m.first = True if m.first is None else m.first
        return m.conv(x)

    assert sized_module(once(ready), image(), dynamic={"batch": (2, 12)}).sizes == {"batch": (2, 12)}


def test_a_call_that_the_model_refuses_after_another_gets_no_program() -> None:
    model = once(_refusal)
    fast = module_of(model, image())
    fast(image())
    with pytest.raises(KindError, match="change each other's answers"):
        fast(image(size=12))
    assert torch.allclose(fast(image()), model(image()), atol=1e-6)


class Tracker(nn.Module):
    """Answers a search after it was given a template."""

    def __init__(self, begins: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.template = nn.Conv2d(3, 4, 3), begins
        self.eval()

    def forward(self, x: Tensor, begin: bool = False) -> Tensor:
        y = self.conv(x)
        if begin:
            self.template = y.mean((2, 3), keepdim=True)
        assert self.template is not None, "give a template first"
        return torch.mul(y, self.template)


def test_a_call_that_is_answered_only_after_another_is_refused_as_such() -> None:
    fast = module_of(Tracker(None), image(), True)
    fast(image(), True)
    for call in (lambda: fast(image()), lambda: fast.prepare((image(),))):
        with pytest.raises(KindError, match="only after one of another kind"):
            call()


def test_a_call_that_the_model_never_answers_raises_its_own_error() -> None:
    fast = module_of(Tracker(None), image(), True)
    with pytest.raises(RuntimeError, match="expected input"):
        fast(torch.randn(1, 5, 8, 8))


class Short(nn.Module):
    """Has no memory left for some of its calls of another size, and writes to its class."""

    fails: ClassVar[list[Exception]] = []
    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.is_begun = nn.Conv2d(3, 4, 3), False
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.is_begun = True
        Short.seen = x.shape[2]
        if x.shape[2] == 12 and Short.fails:
            raise Short.fails.pop()
        return torch.mul(self.conv(x), 1.0)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("a cable is loose")])
def test_what_passes_is_the_model_s_own_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = module_of(Short(), image())
    monkeypatch.setattr(Short, "seen", 0)
    monkeypatch.setattr(Short, "fails", [error])
    with pytest.raises(type(error), match=str(error)):
        fast(image(size=12))
    assert Short.seen == 0
    assert fast(image(size=12)).shape == (4, 4, 10, 10)


def test_a_copy_knows_the_default_dtype_of_its_original() -> None:
    model = once(lambda m, x: m.conv(x).mean((1, 2, 3)) * torch.ones(x.shape[0]))
    fast, x = module_of(model, image()), image()
    torch.set_default_dtype(torch.float64)
    try:
        assert copy.deepcopy(fast)(x).dtype is model(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class Flow(nn.Module):
    """The difference to the frame before, if there is one of this size."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        before = self.before
        moved = x - before if before is not None and before.shape == x.shape else torch.zeros_like(x)
        self.before = x + 0
        return moved


def test_state_of_a_size_that_comes_first_in_inference_mode_is_ordinary() -> None:
    model, fast = Flow(), module_of(Flow(), image(1))
    for size, is_inference in ((12, True), (12, True), (12, False), (8, False), (12, False), (8, True)):
        with torch.inference_mode(is_inference), torch.no_grad():
            x = image(1, size) + torch.rand(1)
            assert torch.equal(fast(x), model(x))


def test_with_another_default_dtype_the_original_answers() -> None:
    def made(m: Any, x: Tensor) -> Any:
        return m.conv(x).mean((2, 3)).argmax(1) * torch.linspace(0, 1, x.shape[0]), torch.arange(3) / 7

    model = once(made)
    fast, images = module_of(model, image()), {batch: image(batch) for batch in (2, 4)}
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for batch in (4, 2, 4):
                for found, expected in zip(fast(images[batch]), model(images[batch]), strict=True):
                    assert found.dtype is expected.dtype is dtype
                    assert torch.allclose(found, expected)
        finally:
            torch.set_default_dtype(torch.float32)
    assert fast.health.served_by_original == 3
