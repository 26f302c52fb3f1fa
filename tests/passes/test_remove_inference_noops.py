"""remove-inference-noops: what changes nothing goes, everything else stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ampopt.ir.graph import aten, calls, copy_of, shape_of
from ampopt.passes import RemoveInferenceNoops
from tests.helpers import Model, check_pass, program_of, targets_of, text_of

Function = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(
    ("dropout", "shape"),
    [
        (nn.Dropout(), (2, 3)),
        (nn.Dropout1d(), (2, 3, 4)),
        (nn.Dropout2d(), (2, 3, 4, 4)),
        (nn.Dropout3d(), (2, 3, 4, 4, 4)),
        (nn.AlphaDropout(), (2, 3)),
        (nn.FeatureAlphaDropout(), (2, 3, 4)),
        (Model(lambda m, x: F.dropout(x, 0.3, training=m.training)), (2, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_every_kind_of_dropout_is_removed(dropout: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Sigmoid(), dropout, nn.ReLU())
    elsewhere = [torch.randn(4, *shape[1:])]
    result = check_pass(RemoveInferenceNoops(), model, torch.randn(shape), rewrites=1, elsewhere=elsewhere)
    assert targets_of(result.program) == [aten.sigmoid.default, aten.relu.default]


def test_a_copy_to_another_device_stays() -> None:
    program = program_of(Model(lambda m, x: x.relu().to("cpu").exp()), torch.randn(2, 3))
    module = copy_of(program.graph)
    (cast,) = calls(module, [aten.to.dtype_layout, aten.to.device])
    cast.kwargs = {**cast.kwargs, "device": torch.device("meta")}
    module.recompile()
    assert RemoveInferenceNoops().apply(program.with_graph(module)).rewrites == 0


def test_a_dropout_that_is_switched_on_stays() -> None:
    program = program_of(nn.Sequential(nn.Dropout(), nn.ReLU()), torch.randn(2, 3))
    module = copy_of(program.graph)
    (dropout,) = calls(module, [aten.dropout.default])
    dropout.args = (*dropout.args[:2], True)
    module.recompile()
    assert RemoveInferenceNoops().apply(program.with_graph(module)).rewrites == 0


@pytest.mark.parametrize(
    "noop",
    [
        pytest.param(lambda x: x.to(torch.float32), id="to"),
        pytest.param(lambda x: x.float(), id="float"),
        pytest.param(lambda x: x.type_as(x.detach()).relu(), id="type_as and detach"),
        pytest.param(lambda x: x.detach(), id="detach"),
        pytest.param(lambda x: x.view(2, 3, 4, 4), id="view"),
        pytest.param(lambda x: x.reshape(2, 3, -1, 4), id="reshape"),
        pytest.param(lambda x: x.flatten(1, 1), id="flatten"),
        pytest.param(lambda x: x.unflatten(1, (3,)), id="unflatten"),
        pytest.param(lambda x: x.expand(2, -1, -1, 4), id="expand"),
        pytest.param(lambda x: x.permute(0, 1, 2, 3), id="permute"),
        pytest.param(lambda x: x.transpose(2, -2), id="transpose"),
        pytest.param(lambda x: x[:, :, 0:4], id="slice of full length"),
        pytest.param(lambda x: x[:, :, :100], id="slice beyond the end"),
        pytest.param(lambda x: x.to("cpu"), id="to the same device"),
        pytest.param(lambda x: x.clone(), id="clone"),
        pytest.param(lambda x: torch.empty_like(x).copy_(x), id="copy"),
    ],
)
def test_a_noop_is_removed(noop: Function) -> None:
    model, x = Model(lambda m, x: noop(x.sigmoid()).relu()), torch.randn(2, 3, 4, 4)
    found = len(targets_of(program_of(model, x))) - len(_without_noops(model, x))
    assert found >= 1
    check_pass(RemoveInferenceNoops(), model, x, rewrites=found)


def _without_noops(model: nn.Module, x: Tensor) -> list[object]:
    """What is left: the functions of these tests begin with a sigmoid and else only apply ReLU."""
    real = {aten.sigmoid.default, aten.relu.default}
    result = RemoveInferenceNoops().apply(program_of(model, x))
    assert set(targets_of(result.program)) == real
    return targets_of(result.program)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda x: x.permute(0, 1, 3, 2), id="permute of equal sizes"),
        pytest.param(lambda x: x.transpose(-1, -2), id="transpose of equal sizes"),
        pytest.param(lambda x: x.mT.clone(memory_format=torch.contiguous_format), id="clone in a format"),
        pytest.param(lambda x: x.to(torch.float64), id="cast to another dtype"),
        pytest.param(lambda x: x.half().float(), id="casts that round"),
        pytest.param(lambda x: x[:, :, 1:], id="shorter slice"),
        pytest.param(lambda x: x[:, :, ::2], id="slice with steps"),
        pytest.param(lambda x: x.reshape(2, 3, 16), id="reshape to another shape"),
        pytest.param(lambda x: x[:, :1].expand(2, 3, 4, 4), id="expand to more"),
        pytest.param(lambda x: x.mT.contiguous(), id="contiguous that copies"),
        pytest.param(lambda x: x.contiguous(memory_format=torch.channels_last), id="another memory format"),
        pytest.param(lambda x: x.flip(2), id="flip"),
        pytest.param(lambda x: x.roll(1, 2), id="roll"),
        pytest.param(lambda x: torch.cat(x.chunk(2, dim=2)), id="several results"),
    ],
)
def test_what_changes_something_stays(other: Function) -> None:
    model = Model(lambda m, x: other(x.sigmoid()).relu())
    check_pass(RemoveInferenceNoops(), model, torch.randn(2, 3, 4, 4), rewrites=0)


@pytest.mark.parametrize(
    ("function", "rewrites"),
    [
        (lambda x: torch.view_as_real(x.conj().to(torch.complex64, copy=True)) + 1, 0),
        (lambda x: torch.view_as_real(x.conj().clone().clone()) + 1, 1),
    ],
    ids=["once", "twice"],
)
def test_a_copy_that_puts_conjugates_into_memory_stays(function: Function, rewrites: int) -> None:
    """What reads memory as other numbers refuses a tensor that only says that it is a conjugate."""
    model, x = Model(lambda m, x: function(torch.fft.rfft(x))), torch.randn(2, 8)
    result = RemoveInferenceNoops().apply(program_of(model, x))
    assert result.rewrites == rewrites
    assert torch.equal(result.program.run(x)[0], model(x))


def test_the_graph_reads_as_if_the_noops_had_not_been_written() -> None:
    model = Model(lambda m, x: F.dropout(m.linear(x.detach()), training=False)[:, :5], linear=nn.Linear(4, 5))
    result = check_pass(RemoveInferenceNoops(), model, torch.randn(2, 4), rewrites=3)
    assert text_of(result.program) == "linear = aten.linear.default(inputs_0, p_linear_weight, p_linear_bias)"


def test_a_slice_is_removed_only_where_the_captured_size_makes_it_whole() -> None:
    model = Model(lambda m, x: x[..., :8].relu())
    narrow, wide = torch.randn(2, 8), torch.randn(2, 12)
    check_pass(RemoveInferenceNoops(), model, narrow, rewrites=1, elsewhere=[wide], rewrites_elsewhere=0)


def test_dead_code_is_removed_and_counted() -> None:
    program = program_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3))
    module = copy_of(program.graph)
    with module.graph.inserting_before(module.graph.output_node()):
        dead = module.graph.call_function(aten.exp.default, (next(calls(module)),))
        module.graph.call_function(aten.log.default, (dead,))
    module.recompile()
    result = RemoveInferenceNoops().apply(program.with_graph(module))
    assert result.rewrites == 2
    assert text_of(result.program) == text_of(program)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda m, x: x.to(torch.float32, copy=True), id="copy of an input"),
        pytest.param(lambda m, x: (x + 1, torch.tensor([1.0, 2.0])), id="constant"),
    ],
)
def test_an_output_stays_the_callers_own(function: Callable[..., object]) -> None:
    model, x = Model(function), torch.randn(2, 3)
    program = RemoveInferenceNoops().apply(program_of(model, x)).program
    mine = x.clone()
    expected = [t.clone() for t in program.run(mine)]
    for output in program.run(mine):
        output.zero_()
    assert torch.equal(mine, x)
    assert all(torch.equal(a, b) for a, b in zip(program.run(x), expected, strict=True))


def test_results_that_the_model_keeps_apart_stay_apart() -> None:
    def function(m: object, x: Tensor) -> list[Tensor]:
        y = x + 1
        z = y.to(torch.float32, copy=True)
        return [y, z, z.to(torch.float32, copy=True)]

    model, x = Model(function), torch.randn(2, 3)
    outputs = RemoveInferenceNoops().apply(program_of(model, x)).program.run(x)
    assert len({output.data_ptr() for output in outputs}) == 3


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda y, z: (y, z.view(3, 2)), id="view of the copy"),
        pytest.param(lambda y, z: (y.view(3, 2), z), id="view of what is copied"),
        pytest.param(lambda y, z: (y.view(3, 2), z.t()), id="views of both"),
        pytest.param(lambda y, z: (y[0], z[1]), id="parts"),
        pytest.param(lambda y, z: (y.chunk(2)[1], z.to(torch.float32, copy=True)), id="copy of the copy"),
    ],
)
def test_views_of_what_the_model_keeps_apart_stay_apart(
    function: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    model, x = Model(lambda m, x: function(y := x + 1, y.to(torch.float32, copy=True))), torch.randn(2, 3)
    first, second = RemoveInferenceNoops().apply(program_of(model, x)).program.run(x)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda y, z: (y.exp(), z.t()), id="one is returned"),
        pytest.param(lambda y, z: (y, z.exp()), id="the other is returned"),
        pytest.param(lambda y, z: y.exp() + z, id="neither is returned"),
    ],
)
def test_a_copy_that_keeps_nothing_apart_is_removed(function: Callable[..., object]) -> None:
    model = Model(lambda m, x: function(y := x + 1, y.to(torch.float32, copy=True)))
    check_pass(RemoveInferenceNoops(), model, torch.randn(2, 3), rewrites=1)


def _looks_alike(node: fx.Node, source: fx.Node) -> bool:
    """A no-op by its shape alone: wrong for permutes of equal sizes."""
    return node.target is aten.permute.default and shape_of(node) == shape_of(source)


def test_the_check_catches_a_permute_taken_for_a_noop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.passes.remove_inference_noops._is_noop", _looks_alike)
    model = Model(lambda m, x: x.sigmoid().permute(0, 2, 1).relu())
    with pytest.raises(AssertionError, match="bits of an output changed"):
        check_pass(RemoveInferenceNoops(), model, torch.randn(2, 3, 3), rewrites=1)
