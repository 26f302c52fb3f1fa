"""What a model's code asks is noted, and nothing that PyTorch's own modules ask of weights or modes."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.asked import Asked, noting_what_is_asked, what_is_asked
from tests.helpers import Model

X = torch.randn(1, 3, 4, 4)


def asked_by(function: Callable[..., Any], **members: nn.Module) -> Asked:
    model = Model(function, **members).eval()
    with torch.no_grad(), noting_what_is_asked(model) as asked:
        model(X)
    return asked


@pytest.mark.parametrize(
    "ask",
    [
        lambda m, x: x.stride(),
        lambda m, x: x.stride(1),
        lambda m, x: Tensor.stride(x),
        lambda m, x: x.is_contiguous(),
        lambda m, x: x.is_contiguous(memory_format=torch.channels_last),
        lambda m, x: x.storage_offset(),
        lambda m, x: x.dim_order(),
        lambda m, x: x.data_ptr() % 16,
        lambda m, x: x.untyped_storage(),
        lambda m, x: x._base is None,
        lambda m, x: x._is_view(),
        lambda m, x: torch._prims_common.suggest_memory_format(x),
        lambda m, x: (x + 1).relu().stride(),
    ],
)
def test_a_question_about_the_layout_is_noted(ask: Callable[..., Any]) -> None:
    assert asked_by(ask) == Asked(layout=True)


def what_it_asks(function: Callable[..., Any], **members: nn.Module) -> Asked:
    model = Model(function, **members).eval()
    return what_is_asked(model, (X,), {}, torch.device("cpu"))


@pytest.mark.parametrize(
    "ask",
    [
        lambda m, x: x * getattr(x, "gain", 1),
        lambda m, x: x * (2 if hasattr(x, "stamp") else 1),
        lambda m, x: x.relu() * getattr(x, "gain", 1),
    ],
)
def test_a_question_for_an_attribute_of_an_argument_is_noted(ask: Callable[..., Any]) -> None:
    assert what_it_asks(ask) == Asked(attributes=True)


@pytest.mark.parametrize(
    "ask",
    [
        lambda m, x: m.conv(x) * getattr(m, "gain", 1),
        lambda m, x: x * (2 if isinstance(x, nn.Parameter) else 1),
        lambda m, x: x + m.conv.weight.requires_grad,
        lambda m, x: x.reshape(x.shape[0], -1).T.mean() + x.dtype.is_floating_point,
        lambda m, x: m.attention(*[x.reshape(1, 12, 4)] * 3)[0],
    ],
)
def test_other_questions_are_not(ask: Callable[..., Any]) -> None:
    members = {"conv": nn.Conv2d(3, 3, 1), "attention": nn.MultiheadAttention(4, 2, batch_first=True)}
    assert what_it_asks(ask, **members) == Asked()


def test_a_model_that_refuses_other_classes_may_ask_for_attributes() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError
        return x + 1

    assert what_it_asks(function) == Asked(attributes=True)


def within_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.conv(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "ask",
    [
        lambda m, x: torch.is_autocast_enabled(),
        lambda m, x: torch.is_autocast_enabled("cpu"),
        lambda m, x: torch.get_autocast_dtype("cpu"),
    ],
)
def test_a_question_about_autocast_is_noted(ask: Callable[..., Any]) -> None:
    assert asked_by(ask) == Asked(autocast=True)


@pytest.mark.parametrize(
    "ask",
    [
        lambda m, x: (x.shape, x.size(), x.dim(), x.numel(), x.dtype, x.device),
        lambda m, x: m.conv.weight.is_contiguous() and m.norm.running_mean.stride(),
        lambda m, x: m.norm(m.conv(x)).flatten(1).contiguous().view(1, -1),
        lambda m, x: m.attention(x[0], x[0], x[0]),
        lambda m, x: m.recurrent(x[0]),
        within_autocast,
    ],
)
def test_other_questions_and_those_of_pytorch_itself_are_not(ask: Callable[..., Any]) -> None:
    members = {
        "conv": nn.Conv2d(3, 3, 1),
        "norm": nn.BatchNorm2d(3),
        "attention": nn.MultiheadAttention(4, 2),
        "recurrent": nn.GRU(4, 2),
    }
    assert asked_by(ask, **members) == Asked()


def test_a_script_may_ask_unseen() -> None:
    assert asked_by(lambda m, x: m.inner(x), inner=torch.jit.script(nn.ReLU())) == Asked(layout=True)


def test_the_users_profiler_is_put_back() -> None:
    seen: list[str] = []

    def profiler(frame: Any, event: str, what: object) -> None:
        seen.append(event)

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        with pytest.raises(ZeroDivisionError):
            asked_by(lambda m, x: 1 / 0)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it hears of calls otherwise from 3.12 on")
def test_a_profiler_in_c_goes_on_and_what_it_hides_is_assumed() -> None:
    with cProfile.Profile():
        before = sys.getprofile()
        asked = what_it_asks(lambda m, x: x + 1)
        assert sys.getprofile() is before
    assert asked == Asked(autocast=True)
