"""OptimizedModule: what surrounds a call (autocast, inference mode, gradients) changes nothing but dtypes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import InputError, StrictError
from ampopt.ir.transform import Recipe, replay
from ampopt.measure.ledger import Ledger
from ampopt.passes import BakeAutocast, FoldConvBn
from tests.helpers import BF16, Model, with_statistics
from tests.support.planted import captured_of, module_of

LOW = (torch.bfloat16, torch.float16)


def net() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))


def image(height: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(1, 3, height, 8, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, atol: float = 1e-5) -> bool:
    return actual.dtype is expected.dtype and torch.allclose(actual.float(), expected.float(), atol=atol)


def in_amp(model: nn.Module, *args: Any) -> OptimizedModule:
    """A module of the AMP lane with its casts in the graph."""
    original, captured = captured_of(model, *args)
    recipe = Recipe(BF16, (BakeAutocast(),))
    program = replay(recipe.passes, recipe.lane.start(captured.program))
    return OptimizedModule(original, captured, program, recipe, Ledger("model", {}, ()))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("height", [8, 9])
def test_under_autocast_the_dtype_is_the_originals_there(height: int, dtype: torch.dtype) -> None:
    model = net()
    fast, x = module_of(model, image(), passes=(FoldConvBn(),)), image(height)
    for _ in range(3):
        assert close(fast(x), model(x)), "outside"
        with torch.autocast("cpu", dtype=dtype), torch.no_grad():
            assert close(fast(x), model(x), atol=0.1)
            with torch.autocast("cpu", enabled=False):
                assert close(fast(x), model(x)), "switched off inside"
    assert fast.health.served_by_original == 0


def test_each_result_has_its_own_dtype_under_autocast() -> None:
    model = Model(
        lambda m, x: {"low": m.conv(x), "wide": m.conv(x).float(), "place": x.argmax(), "n": 3},
        conv=nn.Conv2d(3, 4, 1),
    ).eval()
    fast = module_of(model, image())
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found, expected = fast(image()), model(image())
    assert found.keys() == expected.keys()
    assert found["n"] == 3
    assert all(found[key].dtype is expected[key].dtype for key in ("low", "wide", "place"))


def test_two_autocasts_in_turn_are_not_mixed_up() -> None:
    model = net()
    fast = module_of(model, image())
    for _ in range(2):
        for dtype in LOW:
            with torch.autocast("cpu", dtype=dtype):
                assert fast(image()).dtype is dtype
        assert fast(image()).dtype is torch.float32


ASKING = {
    "is_autocast_enabled": lambda m, x: -m.conv(x) if torch.is_autocast_enabled("cpu") else m.conv(x),
    "get_autocast_dtype": lambda m, x: m.conv(x) * (2 if torch.get_autocast_dtype("cpu") is LOW[1] else 1),
    "a little": lambda m, x: m.conv(x) * (1.01 if torch.is_autocast_enabled("cpu") else 1),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_model_that_asks_for_the_state_of_autocast_is_answered_by_the_original_there(name: str) -> None:
    torch.manual_seed(0)
    model = Model(ASKING[name], conv=nn.Conv2d(3, 4, 1)).eval()
    fast, x = module_of(model, image()), image(seed=1)
    for dtype in LOW:
        with torch.autocast("cpu", dtype=dtype), torch.no_grad():
            assert torch.equal(fast(x), model(x))
    assert fast.health.served_by_original == len(LOW)
    assert close(fast(x), model(x))
    fast.strict = True
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(StrictError, match="autocast"):
        fast(x)


def test_the_original_answers_in_the_callers_autocast() -> None:
    model = net()
    served = module_of(model, image(), serve_original=True)
    fallen = module_of(model, image(), max_captures=0)
    x = image(9)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(served(x), model(x))
        assert torch.equal(fallen(x), model(x))


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("height", [8, 9])
def test_tensors_made_in_inference_mode_are_served_by_programs(height: int, amp: bool) -> None:
    model = net()
    fast = in_amp(model, image()) if amp else module_of(model, image())
    with torch.inference_mode():
        inside = image(height)
        assert close(fast(inside), model(inside), atol=0.05)
    with torch.no_grad():
        assert close(fast(inside), model(inside), atol=0.05)
    assert close(fast(image(height)), model(image(height)), atol=0.05)
    assert fast.health.served_by_original == 0


@pytest.mark.parametrize("amp", [False, True])
def test_prepare_in_inference_mode_and_under_autocast(amp: bool) -> None:
    model = net()
    fast = in_amp(model, image()) if amp else module_of(model, image())
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        fast.prepare((1, 3, 9, 8), image(10))
    for height in (9, 10):
        assert close(fast(image(height)), model(image(height)), atol=0.05)
    assert fast.health.is_good


UNASKED = {
    "is_grad_enabled": lambda m, x: -m.conv(x) if torch.is_grad_enabled() else m.conv(x),
    "is_inference_mode_enabled": lambda m, x: -m.conv(x) if torch.is_inference_mode_enabled() else m.conv(x),
    "requires_grad": lambda m, x: -m.conv(x) if x.requires_grad else m.conv(x),
    "is_inference": lambda m, x: -m.conv(x) if x.is_inference() else m.conv(x),
    "is_leaf": lambda m, x: m.conv(x) if x.is_leaf else -m.conv(x),
    "grad_fn": lambda m, x: m.conv(x) if x.grad_fn is None else -m.conv(x),
}


@pytest.mark.parametrize("height", [8, 9])
@pytest.mark.parametrize("name", UNASKED)
def test_results_are_those_of_the_original_without_gradients_in_whatever_mode(name: str, height: int) -> None:
    torch.manual_seed(0)
    model = Model(UNASKED[name], conv=nn.Conv2d(3, 4, 1)).eval()
    with torch.no_grad():
        expected = model(image(height))
    fast = module_of(model, image())
    modes: list[Any] = [contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()]
    for mode in modes:
        with mode:
            inputs = [image(height), image(height).requires_grad_()]
            if not torch.is_inference_mode_enabled():
                inputs.append(inputs[1] * 1)
            assert all(close(fast(x), expected) for x in inputs)
            asked = [x.requires_grad and torch.is_grad_enabled() for x in inputs]
            assert [fast(x).requires_grad for x in inputs] == asked


TRANSFORMS = {
    "grad": lambda fast, x: torch.func.grad(lambda t: fast(t).sum())(x),
    "vjp": lambda fast, x: torch.func.vjp(fast, x),
    "jvp": lambda fast, x: torch.func.jvp(fast, (x,), (x,)),
    "jacrev": lambda fast, x: torch.func.jacrev(fast)(x),
    "jacfwd": lambda fast, x: torch.func.jacfwd(fast)(x),
    "hessian": lambda fast, x: torch.func.hessian(lambda t: fast(t).sum())(x),
    "vmap": lambda fast, x: torch.vmap(fast)(x[None]),
    "functionalize": lambda fast, x: torch.func.functionalize(fast)(x),
}


def dual(fast: Any, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        result: Tensor = fast(torch.autograd.forward_ad.make_dual(x, x))
        return result


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("transform", [*TRANSFORMS.values(), dual], ids=[*TRANSFORMS, "dual"])
def test_derivatives_are_refused_and_not_zero(transform: Any, original: bool) -> None:
    fast, x = module_of(net(), image(), serve_original=original), image()
    for _ in range(2):
        expected = fast(x)
        with pytest.raises(ampopt.InputError, match=r"for inference: (transform|use) the original model"):
            transform(fast, x)
        assert torch.equal(fast(x), expected)
    assert fast.health.refusals == 2


def test_a_gradient_beside_the_model_is_right() -> None:
    fast, x = module_of(net(), image()), image()
    weight = torch.tensor(3.0)
    found = torch.func.grad(lambda w: (w * fast(x)).sum())(weight)
    assert torch.allclose(found, fast(x).sum())
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(fast(x), fast(image()))


@pytest.mark.parametrize("serve_original", [False, True])
@pytest.mark.parametrize(
    "trace",
    [
        lambda fast, x: torch.jit.trace(fast, x),
        lambda fast, x: torch.export.export(nn.Sequential(nn.ReLU(), fast), (x,)),
        lambda fast, x: torch.fx.experimental.proxy_tensor.make_fx(fast)(x),
        lambda fast, x: torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), fast)),
        lambda fast, x: torch.fx.symbolic_trace(fast),
    ],
    ids=["jit.trace", "export", "make_fx", "fx", "fx, itself"],
)
def test_tracers_are_refused(trace: Any, serve_original: bool) -> None:
    fast, x = module_of(net(), image(), serve_original=serve_original), image()
    expected = fast(x)
    with pytest.raises(ampopt.InputError, match="cannot be traced by"):
        trace(fast, x)
    assert torch.equal(fast(x), expected)


def test_compiled_around_it_a_module_stays_as_it_was_verified() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = net()
    fast = module_of(model, image())
    whole = Model(lambda m, x: m.inner(x + 1) * 2, inner=fast)
    compiled = torch.compile(whole, backend=backend)
    for height in (8, 9):
        assert close(compiled(image(height)), model(image(height) + 1) * 2)
    assert fast.health.served_by_original == 0, "what it captures with was compiled"
    operators = {node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
    assert {target.__name__ for target in operators} == {"add", "mul"}


DERIVATIVES = {
    "grad": lambda fast, x: torch.autograd.grad(fast(x).sum(), x),
    "backward": lambda fast, x: fast(x).mean().backward(),
    "jacobian": torch.autograd.functional.jacobian,
    "hessian": lambda fast, x: torch.autograd.functional.hessian(lambda t: fast(t).sum(), x),
    "through a layer before": lambda fast, x: torch.autograd.grad(fast(x * 2).sum(), x),
}


@pytest.mark.parametrize("served", ["program", "original", "late original"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_derivative_is_refused_and_never_zero(name: str, served: str) -> None:
    model = nn.Conv2d(3, 4, 1).eval()
    fast = module_of(model, image(), serve_original=served == "original", max_captures=0)
    x = image(9 if served == "late original" else 8).requires_grad_()
    with pytest.raises(InputError, match="has no derivatives"):
        DERIVATIVES[name](fast, x)  # type: ignore[no-untyped-call]
    assert torch.equal(fast(x.detach()), fast(x).detach())


@pytest.mark.parametrize("original", [False, True])
def test_results_for_an_input_that_requires_gradients_may_be_written_to(original: bool) -> None:
    fast = module_of(nn.Conv2d(3, 4, 1).eval(), image(), serve_original=original)
    result, expected = fast(image().requires_grad_()), fast(image()).clone()
    result.mul_(2)
    assert torch.equal(result.detach(), expected * 2)
    with pytest.raises(InputError, match="has no derivatives"):
        result.sum().backward()
