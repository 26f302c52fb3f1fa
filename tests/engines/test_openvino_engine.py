"""OpenVINO as a program's engine: what is quicker than a whole call gives what the whole call does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.engines.onnx_engine import MOST_KNOWN
from ampopt.engines.openvino_engine import OpenVinoEngine
from ampopt.passes import Openvino, openvino
from tests.support.planted import module_of
from tests.support.small_net import close

pytest.importorskip("openvino")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def soon(exports_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sweep of the options finds does not matter here."""
    monkeypatch.setattr(openvino, "TUNING_S", 0.02)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()


@pytest.fixture
def fast(model: nn.Module) -> ampopt.OptimizedModule:
    made = module_of(model, image(0), passes=(Openvino(),))
    assert isinstance(made.program.engine, OpenVinoEngine)
    made(image(0))
    assert close(made._calls.latest[1](image(0)), made(image(0)))
    return made


def image(seed: int) -> Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def whole(fast: ampopt.OptimizedModule, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of whole calls of the engine from now on."""
    seen: list[Tensor] = []
    real: Callable[..., object] = OpenVinoEngine.__call__

    def call(engine: OpenVinoEngine, *tensors: Tensor) -> object:
        seen.extend(tensors)
        return real(engine, *tensors)

    monkeypatch.setattr(OpenVinoEngine, "__call__", call)
    return seen


def test_every_input_is_read_where_it_is_now(
    model: nn.Module, fast: ampopt.OptimizedModule, whole: list[Tensor]
) -> None:
    kept = [image(seed) for seed in range(2 * MOST_KNOWN + 1)]
    for _ in range(2):
        for x in kept:
            assert close(fast(x), model(x))
    for seed in range(20):  # memory that an earlier input had
        x = image(seed)
        assert close(fast(x), model(x))
        assert close(fast(x.mul_(2)), model(x))
        del x
    assert whole == []


def test_a_result_is_the_callers_and_stays(model: nn.Module, fast: ampopt.OptimizedModule) -> None:
    found = [fast(image(seed)) for seed in range(5)]
    assert all(close(y, model(image(seed))) for seed, y in enumerate(found))
    assert len({y.data_ptr() for y in found}) == 5
    found[0].zero_()
    assert close(fast(image(0)), model(image(0)))


def test_what_requires_gradients_or_has_a_negative_bit_takes_the_whole_call(
    model: nn.Module, fast: ampopt.OptimizedModule, whole: list[Tensor]
) -> None:
    x = image(4)
    assert close(fast(torch._neg_view(-x)), model(x))
    assert close(fast(x.clone().requires_grad_()).detach(), model(x))
    assert len(whole) == 2


def test_other_layouts_are_served(model: nn.Module, fast: ampopt.OptimizedModule) -> None:
    x = image(5)
    for laid in (x.to(memory_format=torch.channels_last), torch.cat([x, x], 3)[..., :8], nn.Parameter(x)):
        for _ in range(2):
            assert close(fast(laid).detach(), model(x))


def test_threads_get_their_own_results(model: nn.Module, fast: ampopt.OptimizedModule) -> None:
    inputs = [image(seed) for seed in range(200)]
    expected = [model(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fast, inputs))
    assert all(close(y, wanted) for wanted, y in zip(expected, found, strict=True))


def test_a_copy_shares_what_is_compiled(fast: ampopt.OptimizedModule) -> None:
    again = copy.deepcopy(fast)
    assert again.program.engine is fast.program.engine
    assert torch.equal(again(image(1)), fast(image(1)))
