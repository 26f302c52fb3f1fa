"""What a model compiles is left as it is by the modes that watch it, and can be called in them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from ampopt.diagnosis.host_reads import HostReads
from ampopt.errors import CaptureError
from ampopt.ir.capture import capture
from ampopt.ir.eager_mode import EagerMode
from ampopt.ir.model_copy import private_copy
from ampopt.measure.clocks import seconds_once_loaded
from tests.helpers import Model

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


def stance() -> str:
    return eval_frame._stance.stance


class Passing(EagerMode):
    """A mode that changes nothing, and notes that it was asked."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def compiled() -> tuple[Callable[[Tensor], Tensor], list[int]]:
    """A function that has to be compiled as a whole, and a list that grows when what was compiled runs."""
    runs = list[int]()

    def backend(graph: nn.Module, _: object) -> Callable[..., Any]:
        return lambda *args: runs.append(1) or graph(*args)  # type: ignore[func-returns-value]

    return torch.compile(lambda x: x.sin() + 1, backend=backend, fullgraph=True), runs


def test_a_compiled_function_runs_uncompiled_in_the_mode_and_is_compiled_after_it(
    compiled: tuple[Callable[[Tensor], Tensor], list[int]],
) -> None:
    function, runs = compiled
    with Passing() as mode:
        assert torch.equal(function(X), X.sin() + 1)
    assert (runs, mode.seen[:1]) == ([], ["sin.default"])
    assert torch.equal(function(X), X.sin() + 1)
    assert runs == [1]
    with Passing() as mode:
        function(X)
    assert (runs, mode.seen) == ([1], ["sin.default", "add.Tensor"])


def test_the_last_of_all_modes_puts_the_stance_back() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with Passing():
            entered.set()
            left.wait(60.0)

    thread = threading.Thread(target=other)
    with Passing(), Passing():
        thread.start()
        assert entered.wait(60.0)
    assert stance() == "force_eager"
    left.set()
    thread.join()
    assert stance() == "default"


def test_the_stance_is_put_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="must match the size"), Passing():
        torch.add(X, X[:, :2])
    assert stance() == "default"


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_code_may_enter_the_mode() -> None:
    """PyTorch refuses to set a stance there."""

    def function(x: Tensor) -> Tensor:
        with Passing():
            return x.sin()

    assert torch.equal(torch.compile(function, backend="eager")(X), X.sin())
    assert stance() == "default"


OPERATORS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cond": lambda m, x: torch.cond(x.sum() > 0, lambda y: m.linear(y), lambda y: -y, (x,)),
    "while_loop": lambda m, x: while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, m.linear(y)), (torch.tensor(0), x)
    )[1],
    "map": lambda m, x: map_over(lambda y, *_: y * 2, x),
    "scan": lambda m, x: scan(lambda c, y: (c + y, (c * y).clone()), x[0].clone(), x)[1],
    "associative_scan": lambda m, x: associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic"),
    "flex_attention": lambda m, x: flex_attention(x[None, None], x[None, None], x[None, None]),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore")
def test_operators_that_run_functions_work_as_before_once_they_were_watched(name: str) -> None:
    model = Model(OPERATORS[name], linear=nn.Linear(6, 6)).eval()
    with torch.no_grad():
        expected = model(X)
        with contextlib.suppress(CaptureError):
            capture(private_copy(model), (X,), {}, CPU)
        assert torch.equal(model(X), expected)
        assert seconds_once_loaded(lambda: model(X), CPU, long_s=0.0, most_s=60.0, loading_s=60.0) < 60.0
        with HostReads(torch.nn.Module.__call__.__code__).watching():
            assert torch.equal(model(X), expected)
        assert torch.equal(model(X), expected)
