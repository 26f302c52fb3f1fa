"""Operators in ONNX files, in ONNX Runtime, against float64 far outside the usual range, and with NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.engines.onnx_graph import OPSETS, model_of
from ampopt.ir import (
    adaptive_forms,
    deciding_forms,
    loss_forms,
    matrix_forms,
    order_forms,
    part_forms,
    plain_forms,
    pooling_forms,
    recurrent_forms,
    reduction_forms,
    resize_forms,
    scatter_forms,
    similarity_forms,
    spread_forms,
)
from ampopt.ir.graph import aten, calls
from ampopt.ir.stable_forms import FORMS, with_stable_forms
from ampopt.ort.session import OnnxRunner, SessionOptions
from tests.helpers import Model, program_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

_ENDS = [1e-20, 1e-4, 1e-3, 0.02, 0.04, 0.5, 0.99, 1.0, 3.0, 10.0, 17.0, 20.5, 30.0, 50.0, 89.0, 1e2, 1e4]
POINTS = torch.tensor([0.0, *_ENDS, *(-e for e in _ENDS)])
SPOILT = torch.tensor([float("nan"), float("inf"), -float("inf")])


def _sampled(v: Tensor, mode: str, padding: str) -> Tensor:
    """A row for each number: pixels at this place of an image."""
    grid = torch.stack([v * 1e-2, v * 2e-2], -1).view(-1, 1, 1, 2)
    image = torch.arange(25, dtype=v.dtype).view(1, 1, 5, 5).expand(len(v), 1, 5, 5)
    return F.grid_sample(image, grid, mode, padding, align_corners=False)


def _attended(v: Tensor, *, as_numbers: bool) -> Tensor:
    """A row for each number, which attends to all smaller ones: the smallest to none, and NaN to all."""
    query = torch.stack([v.tanh(), 1 - v.tanh()], -1)[None, None]
    key = torch.linspace(-1, 1, 2 * len(v), dtype=v.dtype).view(1, 1, -1, 2)
    mask = ~(v[:, None] <= v.nan_to_num())
    bias = torch.zeros(mask.shape, dtype=v.dtype).masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(query, key, key, bias if as_numbers else mask)[0, 0]


def _rows_of_many(v: Tensor) -> Tensor:
    """For each number two channels of 18x18 times it, whose first columns are larger."""
    columns = torch.tensor([1.5] * 6 + [0.5] * 12, dtype=v.dtype)
    return v.view(-1, 1, 1, 1) * columns.expand(1, 2, 18, 18)


def _after_nothing(v: Tensor) -> Tensor:
    """For each number a row that begins with -inf, as under a mask, and goes on far below 0."""
    return torch.stack([torch.full_like(v, -torch.inf), v - 120, v - 121], -1)


def _whole(v: Tensor) -> Tensor:
    return v.nan_to_num().clamp(-99, 99).long()


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention with a mask": lambda v: _attended(v, as_numbers=False),
    "attention with a mask of numbers": lambda v: _attended(v, as_numbers=True),
    "logsigmoid": F.logsigmoid,
    "log of sigmoid": lambda v: torch.log(torch.sigmoid(v)),
    "logaddexp": lambda v: torch.logaddexp(v, v.flip(-1)),
    "logaddexp of equals": lambda v: torch.logaddexp(v, v),
    "logaddexp2": lambda v: torch.logaddexp2(v, v.flip(-1)),
    "logaddexp of nothing": lambda v: torch.logaddexp(v, v * 0 - torch.inf),
    "expm1": torch.expm1,
    "log1p": lambda v: torch.log1p(v.clamp_min(-0.99)),
    "special.expm1": torch.special.expm1,
    "special.log1p": lambda v: torch.special.log1p(v.clamp_min(-0.99)),
    "log_ndtr": torch.special.log_ndtr,
    "log_ndtr of large numbers": lambda v: torch.special.log_ndtr(v * 1e9),
    "hypot": lambda v: torch.hypot(v, v.flip(-1)),
    "hypot of nothing": lambda v: torch.hypot(v * 0, v * 0),
    "hypot of huge": lambda v: torch.hypot(v * 1e30, v * 1e30),
    "length of a large complex number": lambda v: torch.complex(v * 1e30, v.flip(-1) * 1e30).abs(),
    "length of a small complex number": lambda v: torch.complex(v * 1e-25, v.flip(-1) * 1e-25).abs() * 1e25,
    "atan2": lambda v: torch.atan2(v.flip(-1) + 0.25, v + 0.125),
    "logit": lambda v: torch.logit(torch.sigmoid(v * 0.01), eps=1e-6),
    "bounded below": lambda v: v.clamp_min(-3),
    "bounded above": lambda v: v.clamp_max(3),
    "clamped below": lambda v: v.clamp(min=-3),
    "clamped by an integer and a fraction": lambda v: v.clamp(-3, 1.5),
    "clamped by a fraction and an integer": lambda v: v.clamp(-1.5, 3),
    "clamped to the other bound": lambda v: v.clamp(3, 1.5),
    "integers clamped to fractions": lambda v: _whole(v).clamp(-3, 1.5).to(v.dtype),
    "integers clamped below a fraction": lambda v: _whole(v).clamp(max=1.5).to(v.dtype),
    "softplus": F.softplus,
    "softplus, beta and threshold": lambda v: F.softplus(v, beta=2.0, threshold=10.0),
    "mish": F.mish,
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "sinh": torch.sinh,
    "logsumexp": lambda v: torch.stack([v, -v], -1).logsumexp(-1),
    "logsumexp of nothing and little": lambda v: _after_nothing(v).logsumexp(-1),
    "special.logsumexp": lambda v: torch.special.logsumexp(_after_nothing(v), (-1,), keepdim=True),
    "xlogy": lambda v: torch.xlogy(v, v.flip(-1).abs()),
    "xlogy of a number": lambda v: torch.xlogy(2, v.abs()),
    "xlogy of nothing": lambda v: torch.xlogy(0.0, v.abs()),
    "xlogy with a number": lambda v: torch.xlogy(v, 3),
    "special.xlogy": lambda v: torch.special.xlogy(v, v.abs()),
    "special.xlogy of a number": lambda v: torch.special.xlogy(2, v.abs()),
    "special.xlogy with a number": lambda v: torch.special.xlogy(v, 3),
    "xlog1py": lambda v: torch.special.xlog1py(v * 1e4, v.abs() * 1e-8),
    "xlog1py of a number": lambda v: torch.special.xlog1py(1e4, v.abs() * 1e-8),
    "xlog1py with a number": lambda v: torch.special.xlog1py(v, 1e-6),
    "signbit": lambda v: torch.signbit(torch.stack([v, v.nan_to_num(0, 1, -1) * 0], -1)).to(v.dtype),
    "heaviside": lambda v: torch.heaviside(v, torch.full_like(v, 0.25)),
    "angle": torch.angle,
    "angle of a complex number": lambda v: torch.angle(torch.complex(v, v.flip(-1) + 0.25)),
    "log_softmax": lambda v: torch.stack([v, -v], -1).log_softmax(-1),
    "softmin": lambda v: F.softmin(torch.stack([v, v + 1], -1), -1),
    "normalize": lambda v: F.normalize(torch.stack([v, v + 1], -1), dim=-1),
    "softsign": F.softsign,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "mean of many": lambda v: v.view(-1, 1, 1, 1).expand(-1, 1, 20, 20).mean((2, 3)),
    "mean of pixels": lambda v: F.adaptive_avg_pool2d(torch.stack([v, v + 1], -1).view(-1, 1, 1, 2), 1),
    "gelu": lambda v: F.gelu(v.clamp_min(-3)),
    "group norm of many": lambda v: F.group_norm(_rows_of_many(v), 1),
    "instance norm of many": lambda v: F.instance_norm(_rows_of_many(v)),
    "samples": lambda v: _sampled(v, "bilinear", "zeros"),
    "bicubic samples with padding": lambda v: _sampled(v, "bicubic", "border"),
    "nearest samples": lambda v: _sampled(v, "nearest", "zeros"),
}
"""Those that have a form of their own, and others of which the usual form has been found right."""


@pytest.fixture(scope="module")
def all_of_them() -> torch.fx.GraphModule:
    """A graph of all of these, of all points, ordinary ones first."""
    x = torch.cat([POINTS, SPOILT])
    return program_of(Model(lambda m, v: tuple(f(v) for f in OPERATORS.values())), x).graph


@pytest.fixture(scope="module")
def results(all_of_them: torch.fx.GraphModule) -> dict[str, Tensor]:
    """What one ONNX file of all of these gives in ONNX Runtime."""
    x, graph = torch.cat([POINTS, SPOILT]), all_of_them
    names = [f"y{index}" for index in range(len(OPERATORS))]
    runner = OnnxRunner(_bytes(graph, x, names), SessionOptions())
    return dict(zip(OPERATORS, map(torch.from_numpy, runner(x.numpy())), strict=True))


def _bytes(graph: torch.fx.GraphModule, x: Tensor, names: list[str]) -> bytes:
    import onnx_ir

    model = model_of(graph, (x,), OPSETS["onnxruntime"], ["x"], names, ({},))
    data: bytes = onnx_ir.to_proto(model).SerializeToString()
    return data


@pytest.mark.parametrize("name", OPERATORS)
def test_what_eager_gets_right_the_file_gets_right(name: str, results: dict[str, Tensor]) -> None:
    x = torch.cat([POINTS, SPOILT])
    exact, eager, got = OPERATORS[name](x.double()), OPERATORS[name](x), results[name]
    close = torch.isclose(eager.double(), exact, rtol=1e-4, atol=1e-16) & torch.isfinite(eager)
    right = torch.isclose(got.double(), exact, rtol=1e-4, atol=1e-16)
    wrong = (close & ~right).reshape(len(x), -1).any(-1)
    assert not wrong.any(), f"at {x[wrong].tolist()}: {got[wrong].tolist()} for {eager[wrong].tolist()}"


@pytest.mark.parametrize("name", OPERATORS)
def test_what_eager_leaves_spoilt_the_file_leaves_spoilt(name: str, results: dict[str, Tensor]) -> None:
    x = torch.cat([POINTS, SPOILT])
    spoilt = ~torch.isfinite(x + x.flip(-1))
    lost = (~torch.isfinite(OPERATORS[name](x)) & torch.isfinite(results[name])).reshape(len(x), -1).any(-1)
    lost &= spoilt
    assert not lost.any(), f"numbers at {x[lost].tolist()}"


def test_every_form_is_used_by_one_of_these(all_of_them: torch.fx.GraphModule) -> None:
    other = deciding_forms.FORMS.keys() | resize_forms.FORMS.keys() | pooling_forms.FORMS.keys()
    other |= reduction_forms.FORMS.keys() | loss_forms.FORMS.keys() | spread_forms.FORMS.keys()
    other |= similarity_forms.FORMS.keys() | recurrent_forms.FORMS.keys() | matrix_forms.FORMS.keys()
    other |= order_forms.FORMS.keys() | plain_forms.FORMS.keys() | part_forms.FORMS.keys()
    other |= scatter_forms.FORMS.keys() | adaptive_forms.FORMS.keys()
    other |= {aten.copysign.Tensor, aten.copysign.Scalar, aten.fmax.default, aten.fmin.default}  # of borders
    other |= {aten.mean.default, aten.softmax.int, aten.log_softmax.int}  # of integers, see `integer_forms`
    assert {node.target for node in calls(all_of_them, FORMS)} - other == FORMS.keys() - other


def test_other_graphs_are_left_alone() -> None:
    graph = program_of(Model(lambda m, v: torch.log(v.abs() + 1)), POINTS).graph
    changed = with_stable_forms(graph, (POINTS,))
    assert changed.code == graph.code
    plain = program_of(Model(lambda m, v: v.sin()), POINTS).graph
    assert with_stable_forms(plain, (POINTS,)) is plain


def test_attention_with_a_constant_mask_stays() -> None:
    x = torch.randn(1, 1, 3, 4)
    model = Model(lambda m, x: F.scaled_dot_product_attention(x, x, x, m.mask), mask=torch.eye(3).bool())
    graph = program_of(model, x).graph
    assert with_stable_forms(graph, (x,)).code == graph.code


def test_the_graph_that_is_given_stays_as_it_is() -> None:
    graph = program_of(Model(lambda m, v: F.logsigmoid(v)), POINTS).graph
    changed = with_stable_forms(graph, (POINTS,))
    assert any(calls(graph, [aten.log_sigmoid.default]))
    assert not any(calls(changed, [aten.log_sigmoid.default]))


@pytest.mark.parametrize(("size", "left"), [(1, 0), ((1, 1), 0), ((1, 2), 1), (2, 1)])
def test_pooling_to_one_pixel_is_a_mean_and_any_other_stays(size: int | tuple[int, int], left: int) -> None:
    x = torch.randn(2, 8, 4, 6).to(memory_format=torch.channels_last)
    graph = program_of(Model(lambda m, v: F.adaptive_avg_pool2d(v, size)), x).graph
    changed = with_stable_forms(graph, (x,))
    assert len(list(calls(changed, [aten.adaptive_avg_pool2d.default]))) == left
    (found,), (expected,) = changed(x), graph(x)
    assert torch.equal(found, expected)
    assert left or not any(node.op_type == "Gather" for node in _nodes(_bytes(graph, x, ["y"])))


def _nodes(model: bytes) -> list[Any]:
    import onnx

    return list(onnx.load_from_string(model).graph.node)


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("way", ["mean", "pooling"])
def test_the_mean_of_many_equal_pixels_is_as_exact_as_pytorchs(way: str, keepdim: bool) -> None:
    """A sum of 12,544 equal numbers, one after another, is off by up to 7e-4."""

    def mean(m: Any, v: Tensor) -> Tensor:
        if way == "mean":
            return v.mean((2, 3), keepdim=keepdim)
        pooled = F.adaptive_avg_pool2d(v, 1)
        return pooled if keepdim else pooled.flatten(1)

    values = torch.linspace(0.1, 3, 64)
    x = values.view(1, 64, 1, 1).expand(1, 64, 112, 112).contiguous()
    graph = program_of(Model(mean), x).graph
    (found,) = OnnxRunner(_bytes(graph, x, ["y"]), SessionOptions())(x.numpy())
    expected = mean(None, x)
    assert found.shape == expected.shape
    assert (torch.from_numpy(found).flatten() / values - 1).abs().max() < 2e-5
    few = program_of(Model(mean), x[..., :16, :16]).graph
    assert sum(node.op_type == "ReduceMean" for node in _nodes(_bytes(few, x[..., :16, :16], ["y"]))) == 1


@pytest.mark.parametrize("way", ["one group", "two groups", "each channel", "row"])
def test_a_norm_of_many_nearly_equal_pixels_is_as_exact_as_pytorchs(way: str) -> None:
    """What rounding has made of their mean is divided by their small deviation: 9e-5 in an EfficientNet."""

    def norm(m: Any, v: Tensor) -> Tensor:
        if way == "each channel":
            return F.instance_norm(v, weight=v.new_tensor([1.0, 2, 3, 4]), bias=v.new_tensor([0.0, 1, 2, 3]))
        if way == "row":
            return F.instance_norm(v.flatten(2))
        return F.group_norm(v, 2 if way == "two groups" else 1, v.new_tensor([1.0, 2, 3, 4]))

    x = torch.linspace(0.1, 3, 4).view(1, 4, 1, 1).repeat(1, 1, 112, 112)
    x[..., 0] *= 1.01
    exact = norm(None, x.double())
    graph = program_of(Model(norm), x).graph
    (found,) = OnnxRunner(_bytes(graph, x, ["y"]), SessionOptions())(x.numpy())
    assert found.shape == exact.shape
    assert float((torch.from_numpy(found).double() - exact).norm() / exact.norm()) < 5e-6


def test_norms_of_few_and_of_another_precision_stay() -> None:
    model = Model(lambda m, v: (F.group_norm(v, 2), F.instance_norm(v)))
    for x in (torch.randn(1, 4, 8, 8), torch.randn(1, 4, 40, 40, dtype=torch.float16)):
        graph = program_of(model, x).graph
        assert with_stable_forms(graph, (x,)).code == graph.code


def test_a_norm_takes_batches_of_any_size() -> None:
    x = torch.randn(2, 4, 40, 40)
    graph = program_of(Model(lambda m, v: F.group_norm(v, 2)), x).graph
    changed = with_stable_forms(graph, (x,))
    other = torch.randn(3, 4, 36, 44)
    (found,), (expected,) = changed(other), graph(other)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
