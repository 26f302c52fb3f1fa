"""`ampopt.load`: a loaded model takes the calls that its code cannot tell from the one it was made for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import ampopt
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import InputError
from ampopt.ir.lanes import FP32
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger
from tests.helpers import Model, with_statistics
from tests.support.planted import captured_of, module_of

X = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Answer(NamedTuple):
    """What the model of these tests returns."""

    scores: Tensor
    mask: Tensor
    scale: int


class Nested(nn.Module):
    """A call with keyword arguments, a dict and a float; a named tuple as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, *, gain: Tensor, flags: dict[str, float]) -> Answer:
        y = torch.relu(self.bn(self.conv(x))) * gain
        return Answer(y.mean((2, 3)), y > flags["least"], 3)


def test_nested_calls_and_results_come_back_in_their_own_types(tmp_path: Path) -> None:
    model = with_statistics(Nested())
    kwargs: dict[str, Any] = {"gain": torch.tensor(2.0), "flags": {"least": 0.5}}
    original, captured = captured_of(model, X, **kwargs)
    recipe = Recipe(FP32, ())
    fast = OptimizedModule(original, captured, captured.program, recipe, Ledger("M", {"device": "d"}, ()))
    fast.save(tmp_path / "b", tune_s=0.2)
    expected = model(X, **kwargs)
    for backend in ("ampopt", "onnxruntime"):
        loaded = ampopt.load(tmp_path / "b", backend=backend, device="cpu", types=[Answer])
        found = loaded(X, **kwargs)
        assert type(found) is Answer
        assert found.scale == 3
        assert found.mask.dtype is torch.bool
        assert torch.allclose(found.scores, expected.scores, atol=1e-5)
        with pytest.raises(InputError, match=r"0\.5"):
            loaded(X, gain=torch.tensor(2.0), flags={"least": 0.6})


class Stereo(nn.Module):
    """Takes two images by name, and further sensors in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, right: Tensor, left: Tensor, **rest: Tensor) -> Tensor:
        total: Tensor = self.conv(right) - 2 * self.conv(left)
        for place, sensor in enumerate(rest.values()):
            total = total + place * self.conv(sensor)
        return total


class Frame(NamedTuple):
    """What a model takes."""

    image: Tensor
    places: list[Tensor]


def test_a_namedtuple_is_taken_for_one_of_its_name_and_fields(tmp_path: Path) -> None:
    """The bundle holds no classes: it has one of its own, where the caller's is not given."""
    model = Model(lambda m, frame: m.conv(frame.image) + frame.places[0], conv=nn.Conv2d(3, 4, 3)).eval()
    frame = Frame(X, [torch.ones(4, 1, 1)])
    module_of(model, frame).save(tmp_path / "b", tune_s=0.2)
    for backend in ("ampopt", "onnxruntime", "original"):
        loaded = ampopt.load(tmp_path / "b", backend=backend, device="cpu")
        with torch.no_grad():
            torch.testing.assert_close(loaded(frame), model(frame))

    class Other(NamedTuple):
        image: Tensor
        corners: list[Tensor]

    Other.__name__ = "Frame"
    for given in (Other(*frame), tuple(frame), Frame(X, [])):
        with pytest.raises(InputError, match="this bundle was made for other calls"):
            loaded(given)


@pytest.mark.parametrize("backend", ["ampopt", "onnxruntime", "original"])
@pytest.mark.parametrize("rest", [(), ("b", "a")], ids=["named", "with a rest"])
def test_keyword_arguments_have_an_order_where_the_model_saw_it(
    backend: str, rest: tuple[str, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Stereo().eval()
    kwargs = {name: X + i for i, name in enumerate(("right", "left", *rest))}
    original, captured = captured_of(model, **kwargs)
    program = captured.program
    fast = OptimizedModule(original, captured, program, Recipe(FP32, ()), Ledger("M", {"device": "d"}, ()))
    fast.save(tmp_path / "b", tune_s=0.2)
    loaded = ampopt.load(tmp_path / "b", backend=backend, device="cpu")
    swapped = {"left": kwargs["left"], **kwargs}
    for given in (kwargs, swapped):
        assert torch.allclose(loaded(**given), model(**given), atol=1e-5)
    turned = dict(reversed(kwargs.items()))
    if rest:
        with pytest.raises(InputError, match="made for other calls"):
            loaded(**turned)
    else:
        assert torch.allclose(loaded(**turned), model(**turned), atol=1e-5)


@pytest.mark.parametrize("asks", [True, False])
def test_a_tensor_is_given_twice_only_where_the_model_does_not_ask(asks: bool, tmp_path: Path) -> None:
    model = Model(lambda m, a, b: a - (3 if asks and a is b else 2) * b)
    module_of(model, X, X + 1).save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", backend="ampopt", device="cpu")
    assert torch.allclose(loaded(X, X.clone()), model(X, X.clone()))
    if asks:
        with pytest.raises(InputError, match="takes nothing twice"):
            loaded(X, X)
    else:
        assert torch.allclose(loaded(X, X), model(X, X))


@pytest.mark.parametrize("asks", [True, False])
def test_a_list_is_given_twice_only_where_the_model_does_not_ask(asks: bool, tmp_path: Path) -> None:
    model = Model(lambda m, x, a, b: x * (3 if asks and a is b else 2) * a[0] * b[0])
    module_of(model, X, [2], [2]).save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", backend="ampopt", device="cpu")
    given = [2]
    assert torch.equal(loaded(X, given, [2]), model(X, given, [2]))
    if asks:
        with pytest.raises(InputError, match="takes nothing twice"):
            loaded(X, given, given)
    else:
        assert torch.equal(loaded(X, given, given), model(X, given, given))


@pytest.mark.parametrize("given", [np.ones((2, 3), np.float32), "image.png", None])
def test_what_is_no_tensor_is_refused_with_what_it_takes(given: Any, tmp_path: Path) -> None:
    module_of(nn.Linear(3, 2).eval(), torch.ones(2, 3)).save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", backend="ampopt", device="cpu")
    with pytest.raises(InputError, match=r"it takes float32\[2, 3\] on cpu, not (array|'image|None)"):
        loaded(given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (X.numpy(), "not array of NumPy, float32[1, 3, 12, 12]: give torch.from_numpy(array)"),
        (X.tolist(), "not a list: give a torch.Tensor"),
        ({"image": X}, "not a dict: give a torch.Tensor"),
        (None, "not None: give a torch.Tensor"),
        ("a" * 500, f"not '{'a' * 78}…: give a torch.Tensor"),
    ],
    ids=["array", "list", "dict", "None", "text"],
)
def test_what_is_no_tensor_is_told_by_its_kind_and_with_what_to_give(
    given: Any, told: str, tmp_path: Path
) -> None:
    module_of(nn.Conv2d(3, 4, 3).eval(), X).save(tmp_path / "b", onnx=None)
    loaded = ampopt.load(tmp_path / "b", backend="ampopt", device="cpu")
    with pytest.raises(InputError) as caught:
        loaded(given)
    wanted = "this bundle was made for other calls: it takes float32[1, 3, 12, 12] on cpu, "
    assert str(caught.value) == wanted + told


BACKENDS = [
    "ampopt",
    "original",
    "onnxruntime",
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="no OpenVINO"),
    ),
]


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("convolutions") / "b"
    model = Model(lambda m, x: {"y": m.conv(x), "places": x.mean(1).argmax(1)}, conv=nn.Conv2d(3, 4, 3))
    module_of(model.eval(), X).save(path, tune_s=0.1)
    return path


def _forward_mode(loaded: Callable[[Tensor], Any]) -> None:
    with forward_ad.dual_level():
        loaded(forward_ad.make_dual(X, torch.ones_like(X)))


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Any]], object]] = {
    "a gradient beside another": lambda f: (
        (a := X.clone().requires_grad_()).sum() + f(a)["y"].sum()
    ).backward(),
    "a parameter's": lambda f: f(nn.Parameter(X))["y"].sum().backward(),
    "forward mode": _forward_mode,
    "torch.func.grad": lambda f: torch.func.grad(lambda x: f(x)["y"].sum())(X),
    "torch.func.jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "torch.vmap": lambda f: torch.vmap(f)(X[None]),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_gives_a_derivative_and_each_says_so(convolutions: Path, backend: str) -> None:
    loaded = ampopt.load(convolutions, backend=backend, device="cpu")
    for name, derive in DERIVATIVES.items():
        with pytest.raises(InputError, match="for inference"):
            pytest.fail(f"{name}: {derive(loaded)}")
    with torch.no_grad():
        assert not loaded(X.clone().requires_grad_())["y"].requires_grad
    assert not loaded(X)["y"].requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_for_an_input_that_requires_gradients_may_be_written_to(
    convolutions: Path, backend: str
) -> None:
    loaded = ampopt.load(convolutions, backend=backend, device="cpu")
    result, expected = loaded(X.clone().requires_grad_())["y"], loaded(X)["y"].clone()
    result.mul_(2)
    torch.testing.assert_close(result.detach(), expected * 2)
    with pytest.raises(InputError, match="for inference"):
        result.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_negated_or_conjugated_by_a_bit_alone_is_taken(convolutions: Path, backend: str) -> None:
    loaded = ampopt.load(convolutions, backend=backend, device="cpu")
    for x in (torch._neg_view(X), torch.complex(X, X).conj().imag):
        assert x.is_neg()
        torch.testing.assert_close(loaded(x)["y"], loaded(x.resolve_neg())["y"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_autocast_around_a_call_changes_nothing(convolutions: Path, backend: str) -> None:
    loaded = ampopt.load(convolutions, backend=backend, device="cpu")
    expected = loaded(X)["y"]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(loaded(X)["y"], expected, rtol=1e-6, atol=1e-6)
