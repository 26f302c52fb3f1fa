"""What the tests share: programs of small models, their error against float64, and the check of a pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ampopt.engines.executable import executable
from ampopt.ir.capture import capture
from ampopt.ir.graph import calls, copy_of, finish, tensor_meta
from ampopt.ir.lanes import FP32, Lane, mixed
from ampopt.ir.model_copy import device_of, private_copy, same_tensor
from ampopt.ir.numerics import fresh_draw, relative_error
from ampopt.ir.origin import WHOLE_MODEL, Origin, origins_of
from ampopt.ir.program import Program
from ampopt.ir.settings import Settings
from ampopt.ir.shapes import record_shapes
from ampopt.ir.signature import flatten_outputs
from ampopt.ir.transform import Numerics, Pass, Result, replay

FP16 = mixed("amp", torch.float16)
BF16 = mixed("amp", torch.bfloat16)

FLOORS = {torch.float32: 5e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""The relative error that the small models of these tests may always have, by the dtype of the lane."""


class Model(nn.Module):
    """A model made of a function: `Model(lambda m, x: m.conv(x) + 1, conv=nn.Conv2d(3, 8, 3))`."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


class WearsOut(nn.Module):
    """A convolution that fails after some calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.conv, self.left = nn.Conv2d(3, 4, 3), calls

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, or raise ValueError."""
        if self.left == 0:
            raise ValueError("worn out")
        self.left -= 1
        return self.conv(x)  # type: ignore[no-any-return]


def with_statistics(model: nn.Module) -> nn.Module:
    """The model with statistics and an affine part in its batch norms that no mistake can hide behind."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_mean, module.bias):
                if tensor is not None:
                    nn.init.normal_(tensor)
            for tensor in (module.running_var, module.weight):
                if tensor is not None:
                    nn.init.uniform_(tensor, 0.3, 3.0)
    return model.eval()


def program_of(
    model: nn.Module, *inputs: Tensor, lane: Lane = FP32, on_top_of: Sequence[Pass] = ()
) -> Program:
    """The program of a private copy of the model as `lane` starts with it, after the passes `on_top_of`."""
    device = device_of(model, inputs)
    return replay(tuple(on_top_of), lane.start(capture(private_copy(model), inputs, {}, device).program))


def text_of(program: Program) -> str:
    """The calls of the program's graph, one a line: `relu = aten.relu.default(conv2d)`."""
    return "\n".join(f"{node.name} = {node.target}({_arguments_of(node)})" for node in calls(program.graph))


def _arguments_of(node: fx.Node) -> str:
    named = [f"{name}={value}" for name, value in node.kwargs.items()]
    return ", ".join([*map(str, node.args), *named])


def dtypes_of(program: Program) -> dict[str, torch.dtype]:
    """The dtype of every call's result, by the call's name."""
    nodes = list(calls(record_shapes(program)))
    return {n.name: tensor_meta(n).dtype for n in nodes if hasattr(n.meta["tensor_meta"], "dtype")}


def targets_of(program: Program) -> list[object]:
    """What the program calls, in order."""
    return [node.target for node in calls(program.graph)]


def reference_of(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The original model's flat outputs in float64."""
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    with Settings().scope(device_of(model, inputs)):
        return flatten_outputs(private_copy(model).double()(*wide))[0]


def several_kinds() -> nn.Module:
    """A small classifier with convolutions, one of them depthwise, a norm, pooling and a linear layer."""
    return with_statistics(
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 5),
        )
    )


class Unpooling(nn.Module):
    """An encoder and decoder whose indices cross over: tracing the module itself fails in torch 2.15."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y, indices = self.pool(self.down(x).relu())
        return self.up(self.unpool(y, indices))  # type: ignore[no-any-return]


def eager_of(model: nn.Module, inputs: Sequence[Tensor], lane: Lane) -> list[Tensor]:
    """The original model's flat outputs in a lane: in strict FP32, or under autocast."""
    with lane.scope(device_of(model, inputs)):
        return flatten_outputs(private_copy(model)(*inputs))[0]


def largest_error(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest relative error of an output."""
    return max(relative_error(o, r) for o, r in zip(outputs, reference, strict=True))


def error_of(program: Program, model: nn.Module, inputs: Sequence[Tensor]) -> float:
    """The program's largest relative error against the model in float64."""
    return largest_error(executable(program)(*inputs), reference_of(model, inputs))


def check_pass(
    step: Pass,
    model: nn.Module,
    *inputs: Tensor,
    rewrites: int,
    lane: Lane = FP32,
    on_top_of: Sequence[Pass] = (),
    elsewhere: Sequence[Tensor] | None = None,
    rewrites_elsewhere: int | None = None,
    limit: float | None = None,
) -> Result:
    """Apply a pass to a capture of `model`, and assert everything that every pass promises.

    It makes `rewrites` rewrites and leaves the program that it is given alone; the new graph is sound, and
    its nodes still say where in the model they come from; its outputs keep within the declared numerics, or
    within the relative error `limit`, and keep NaN; a second apply does nothing; and what goes into the
    recipe makes as many rewrites, or `rewrites_elsewhere`, in a capture for inputs of another shape,
    `elsewhere`, and gives a right program there too.
    """
    program = program_of(model, *inputs, lane=lane, on_top_of=on_top_of)
    assert step.why_not(program) is None, f"refused: {step.why_not(program)}"
    result = apply_to_untouched(step, program)
    assert result.rewrites == rewrites, f"{result.rewrites} rewrites were counted instead of {rewrites}"
    check_graph(result.program)
    check_origins(program, result.program)
    check_outputs(step.numerics, program, result.program, model, inputs, lane, limit)
    check_keeps_nan(result.program, model, inputs, lane)
    step = result.replay or step
    if step.why_not(result.program) is None:
        again = step.apply(result.program).rewrites
        assert again == 0, f"not idempotent: a second apply makes {again} rewrites"
    if elsewhere is not None:
        before = program_of(model, *elsewhere, lane=lane, on_top_of=on_top_of)
        there = step.apply(before)
        expected = rewrites if rewrites_elsewhere is None else rewrites_elsewhere
        assert there.rewrites == expected, f"its replay makes {there.rewrites} rewrites instead of {expected}"
        check_origins(before, there.program)
        check_outputs(step.numerics, before, there.program, model, elsewhere, lane, limit)
    return result


def apply_to_untouched(step: Pass, program: Program) -> Result:
    """Apply a pass; assert that the program it is given stays as it is, and that the count is honest.

    The pass is applied without what puts weights back to which one of another package has written.
    """
    code = program.graph.code
    weights = {name: (t.clone(), t.stride()) for name, t in program.graph.named_buffers()}
    apply: Any = inspect.unwrap(type(step).apply)
    result: Result = apply(step, program)
    assert program.graph.code == code, "the graph of the input program changed"
    left = dict(program.graph.named_buffers())
    assert left.keys() == weights.keys(), "the input program's weights are not the same ones"
    for name, (weight, stride) in weights.items():
        same = left[name].stride() == stride and same_tensor(left[name], weight)
        assert same, f"weight {name} of the input program changed"
    changed = result.program is not program
    assert result.modified == changed, "the count does not say whether anything changed"
    return result


def check_graph(program: Program) -> None:
    """Assert that a graph is well-formed and compiled, and holds no weight that nothing reads."""
    module = program.graph
    module.graph.lint()
    assert module.graph.python_code("self").src == module.code, "the graph was edited after it was compiled"
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    assert read == dict(module.named_buffers()).keys(), "the graph holds weights that nothing reads"


def check_origins(before: Program, after: Program) -> None:
    """Assert that a pass has carried provenance on: no node is without, none is invented, and none is lost.

    Lost is the origin of a node which an output depended on that no node has any more.
    """
    known = {origin for node in before.graph.graph.nodes for origin in origins_of(node)} | {WHOLE_MODEL}
    left = set[Origin]()
    for node in after.graph.graph.nodes:
        own = origins_of(node)
        assert own or node.op not in ("call_function", "get_attr"), f"{node.name} has no origin"
        invented = [str(origin) for origin in own if origin not in known]
        assert not invented, f"{node.name} comes from where nothing came from: {invented}"
        left.update(own)
    needed, todo = set[fx.Node](), [before.graph.graph.output_node()]
    while todo:
        sources = set(todo.pop().all_input_nodes) - needed
        needed |= sources
        todo += sources
    lost = sorted({str(origin) for node in needed for origin in origins_of(node) if origin not in left})
    assert not lost, f"nothing comes from {lost} any more"


def check_outputs(
    numerics: Numerics,
    before: Program,
    after: Program,
    model: nn.Module,
    inputs: Sequence[Tensor],
    lane: Lane,
    limit: float | None = None,
) -> None:
    """Assert that a pass moved the outputs no further than declared, on the inputs and on a fresh draw."""
    run_before, run_after = executable(before), executable(after)
    generator = torch.Generator().manual_seed(1)
    for tensors in (inputs, [fresh_draw(t, generator) for t in inputs]):
        old, new = run_before(*tensors), run_after(*tensors)
        for a, b, border in zip(old, new, after.exit, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), "another kind of tensor"
            as_it_comes = border.memory_format is torch.preserve_format
            assert as_it_comes or a.stride() == b.stride(), "other strides than were promised"
            if numerics is Numerics.BITWISE:
                assert same_tensor(a, b), "bits of an output changed"
        reference = reference_of(model, tensors)
        own = largest_error(eager_of(model, tensors, lane), reference)
        allowed = max(lane.limits.multiple * own, FLOORS[lane.dtype]) if limit is None else limit
        error = largest_error(new, reference)
        assert error <= allowed, f"the error is {error:.2g}, over {allowed:.2g}"
        check_ownership(run_before, run_after, tensors)


def check_keeps_nan(program: Program, model: nn.Module, inputs: Sequence[Tensor], lane: Lane) -> None:
    """Assert that where one pixel is NaN or Inf, what that spoils in eager's outputs it spoils here, too."""
    run = executable(program)
    for value in (float("nan"), float("inf")):
        spoilt_inputs = [with_pixel(t, value) for t in inputs]
        expected, outputs = eager_of(model, spoilt_inputs, lane), run(*spoilt_inputs)
        exact = reference_of(model, spoilt_inputs)  # a kernel of eager's own may spread it further
        for index, (e, r, o) in enumerate(zip(expected, exact, outputs, strict=True)):
            spoilt = ~torch.isfinite(e)
            if r.shape == e.shape:  # a view as another dtype is of another size in float64
                spoilt &= ~torch.isfinite(r)
            lost = int((spoilt & torch.isfinite(o)).sum())
            assert lost == 0, f"output {index} has numbers in {lost} places that {value} has spoilt in eager"


def with_pixel(x: Tensor, value: float) -> Tensor:
    """A copy with one pixel of the first image, or of anything else one element, set to a value."""
    if not x.is_floating_point() or x.numel() == 0:
        return x
    x = x.clone()
    if x.dim() == 4:
        x[0, :, x.shape[2] // 2, x.shape[3] // 2] = value
    else:
        x[tuple(size // 2 for size in x.shape)] = value
    return x


Run = Callable[..., Sequence[Tensor]]


def check_ownership(before: Run, after: Run, inputs: Sequence[Tensor]) -> None:
    """Assert that a caller who writes to the outputs changes neither later results nor, anew, the inputs."""
    shared = _shared_with_inputs(after, inputs) - _shared_with_inputs(before, inputs)
    assert not shared, "an output shares memory with an input"
    first = after(*[t.clone() for t in inputs])
    kept = [t.clone() for t in first]
    for output in first:
        output.zero_()
    for a, b in zip(kept, after(*inputs), strict=True):
        assert same_tensor(a, b), "an output shares memory with the program"


def _shared_with_inputs(run: Run, inputs: Sequence[Tensor]) -> set[tuple[int, int]]:
    copies = [t.clone() for t in inputs]
    outputs = run(*copies)
    for copy, original in zip(copies, inputs, strict=True):
        assert same_tensor(copy, original), "the program writes to its input"
    return {
        (i, j)
        for i, output in enumerate(outputs)
        for j, copy in enumerate(copies)
        if output.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr() != 0
    }


def spoilt(result: Result, spoil: Callable[[fx.GraphModule], object]) -> Result:
    """A result with a planted mistake: what `spoil` does to its graph."""
    module = copy_of(result.program.graph)
    spoil(module)
    changed = result.program.with_graph(finish(module))
    return Result(changed, result.rewrites, result.declined, result.hints)
