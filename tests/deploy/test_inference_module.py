"""An optimized module as a `torch.nn.Module`: weights can be read and saved, and nothing can change them."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import InputError
from tests.helpers import with_statistics
from tests.support.planted import keep_the_original, module_of, optimize

X = torch.randn(1, 3, 8, 8)


class Branching(nn.Module):
    """Not one graph: it branches on a value."""

    threshold = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y * 2 if float(y.sum()) > 1e9 else y


def network() -> nn.Module:
    torch.manual_seed(0)
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    model.threshold = 0.5  # type: ignore[assignment]
    return model


@pytest.fixture(scope="module", params=[network, Branching], ids=["one graph", "in parts"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    model: nn.Module = request.param()
    return model, optimize(model, X, precision="fp32", budget_s=3)


Pair = tuple[nn.Module, Any]


def moved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value + 1 for name, value in state.items()}


def test_weights_are_those_of_the_original(pair: Pair) -> None:
    model, fast = pair
    for mine, its in (
        (fast.named_parameters(), model.named_parameters()),
        (fast.named_buffers(), model.named_buffers()),
        (fast.state_dict().items(), model.state_dict().items()),
        (fast.state_dict(prefix="a.").items(), model.state_dict(prefix="a.").items()),
        (nn.Sequential(fast).state_dict().items(), nn.Sequential(model).state_dict().items()),
    ):
        found, expected = dict(mine), dict(its)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert next(fast.parameters()).device == X.device


def test_what_is_saved_of_it_is_loaded_into_the_model(pair: Pair) -> None:
    model, fast = pair
    torch.save(fast.state_dict(), file := io.BytesIO())
    file.seek(0)
    other = type(model)(*model) if isinstance(model, nn.Sequential) else type(model)()
    assert other.load_state_dict(torch.load(file)).missing_keys == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda fast: fast.load_state_dict(moved(fast.state_dict())), "load them into the original"),
        (lambda fast: nn.Sequential(fast).load_state_dict({"0.0.weight": X}, strict=False), "the original"),
        (lambda fast: fast.load_state_dict({"head.weight": X}, strict=False), "load them into the original"),
        (lambda fast: fast.half(), "precision= for other dtypes"),
        (lambda fast: nn.Sequential(fast).double(), "precision= for other dtypes"),
        (lambda fast: fast.to("meta"), "device= for another device"),
        (lambda fast: fast.to_empty(device="cpu"), "optimize the original again"),
        (lambda fast: fast.train(), "cannot be trained"),
        (lambda fast: fast.requires_grad_(), "cannot be trained"),
        (lambda fast: setattr(fast, "head", nn.Identity()), "cannot take another 'head'"),
        (lambda fast: setattr(fast, "forward_pass", nn.Identity()), "set it in the original"),
        (lambda fast: setattr(fast, "gain", nn.Parameter(X)), "cannot take another 'gain'"),
        (lambda fast: setattr(fast, "threshold", 0.7), "cannot take another 'threshold'"),
        (lambda fast: fast.add_module("head", nn.Identity()), "cannot take another 'head'"),
        (lambda fast: fast.register_buffer("gain", X), "cannot take another 'gain'"),
        (lambda fast: torch.jit.script(nn.Sequential(fast)), "script the original"),
        (lambda fast: ampopt.optimize(fast, X), "the model is optimized already"),
        (lambda fast: ampopt.optimize(nn.Sequential(nn.Identity(), fast), X), "submodule 1 of the model is"),
    ],
)
def test_what_would_change_it_is_refused(pair: Pair, change: Callable[[Any], Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        change(pair[1])
    assert pair[1].eval() is pair[1]
    assert pair[1].requires_grad_(False) is pair[1]


def test_what_changes_nothing_is_no_error(pair: Pair) -> None:
    model, fast = pair
    holder = nn.Sequential(fast, nn.Linear(2, 2))
    assert fast.to("cpu", torch.float32) is fast
    assert fast.cpu().float() is fast
    assert holder.to("cpu") is holder
    assert fast.load_state_dict(model.state_dict()).missing_keys == []
    assert fast.load_state_dict({}, strict=False).missing_keys == list(model.state_dict())
    assert holder.load_state_dict(holder.state_dict()).missing_keys == []
    with pytest.raises(RuntimeError, match="Missing key"):
        fast.load_state_dict({})
    fast.label = "left camera"
    assert fast.label == "left camera"


def test_what_is_written_to_weights_changes_no_answer(pair: Pair) -> None:
    model, fast = pair
    with torch.no_grad():
        for weight in (*fast.parameters(), *fast.buffers(), *fast.state_dict().values()):
            weight.zero_()
        for x in (X, torch.randn(2, 3, 8, 8)):  # the second is captured now
            torch.testing.assert_close(fast(x), model(x))


def test_weights_that_are_tied_are_tied_in_what_it_gives() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    fast: Any = optimize(model, torch.randn(2, 4), precision="fp32", budget_s=3)
    given = dict(fast.named_parameters(remove_duplicate=False))
    assert given["0.weight"] is given["1.weight"]
    saved = nn.Sequential(fast).state_dict()
    assert saved["0.0.weight"].data_ptr() == saved["0.1.weight"].data_ptr()
    assert saved["0.0.weight"].data_ptr() != fast.state_dict()["0.weight"].data_ptr()
    assert isinstance(fast.state_dict(keep_vars=True)["0.weight"], nn.Parameter)
    assert [name for name, _ in fast.named_parameters()] == ["0.weight", "0.bias", "1.bias"]


def test_the_weights_of_a_model_that_cannot_be_copied_can_be_read() -> None:
    model = network().eval()
    model.lock = threading.Lock()  # type: ignore[assignment]
    fast: Any = optimize(model, X, precision="fp32", budget_s=3)
    assert [*fast.state_dict()] == [*model.state_dict()]
    assert [name for name, _ in fast.named_buffers()] == [name for name, _ in model.named_buffers()]


class OnGraph(nn.Module):
    """A layer on the nodes of a graph, whose edges are a sparse matrix."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(4).to_sparse())
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.sparse.mm(self.edges, self.layer(x))
        return product


def test_a_sparse_weight_can_be_read_and_moved_to_where_it_is() -> None:
    model = OnGraph().eval()
    fast: Any = optimize(model, torch.randn(4, 3), precision="fp32", budget_s=3)
    saved = nn.Sequential(fast).state_dict()["0.edges"]
    for mine in (dict(fast.named_buffers())["edges"], fast.get_buffer("edges"), saved):
        assert torch.equal(mine.to_dense(), model.edges.to_dense())
    assert fast.to("cpu") is fast
    assert fast.load_state_dict(model.state_dict()).missing_keys == []


def test_what_reads_the_model_itself_is_told_where_it_is(pair: Pair) -> None:
    with pytest.raises(AttributeError, match=r"'threshold': of its original .* has the call"):
        _ = pair[1].threshold
    with pytest.raises(Exception, match="export the original"):
        torch.onnx.export(pair[1], (X,), dynamo=True, verbose=False)


def test_hooks_of_all_modules_see_it(pair: Pair) -> None:
    seen: list[type[nn.Module]] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        pair[1](X)
        pair[1](X)
    finally:
        hook.remove()
    assert seen.count(type(pair[1])) == 2


def test_a_forward_that_was_replaced_is_called(pair: Pair) -> None:
    model, fast = pair
    own = fast.forward
    fast.forward = lambda x: own(x) + 1
    try:
        for _ in range(2):
            torch.testing.assert_close(fast(X), model(X) + 1)
    finally:
        fast.forward = own


def test_a_model_in_parts_says_why_it_cannot_leave() -> None:
    fast: Any = optimize(Branching(), X, precision="fp32", budget_s=3)
    for leave in (fast.save, fast.export_onnx):
        with pytest.raises(InputError, match="this one is not: not one graph: "):
            leave("robot.ampopt")


def test_a_model_that_answers_itself_has_nothing_to_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_original(monkeypatch)
    fast: Any = optimize(Branching(), X, precision="fp32", budget_s=0.01)
    assert fast.report.chosen == "original"
    fast.prepare((2, 3, 8, 8))


def test_a_nested_tensor_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    with pytest.raises(InputError, match="to_padded_tensor"):
        ampopt.optimize(nn.Linear(8, 4), nested)


def test_weights_are_found_by_name_and_submodules_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    weight, mean = model.get_parameter("0.weight"), model.get_buffer("1.running_mean")
    fast = module_of(model, torch.randn(1, 3, 4, 4))
    assert torch.equal(fast.get_parameter("0.weight"), weight)
    assert torch.equal(fast.get_buffer("1.running_mean"), mean)
    assert fast.get_parameter("0.weight").data_ptr() != weight.data_ptr()
    assert fast.get_submodule("") is fast
    with pytest.raises(AttributeError, match="no submodule '0'"):
        fast.get_submodule("0")
    with pytest.raises(AttributeError):
        fast.get_parameter("0.nothing")
