"""Capture: one graph that owns its weights and answers as the model does, or a CaptureError that says why."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.errors import CaptureError, InputError
from ampopt.ir.model_copy import device_of, private_copy, untouched_rng
from tests.helpers import Model, check_graph
from tests.support import snapshot
from tests.support.planted import captured_of

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Pair = namedtuple("Pair", ["first", "second"])


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 3, 3, padding=1)


def answers(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the capture of a call of the model answers, in the model's own structure."""
    _, captured = captured_of(model, *args, **kwargs)
    check_graph(captured.program)
    return captured.layout.restore(captured.program.run(*captured.program.examples))


def test_the_graph_has_the_private_copys_parameters_and_clones_of_its_buffers() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(3)).eval()
    original, captured = captured_of(model, X)
    users = {t.data_ptr() for t in (*model.parameters(), *model.buffers(), *original.buffers())}
    weights = {t.data_ptr() for t in captured.program.graph.buffers()}
    assert users.isdisjoint(weights)
    assert {parameter.data_ptr() for parameter in original.parameters()} < weights
    assert not list(captured.program.graph.parameters())


def test_a_weight_that_two_layers_share_is_one_weight_of_the_graph() -> None:
    first, second = conv(), conv()
    second.weight = first.weight
    _, captured = captured_of(nn.Sequential(first, nn.ReLU(), second), X)
    assert len(list(captured.program.graph.buffers())) == 3


def _takes(m: Any, a: Any, b: Any = None, *, c: Any = None, flag: bool = False) -> Tensor:
    found = torch.utils._pytree.tree_leaves((a, b, c))
    total = sum(t for t in found if isinstance(t, Tensor))
    out: Tensor = m.conv(total) * (2 if flag else 1)
    return out


class Caller(nn.Module):
    """A model of any arguments."""

    def __init__(self, function: Any = _takes) -> None:
        super().__init__()
        self.conv, self.function = conv(), function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(self, *args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((X, X + 1), {}),
        (((X, X),), {}),
        (([X, X + 1],), {"flag": True}),
        (({"x": X, "y": [X, 3]},), {"c": X}),
        ((), {"a": X, "flag": True}),
        ((Pair(X, None),), {"b": OrderedDict(one=X)}),
        ((X.double().float(), "text"), {"c": 2.5}),
    ],
)
def test_inputs_of_any_structure_are_taken(args: Any, kwargs: dict[str, Any]) -> None:
    model = Caller()
    with torch.no_grad():
        assert torch.equal(answers(model, *args, **kwargs), model(*args, **kwargs))


OUTPUTS: dict[str, Any] = {
    "tuple": lambda y: (y, y + 1),
    "one": lambda y: (y,),
    "list": lambda y: [y, [y * 2]],
    "namedtuple": lambda y: Pair(y, y.sum()),
    "ordered dict": lambda y: OrderedDict(out=y, aux=y.mean()),
    "dict of tuples": lambda y: {"b": (y, y - 1), "a": (y.abs(),)},
    "none and numbers": lambda y: {"x": y, "none": None, "int": 3, "float": 0.5, "text": "t", "bool": True},
    "return type": lambda y: torch.topk(y, 2),
    "size": lambda y: (y, y.shape),
    "same twice": lambda y: (y, y),
    "view": lambda y: (y, y.view(-1)),
    "empty": lambda y: (y, [], {}),
}


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal in structure, types and values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype is b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", OUTPUTS)
def test_results_have_the_models_own_structure_and_types(name: str) -> None:
    model = Model(lambda m, x: OUTPUTS[name](m.conv(x)), conv=conv())
    with torch.no_grad():
        assert same(answers(model, X), model(X))


def test_an_output_that_is_an_input_or_a_weight_is_the_callers_own() -> None:
    model = Model(lambda m, x: (x, m.conv.weight, x[:, 0], m.conv(x)), conv=conv()).eval()
    _, captured = captured_of(model, X)
    x = X.clone()
    first = captured.program.run(x)
    assert same(list(first), list(map(torch.clone, model(X))))
    for tensor in first:
        tensor.zero_()
    assert torch.equal(x, X)
    with torch.no_grad():
        assert same(list(captured.program.run(X)), list(map(torch.clone, model(X))))


def _counts(m: Any, x: Tensor) -> Tensor:
    m.count.add_(1)
    out: Tensor = m.conv(x) + m.count
    return out


def _changes_its_input(m: Any, x: Tensor) -> Tensor:
    x.add_(1)
    out: Tensor = m.conv(x)
    return out


def _draws(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.conv(x) + torch.rand_like(x)
    return out


def _drops_always(m: Any, x: Tensor) -> Tensor:
    return F.dropout(m.conv(x), 0.5, training=True)


def _depends_on_data(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.conv(x) if x.sum() > 0 else x
    return out


def _counts_in_python(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    out: Tensor = m.conv(x) * m.calls
    return out


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_changes_its_input, "changes its input"),
        (_draws, "draws random numbers"),
        (_drops_always, "draws random numbers"),
        (_depends_on_data, r"torch\.export cannot capture Model"),
        (_counts_in_python, "calls"),
    ],
)
def test_what_is_no_pure_function_of_its_inputs_is_declined(function: Any, reason: str) -> None:
    model = Model(function, conv=conv(), count=torch.zeros(1)).eval()
    model.calls = 0  # type: ignore[assignment]
    before = snapshot.of_torch()
    with pytest.raises(CaptureError, match=reason):
        captured_of(model, X.clone())
    assert snapshot.differences(before, snapshot.of_torch()) == []


@pytest.fixture(scope="module")
def keep() -> Iterator[Any]:
    """An operator that keeps what is positive, whose shape function promises at least as many as asked."""
    with torch.library._scoped_library("ampopt_test_capture", "FRAGMENT") as library:
        library.define("keep(Tensor x, int least) -> Tensor")
        library.impl("keep", lambda x, least: x[x > 0], "CPU")

        def shape(x: Tensor, least: int) -> Tensor:
            return x.new_empty(torch.library.get_ctx().new_dynamic_size(min=least))

        torch.library.register_fake("ampopt_test_capture::keep", shape, lib=library)
        yield torch.ops.ampopt_test_capture.keep


@pytest.mark.parametrize("under", [contextlib.nullcontext, torch.no_grad, lambda: torch.autocast("cpu")])
def test_a_shape_function_that_promises_too_much_is_no_reason_to_fail(
    keep: Any, under: Callable[[], Any]
) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with under():
            return keep(m.conv(x), 2) * 2

    model = Model(forward, conv=conv()).eval()
    with pytest.raises(
        CaptureError, match=r"would hold only where u0 >= 2, which the inputs' values decide: keep"
    ):
        captured_of(model, X)


@pytest.fixture
def told() -> Iterator[Any]:
    """Operators that tell somebody something: one with no result, one whose result may be left unread."""
    with torch.library._scoped_library("ampopt_test_told", "FRAGMENT") as library:
        for name, result in (("tell", "()"), ("ask", "Tensor")):
            library.define(f"{name}(Tensor x) -> {result}")
        library.impl("tell", lambda x: None, "CompositeExplicitAutograd")
        library.impl("ask", lambda x: x + 1, "CompositeExplicitAutograd")
        yield torch.ops.ampopt_test_told


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("aten._assert_async.msg", lambda told, x: torch._assert_async((x < 9).all(), "too large")),
        ("aten._assert_async.default", lambda told, x: torch._assert_async((x < 9).all())),
        ("ampopt_test_told.tell.default", lambda told, x: told.tell(x)),
        ("ampopt_test_told.ask.default", lambda told, x: told.ask(x)),
    ],
)
@pytest.mark.parametrize("under", [contextlib.nullcontext, torch.no_grad, lambda: torch.autocast("cpu")])
def test_what_is_called_for_its_effect_is_in_no_graph(
    told: Any, name: str, call: Callable[..., Any], under: Callable[[], Any]
) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with under():
            call(told, x)
            return m.conv(x)

    with pytest.raises(CaptureError, match=rf"{name} for its effect, .*test_capture\.py:\d+"):
        captured_of(Model(forward, conv=conv()).eval(), X)


def test_an_operator_of_the_user_s_is_in_the_graph_for_its_result(told: Any) -> None:
    _, captured = captured_of(Model(lambda m, x: told.ask(m.conv(x)), conv=conv()).eval(), X)
    assert told.ask.default in {node.target for node in captured.program.graph.graph.nodes}


def test_a_name_for_the_profiler_is_no_effect() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with torch.profiler.record_function("mine"):
            return m.conv(x)

    captured_of(Model(forward, conv=conv()).eval(), X)


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
def test_a_size_that_values_decide_may_be_any(keep: Any, value: float) -> None:
    for function in (lambda m, x: keep(m.conv(x), 0) * 2, lambda m, x: torch.nonzero(m.conv(x) > 0)):
        model = Model(function, conv=conv()).eval()
        original, captured = captured_of(model, X)
        x = torch.full_like(X, value)
        assert torch.equal(captured.program.run(x)[0], original(x))


def test_a_dropout_that_is_off_draws_nothing() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).eval()
    model = Model(lambda m, x: m.attention(x, x, x)[0], attention=attention)
    captured_of(model, torch.randn(1, 4, 8))


def test_a_copy_is_private_in_evaluation_mode_and_without_gradients() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(3)).train()
    duplicate = private_copy(model)
    assert not any(module.training for module in duplicate.modules())
    assert not any(p.requires_grad for p in duplicate.parameters())
    assert all(module.training for module in model.modules())


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason() -> None:
    model = conv()
    vars(model)["lock"] = threading.Lock()
    with pytest.raises(InputError, match=r"cannot be copied \(.*lock.*remove what cannot be deep-copied"):
        private_copy(model)


def test_weights_on_two_devices_are_refused() -> None:
    model = nn.Sequential(conv(), conv().to("meta"))
    with pytest.raises(InputError, match=r"several devices \(cpu, meta\)"):
        device_of(model, [])


def test_blocks_that_overlap_in_several_threads_leave_the_generators_as_they_were() -> None:
    before, inside, left = torch.get_rng_state(), threading.Barrier(3), threading.Barrier(2)

    def one(waits: bool) -> None:
        with untouched_rng(torch.device("cpu")):
            inside.wait()
            torch.rand(3)
            if waits:
                left.wait()
        if not waits:
            left.wait()

    threads = [threading.Thread(target=one, args=(waits,)) for waits in (True, False)]
    with untouched_rng(torch.device("cpu")):
        for thread in threads:
            thread.start()
        inside.wait()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_graph_that_runs_only_while_it_is_made_is_no_capture() -> None:
    """An export writes the calls inside of `torch.vmap` down one by one."""
    model = Model(
        lambda m, x: torch.vmap(lambda row: row * 2 + row.mean())(m.linear(x)), linear=nn.Linear(4, 4)
    )
    with pytest.raises(CaptureError, match="the graph of Model fails where the model does not"):
        captured_of(model.eval(), torch.randn(2, 4))
