"""Converts a portable program to an ONNX model in memory: standard operators, the user's names, no paths."""

from __future__ import annotations

import re
import textwrap
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ampopt.engines.onnx_decompositions import decomposed_by_node
from ampopt.engines.onnx_names import move_weights_apart
from ampopt.engines.onnx_pool_sizes import round_sizes_down
from ampopt.engines.onnx_registry import registry_kept
from ampopt.engines.onnx_rules import (
    constants_apart,
    exact_rules,
    last_match_freed,
    tried_where_they_begin,
)
from ampopt.engines.onnx_stacks import without_stacks
from ampopt.errors import ExportError, InputError
from ampopt.ir.adaptive_forms import TO_SIZES
from ampopt.ir.capturing import capturing
from ampopt.ir.emulated_half import EmulatedHalf
from ampopt.ir.graph import aten, calls, cast_for_readers, copy_of, dtype_of, finish, insert_call, where
from ampopt.ir.half_numbers import with_numbers_that_fit
from ampopt.ir.integer_forms import with_integer_forms
from ampopt.ir.origin import Origin, hand_on, origins_of
from ampopt.ir.program import Program
from ampopt.ir.resize_forms import BY_NUMBER, check_varying
from ampopt.ir.shapes import record_shapes
from ampopt.ir.size_forms import use_exact_sizes
from ampopt.ir.size_numbers import with_numbers_as_tensors
from ampopt.ir.size_range import Sizes
from ampopt.ir.stable_forms import with_forms, with_stable_forms
from ampopt.system.flags import older_flags_readable
from ampopt.system.wording import argument

Dims = tuple[dict[int, str], ...]
"""The names of the dynamic dimensions of each input tensor."""


def dims_in(sizes: Sizes) -> Dims:
    """The names of the dimensions that vary in ranges of sizes."""
    return tuple({index: each.name for index, each in named.items()} for named in sizes)


OPSETS = {"onnxruntime": 20, "tensorrt": 18, "openvino": 18}
"""The opset for each target: the newest one that widely used versions of the target read."""


def to_onnx(
    program: Program,
    *,
    io: str | None,
    target: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    dims: Dims,
) -> Any:
    """Convert a portable program to an `onnx_ir.Model` with float16 or float32 inputs and outputs.

    `io`: "fp16" or "fp32"; None: the program's own dtypes, and float32 for bfloat16, which NumPy lacks.

    Raises ExportError if ONNX cannot express a node, with its name and its line in the user's code.
    """
    if target not in OPSETS:
        raise InputError(f"{argument('target', target)}: choose from {', '.join(OPSETS)}")
    graph, examples = _with_border(program, io)
    return model_of(graph, examples, OPSETS[target], input_names, output_names, dims)


def model_of(
    graph: fx.GraphModule,
    examples: tuple[Tensor, ...],
    opset: int,
    input_names: Sequence[str],
    output_names: Sequence[str],
    dims: Dims,
) -> Any:
    """Convert a graph of plain ATen operators to an `onnx_ir.Model`; raises ExportError as `to_onnx`.

    Operators whose usual ONNX form overflows or cancels are written in a stable form, see `stable_forms`;
    indices and divisions of integers are as in `integer_forms`, factors that float16 rounds as in
    `half_numbers`.
    """
    try:
        exported = _exported(graph, examples, dims)
        with (
            capturing(),
            torch.no_grad(),
            older_flags_readable(),
            exact_rules(),
            constants_apart(),
            tried_where_they_begin(),
            last_match_freed(),
            registry_kept(),
            decomposed_by_node(exported),
            without_stacks(),
        ):
            result = torch.onnx.export(
                exported,
                dynamo=True,
                verbose=False,
                opset_version=opset,
            )
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(_explain(error)) from error
    assert result is not None
    model = result.model
    _name_border(model, input_names, output_names)
    round_sizes_down(model)
    _cast_outputs(model, exported)
    _tidy(model)
    rename_dims(model, dims)
    _check_vocabulary(model, opset)
    return model


def _exported(graph: fx.GraphModule, examples: tuple[Tensor, ...], dims: Dims) -> Any:
    """The graph in the forms that ONNX gets, exported; its nodes have their origins, also for `_explain`."""
    shapes = tuple(dict.fromkeys(named, torch.export.Dim.DYNAMIC) for named in dims)
    dynamic = shapes if any(dims) else None
    if any(index >= 2 for named in dims for index in named):
        check_varying(graph)
    is_of_pixels = any(index >= 1 for named in dims for index in named)
    with capturing(), torch.no_grad(), older_flags_readable(), without_stacks(), EmulatedHalf():
        fitting = with_numbers_that_fit(graph, examples)
        if any(dims):
            sized = with_forms(
                with_numbers_as_tensors(fitting, examples), examples, TO_SIZES if is_of_pixels else {}
            )
        else:
            sized = with_forms(fitting, examples, BY_NUMBER)
        stable = with_stable_forms(sized, examples)
        stable = copy_of(with_integer_forms(stable, examples, is_dynamic=any(dims)))
        move_weights_apart(stable)
        hand_on(stable)
        exported = torch.export.export(stable, examples, dynamic_shapes=dynamic, strict=False)
        if dynamic is not None:
            use_exact_sizes(exported.graph_module)
        return exported


def origins_of_values(graph: fx.GraphModule, examples: tuple[Tensor, ...]) -> dict[str, tuple[Origin, ...]]:
    """The origins of the values of a graph's ONNX model, by their names; costs an export without ONNX."""
    return {node.name: origins_of(node) for node in calls(_exported(graph, examples, ()).graph_module)}


def _with_border(program: Program, io: str | None) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """The graph with the casts at its border as nodes, and example inputs for it."""
    with EmulatedHalf():
        recorded = record_shapes(program)
    given = [dtype_of(node) for node in recorded.graph.output_node().all_input_nodes]
    dtypes = dict(zip([n.name for n in recorded.graph.output_node().all_input_nodes], given, strict=True))
    module, examples = copy_of(program.graph), []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, example, border in zip(placeholders, program.examples, program.entry, strict=True):
        examples.append(example.to(outer_dtype(example.dtype, io)).contiguous())
        if examples[-1].dtype is not border.dtype:
            cast_for_readers(module, node, border.dtype)
    output, results = module.graph.output_node(), list[fx.Node]()
    flat: tuple[fx.Node, ...] = output.args[0]  # type: ignore[assignment]
    for node, border in zip(flat, program.exit, strict=True):
        wanted, result = outer_dtype(border.dtype, io), node
        if dtypes[node.name] is not wanted:
            result = insert_call(module, output, aten._to_copy.default, node, dtype=wanted)
        results.append(result)
    output.args = (tuple(results),)
    return finish(module), tuple(examples)


def outer_dtype(dtype: torch.dtype, io: str | None) -> torch.dtype:
    """The dtype in a file of an input or output that has `dtype` at the program's border; see `to_onnx`."""
    if io == "fp16" and dtype.is_floating_point:
        return torch.float16
    is_low = dtype is torch.bfloat16 or (io == "fp32" and dtype is torch.float16)
    return torch.float32 if is_low else dtype


def _name_border(model: Any, input_names: Sequence[str], output_names: Sequence[str]) -> None:
    """Give inputs and outputs their names, which other values then lose in `_tidy`.

    The exporter of torch 2.10 names them before it gives an output that is another one, or an input, a value
    of its own: one of the two kept its name, and the other had one that nobody gave.
    """
    for values, names in ((model.graph.inputs, input_names), (model.graph.outputs, output_names)):
        for value, name in zip(values, names, strict=True):
            value.name = name


def _cast_outputs(model: Any, exported: torch.export.ExportedProgram) -> None:
    """Give each output the dtype that it has in the program.

    torch.onnx computes sums and products of float16 in float32, and casts them for those that read them, but
    not where they are outputs.
    """
    import onnx_ir
    from onnx_ir.tensor_adapters import from_torch_dtype

    returned: Any = exported.graph.output_node().args[0]
    for place, (output, node) in enumerate(zip(model.graph.outputs, returned, strict=True)):
        dtype = from_torch_dtype(node.meta["val"].dtype)
        if output.dtype == dtype:
            continue
        cast = onnx_ir.node("Cast", [output], {"to": dtype})
        cast.outputs[0].name, output.name = output.name, f"{output.name}_before_cast"
        cast.outputs[0].shape, cast.outputs[0].dtype = output.shape, dtype
        model.graph.append(cast)
        model.graph.outputs[place] = cast.outputs[0]


def _tidy(model: Any) -> None:
    """Inline local functions, give values unique names, and drop notes that tell paths of this machine."""
    from onnx_ir.passes import common

    common.InlinePass()(model)
    common.NameFixPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _check_vocabulary(model: Any, opset: int) -> None:
    """Raise ExportError where the model is not of the target's opset, or uses other than ONNX's operators."""
    foreign = {node.domain for node in model.graph.all_nodes()} - {"", "ai.onnx"}
    if foreign or model.functions:
        names = ", ".join(sorted(foreign)) or "local functions"
        raise ExportError(f"the exporter used operators that are not ONNX's own: {names}")
    written = model.opset_imports[""]
    if written > opset:
        raise ExportError(f"the model needs opset {written}, and the target reads {opset} at most")


def _explain(error: Exception) -> str:
    """What ONNX cannot express, with the node and the line of the user's code where that is known."""
    node, causes = _failing_node(error), [error]
    while (cause := causes[-1].__cause__) is not None and isinstance(cause, Exception):
        causes.append(cause)
    reason = textwrap.shorten(str(causes[-1]) or type(causes[-1]).__name__, 300, placeholder=" …")
    if node is None:
        return f"the model cannot be exported to ONNX: {reason}"
    if "SymbolicTensor" in reason and any(map(_is_of_sizes, node.all_input_nodes)):
        reason = "sizes, which vary, make a number that ONNX has as a constant; export with static shapes"
    return f"ONNX cannot express {node.target}, {where(node)}: {reason}"


def _failing_node(error: BaseException) -> fx.Node | None:
    """The node that an exporter was at when it failed: only the frames of its traceback know.

    A number that the innermost function was at is an operand of that node, and has no line of its own.
    """
    found = list[fx.Node]()
    current: BaseException | None = error
    while current is not None:
        for frame, _ in reversed(list(traceback.walk_tb(current.__traceback__))):
            node = frame.f_locals.get("node", frame.f_locals.get("n"))
            if isinstance(node, fx.Node) and node.op == "call_function":
                found.append(node)
        current = current.__cause__
    return next((node for node in found if not _is_of_sizes(node)), found[0] if found else None)


def _is_of_sizes(node: fx.Node) -> bool:
    """Whether a call computes a number of sizes."""
    return node.target is aten.sym_size.int or not isinstance(node.target, OpOverload)


def rename_dims(model: Any, dims: Dims) -> None:
    """Give the symbols of an `onnx_ir.Model` the user's names, also in expressions.

    Raises ExportError if a dimension that should be dynamic has become a number.
    """
    import onnx_ir

    names: dict[str, str] = {}
    for value, named in zip(model.graph.inputs, dims, strict=True):
        for index, name in named.items():
            size = value.shape[index]
            if isinstance(size, int):
                raise ExportError(f"dimension {index} of input {value.name!r} became {size}, not dynamic")
            names.setdefault(str(size.value), name)
    for value in _values(model.graph):
        if value.shape is None:
            continue
        value.shape = onnx_ir.Shape(  # the one there may be frozen
            re.sub(r"\w+", lambda m: names.get(m[0], m[0]), str(size.value))
            if isinstance(size, onnx_ir.SymbolicDim) and size.value is not None
            else size
            for size in value.shape
        )


def _values(graph: Any) -> list[Any]:
    return [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
