"""Rules of the exporter are exact: a small number in a sum is a number, and keeps divisions by 0 finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.engines.onnx_graph import to_onnx
from ampopt.engines.onnx_rules import exact_rules, tried_where_they_begin
from tests.helpers import Model, program_of
from tests.support.exporting import export, run

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))

EPS = torch.tensor(1e-9)

MODELS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a sum": lambda m, x: x / (x.relu().sum(1, keepdim=True) + 1e-8),
    "a norm": lambda m, x: x / (x.norm(dim=1, keepdim=True) + 1e-12),
    "a mean of squares": lambda m, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-10),
    "rms_norm": lambda m, x: F.rms_norm(x, (6,), eps=1e-9),
    "a logarithm": lambda m, x: (x.abs() + 1e-9).log(),
    "a difference": lambda m, x: (x.abs() - 1e-9).abs().log(),
    "a buffer": lambda m, x: x / (x.abs() + m.eps),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_small_number_is_added(name: str, tmp_path: Path) -> None:
    model = Model(MODELS[name], eps=EPS).eval()
    export(model, tmp_path / "model.onnx", X)
    for x in (X, torch.zeros_like(X)):
        found, wanted = torch.from_numpy(run(tmp_path / "model.onnx", x)[0]), model(x)
        assert bool(wanted.isfinite().all())
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_factor_near_1_multiplies(tmp_path: Path) -> None:
    model = Model(lambda m, x: (x * 1.000009 - x) * 1e5).eval()
    export(model, tmp_path / "model.onnx", X)
    (found,) = run(tmp_path / "model.onnx", X)
    assert torch.allclose(torch.from_numpy(found), model(X))


def test_what_does_nothing_is_left_out(tmp_path: Path) -> None:
    export(Model(lambda m, x: ((x + 0.0) * 1.0).relu()).eval(), tmp_path / "model.onnx", X)
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node] == ["Relu"]


BOUNDS: dict[str, Callable[[Any, Tensor], tuple[Tensor, ...]]] = {
    "integers": lambda m, x: tuple(x.int().clamp(-low, high) for low, high in ((5, 5), (0, 7), (1, 2))),
    "a ReLU of each": lambda m, x: (x.clamp(-1, 3).relu(), x.clamp(-2, 1).relu(), F.relu6(x)),
    "one after another": lambda m, x: (x.clamp(-1, 3).clamp(0, 2), x.clamp(-5, 5).clamp(-3, 1)),
    "by tensors": lambda m, x: (x.minimum(m.eps).maximum(-m.eps), x.minimum(m.eps * 3).maximum(-m.eps * 2)),
    "beside one of that name": lambda m, x: (
        (x * m.x_min).clamp(-1, 3).relu(),
        x.clamp(-2, 1).relu() + m.x_min,
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_several_bounds_of_one_value_are_apart(name: str, tmp_path: Path) -> None:
    model = Model(BOUNDS[name], eps=torch.tensor(0.7), x_min=torch.tensor([0.3])).eval()
    export(model, tmp_path / "model.onnx", 3 * X)
    for found, wanted in zip(run(tmp_path / "model.onnx", 3 * X), model(3 * X), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), wanted)


def test_the_rules_are_as_they_were_after_it() -> None:
    from onnxscript.rewriter.rules.common import _no_op

    def tolerances() -> list[float]:
        nodes = (node for rule in _no_op.rules for node in rule._target_pattern._nodes)
        return [each._abs_tol for node in nodes for each in node.inputs if hasattr(each, "_abs_tol")]

    before = tolerances()
    assert max(before) > 0
    with exact_rules():
        assert set(tolerances()) == {0.0}
    assert tolerances() == before


MANY: dict[str, Callable[[Any, Tensor], Any]] = {
    "two halves": lambda m, x: (x[:, :2], x[:, 2:]),
    "one after another": lambda m, x: x.clamp(-1, 3).relu().clamp(max=2.0),
    "reshaped twice": lambda m, x: x.reshape(2, -1).reshape(2, 4, -1).transpose(1, 2).transpose(0, 1),
    "of nothing": lambda m, x: (x + 0.0) * 1.0 / 1.0 - 0.0,
    "a convolution": lambda m, x: m.conv(F.pad(x, (1, 1, 1, 1))),
    "expanded": lambda m, x: x * x.new_zeros(1).expand(6) + x[:, None].squeeze(1),
}


def test_a_rule_is_tried_where_its_pattern_begins_and_makes_what_it_makes_if_tried_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from onnxscript.rewriter import _matcher

    tried, match = list[tuple[Any, Any]](), _matcher.SimplePatternMatcher.match

    def noted(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        tried.append((self.pattern.output_nodes[0].op_identifier(), node.op_identifier()))
        return match(self, model, graph, node, **options)

    monkeypatch.setattr(_matcher.SimplePatternMatcher, "match", noted)
    conv = torch.nn.Conv2d(4, 4, 3, bias=False)
    model = Model(lambda m, x: [function(m, x) for function in MANY.values()], conv=conv)
    program = program_of(model, X)
    names = [f"y{place}" for place in range(len(program.exit))]
    graphs, counts = [], []
    for block in (tried_where_they_begin, contextlib.nullcontext):
        monkeypatch.setattr("ampopt.engines.onnx_graph.tried_where_they_begin", block)
        tried.clear()
        made = to_onnx(
            program, io=None, target="onnxruntime", input_names=["x"], output_names=names, dims=({},)
        )
        graphs.append(onnx_ir.to_proto(made).graph)
        counts.append([begins in (None, operator) for begins, operator in tried])
    assert graphs[0] == graphs[1]
    assert sum(counts[0]) == sum(counts[1]) > 0
    assert all(counts[0])
    assert not all(counts[1])
