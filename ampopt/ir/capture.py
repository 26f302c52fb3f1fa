"""Captures a model and an example call as a Program: `torch.export`, then `lowering`.

The user's model is never changed, and the private copy that is captured is never called: all functions work
on further copies of it, in evaluation mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from ampopt.errors import CaptureError
from ampopt.ir.capturing import capturing
from ampopt.ir.custom_forward import shown_as_under_autocast
from ampopt.ir.export_repairs import averages_of_all_batches, masks_as_given
from ampopt.ir.graph import aten, calls, where
from ampopt.ir.keywords import in_order, taken_by_name
from ampopt.ir.lane_io import LaneIO, original_of
from ampopt.ir.lifted_state import ARGUMENT, Attribute, LiftedState, with_state
from ampopt.ir.lowering import lower
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.ir.model_stacks import stacks_within_models
from ampopt.ir.model_state import Behaviour, behaviour_of
from ampopt.ir.normal_form import is_normal, normal_form, why_not_normal
from ampopt.ir.obstacles import obstacle
from ampopt.ir.origin import note_exported
from ampopt.ir.outside import variables_kept
from ampopt.ir.place_in_code import place_in_code
from ampopt.ir.plain_tensors import why_not_dense
from ampopt.ir.program import Border, Program
from ampopt.ir.scripted import export_script, scripted_submodules, with_frozen_scripts
from ampopt.ir.settings import plain_world
from ampopt.ir.settled_assertions import settle_assertions
from ampopt.ir.signature import OutputLayout, flatten_call, flatten_outputs, tensors_of
from ampopt.ir.unknown_containers import unknown_container
from ampopt.system.lack import lack


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A captured model: its program, and the structure of its calls and results.

    The program's inputs are the tensors of `leaves`, then those of the model's state; its outputs are the
    tensors of the result, then the state for the next call.
    """

    program: Program
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """The example call's leaves; a call whose leaves differ, except tensors, needs another program."""
    layout: OutputLayout
    by_name: frozenset[str] = frozenset()
    """Keyword arguments whose order the model cannot see, see `ampopt.ir.keywords`."""
    all_differ: bool = False
    """Of a program without the original: whether it answers only calls that give no tensor twice."""
    lifted: LiftedState | None = None
    ignored: frozenset[Attribute] = frozenset()
    """What the captured call writes and no call like it reads, so that the program leaves it out."""
    told: str | None = None
    """What the model prints, logs and warns of, which the program does not repeat; None: nothing."""

    @property
    def state(self) -> tuple[str, ...]:
        """The place in the model of each tensor of its state."""
        return () if self.lifted is None else self.lifted.places

    @property
    def initial_state(self) -> tuple[Tensor, ...]:
        """The state before the captured call."""
        return self.program.examples[len(self.program.examples) - len(self.state) :]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The example inputs without the state."""
        return self.program.examples[: len(self.program.examples) - len(self.state)]


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: LiftedState | None
) -> torch.export.ExportedProgram:
    with averages_of_all_batches(model):  # before the call with a state is made of the model's own
        return _exported(model, args, kwargs, state)


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: LiftedState | None
) -> torch.export.ExportedProgram:
    if state is not None:
        model, kwargs = with_state(working_copy(state.model), state), {**kwargs, ARGUMENT: state.initial}
    elif isinstance(model, torch.jit.ScriptModule):  # which torch.export itself refuses
        return export_script(model, args, kwargs)
    with shown_as_under_autocast(), stacks_within_models(), masks_as_given(model):
        if state is None and scripted_submodules(model):
            with contextlib.suppress(AttributeError):  # the model reads more of one than its results
                frozen = with_frozen_scripts(working_copy(model))
                return torch.export.export(frozen, args, kwargs, strict=False)
        return torch.export.export(model, args, kwargs, strict=False)


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    *,
    lift_state: bool = True,
    also: Collection[Attribute] = (),
) -> Captured:
    """Capture one call of a model (a private copy, on `device`) as a Program.

    With `lift_state`, tensors that a call leaves for the next become inputs and outputs. Raises CaptureError
    with the reason if the model cannot be one graph, or if its results depend on more than its inputs: its
    state is more than tensors, or it draws random numbers. What is in `also` is state in any case. A `LaneIO`
    is captured as the model inside it, with its conversions as the borders. The captured call is the
    normal form of this one (see `ampopt.ir.normal_form`), with its keyword arguments in order
    (`ampopt.ir.keywords`). A LackError says that it is the machine that has not what the capture needs.
    """
    try:
        return _capture(model, args, kwargs, device, lift_state=lift_state, also=also)
    except Exception as error:
        if (lacking := lack(f"the capture of {type(original_of(model)).__name__}", error)) is not None:
            raise lacking from error
        raise


def _capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    *,
    lift_state: bool,
    also: Collection[Attribute],
) -> Captured:
    by_name = taken_by_name(original_of(model))
    kwargs = in_order(kwargs, by_name)
    if isinstance(model, LaneIO):
        entered, named = model.entered(args, kwargs)
        inside = _capture(model.model, entered, named, device, lift_state=lift_state, also=also)
        return _from_outside(inside, model, normal_form(*flatten_call(args, kwargs))[0])
    leaves, spec = flatten_call(args, kwargs)
    kind = type(model).__name__
    if (unknown := unknown_container(leaves)) is not None:
        raise CaptureError(f"{kind} is called with {unknown}")
    if (sparse := next(filter(None, map(why_not_dense, tensors_of(leaves))), None)) is not None:
        raise CaptureError(f"{kind} is called with a tensor that {sparse}")
    try:
        with capturing(), plain_world(device), untouched_rng(device), variables_kept(model):
            if not is_normal(leaves, spec) and (reason := why_not_normal(model, args, kwargs, device)):
                raise CaptureError(f"{kind} is more than its graph: {reason}")
            leaves, spec = normal_form(leaves, spec)
            positional, named = pytree.tree_unflatten(leaves, spec)
            behaviour = behaviour_of(model, positional, named, device, also)
            _check_behaviour(model, behaviour, lift_state=lift_state)
            state = behaviour.state
            result = working_copy(model if state is None else state.model)(*positional, **named)
            exported = _export(working_copy(model), positional, named, state)
            settle_assertions(exported)
            _check_assertions(kind, exported)
            _check_effects(kind, exported)
    except CaptureError:
        raise
    except Exception as error:
        place = place_in_code(error)
        where = f", because of {place}" if place else ""
        reason = obstacle(error) or _short(error)
        raise CaptureError(f"torch.export cannot capture {kind}{where}: {reason}") from error
    try:
        with capturing(), plain_world(device), untouched_rng(device):
            graph = lower(exported, () if state is None else state.identifiers)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"the graph of {kind} cannot be made functional: {_short(error)}") from error
    outputs, layout = flatten_outputs(result)
    held = () if state is None else tuple(state.initial)
    produced = len(graph.graph.output_node().args[0]) - len(held)  # type: ignore[arg-type]
    if produced != len(outputs):
        raise CaptureError(f"{kind} returns {len(outputs)} tensors, its graph {produced}")
    _check_shapes(kind, exported, outputs)
    examples = (*(t.detach() for t in tensors_of(leaves)), *held)
    program = Program(
        graph=graph,
        examples=examples,
        entry=tuple(Border(t.dtype) for t in examples),
        exit=tuple(Border(t.dtype) for t in (*outputs, *held)),
        device=device,
    )
    if not _switches_autocast_on(exported):  # each lane finds out about dtypes that only this gives
        _check_runs(kind, program)
    ignored, told = behaviour.ignored, behaviour.told
    return Captured(program, spec, tuple(leaves), layout, by_name, lifted=state, ignored=ignored, told=told)


def _from_outside(captured: Captured, border: LaneIO, leaves: Sequence[Any]) -> Captured:
    """The capture of a model as that of the `LaneIO` around it, called with these leaves."""
    program, count = captured.program, len(captured.program.exit) - len(captured.state)
    examples = (*(tensor.detach() for tensor in tensors_of(leaves)), *captured.initial_state)
    given = tuple(Border(border.border(own.dtype)) for own in program.exit[:count])
    outside = program.replace(examples=examples, exit=(*given, *program.exit[count:]))
    lifted = captured.lifted
    if lifted is not None:
        lifted = dataclasses.replace(lifted, model=border.around(lifted.model))
    return dataclasses.replace(captured, program=outside, leaves=tuple(leaves), lifted=lifted)


def _check_shapes(kind: str, exported: torch.export.ExportedProgram, outputs: Sequence[Tensor]) -> None:
    """Raise CaptureError where an operator's shape function, which the export relies on, is wrong."""
    specs, results = exported.graph_signature.output_specs, exported.graph.output_node().args[0]
    own = [
        node
        for spec, node in zip(specs, results, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(node, fx.Node)
    ]
    for node, output in zip(own, outputs, strict=False):
        promised = node.meta.get("val")
        if isinstance(promised, Tensor) and not _may_be(promised.shape, output.shape):
            raise CaptureError(
                f"{kind} returns a tensor of shape {list(output.shape)}, where PyTorch's export expects "
                f"{list(promised.shape)}"
            )


def _check_assertions(kind: str, exported: torch.export.ExportedProgram) -> None:
    """Raise CaptureError where the graph asserts that a number, which values decide, is above zero.

    An operator's shape function may promise too much: torchvision's says that `nms` keeps at least two boxes.
    The export has decided branches by that, and the graph raises where the model answers.
    """
    kinds = [aten._assert_scalar.default]
    for node in (node for module in _graphs(exported) for node in calls(module, kinds)):
        condition, message = node.args
        if isinstance(condition, fx.Node) and _is_lower_bound(condition):
            said = (
                str(message)
                .removeprefix("Runtime assertion failed for expression ")
                .partition(" on node ")[0]
            )
            raise CaptureError(
                f"the graph of {kind} would hold only where {said}, which the inputs' values decide: "
                f"{where(_source(condition))}"
            )


OF_THE_EXPORT = {
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
"""Calls without a result by which an export states what it has assumed."""


def _check_effects(kind: str, exported: torch.export.ExportedProgram) -> None:
    """Raise CaptureError where an operator is called for what it does, as `torch._assert_async` is.

    A graph keeps what its outputs need: passes and engines leave out a call that nothing is computed from.
    """
    for node in (node for module in _graphs(exported) for node in calls(module)):
        if isinstance(node.target, OpOverload) and _is_for_its_effect(node, node.target):
            note_exported(exported.graph_module)  # who reads of it wants the line
            raise CaptureError(
                f"{kind} calls {node.target} for its effect, which no graph keeps: {where(node)}"
            )


def _is_for_its_effect(node: fx.Node, operator: OpOverload) -> bool:
    schema = operator._schema
    if operator in OF_THE_EXPORT or operator.namespace == "profiler" or schema.is_mutable:
        return False
    is_foreign = operator.namespace not in ("aten", "prims", "torchvision")
    return not schema.returns or (is_foreign and not node.users)


def _graphs(exported: torch.export.ExportedProgram) -> list[fx.GraphModule]:
    """The graph of a model and those of its blocks, which run under another mode."""
    return [each for each in exported.graph_module.modules() if isinstance(each, fx.GraphModule)]


def _switches_autocast_on(exported: torch.export.ExportedProgram) -> bool:
    """Whether the model computes in a lower precision of its own, in a block under `torch.autocast`."""
    kind = torch.ops.higher_order.wrap_with_autocast
    return any(block.args[2] for module in _graphs(exported) for block in calls(module, [kind]))


def _check_runs(kind: str, program: Program) -> None:
    """Raise CaptureError where the graph fails on the example, on which the model has just run.

    An export may leave calls in it that only work while it is made, as those of `torch.vmap`.
    """
    try:
        with untouched_rng(program.device):
            program.run(*program.examples)
    except Exception as error:
        raise CaptureError(f"the graph of {kind} fails where the model does not: {_short(error)}") from error


def _source(condition: fx.Node) -> fx.Node:
    """The call that gave the tensor whose size or value a condition is about."""
    node = condition
    while node.all_input_nodes and not isinstance(node.meta.get("val"), Tensor):
        node = node.all_input_nodes[0]
    return node


def _is_lower_bound(condition: fx.Node) -> bool:
    """Whether it demands a number above zero: what no size has to be."""
    least = condition.args[1] if condition.target is operator.ge else 0
    return isinstance(least, int) and least > 0


def _may_be(promised: Sequence[int | torch.SymInt], shape: Sequence[int]) -> bool:
    """Whether a shape is the promised one, where that does not depend on values."""
    return len(promised) == len(shape) and all(
        size == real for size, real in zip(promised, shape, strict=True) if isinstance(size, int)
    )


def _short(error: Exception) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" …")


def _check_behaviour(model: nn.Module, behaviour: Behaviour, *, lift_state: bool) -> None:
    """Raise CaptureError where a graph cannot stand for the model, as it behaves from call to call."""
    kind, state = type(model).__name__, behaviour.state
    if behaviour.reason is not None:
        raise CaptureError(f"{kind} is more than its graph: {behaviour.reason}")
    if state is not None and not lift_state:
        raise CaptureError(f"{kind} changes its {state.named} when it is called")
