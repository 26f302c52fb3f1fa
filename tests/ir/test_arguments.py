"""Arguments of another kind are refused at once, and the message says what to write instead."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import ampopt
from ampopt.errors import InputError
from ampopt.search.options import Options
from tests.helpers import Model
from tests.support.planted import module_of, optimize

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(2, 4)


def fake_model() -> nn.Module:
    with FakeTensorMode():
        return tiny()


class _Never:
    """Stands for the work, which must not begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("api", "comparison"):
            monkeypatch.setattr(f"ampopt.{module}.capture", lambda *args: pytest.fail("the long work began"))


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("budget_s", "5", "budget_s='5': give a positive, finite number of seconds"),
        ("budget_s", True, "budget_s=True: give a positive, finite number"),
        ("budget_s", 0, "budget_s=0: give a positive, finite number"),
        ("budget_s", -1, "budget_s=-1: give a positive, finite number"),
        ("budget_s", float("nan"), "budget_s=nan: give a positive, finite number"),
        ("budget_s", float("inf"), "budget_s=inf: give a positive, finite number"),
        ("budget_s", [5], r"budget_s=\[5\]: give a positive, finite number"),
        ("tolerance", "x", "tolerance='x': give a relative error, 0 or more"),
        ("tolerance", False, "tolerance=False: give a relative error"),
        ("tolerance", float("inf"), "tolerance=inf: give a relative error"),
        ("tolerance", torch.ones(2), "give a relative error"),
        ("exclude", "compile", r"exclude='compile': give a list of names, exclude=\['compile'\]"),
        ("exclude", None, "exclude=None: give a list of the names"),
        ("exclude", [5], r"exclude=\[5\]: give a list of the names"),
        ("exclude", 5, "exclude=5: give a list of the names"),
        ("exclude", {"nothing"}, "there is no pass nothing: choose from"),
        ("precision", 5, "precision=5: choose from auto, fp32, amp"),
        ("precision", ["amp"], r"precision=\['amp'\]: choose from"),
        ("policy", 5, "policy=5: choose from amp, O1, O2, half"),
        ("policy", "o1", "policy='o1': choose from amp, O1, O2, half"),
        ("amp_dtype", "float16", "amp_dtype='float16': choose torch.float16"),
        ("amp_dtype", "", "amp_dtype='': choose torch.float16"),
        ("device", 1.5, "device=1.5 is no device"),
        ("device", True, "device=True is no device"),
        ("device", "meta", "device='meta' computes nothing"),
        ("example_kwargs", [1], "example_kwargs takes a dict of keyword arguments, not a list"),
        ("example_kwargs", {5: X}, "example_kwargs has the key 5"),
    ],
)
@pytest.mark.parametrize("function", ["optimize", "compare"])
def test_an_option_of_another_kind_is_refused(
    function: str, option: str, value: object, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Never(monkeypatch)
    with pytest.raises(InputError, match=advice):
        getattr(ampopt, function)(tiny(), X, **{"progress": False, option: value})


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("metric", 5, r"metric=5: give a function, metric\(outputs, original_outputs\)"),
        ("metric", "iou", "metric='iou': give a function"),
        ("outputs", 5, "outputs=5: choose 'copy' or 'static'"),
        ("outputs", ["copy"], "choose 'copy' or 'static'"),
        ("cache", "no", "cache='no': give True or False"),
        ("cache", None, "cache=None: give True or False"),
        ("progress", "no", "progress='no': give True or False"),
        ("strict", "no", "strict='no': give True or False"),
    ],
)
def test_an_option_that_only_optimize_has_is_refused(option: str, value: object, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        ampopt.optimize(tiny(), X, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [np.float32(5), np.float64(5), np.int64(5), 5])
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    options = Options(budget_s=number, tolerance=number)
    assert (options.budget_s, options.tolerance) == (5.0, 5.0)
    assert {type(options.budget_s), type(options.tolerance)} == {float}
    assert Options(cache=np.bool_(False)).cache is False  # type: ignore[arg-type]


@pytest.mark.parametrize("excluded", [["compile"], ("compile",), {"compile"}, frozenset({"compile"})])
def test_any_collection_of_names_may_be_excluded(excluded: Any) -> None:
    assert Options(exclude=excluded).exclude == ("compile",)


@pytest.mark.parametrize("function", ["optimize", "compare", "diagnose"])
def test_inputs_that_are_no_tuple_are_refused_with_the_tuple(function: str) -> None:
    advice = re.escape(
        "2 example inputs were given one by one: pass the arguments as one tuple, (a, b), and those with "
        "keywords as example_kwargs={...}"
    )
    with pytest.raises(InputError, match=advice):
        getattr(ampopt, function)(tiny(), X, X)


@pytest.mark.parametrize(
    ("inputs", "advice"),
    [
        ((1, 3, 8, 8), r"a shape is no example: pass torch.randn\(1, 3, 8, 8\)"),
        (torch.Size([2, 4]), r"a shape is no example: pass torch.randn\(2, 4\)"),
        ([X, X], "a list is one argument: several go into a tuple"),
        (X.numpy(), "pass torch.from_numpy"),
        (
            torch.empty(2, 4, device="meta"),
            r"is a meta tensor without numbers: pass a real one, torch.randn\(2, 4\)",
        ),
        (fake(), "is a fake tensor without numbers"),
        ([torch.empty(2, 4, device="meta")], "is a meta tensor"),
    ],
)
def test_example_inputs_of_another_kind_are_refused(inputs: Any, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        optimize(tiny(), inputs)


def test_an_example_of_a_function_transform_is_refused() -> None:
    model = tiny()

    def inside(x: Tensor) -> Tensor:
        optimize(model, x)
        return x

    with pytest.raises(InputError, match=r"belongs to a torch\.func transform: call optimize outside of it"):
        torch.func.vmap(inside)(torch.randn(3, 2, 4))


def data_parallel(model: nn.Module) -> nn.Module:
    """The wrapper as it is on a machine without a GPU; on one with GPUs it moves the model there."""
    with mock.patch("torch.nn.parallel.data_parallel._get_available_device_type", return_value=None):
        return nn.DataParallel(model)


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (lambda: nn.Linear, r"Linear is a class: pass an instance, Linear\(\.\.\.\)"),
        (lambda: torch.relu, "takes a torch.nn.Module, not builtin_function_or_method"),
        (lambda: None, "takes a torch.nn.Module, not NoneType"),
        (
            lambda: nn.LazyLinear(4),
            r"weight of the model has no shape yet.*call the model once, model\(example\)",
        ),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d()), "0.weight of the model has no shape yet"),
        (
            lambda: nn.Linear(4, 4, device="meta"),
            r"weight of the model is a meta tensor.*to_empty\(device='cpu'\)",
        ),
        (fake_model, "0.weight of the model is a fake tensor"),
        (lambda: module_of(tiny(), X), "the model is optimized already: pass the original"),
        (lambda: data_parallel(module_of(tiny(), X)), "the model is optimized already"),
    ],
)
def test_what_is_no_model_yet_or_no_more_is_refused(model: Any, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        optimize(model(), X)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("wrap", [data_parallel, torch.compile])
def test_a_wrapper_for_training_or_compiling_is_taken_off(wrap: Any) -> None:
    model = tiny()
    fast = optimize(wrap(model), X, precision="fp32", cache=False)
    assert fast.report.model == "Sequential"
    assert any("the result does without that" in note for note in fast.report.notes)
    with torch.no_grad():
        assert torch.allclose(fast(X), model(X), atol=1e-5)


class _Annotated(Tensor):
    """A subclass of Tensor, as torchvision's images are."""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "example",
    [
        X.clone().requires_grad_(),
        nn.Parameter(X.clone()),
        torch.randn(4, 2).t(),
        X.as_subclass(_Annotated),
        torch.randn(4, 8)[::2, ::2],
        torch.randn(1, 4).expand(2, 4),
    ],
    ids=["gradient", "parameter", "transposed", "subclass", "strided", "expanded"],
)
def test_tensors_of_many_kinds_are_examples(example: Tensor) -> None:
    model = Model(lambda m, x: m.linear(x).relu(), linear=nn.Linear(4, 4)).eval()
    fast = optimize(model, example, precision="fp32", cache=False)
    with torch.no_grad():
        assert torch.allclose(fast(example), model(example).as_subclass(Tensor), atol=1e-5)
