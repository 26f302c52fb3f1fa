"""What the exporter decomposes without a trace is what a trace makes of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx_ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from ampopt.engines import onnx_decompositions
from ampopt.engines.onnx_decompositions import decomposed_by_node
from ampopt.engines.onnx_graph import to_onnx
from tests.helpers import Model, program_of, with_statistics

X = torch.randn(2, 6, 8, 10, generator=torch.Generator().manual_seed(0))

SIMPLE: dict[str, Callable[[Any, Tensor], Any]] = {
    "a norm": lambda m, x: m.norm(x).relu(),
    "a norm that is a result": lambda m, x: (m.norm(x), m.norm(x + 1)),
    "a view": lambda m, x: (x.flatten(1) + 1, x.reshape(2, 3, -1), x.unflatten(1, (2, -1))),
    "another order of memory": lambda m, x: x.permute(0, 2, 3, 1).flatten(1, 2).reshape(6, -1).neg(),
    "a copy of rows": lambda m, x: x.transpose(1, 3).contiguous().view(2, -1) * x.contiguous().view(2, -1),
    "a dropout": lambda m, x: (F.dropout(x, 0.5, False), F.dropout2d(x + 1, 0.5, False).flatten(1)),
    "swapped": lambda m, x: x.swapaxes(1, -1).swapdims(0, 2) - 1,
    "chunks": lambda m, x: [y + i for i, y in enumerate((*x.chunk(3, 1), *x.chunk(4, -1), *x.chunk(5, 3)))],
    "chunks of one": lambda m, x: [y.exp() for y in x.chunk(20, 1)],
    "dtypes": lambda m, x: (
        x.to(torch.float16).to(torch.float32),
        x.to(torch.float32) + 1,
        x.to(torch.int64),
    ),
    "expanded": lambda m, x: x[:, :1].expand_as(x) * x,
    "a constant": lambda m, x: x * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1),
    "resized": lambda m, x: (
        F.interpolate(x, scale_factor=2.0),
        F.interpolate(x, size=(5, 7), mode="bilinear"),
    ),
    "an input": lambda m, x: (x.flatten(), x, x.contiguous()),
    "poolings of equal windows": lambda m, x: (
        F.adaptive_avg_pool2d(x, (4, 5)),
        F.adaptive_avg_pool2d(x[0], 2) * 2,
    ),
    "a pooling of single pixels": lambda m, x: F.adaptive_avg_pool2d(x, (8, 10)) + 1,
    "normalized": lambda m, x: F.normalize(x, dim=1),
}

TRACED: dict[str, Callable[[Any, Tensor], Any]] = {
    "a norm without weights": lambda m, x: m.plain(x),
    "a pooling of other windows": lambda m, x: F.adaptive_avg_pool2d(x, (3, 5)),
    "an operator without a form in ONNX": lambda m, x: torch.outer(x[0, 0, 0], x[0, 0, 1]),
    "chunks of nothing": lambda m, x: torch.cat([*x[:, :0].chunk(3, 1), x], 1),
    "another memory format": lambda m, x: x.contiguous(memory_format=torch.channels_last) + 1,
}


def built(function: Callable[[Any, Tensor], Any]) -> nn.Module:
    norm, plain = nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False)
    return with_statistics(Model(function, norm=norm, plain=plain).eval())


def onnx_of(model: nn.Module) -> Any:
    program = program_of(model, X)
    names = [f"y{place}" for place in range(len(program.exit))]
    return to_onnx(program, io=None, target="onnxruntime", input_names=["x"], output_names=names, dims=({},))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """The programs that are traced anew."""
    found, before = list[ExportedProgram](), ExportedProgram.run_decompositions

    def noted(program: ExportedProgram, *args: Any, **options: Any) -> Any:
        if args and args[0]:
            found.append(program)
        return before(program, *args, **options)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", noted)
    return found


@pytest.mark.parametrize("name", SIMPLE)
def test_a_simple_graph_is_not_traced_and_its_file_is_the_same(
    name: str, traces: list[ExportedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(SIMPLE[name])
    by_node = onnx_of(model)
    assert traces == []
    monkeypatch.setattr(onnx_decompositions, "_decompose", lambda *_: False)
    by_trace = onnx_of(model)
    assert len(traces) == 1
    assert operators(by_node) == operators(by_trace)
    expected = model(X)
    for found in (by_node, by_trace):
        session = onnxruntime.InferenceSession(onnx_ir.to_proto(found).SerializeToString())
        results = session.run(None, {"x": X.numpy()})
        wanted = [expected] if isinstance(expected, Tensor) else expected
        for one, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(torch.from_numpy(one), other.detach())


def operators(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


@pytest.mark.parametrize("name", TRACED)
def test_another_graph_is_traced(name: str, traces: list[ExportedProgram]) -> None:
    onnx_of(built(TRACED[name]))
    assert len(traces) == 1


def test_a_graph_of_varying_sizes_is_traced(traces: list[ExportedProgram]) -> None:
    sizes = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(nn.Flatten(), (X,), dynamic_shapes=(sizes,))
    with decomposed_by_node(exported):
        assert exported.run_decompositions(torch.export.default_decompositions()) is not exported
    assert len(traces) == 1


def test_programs_of_others_are_not_touched() -> None:
    mine, yours = (torch.export.export(nn.Flatten(), (X,)) for _ in range(2))
    before = str(yours.graph)
    with decomposed_by_node(mine):
        assert yours.run_decompositions({}) is not yours
        assert mine.run_decompositions({}) is mine
    assert str(yours.graph) == before
    assert "aten.view.default" in str(mine.graph)


def test_nothing_of_it_stays_behind() -> None:
    before, inside = ExportedProgram.run_decompositions, None
    exported = torch.export.export(nn.Flatten(), (X,))
    with contextlib.suppress(KeyError), decomposed_by_node(exported):
        inside = ExportedProgram.run_decompositions
        raise KeyError
    assert ExportedProgram.run_decompositions is before
    assert inside not in (None, before)
