"""A graph is tried without memory: calls that do not fit, and results without bounds, are refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from ampopt.bundle import trial_run
from ampopt.bundle.stored_weights import StoredWeight
from ampopt.bundle.trial_run import LARGEST_RESULT, try_out
from ampopt.errors import BundleError
from ampopt.ir.graph import aten
from ampopt.ir.program import Border
from ampopt.ir.settings import Settings

CPU = torch.device("cpu")
X = torch.ones(2, 6)


def graph_of(make: Callable[[fx.Graph, fx.Node, fx.Node], Any]) -> fx.Graph:
    """A graph of an input [2, 6] and a weight [6, 4], with what `make` adds to it as its output."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    graph.output((make(graph, x, w),))
    return graph


def trial(
    make: Callable[[fx.Graph, fx.Node, fx.Node], Any],
    *,
    x: Tensor = X,
    entry: Border | None = None,
    autocast: torch.dtype | None = None,
) -> None:
    weights = {"w": StoredWeight(torch.ones(6, 4), (4, 1), CPU)}
    inputs = [(entry or Border(torch.float32), x)]
    try_out(graph_of(make), weights, inputs, Settings().scope(CPU, autocast), "file")


def call(target: Any, *operands: Any, name: str | None = None) -> Callable[..., fx.Node]:
    return lambda graph, x, w: graph.create_node("call_function", target, (x, *operands), {}, name)


def test_what_fits_passes_without_a_number_being_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def product(x: Tensor, w: Tensor) -> Tensor:
        seen.append(torch.mm(x, w))
        return seen[-1]

    trial(lambda graph, x, w: graph.call_function(product, (x, w)))
    (result,) = seen
    assert type(result).__name__ == "FakeTensor"
    assert (result.shape, result.device) == ((2, 4), CPU)


def test_inputs_enter_as_the_border_says() -> None:
    seen: list[tuple[torch.dtype, bool]] = []

    def look(x: Tensor) -> Tensor:
        seen.append((x.dtype, x.is_contiguous(memory_format=torch.channels_last)))
        return x

    image = torch.ones(1, 3, 4, 5, dtype=torch.float64)
    trial(call(look), x=image, entry=Border(torch.float16, torch.channels_last))
    assert seen == [(torch.float16, True)]


def test_it_runs_in_the_world_of_the_program() -> None:
    seen: list[torch.dtype] = []

    def look(x: Tensor, w: Tensor) -> Tensor:
        seen.append(torch.mm(x, w).dtype)
        return x

    for low in (None, torch.bfloat16):
        trial(lambda graph, x, w: graph.call_function(look, (x, w)), autocast=low)
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (call(aten.mm.default, 3, name="product"), "file, node 'product': it cannot be called like this ("),
        (
            lambda graph, x, w: graph.call_function(aten.mm.default, (w, x)),
            "file, node 'mm_default': it cannot be called",
        ),
        (call(aten.view.default, [5, 5]), "file, node 'view_default': it cannot be called like this ("),
        (call(lambda x: 3, name="number"), "file, node 'number': it gives a int instead of tensors"),
        (call(lambda x: [x, None], name="some"), "file, node 'some': it gives a NoneType instead of tensors"),
        (
            call(aten.expand.default, [2**40, 2, 6]),
            f"file, node 'expand_default': its result [{2**40}, 2, 6] has more than {LARGEST_RESULT} ele",
        ),
        (call(aten.split.Tensor, 1), "file, node 'split_tensor': an output is not a tensor"),
    ],
    ids=["no matrix", "other shapes", "no view", "a number", "nothing", "huge", "several"],
)
def test_what_does_not_fit_is_refused_with_its_node(make: Any, message: str) -> None:
    with pytest.raises(BundleError) as caught:
        trial(make)
    assert str(caught.value).startswith(message)


def test_an_error_is_told_by_its_first_line_or_its_kind_and_kept_as_the_cause() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("\n" + "long " * 200 + "\nsecond line")

    with pytest.raises(BundleError) as caught:
        trial(call(fail))
    assert "long long" in str(caught.value)
    assert "second line" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert isinstance(caught.value.__cause__, ValueError)

    def wordless(x: Tensor) -> Tensor:
        raise KeyError

    with pytest.raises(BundleError, match=r"it cannot be called like this \(KeyError\)"):
        trial(call(wordless))


def items(*arguments: Any, **named: Any) -> Callable[..., fx.Node]:
    """An item of what `split` gives, by these arguments."""

    def make(graph: fx.Graph, x: fx.Node, w: fx.Node) -> fx.Node:
        parts = graph.call_function(aten.split.Tensor, (x, 1))
        return graph.create_node("call_function", operator.getitem, (parts, *arguments), named, "part")

    return make


def test_one_of_several_results_is_taken_by_its_number() -> None:
    trial(items(1))
    with pytest.raises(BundleError, match="file, node 'part': it cannot be called like this"):
        trial(items(2))


@pytest.mark.parametrize(
    "make",
    [items("__class__"), items(True), items(slice(0, 1)), items(), items(0, 1), items(0, b=1)],
    ids=["a name", "a truth", "a slice", "nothing", "two", "a keyword"],
)
def test_an_item_is_taken_by_nothing_but_a_number(make: Any) -> None:
    with pytest.raises(BundleError, match=r"^file, node 'part': getitem takes a list of tensors and an"):
        trial(make)


def test_the_largest_result_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_run, "LARGEST_RESULT", 12)
    trial(call(aten.relu.default))
    with pytest.raises(BundleError, match=r"its result \[2, 7\] has more than 12 elements"):
        trial(call(aten.relu.default), x=torch.ones(2, 7))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def tell(x: Tensor) -> Tensor:
        print("from an operator")
        return x

    trial(call(tell))
    assert capfd.readouterr() == ("", "")
