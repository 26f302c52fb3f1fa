"""Builds the portable program: applies the rewrites that hold on every machine to the capture again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from ampopt.errors import AmpoptError, ExportError, InputError, first_line
from ampopt.ir.capture import Captured
from ampopt.ir.cuda_autocast import with_widening_casts
from ampopt.ir.emulated_half import EmulatedHalf
from ampopt.ir.graph import aten, calls, cast_for_readers, copy_of, dtype_of, finish, insert_call, where
from ampopt.ir.lanes import FP32, LANES, Lane
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ir.transform import Family, Pass, replay
from ampopt.passes import PIPELINE, BakeAutocast, KeepFp32
from ampopt.passes.openvino import computed_otherwise
from ampopt.system.interrupts import check_interrupted

HALF = LANES["amp"]["cuda"]
"""The lane of a float16 export, with CUDA's autocast rules on any device."""

_NORMALIZATIONS = (
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.layer_norm.default,
    aten.group_norm.default,
)


def portable_program(
    captured: Captured, recipe: tuple[Pass, ...], lane: Lane, *, dynamic: bool = False
) -> Program:
    """The captured model with every portable rewrite in it, in float32 or with float16 casts baked in.

    The rewrites are all portable ones of the pipeline that need no measurement, whether faster on this
    machine or not (they are exact), and the portable ones of `recipe`, as measured. For float16 the casts are
    those of CUDA's autocast, on any device. `dynamic`: the graph holds symbolic sizes, and rewrites that
    depend on the example's sizes are left out.
    """
    if lane not in (FP32, HALF):
        raise InputError(f"a portable program is float32 or float16, not {lane.dtype}")
    program = captured.program
    steps = [step for step in _rewrites(recipe) if not (dynamic and step.shape_dependent)]
    if lane == FP32:
        return replay(tuple(steps), FP32.start(program))
    bake = next((step for step in recipe if isinstance(step, (BakeAutocast, KeepFp32))), BakeAutocast())
    if isinstance(bake, KeepFp32):
        bake = bake.in_fp32()  # ONNX has few operators in bfloat16, and no TF32
    return _in_half(program, _in_order([*steps, bake]))


def autocast_program(captured: Captured) -> Program:
    """The captured model as CUDA's float16 autocast runs it, on any device, with no other rewrite.

    On a CPU, run it under `EmulatedHalf`, which is faster.
    """
    return _in_half(captured.program, (BakeAutocast(),))


def why_not_openvino(program: Program, inputs: Sequence[str], *, varies: bool = False) -> str | None:
    """Why OpenVINO must not run a portable program, whose inputs have these names; None: it may.

    The rules are those of the pass `openvino`, whether that package is installed or not. `varies`: the sizes
    of the inputs do.
    """
    with (
        EmulatedHalf() if program.lane == HALF and program.device.type == "cpu" else contextlib.nullcontext()
    ):
        found = computed_otherwise(program, varies=varies)
    if found is None:
        return None
    node, reason = found
    taken = [each.name for each in program.graph.graph.find_nodes(op="placeholder")]
    place = f"input {inputs[taken.index(node.name)]!r}" if node.name in taken else where(node)
    return f"{reason}, at {place}"


def _in_half(program: Program, steps: tuple[Pass, ...]) -> Program:
    """The program after the steps, BakeAutocast or KeepFp32 among them, by CUDA's rules of float16.

    Raises ExportError where an operator refuses float16, or a number that float16 does not hold.
    """
    on_cpu = program.device.type == "cpu"
    if on_cpu:
        program = with_widening_casts(program)
    try:
        with EmulatedHalf() if on_cpu else contextlib.nullcontext():
            return _with_uniform_norms(replay(steps, HALF.start(program)))
    except AmpoptError:
        raise
    except Exception as error:
        check_interrupted(error)
        cause = error.__cause__ or error  # what a run of the graph raises names the node first
        raise ExportError(f"the model does not run in float16: {first_line(cause)}") from error


def _rewrites(recipe: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """The recipe's portable passes, and those of the pipeline's portable rewrites that it does not name."""
    named = [step for step in recipe if step.portable]
    types = {type(step) for step in named}
    always = [step for step in PIPELINE.rewrites if step.portable and step.family is Family.REWRITE]
    return _in_order([*named, *(step for step in always if type(step) not in types)])


def _in_order(steps: list[Pass]) -> tuple[Pass, ...]:
    """Passes in the pipeline's order; those that it does not know come last."""
    order = {type(step): index for index, step in enumerate(PIPELINE.rewrites)}
    return tuple(sorted(steps, key=lambda step: order.get(type(step), len(order))))


def _with_uniform_norms(program: Program) -> Program:
    """The program with every normalization of mixed dtypes computed in float32 and rounded again.

    PyTorch normalizes a float16 tensor with float32 statistics; ONNX has no such operator, or no kernel.
    """
    module, recorded = copy_of(program.graph), record_shapes(program)
    known = {node.name: node for node in recorded.graph.nodes}
    for node in calls(module, _NORMALIZATIONS):
        floats = {source: dtype_of(known[source.name]) for source in node.all_input_nodes}
        floats = {source: dtype for source, dtype in floats.items() if dtype.is_floating_point}
        if len(set(floats.values())) < 2:
            continue
        for source, dtype in floats.items():
            if dtype is not torch.float32:
                wide = insert_call(module, node, aten._to_copy.default, source, dtype=torch.float32)
                node.replace_input_with(source, wide)
        cast_for_readers(module, node, dtype_of(known[node.name]))
    return program.with_graph(finish(module))
