"""What a call has put into a container itself is no state; what an earlier one has left, and it uses, is."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.ir.unread_contents import used_contents
from tests.helpers import Model

X = torch.randn(1, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def _replaced(m: Any, x: Tensor) -> Any:
    m.kept["features"] = x + 1
    return m.kept["features"].sum()


def _cleared(m: Any, x: Tensor) -> Any:
    m.kept.clear()
    m.kept.append(x + 1)
    return m.kept[0].sum()


def _of_tuples(m: Any, x: Tensor) -> Any:
    m.kept["pair"] = (x, None, x + 1)
    return m.kept["pair"][2].sum()


def _by_a_hook(m: Any, x: Tensor) -> Any:
    m.layer(x)
    return m.kept["layer"].sum()


def _added(m: Any, x: Tensor) -> Any:
    m.kept[0] = m.kept[0] + x
    return x * 2


def _by_its_size(m: Any, x: Tensor) -> Any:
    size = m.kept[0].shape[0]
    m.kept[0] = x
    return x * size


def _moved(m: Any, x: Tensor) -> Any:
    m.before = m.kept[0]
    m.kept[0] = x
    return x * 2


def _given(m: Any, x: Tensor) -> Any:
    last = m.kept[0]
    m.kept[0] = x
    return x * 2, last * 1


def _shifted(m: Any, x: Tensor) -> Any:
    m.kept[1], m.kept[0] = m.kept[0], x
    return x * 2


def _growing(m: Any, x: Tensor) -> Any:
    m.kept.append(x)
    return x * 2


def _counted(m: Any, x: Tensor) -> Any:
    m.kept["calls"] = m.kept["calls"] + 1
    return x * 2


def model_of(forward: Callable[[Any, Tensor], Any], kept: Any) -> Any:
    model: Any = Model(forward, layer=nn.Conv2d(3, 4, 3))
    model.kept, model.before = kept, None
    model.layer.register_forward_hook(lambda layer, given, result: kept.__setitem__("layer", result))
    return model.eval()


UNUSED: dict[str, tuple[Callable[[Any, Tensor], Any], Any]] = {
    "a dict": (_replaced, {"features": X}),
    "an ordered dict": (_replaced, collections.OrderedDict(features=X)),
    "a default dict": (_replaced, collections.defaultdict(list, features=X)),
    "a list that is cleared": (_cleared, [X]),
    "a deque that is cleared": (_cleared, collections.deque([X])),
    "tuples in a dict": (_of_tuples, {"pair": (X, None, X)}),
    "what a hook leaves": (_by_a_hook, {"layer": X}),
}

USED: dict[str, tuple[Callable[[Any, Tensor], Any], Any]] = {
    "it is computed with": (_added, [X]),
    "its size is read": (_by_its_size, [X]),
    "it is moved to another attribute": (_moved, [X]),
    "it is a result": (_given, [X]),
    "it is moved within": (_shifted, [X, X]),
    "it stays": (_growing, [X]),
    "a number is beside it": (_counted, {"calls": 0, "x": X}),
    "it is no container": (_added, (X,)),
}


@pytest.mark.parametrize("name", UNUSED)
def test_contents_that_a_call_replaces_are_not_used(name: str) -> None:
    model = model_of(*UNUSED[name])
    assert used_contents(model, {("", "kept")}, lambda called: called(X)) == set()


@pytest.mark.parametrize("name", USED)
def test_contents_that_a_call_uses_or_keeps_are_used(name: str) -> None:
    forward, kept = USED[name]
    model: Any = model_of(forward, kept)
    call = (lambda called: None) if isinstance(kept, tuple) else (lambda called: called(X))
    assert used_contents(model, {("", "kept")}, call) == {("", "kept")}


@pytest.mark.parametrize("forward", [_replaced, _by_a_hook])
def test_a_model_that_keeps_its_features_in_a_dict_is_saved_and_exported(
    forward: Callable[[Any, Tensor], Any], tmp_path: Path, few_samples: None
) -> None:
    """It has nothing in it before its first call: that is no state which a file would have to begin with."""
    model: Any = Model(
        lambda m, x: forward(m, m.first(x)), first=nn.Conv2d(3, 3, 3), layer=nn.Conv2d(3, 4, 3)
    )
    model.kept = {}
    model.layer.register_forward_hook(Hook(model))
    expected = model.eval()(X)
    fast = ampopt.optimize(model, X, precision="fp32", exclude=("compile", "onnx-runtime", "openvino"))
    fast.save(tmp_path / "m.ampopt", tune_s=0.1)
    loaded = ampopt.load(tmp_path / "m.ampopt")
    for _ in range(2):
        torch.testing.assert_close(fast(X), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(loaded(X), expected, rtol=1e-4, atol=1e-4)
    fast.export_onnx(tmp_path / "m.onnx")


class Hook:
    """Keeps a layer's result in its model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, layer: nn.Module, given: Any, result: Tensor) -> None:
        self.model.kept["layer"] = result
