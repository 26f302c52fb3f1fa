"""The operators that a file may name compute tensors from tensors, and the list says why others do not."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from ampopt.ir.operator_list import find_operator, why_not_call, why_not_operator

aten = torch.ops.aten


@pytest.mark.parametrize(
    "found",
    [
        *(aten.conv2d.default, aten.linear.default, aten.batch_norm.default, aten._to_copy.default),
        *(aten.add.Tensor, aten.__and__.Tensor, aten.index.Tensor, aten.max_unpool2d.default),
        *(aten.scaled_dot_product_attention.default, aten.lstm.input, aten.upsample_bilinear2d.vec),
        *(aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact2d.vec),
        *(aten._conj.default, aten._neg_view.default, aten.view_as_real.default),
        *(aten.dropout.default, aten.fake_quantize_per_tensor_affine.default, aten.fft_rfft2.default),
    ],
    ids=str,
)
def test_what_networks_compute_with_is_found_under_its_name_and_allowed(found: object) -> None:
    assert find_operator(str(found)) is found
    assert why_not_operator(found) is None


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (aten.relu_.default, "changes its argument"),
        (aten.add.out, "changes its argument"),
        (aten.item.default, "not a tensor"),
        (aten.equal.default, "not a tensor"),
        (aten._local_scalar_dense.default, "not a tensor"),
        (aten.sym_size.int, "not a tensor"),
        (aten._assert_async.default, "not a tensor"),
        (aten.randn_like.default, "random"),
        (aten.multinomial.default, "random"),
        (aten.from_file.default, "files"),
        (aten.empty.memory_format, "nothing has written"),
        (aten.new_empty_strided.default, "nothing has written"),
        (aten.cudnn_convolution_relu.default, "one machine"),
        (aten.mkldnn_linear.default, "one machine"),
        (aten.to_sparse.default, "plain arrays"),
        (aten.quantize_per_tensor.default, "quantized"),
        (aten.linalg_lu_solve.default, "indices"),
        (aten._embedding_bag.default, "indices"),
        (aten.convolution_backward.default, "training"),
        (aten._foreach_add.Scalar, "PyTorch's own use"),
        (aten.save.default, "no operator of ATen"),
        (torch.ops.prims.add.default, "no operator of ATen"),
        (torch.relu, "no operator of ATen"),
        (operator.getitem, "no operator of ATen"),
        (None, "no operator of ATen"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_everything_else_is_refused_with_its_reason(refused: object, reason: str) -> None:
    assert reason in str(why_not_operator(refused))


def test_no_allowed_operator_takes_or_gives_anything_but_tensors_and_plain_values() -> None:
    names = [name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()]
    found = [find_operator(name if name.count(".") > 1 else f"{name}.default") for name in names]
    allowed = [overload for overload in found if overload is not None and why_not_operator(overload) is None]
    assert 500 < len(allowed) < 1000
    plain = {"Tensor", "int", "bool", "float", "number", "str", "Device"}
    for overload in allowed:
        assert not overload._schema.is_mutable, overload
        assert all(str(r.type) in ("Tensor", "List[Tensor]") for r in overload._schema.returns), overload
        for argument in overload._schema.arguments:
            kind = str(argument.type).replace("Optional[", "").replace("List[", "").rstrip("]")
            assert kind in plain or (kind == "Generator" and argument.has_default_value()), (overload, kind)


def test_names_that_the_registry_does_not_list_are_not_looked_up() -> None:
    for name in ("aten.relu", "aten::relu", "aten.__class__.default", "aten.relu.__call__", "os.system", ""):
        assert find_operator(name) is None


def _call(overload: object, *args: object) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(overload, (x, *args))  # type: ignore[arg-type]


def test_calls_that_draw_random_numbers_are_told_from_those_that_do_not() -> None:
    assert why_not_call(_call(aten.dropout.default, 0.5, False)) is None
    assert "random" in str(why_not_call(_call(aten.dropout.default, 0.5, True)))
    graph = fx.Graph()
    x = graph.placeholder("x")
    attention = aten.scaled_dot_product_attention.default
    assert why_not_call(graph.call_function(attention, (x, x, x))) is None
    assert "random" in str(why_not_call(graph.call_function(attention, (x, x, x, None, 0.1))))


def test_norms_that_change_their_statistics_are_told_from_those_that_do_not() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for mean, training, allowed in ((x, False, True), (x, True, False), (None, True, True)):
        call = (x, x, x, mean, mean, training, 0.1, 1e-5, True)
        assert (why_not_call(graph.call_function(aten.batch_norm.default, call)) is None) is allowed
