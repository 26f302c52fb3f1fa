"""One program for a range of sizes: makes it, and verifies it against the original within the range."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.deploy.kinds_of_calls import KindsOfCalls
from ampopt.deploy.optimized import Optimized
from ampopt.engines.executable import Executable, executable
from ampopt.engines.graph_per_size import CALLS
from ampopt.errors import AmpoptError, KindError, VerificationError
from ampopt.ir.asked import Asked, what_is_asked
from ampopt.ir.capture import Captured
from ampopt.ir.graph import reads_strides
from ampopt.ir.lanes import Lane
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.ir.narrow_convs import narrow_convs
from ampopt.ir.program import Program
from ampopt.ir.settings import Settings
from ampopt.ir.signature import flatten_outputs
from ampopt.ir.size_range import Sizes, corners
from ampopt.ir.size_ranges import drawn_within, now
from ampopt.ir.symbolic_capture import at_sizes, capture_ranges
from ampopt.ir.transform import Pass, replay
from ampopt.measure.verify import Verifier
from ampopt.system.interrupts import check_interrupted
from ampopt.system.wording import argument


class NoSizedProgramError(AmpoptError):
    """There is no program for a range of sizes; the message says why."""


@dataclasses.dataclass(frozen=True)
class SizedProgram:
    """A program for all calls like the captured one whose sizes are in ranges.

    `captured` has the symbolic graph, and the example that the model was optimized for. `left_out` names the
    passes of the recipe that hold for the example's sizes alone.
    """

    captured: Captured
    program: Program
    run: Executable
    sizes: Sizes
    asked: Asked
    left_out: tuple[str, ...]


def sized_program(optimized: Optimized, sizes: Sizes) -> SizedProgram:
    """Capture a model with symbolic sizes and replay its recipe, without passes that depend on the sizes.

    It is not verified. Raises NoSizedProgramError with the reason where a model fixes a size, or decides by
    it, and where it keeps a state, or leaves something behind in its calls.
    """
    captured, recipe = optimized.captured, optimized.recipe
    asked = _asked_of_one_graph(optimized)
    try:
        symbolic = capture_ranges(optimized.original, captured, sizes)
    except Exception as error:
        check_interrupted(error)
        raise NoSizedProgramError(f"torch.export refuses it: {_short(error)}") from error
    if recipe.lane.is_mixed:
        _check_narrow_convs(symbolic, sizes)
    steps = tuple(step for step in recipe.passes if not step.shape_dependent)
    left_out = tuple(step.name for step in recipe.passes if step.shape_dependent)
    example = symbolic.program.replace(examples=captured.program.examples)
    at_example = dataclasses.replace(symbolic, program=example, leaves=captured.leaves)
    try:
        return replayed(at_example, symbolic.program.examples, steps, recipe.lane, sizes, asked, left_out)
    except Exception as error:
        check_interrupted(error)
        raise NoSizedProgramError(f"its passes fail with sizes that vary: {_short(error)}") from error


def replayed(
    symbolic: Captured,
    examples: tuple[Tensor, ...],
    steps: tuple[Pass, ...],
    lane: Lane,
    sizes: Sizes,
    asked: Asked,
    left_out: tuple[str, ...] = (),
) -> SizedProgram:
    """The program for a range that passes make of a symbolic capture; it is not verified.

    `examples` have sizes that stand for all, of `LEAST` or more, see `ampopt.ir.symbolic_capture`.
    """
    program = replay(steps, lane.start(symbolic.program.replace(sizes=sizes, examples=examples)))
    left_out += tuple(step.name for step in steps if step.name not in {s.name for s in program.recipe})
    program = program.replace(examples=symbolic.program.examples)
    return SizedProgram(symbolic, program, executable(program), sizes, asked, left_out)


def _asked_of_one_graph(optimized: Optimized) -> Asked:
    """What the model asks in its call. NoSizedProgramError where sizes are not all."""
    captured = optimized.captured
    if captured.lifted is not None:
        raise NoSizedProgramError(f"it keeps a state in its {captured.lifted.named}, whose sizes are fixed")
    if captured.ignored:
        raise NoSizedProgramError("its calls leave something behind in it, which may have the call's sizes")
    args, kwargs = pytree.tree_unflatten(list(captured.leaves), captured.spec)
    asked = what_is_asked(working_copy(optimized.original), args, kwargs, captured.program.device)
    if asked.layout or reads_strides(captured.program.graph) is not None:
        raise NoSizedProgramError("it reads how tensors lie in memory")
    return asked


def _check_narrow_convs(symbolic: Captured, sizes: Sizes) -> None:
    """Raise NoSizedProgramError where sizes decide which convolutions PyTorch computes wrongly below FP32.

    They are those with the smallest outputs, so the corners show it.
    """
    usual = narrow_convs(symbolic.program)
    for wanted in corners(sizes):
        try:
            found = narrow_convs(at_sizes(symbolic, sizes, wanted).program)
        except Exception as error:
            check_interrupted(error)
            raise NoSizedProgramError(f"the model fails at {_place(wanted)}: {_short(error)}") from error
        if found != usual:
            raise NoSizedProgramError(
                f"at {_place(wanted)} PyTorch computes {min(found ^ usual)} wrongly below FP32 on a CPU, and "
                "not at other sizes"
            )


def verify_sizes(
    optimized: Optimized, sized: SizedProgram, may_go_on: Callable[[], bool], *, draws: int
) -> int:
    """Compare a program with the original in float64; the number of sizes that it was compared at.

    They are the example's, with inputs far outside of its range, too; all corners of the ranges; and some
    sizes within. Raises NoSizedProgramError where one of them is wrong, where the original fails at one, or
    gives something else there after a call of another size, and where `may_go_on` says before one that it may
    not.
    """
    example = now(sized.sizes, optimized.captured.program.examples)
    chosen = [example, *corners(sized.sizes), *drawn_within(sized.sizes)]
    distinct = list({tuple(wanted.items()): wanted for wanted in chosen}.values())
    kinds = KindsOfCalls(optimized.original, optimized.program.device)
    for number, wanted in enumerate(distinct):
        if not may_go_on():
            raise NoSizedProgramError(
                f"the time budget was spent when {number} of {len(distinct)} sizes were verified: "
                f"raise {argument('budget_s')}"
            )
        there = optimized.captured if wanted == example else at_sizes(sized.captured, sized.sizes, wanted)
        _verify_at(optimized, sized, there, wanted, draws=draws, everywhere=wanted == example)
        try:
            kinds.add(there)
        except KindError as error:
            raise NoSizedProgramError(
                f"after a call of another size the model answers otherwise at {_place(wanted)}"
            ) from error
    return len(distinct)


def _verify_at(
    optimized: Optimized,
    sized: SizedProgram,
    there: Captured,
    wanted: Mapping[str, int],
    *,
    draws: int,
    everywhere: bool,
) -> None:
    place, original, recipe = _place(wanted), optimized.original, optimized.recipe
    try:
        _check_result(working_copy(original), there)
        verifier = Verifier(
            original,
            there,
            tolerance=recipe.tolerance,
            metric=recipe.metric,
            draws=draws,
            faults=recipe.faults,
        )
    except VerificationError as error:
        raise NoSizedProgramError(f"at {place} {error}") from error
    except Exception as error:
        check_interrupted(error)
        raise NoSizedProgramError(f"the model itself fails at {place}: {_short(error)}") from error
    try:
        run = executable(sized.program)  # of its own: graphs for these sizes would take the place of others
        if sized.program.cuda_graph:
            for _ in range(CALLS):
                run(*there.program.examples)
        reason = verifier.check(run, recipe.lane, everywhere=everywhere).reason
    except Exception as error:
        check_interrupted(error)
        raise NoSizedProgramError(f"the program fails at {place}: {_short(error)}") from error
    if reason is not None:
        raise NoSizedProgramError(f"the program is wrong at {place}: {reason}")


def _check_result(original: nn.Module, there: Captured) -> None:
    """Raise VerificationError where the original's result has another structure, dtype or number."""
    args, kwargs = pytree.tree_unflatten([_own(leaf) for leaf in there.leaves], there.spec)
    device = there.program.device
    with Settings().scope(device), untouched_rng(device):
        outputs, layout = flatten_outputs(original(*args, **kwargs))
    if layout != there.layout:
        raise VerificationError("the model's result has another structure, or other numbers in it")
    if [output.dtype for output in outputs] != [border.dtype for border in there.program.exit]:
        raise VerificationError("the model's results have other dtypes")


def _place(wanted: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in wanted.items())


def _own(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _short(error: Exception) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" …")
