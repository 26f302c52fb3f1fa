"""The base classes of passes: `Pass`, `Engine`, their results, and recipes."""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib.util
import inspect
import re
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from ampopt.ir.lanes import Lane
from ampopt.ir.program import Program


class Numerics(enum.Enum):
    """How far a pass may move the outputs, and so how it is verified."""

    BITWISE = "bitwise"
    """Every output bit stays."""
    REASSOCIATED = "reassociated"
    """The same real-number function; only the rounding differs."""
    APPROXIMATE = "approximate"
    """Computes in lower precision."""


class Family(enum.Enum):
    """What a pass changes, which decides its place in the order and the clock that it is judged by."""

    REWRITE = "rewrite"
    """The graph's algebra. Judged on device time."""
    PLACEMENT = "placement"
    """Precision, memory format, algorithm choice. Judged on device time."""
    KERNEL = "kernel"
    """Operators that exist on this machine only and that compilers cannot see into. Judged on device time."""
    ENGINE = "engine"
    """Who runs the graph (TorchScript, inductor). Judged on latency, against the other engines."""
    LAUNCH = "launch"
    """How the program is launched (a captured CUDA graph). Judged on latency, on top of every engine."""


@dataclasses.dataclass(frozen=True)
class Declined:
    """One place that a pass looked at and left alone, and why."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Result:
    """What a pass did to a program.

    `rewrites` counts the places that were changed; with none, `program` is the one that came in. `replay`
    is the pass to put into the recipe: the pass itself, or a copy with what it measured written into its
    fields, so that a replay measures nothing. `hints` are findings worth reading although nothing changed.
    """

    program: Program
    rewrites: int
    declined: tuple[Declined, ...] = ()
    hints: tuple[str, ...] = ()
    replay: Pass | None = None

    @property
    def modified(self) -> bool:
        """Whether the pass changed anything."""
        return self.rewrites > 0


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """A transform of a program. Subclasses are frozen dataclasses whose fields are the pass's options.

    The pass manager owns copying, linting, verifying, timing and the decision; a pass only rewrites. It
    never changes the program that it is given: `graph.copy_of` makes the copy to work on.

    It carries provenance on (`ampopt.ir.origin`): every call and weight of the result comes from places of
    the model that the program knew before, and none that an output depended on is lost. The helpers of
    `graph` see to it.
    """

    numerics: ClassVar[Numerics]
    family: ClassVar[Family]
    portable: ClassVar[bool]
    """True: holds on every machine and belongs into an exported model."""
    shape_dependent: ClassVar[bool] = False
    """True: it judges by the example's sizes, so it is left out of a model that is exported for others."""
    enables_others: ClassVar[bool] = False
    """True: kept although it gains nothing, as long as it costs nothing, because later passes build on it."""

    @property
    def name(self) -> str:
        """The name that reports and the command line use: `FoldConvBn` is `fold-conv-bn`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def summary(self) -> str:
        """The first line of the pass's docstring."""
        return inspect.cleandoc(type(self).__doc__ or "").partition("\n")[0]

    def numerics_on(self, program: Program) -> Numerics:
        """How far the pass may move the outputs of this program."""
        return self.numerics

    def why_not(self, program: Program) -> str | None:
        """Why the pass cannot be applied to this program as a whole; None where it can."""
        return None

    def expected_seconds(self, program: Program) -> float:
        """About how long `apply` will take; it is not begun where the time budget has no room for it."""
        return 0.0

    def within(self, seconds: float) -> Pass:
        """The pass as it is to be applied where so many seconds are left of the time budget."""
        return self

    @abc.abstractmethod
    def apply(self, program: Program) -> Result:
        """Apply the pass where it holds; say where it does not."""


@dataclasses.dataclass(frozen=True)
class Engine(Pass):
    """A pass that says who runs the graph: a compiler, a runtime. It leaves the graph itself as it is.

    `apply` gives `program.replace(engine=...)`: a callable from the program's flat inputs to its outputs. It
    may have a shorter way for calls of one tensor, see `ampopt.engines.quick_call.HasQuickCall`.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.ENGINE
    portable = False

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages, by the names that they are imported by, without which the engine is declined; what it finds
    is kept under their versions."""
    extra: ClassVar[str | None] = None
    """The extra of ampopt that brings them."""
    risky: ClassVar[bool] = False
    """True: a foreign compiler that could take the process down, so it is rehearsed in another one first."""
    slow_to_apply: ClassVar[bool] = False
    """True: takes seconds to minutes; a new input shape at work does not wait for it."""

    def why_not(self, program: Program) -> str | None:
        """A package that is not there; autocast, which no engine sees: casts have to be written down."""
        for name in self.packages:
            if importlib.util.find_spec(name) is None:
                wanted = f"'ampopt[{self.extra}]'" if self.extra else name
                return f"{name} is not installed: run  pip install {wanted}"
        return "it still runs under autocast" if program.under_autocast else None

    def hurried(self) -> Engine:
        """The engine as it is applied where less time is left than it expects to take."""
        return self

    def apply_beside(self, program: Program, rehearsed: Callable[[], object]) -> Result:
        """Apply a risky engine while it is rehearsed; `rehearsed` waits for that, and raises where it failed.

        What can take the process down comes after it. By default everything does.
        """
        rehearsed()
        return self.apply(program)


def is_slow(step: Pass) -> bool:
    """Whether a new input shape at work does not wait for a pass."""
    return isinstance(step, Engine) and step.slow_to_apply


def replay(recipe: tuple[Pass, ...], program: Program) -> Program:
    """Apply the passes of a recipe, in order, to another capture of the same model.

    A pass that has nothing to do there is left out of the new program's recipe.
    """
    for step in recipe:
        if step.why_not(program) is None and (result := step.apply(program)).modified:
            program = result.program.replace(recipe=(*program.recipe, result.replay or step))
    return program


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make a program for inputs not seen yet: the lane, and the passes kept in it."""

    lane: Lane
    passes: tuple[Pass, ...]
    tolerance: float | None = None
    metric: Callable[[Any, Any], float] | None = None
    faults: Literal["keep", "exact", "ignore"] = "keep"
    """What has to become of NaN and infinities, see `ampopt.measure.verify.Faults`."""
