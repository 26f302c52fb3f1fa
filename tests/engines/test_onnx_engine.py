"""ONNX Runtime as a program's engine: what is quicker than a whole call gives what the whole call does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.engines.executable import quick
from ampopt.engines.onnx_engine import MOST_KNOWN, OnnxEngine
from ampopt.ir.program import Program
from ampopt.passes import OnnxRuntime, onnx_runtime
from tests.helpers import Model
from tests.support.planted import module_of
from tests.support.small_net import close

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def soon(exports_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sweep of the options and of the rewrites finds does not matter here."""
    monkeypatch.setattr(onnx_runtime, "TUNING_S", 0.05)
    monkeypatch.setattr(onnx_runtime, "COMPARING_S", 0.05)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()


@pytest.fixture
def fast(model: nn.Module) -> ampopt.OptimizedModule:
    made = module_of(model, image(0), passes=(OnnxRuntime(),))
    assert isinstance(made.program.engine, OnnxEngine)
    assert made._calls.latest == {}
    made(image(0))
    assert close(made._calls.latest[1](image(0)), made(image(0)))
    return made


def image(seed: int) -> Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def whole(fast: ampopt.OptimizedModule, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of whole calls of the engine from now on."""
    seen: list[Tensor] = []
    real: Callable[..., object] = OnnxEngine.__call__

    def call(engine: OnnxEngine, *tensors: Tensor) -> object:
        seen.extend(tensors)
        return real(engine, *tensors)

    monkeypatch.setattr(OnnxEngine, "__call__", call)
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


def test_results_that_are_inputs_do_not_share_their_memory() -> None:
    model = Model(lambda m, x: (x, m.linear(x)), linear=nn.Linear(4, 4))
    fast, x = module_of(model, torch.randn(3, 4), passes=(OnnxRuntime(),)), torch.randn(3, 4)
    wanted = x.clone()
    for _ in range(3):
        same, _other = fast(x)
        same.zero_()
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("inference", [False, True])
def test_what_requires_gradients_is_read_in_its_place(
    model: nn.Module, fast: ampopt.OptimizedModule, whole: list[Tensor], inference: bool
) -> None:
    x = image(3).requires_grad_()
    wanted = model(x).detach()
    with torch.inference_mode(inference):
        found = fast(x)
    assert close(found.detach(), wanted)
    assert found.requires_grad is not inference
    assert len(whole) == 1


def test_what_is_not_there_as_its_numbers_say_takes_the_whole_call(
    model: nn.Module, fast: ampopt.OptimizedModule, whole: list[Tensor]
) -> None:
    x = image(4)
    fast(-x)
    negative = torch._neg_view(-x)
    assert fast._calls.latest[1](negative) is NotImplemented
    for _ in range(2):
        assert close(fast(negative), model(x))
    assert len(whole) == 2


def test_other_layouts_and_classes_are_served(model: nn.Module, fast: ampopt.OptimizedModule) -> None:
    x = image(5)
    for laid in (
        x.to(memory_format=torch.channels_last),
        torch.cat([x, x], 3)[..., :8],
        x.as_subclass(_Named),
        nn.Parameter(x),
    ):
        for _ in range(2):
            assert close(fast(laid).as_subclass(Tensor), model(x))


class _Named(Tensor):
    """Some library's own kind of tensor."""


def test_threads_get_their_own_results(model: nn.Module, fast: ampopt.OptimizedModule) -> None:
    inputs = [image(seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fast, inputs))
    assert all(close(y, model(x)) for x, y in zip(inputs, found, strict=True))


def test_only_a_program_that_converts_nothing_has_a_quicker_way(
    model: nn.Module, fast: ampopt.OptimizedModule, whole: list[Tensor]
) -> None:
    x, program = image(0), fast.program
    assert copy.deepcopy(program.engine) is program.engine

    def quicker(program: Program, x: Tensor) -> bool:
        before = len(whole)
        assert close(quick(program, program.run, x)(torch.is_tensor, tuple)(x)[0].float(), model(x.float()))
        return len(whole) == before

    assert quicker(program, x)
    assert not quicker(program, x.to(memory_format=torch.channels_last))
    assert not quicker(program, x.double())
    (border,) = program.exit
    for other in ({"dtype": torch.float64}, {"memory_format": torch.channels_last}):
        assert not quicker(program.replace(exit=(border.__class__(**{**vars(border), **other}),)), x)
