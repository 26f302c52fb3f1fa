"""Integers in ONNX files, in ONNX Runtime: what eager refuses is refused, and large numbers are exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.engines.onnx_graph import OPSETS, model_of
from ampopt.ir.graph import aten, calls
from ampopt.ir.integer_forms import DIVISIONS, INDEXED, PLACES, PRODUCTS, SUMS, with_integer_forms
from ampopt.ort.session import OnnxRunner, SessionError, SessionOptions
from tests.helpers import Model, program_of
from tests.support.exporting import export, run
from tests.support.side_by_side import parts_of, side_by_side

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

W = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([1, 2, 3])

LOOK_UPS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda i: F.embedding(i, W),
    "embedding_bag": lambda i: F.embedding_bag(i[None], W),
    "embedding_bag of offsets": lambda i: F.embedding_bag(i, W, torch.tensor([0, 2]), mode="sum"),
    "embedding_bag without offsets that end": lambda i: torch.embedding_bag(W, i, torch.tensor([0, 2]))[0],
    "one_hot": lambda i: F.one_hot(i[None], 10),
    "index_select": lambda i: W.index_select(0, i),
    "gather": lambda i: W.gather(0, i[:, None].expand(3, 3)),
    "scatter": lambda i: W.scatter(0, i[:, None], W[:3, :1]),
    "scatter of a value": lambda i: W.scatter(0, i[:, None], 1.0),
    "scatter_add": lambda i: W.scatter_add(0, i[:, None], W[:3, :1]),
    "scatter_reduce": lambda i: W.scatter_reduce(0, i[:, None], W[:3, :1], "amax"),
    "index_add": lambda i: W.index_add(0, i, W[:3]),
    "index_copy": lambda i: W.index_copy(0, i, W[:3]),
    "divided by short ones": lambda i: i // (i % 7 + 249).to(torch.uint8),
    "divided by a short constant": lambda i: i // torch.tensor([255, 3, 254], dtype=torch.uint8),
    "divided by booleans": lambda i: i // (i * 0 == 0),
    "short ones, divided": lambda i: (i % 7 - 9).short() // (i % 5 + 2).short(),
    "a sum as a place": lambda i: W[torch.stack((i % 3, i % 2)).sum(0)],
    "a sum of sums": lambda i: torch.stack((i, i)).sum(0).sum(0),
    "its own places": lambda i: (i % 3)[i % 3],
    "places": lambda i: W[i],
    "places to be written": lambda i: W.index_put((i,), torch.zeros(3, 3)),
    "take_along_dim": lambda i: W.take_along_dim(i[:, None], 0),
}

ARITHMETIC: dict[str, Callable[[Tensor], Tensor]] = {
    "divided, down": lambda i: torch.div(i, 3, rounding_mode="floor"),
    "divided by another, down": lambda i: torch.div(i, i.flip(0), rounding_mode="floor"),
    "divided by the operator": lambda i: i // 3,
    "divided by -1, down": lambda i: i // -1,
    "divided by a constant, down": lambda i: i // torch.tensor([-1, 3, -1]),
    "divided twice": lambda i: i // i.flip(0) // 2,
    "divided by long ones": lambda i: i // i.flip(0).long(),
    "number, divided": lambda i: 2**20 // (i + 10),
    "places": lambda i: W[i.clamp(0, 9), i.clamp(-2, 2)],
    "places to be written": lambda i: W.index_put((i.clamp(0, 9),), torch.zeros(3, 3)),
    "remainder": lambda i: i % 7,
    "multiple": lambda i: i * 3 + 1,
    "bounded below": lambda i: i.clamp(min=2),
    "bounded above": lambda i: i.clamp_max(2),
    "floats, down": lambda i: torch.div(i.float(), 3, rounding_mode="floor"),
    "sum": lambda i: i.sum(),
    "sum along a dimension": lambda i: torch.stack((i, i.flip(0))).sum(1),
    "sum along both, with sizes of 1": lambda i: torch.stack((i, i.flip(0))).sum((0, -1), keepdim=True),
    "sum that goes around": lambda i: (i * 2**31).sum(),
    "sum in int32": lambda i: i.sum(dtype=torch.int32),
    "sum of both in int32": lambda i: torch.stack((i, i.flip(0))).sum(
        (0, 1), dtype=torch.int32, keepdim=True
    ),
    "sum of a sum in int32": lambda i: torch.stack((i, i)).sum(0).sum(dtype=torch.int32),
    "sum of squares in int32": lambda i: (i * i).sum(0, dtype=torch.int32),
    "sum of short ones in int32": lambda i: i.short().sum(dtype=torch.int32),
    "trace": lambda i: torch.outer(i, i * 2 + 1).trace(),
    "trace of one number": lambda i: i[None].trace(),
    "diagonal": lambda i: torch.outer(i, i * 2 + 1).diagonal(),
    "diagonal below": lambda i: torch.stack([torch.outer(i, i + 1)] * 2, 1).diagonal(-1, 0, 2),
    "diagonal above, of the others": lambda i: torch.stack([torch.outer(i, i + 1)] * 2, 1).diagonal(1, 2, 0),
    "diagonal of linear algebra": lambda i: torch.linalg.diagonal(torch.outer(i, i * 2 + 1), offset=1),
    "diagonal of a matrix": lambda i: torch.outer(i, i * 2 + 1).diag(-1),
    "matrix of a diagonal": lambda i: i.diag(),
    "diagonal of nothing": lambda i: torch.outer(i, i + 1).diagonal(3),
    "einsum": lambda i: torch.einsum("ij->", torch.outer(i, i)),
    "einsum of a diagonal": lambda i: torch.einsum("i i j -> j", torch.stack([torch.outer(i, i)] * 2, 2)),
    "einsum of what is left": lambda i: torch.einsum("jij", torch.stack([torch.outer(i, i)] * 3, 1)),
    "einsum of another order": lambda i: torch.einsum("bac->ca", torch.stack([torch.outer(i, i)] * 2)),
    "einsum of two": lambda i: torch.einsum("ij,kj->ik", torch.outer(i, i), torch.outer(i, i)),
    "einsum of sums": lambda i: torch.einsum("ij,kl->ik", torch.outer(i, i), torch.outer(i, i)),
    "einsum of the last": lambda i: torch.einsum("...i->...", torch.outer(i, i)),
    "fourth power": lambda i: i**4,
    "eleventh power": lambda i: i.pow(11),
    "last power": lambda i: i**64,
    "product": lambda i: i.prod(),
    "product along a dimension": lambda i: torch.stack((i, i.flip(0))).prod(1),
    "product along another": lambda i: torch.stack((i, i.flip(0)), 1).prod(0, keepdim=True),
    "product of an even number": lambda i: torch.cat((i, i + 1)).prod(),
    "product in int32": lambda i: i.prod(dtype=torch.int32),
    "mean in float64": lambda i: (i % 1000).double().mean(),
    "mean with a dtype": lambda i: (i % 1000).mean(dtype=torch.float32),
    "mean along a dimension with a dtype": lambda i: torch.stack((i % 100, i % 7)).mean(
        0, dtype=torch.float64
    ),
    "sum with a dtype": lambda i: (i % 1000).sum(dtype=torch.float32),
    "softmax with a dtype": lambda i: (i % 2).softmax(0, dtype=torch.float32).round(),
    "log_softmax with a dtype": lambda i: (i % 2).log_softmax(0, dtype=torch.float32).round(),
    "count": lambda i: (i > 1).sum(),
    "count of integers": lambda i: (i > 1).long().sum(),
}

TRUNCATED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided, to zero": lambda i: torch.div(i, -3, rounding_mode="trunc"),
    "divided by its other name": lambda i: torch.divide(i, other=-3, rounding_mode="trunc"),
    "divided by another, to zero": lambda i: torch.div(i, -i.flip(0), rounding_mode="trunc"),
}
"""PyTorch dies where it divides the smallest integer so."""


def exported(model: nn.Module, ids: tuple[Tensor, ...], outputs: int) -> Any:
    graph = program_of(model, *ids).graph
    taken, given = [f"x{place}" for place in range(len(ids))], [f"y{place}" for place in range(outputs)]
    return model_of(graph, ids, OPSETS["onnxruntime"], taken, given, ({},) * len(ids))


def runner_of(ids: Tensor, *functions: Callable[[Tensor], Tensor]) -> OnnxRunner:
    model = Model(lambda m, i: tuple(function(i) for function in functions))
    file = onnx_ir.to_proto(exported(model, (ids,), len(functions))).SerializeToString()
    return OnnxRunner(file, SessionOptions())


def answer_of(call: Callable[[], Tensor]) -> Tensor | None:
    try:
        return call()
    except (IndexError, RuntimeError, SessionError):
        return None


@pytest.fixture(scope="module")
def look_ups() -> dict[str, OnnxRunner]:
    """A file for each, as one refuses for all that are in it; they were exported at once."""
    ids = tuple(IDS.clone() for _ in LOOK_UPS)
    model = exported(side_by_side(LOOK_UPS), ids, len(LOOK_UPS))
    files = parts_of(model, [1] * len(LOOK_UPS))
    return {name: OnnxRunner(file, SessionOptions()) for name, file in zip(LOOK_UPS, files, strict=True)}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_an_index_that_eager_refuses_is_refused(name: str, look_ups: dict[str, OnnxRunner]) -> None:
    runner, function = look_ups[name], LOOK_UPS[name]
    for value in (0, 9, 10, -1, -10, -11, 2**40):
        ids = torch.tensor([1, value, 3])
        expected = answer_of(lambda ids=ids: function(ids))  # type: ignore[misc]
        found = answer_of(lambda ids=ids: torch.from_numpy(runner(ids.numpy())[0]))  # type: ignore[misc]
        assert (found is None) == (expected is None), value
        if expected is not None and found is not None:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("table", [ARITHMETIC, TRUNCATED], ids=["all numbers", "all but the smallest"])
def test_integers_are_exact(table: dict[str, Callable[[Tensor], Tensor]], dtype: torch.dtype) -> None:
    """One file has all operators of a table, each of which is compared for itself."""
    runner = runner_of(IDS.to(dtype), *table.values())
    large = [2**24 + 1, 3 * (2**24 + 1)] + [2**53 + 1, 2**62 + 1, -(2**40) - 1] * (dtype is torch.int64)
    vectors = [[1, value, -4] for value in (-7, -1, 5, *large)]
    bounds = [torch.iinfo(dtype).max, *([torch.iinfo(dtype).min] if table is ARITHMETIC else [])]
    for numbers in (*vectors, *([bound] * 3 for bound in bounds)):
        ids = torch.tensor(numbers, dtype=dtype)
        for (name, function), found in zip(table.items(), runner(ids.numpy()), strict=True):
            torch.testing.assert_close(
                torch.from_numpy(found),
                function(ids),
                rtol=0,
                atol=0,
                msg=f"{name} of {numbers}: {{}}".format,
            )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_smallest_integer_is_divided_by_minus_one(dtype: torch.dtype) -> None:
    """ONNX Runtime's own division ends the process there."""
    ids = torch.tensor([torch.iinfo(dtype).min, -1, -1], dtype=dtype)
    functions: list[Callable[[Tensor], Tensor]] = [
        *(lambda i: i // i[1:2], lambda i: i // -1, lambda i: i // torch.tensor([-1, 2, 3])),
    ]
    found = runner_of(IDS.to(dtype), *functions)(ids.numpy())
    for mine, function in zip(found, functions, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), function(ids), rtol=0, atol=0)


def test_a_size_that_varies_divides_as_it_did(tmp_path: Path) -> None:
    def function(_: object, x: Tensor) -> tuple[Tensor, ...]:
        height = x.shape[2]
        return (
            x.long() // height,
            torch.div(x.long(), height, rounding_mode="floor"),
            torch.div(x.long(), height, rounding_mode="trunc"),
            torch.arange(height) // (height // 2),
        )

    model = Model(function).eval()
    x = 1000 * torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    export(model, tmp_path / "model.onnx", x, dynamic={"inputs_0": {2: "height"}})
    for height in (5, 8, 17):
        y = 1000 * torch.randn(1, 3, height, 8, generator=torch.Generator().manual_seed(1))
        for found, wanted in zip(run(tmp_path / "model.onnx", y), model(y), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=0)


def test_every_form_is_used_by_one_of_these() -> None:
    functions: list[Any] = [*LOOK_UPS.values(), *ARITHMETIC.values(), *TRUNCATED.values()]
    graph = program_of(Model(lambda m, i: tuple(f(i) for f in functions)), IDS).graph
    used = {node.target for node in calls(graph, [*INDEXED, *DIVISIONS, *PLACES])}
    assert INDEXED.keys() - used <= {aten.scatter.reduce, aten.scatter.value_reduce}  # PyTorch warns of them


def test_other_graphs_and_constant_indices_are_left_alone() -> None:
    plain = program_of(Model(lambda m, i: i + 1), IDS).graph
    assert with_integer_forms(plain, (IDS,)) is plain
    constant = program_of(Model(lambda m, x: x.index_select(0, m.i), i=IDS), W).graph
    assert not any(calls(with_integer_forms(constant, (W,)), [aten.masked_fill.Scalar]))
    floats = program_of(Model(lambda m, x: torch.div(x, 3, rounding_mode="floor")), W).graph
    assert any(calls(with_integer_forms(floats, (W,)), DIVISIONS))


def test_counts_sums_of_floats_and_of_nothing_and_products_of_dynamic_sizes_are_left_alone() -> None:
    graph = program_of(
        Model(
            lambda m, i: (
                *((i > 1).sum(), (i > 1).long().sum(0), (i > 1).sum(dtype=torch.int32)),
                *(i.short().sum(), i.float().sum(), i[:0].sum()),
            )
        ),
        IDS,
    ).graph
    before = [node.target for node in calls(graph, SUMS)]
    assert [node.target for node in calls(with_integer_forms(graph, (IDS,)), SUMS)] == before
    product = program_of(Model(lambda m, i: i.prod()), IDS).graph
    assert not any(calls(with_integer_forms(product, (IDS,)), PRODUCTS))
    assert any(calls(with_integer_forms(product, (IDS,), is_dynamic=True), PRODUCTS))


def test_traces_and_einsums_of_floats_are_left_alone() -> None:
    targets = [aten.trace.default, aten.einsum.default, aten.diagonal.default, aten.pow.Tensor_Scalar]
    function = lambda m, x: (x.trace(), torch.einsum("ii->i", x), x.diagonal(), x**4)  # noqa: E731
    graph = program_of(Model(function), W[:3]).graph
    kept = [node.target for node in calls(with_integer_forms(graph, (W[:3],)), targets)]
    assert kept == [node.target for node in calls(graph, targets)] == targets


def test_a_sum_of_a_dynamic_size_is_exact() -> None:
    graph = program_of(Model(lambda m, i: i.sum(0)), IDS).graph
    model = model_of(graph, (IDS,), OPSETS["onnxruntime"], ["x"], ["y"], ({0: "n"},))
    runner = OnnxRunner(onnx_ir.to_proto(model).SerializeToString(), SessionOptions())
    for count in (1, 2, 5):
        ids = torch.arange(count) + 2**60
        torch.testing.assert_close(torch.from_numpy(runner(ids.numpy())[0]), ids.sum(0), rtol=0, atol=0)


def test_the_graph_that_is_given_stays_as_it_is() -> None:
    graph = program_of(Model(lambda m, i: LOOK_UPS["embedding"](i)), IDS).graph
    before = graph.code
    with_integer_forms(graph, (IDS,))
    assert graph.code == before


def test_classes_take_no_more_than_their_own_list() -> None:
    """A matrix of classes would be 800 MB of 10,000."""
    program = program_of(Model(lambda m, i: F.one_hot(i, 10_000)), IDS)
    formed = with_integer_forms(program.graph, (IDS,))
    assert sum(tensor.nbytes for tensor in formed.buffers()) < 50 * 10_000
    assert torch.equal(formed(IDS)[0], F.one_hot(IDS, 10_000))
