"""The base classes of passes: `Pass`, `Engine`, their results, and recipes."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from ampopt.errors import PassError
from ampopt.ir.kept_program import is_of_another_package, with_program_kept
from ampopt.ir.lanes import Lane
from ampopt.ir.pass_answers import Allowed, is_list_of, is_text, is_time, with_answer_checked
from ampopt.ir.program import Program


class Numerics(enum.Enum):
    """The largest change that a pass may make to outputs; it decides how the pass is verified."""

    BITWISE = "bitwise"
    """All bits of every output stay the same."""
    REASSOCIATED = "reassociated"
    """The same function over real numbers, with another rounding."""
    APPROXIMATE = "approximate"
    """Computes in lower precision."""


class Family(enum.Enum):
    """What a pass changes; it decides the pass's position in the pipeline and the clock that judges it."""

    REWRITE = "rewrite"
    """The graph's algebra. Judged on device time."""
    PLACEMENT = "placement"
    """Precision, memory format, algorithm choice. Judged on device time."""
    KERNEL = "kernel"
    """Operators that exist on this machine only and that compilers cannot see into. Judged on device time."""
    ENGINE = "engine"
    """The engine that runs the graph (TorchScript, inductor).

    Judged on latency, against the other engines.
    """
    LAUNCH = "launch"
    """How the program is launched (a captured CUDA graph). Judged on latency, on top of every engine."""


@dataclasses.dataclass(frozen=True)
class Declined:
    """A node that a pass examined and did not change, with the reason."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of applying a pass to a program.

    `rewrites` counts the places that were changed; with none, `program` is the one that came in. `replay` is
    the pass to put into the recipe: the pass itself, or a copy with what it measured written into its fields,
    so that a replay measures nothing. `hints` are findings for the report even if nothing changed.
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


_WAYS_TO_APPLY = ("apply", "apply_beside", "apply_judged")
"""The methods of passes, engines and passes that search which make a program of another."""


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """A transform of a program. Subclasses are frozen dataclasses whose fields are the pass's options.

    The pass manager copies, checks, verifies, times and decides; a pass only rewrites. It never changes the
    program that it is given: `graph.copy_of` makes the copy to work on.

    It keeps provenance (`ampopt.ir.origin`): every call and weight of the result has origins that the program
    had before, and no origin that an output depended on is lost. The helpers of `graph` do this.
    """

    numerics: ClassVar[Numerics]
    family: ClassVar[Family]
    portable: ClassVar[bool]
    """True: valid on every machine, so that the pass is applied to exported models."""
    shape_dependent: ClassVar[bool] = False
    """True: it depends on the example's sizes, so that it is left out of programs for a range of sizes."""
    enables_others: ClassVar[bool] = False
    """True: kept without a gain, unless it is slower, because later passes build on it."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let no pass of another package change the program that it is given, see `with_program_kept`.

        Nor may it answer what its callers cannot use, see `with_answer_checked`.
        """
        super().__init_subclass__(**options)
        if not is_of_another_package(cls):
            return
        for name in _WAYS_TO_APPLY:
            if (own := cls._own_or_of_a_mixin(name)) is not None:
                setattr(cls, name, with_program_kept(own))
        for name, allowed in (_ANSWERS | (_ANSWERS_OF_ENGINES if issubclass(cls, Engine) else {})).items():
            if (own := cls._own_or_of_a_mixin(name)) is not None:
                setattr(cls, name, with_answer_checked(name, own, allowed))

    @classmethod
    def _own_or_of_a_mixin(cls, name: str) -> Any:
        owner = next((kind for kind in cls.__mro__ if name in vars(kind)), None)
        is_own = owner is not None and (owner is cls or not issubclass(owner, Pass))
        return vars(owner)[name] if is_own else None

    @property
    def name(self) -> str:
        """The name in reports and on the command line: `FoldConvBn` is `fold-conv-bn`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    @property
    def summary(self) -> str:
        """The first line of the pass's docstring."""
        return inspect.cleandoc(type(self).__doc__ or "").partition("\n")[0]

    def numerics_on(self, program: Program) -> Numerics:
        """The largest change that the pass may make to the outputs of this program."""
        return self.numerics

    def why_not(self, program: Program) -> str | None:
        """Why the pass cannot be applied to this program at all; None if it can."""
        return None

    def expected_seconds(self, program: Program) -> float:
        """Estimated time of `apply` in seconds; the pass is skipped if the time budget has less left."""
        return 0.0

    def within(self, seconds: float) -> Pass:
        """The pass to apply when this many seconds of the time budget are left."""
        return self

    def preparations(self, program: Program, count: int) -> Sequence[Callable[[], object]]:
        """Up to `count` functions that other processes call ahead of `apply`, which finds what they made.

        They can be pickled, need nothing of this process, and leave what they make in caches on disk.
        """
        return ()

    def prepared(self) -> Pass:
        """The pass to apply where other processes had time for its `preparations`."""
        return self

    @abc.abstractmethod
    def apply(self, program: Program) -> Result:
        """Rewrite every place where the pass is valid, and list the places that it declines."""


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What came of applying an engine in another process first.

    `why_not`: why that was not possible. `sent`: what the engine's `send` gave there, for each of those that
    its `divided` gave for `count` processes.
    """

    why_not: str | None = None
    sent: tuple[dict[str, Any] | None, ...] = ()
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Engine(Pass):
    """A pass that selects a compiler or runtime to run the graph. It does not change the graph.

    `apply` returns `program.replace(engine=...)`: a callable from the program's flat inputs to its outputs.
    It may have a fast path for calls of one tensor, see `ampopt.engines.quick_call.HasQuickCall`.
    """

    numerics = Numerics.REASSOCIATED
    family = Family.ENGINE
    portable = False
    shape_dependent = True

    packages: ClassVar[tuple[str, ...]] = ()
    """Import names of the packages that the engine needs.

    Without them the engine is declined; results are cached by their versions.
    """
    extra: ClassVar[str | None] = None
    """The extra of ampopt that installs them."""
    risky: ClassVar[bool] = False
    """True: a third-party compiler that could crash the process; another process rehearses it first."""
    risky_on_cuda: ClassVar[bool] = False
    """True: kernels that it compiles could leave a GPU unusable; there another process runs it first."""
    slow_to_apply: ClassVar[bool] = False
    """True: applying takes seconds to minutes, so that it is left out for new shapes during calls."""

    def why_not(self, program: Program) -> str | None:
        """Why the engine cannot run: a missing package, or autocast, whose casts engines do not see."""
        for name in self.packages:
            if importlib.util.find_spec(name) is None:
                wanted = f"'ampopt[{self.extra}]'" if self.extra else name
                return f"{name} is not installed: run  pip install {wanted}"
        return "it still runs under autocast" if program.under_autocast else None

    def hurried(self) -> Engine:
        """The engine to apply when less time is left than it expects to need."""
        return self

    def divided(self, program: Program, count: int) -> Sequence[Program]:
        """Up to `count` programs that may be rehearsed at once in place of a program: by default itself.

        What the engine makes of them, one after the other, is what it makes of the program. The same count
        gives the same ones.
        """
        return [program]

    def undivided(self) -> Engine:
        """The engine that takes each of what `divided` gave as a whole."""
        return self

    def send(self, program: Program) -> dict[str, Any] | None:
        """What lets another process make the engine of this program sooner: tensors and plain values by name.

        None: nothing does.
        """
        return None

    def apply_beside(self, program: Program, rehearsed: Callable[[], Rehearsed]) -> Result:
        """Apply a risky engine during its rehearsal; `rehearsed` waits for it, and raises if it failed.

        Steps that could crash the process must come after `rehearsed()`. By default all steps do.
        """
        rehearsed()
        return self.apply(program)


def is_slow(step: Pass) -> bool:
    """Whether a pass is left out for new input shapes during calls."""
    return isinstance(step, Engine) and step.slow_to_apply


@contextlib.contextmanager
def exits_failed() -> Iterator[None]:
    """Raise PassError where a pass ends Python in the block, or the decorated function: it fails alone."""
    try:
        yield
    except SystemExit as error:
        raise PassError(f"the pass ends Python (SystemExit: {error}): let it raise an error") from error


def outcome(program: Program, apply: Callable[[Program], Result]) -> Result:
    """What `apply`, a pass's own way to be applied, makes of a program, where it is what a pass may give.

    Raises PassError for what is no Result, for one with a field that is something else than it has to be, or
    whose count contradicts its program.
    """
    result = apply(program)
    _RESULT.check("the pass returned", result)
    for name, allowed in _FIELDS.items():
        allowed.check(f"the pass returned a Result whose {name} is", getattr(result, name))
    for name in ("lane", "device", "sizes"):
        if (given := getattr(result.program, name)) != getattr(program, name):
            raise PassError(f"the pass returned a program with {name}={given!r}: let it keep that as it is")
    if not result.modified and result.program is not program:
        raise PassError(
            "the pass returned another program, and counts no rewrites: let it count what it changed"
        )
    if result.modified and result.program is program:
        raise PassError(
            f"the pass returned the program that it was given, with rewrites={result.rewrites}: let it "
            "return what it changed, or count none"
        )
    return result


_RESULT = Allowed(lambda given: isinstance(given, Result), "Result(program, rewrites)")

_FIELDS = {
    "program": Allowed(lambda given: isinstance(given, Program), "Result(program, rewrites)"),
    "rewrites": Allowed(
        lambda given: isinstance(given, int) and not isinstance(given, bool) and given >= 0,
        "their number, an int from 0 on",
    ),
    "declined": Allowed(
        is_list_of(Declined, "node", "reason"), "a tuple of Declined, each of the name of a node and a text"
    ),
    "hints": Allowed(is_list_of(str), "a tuple of texts"),
    "replay": Allowed(lambda given: given is None or isinstance(given, Pass), "a pass, or None"),
}
"""What the fields of a Result may be."""

_A_PASS = Allowed(lambda given: isinstance(given, Pass), "a pass, such as `self`")
_AN_ENGINE = Allowed(lambda given: isinstance(given, Engine), "an engine, such as `self`")

_ANSWERS = {
    "why_not": Allowed(
        lambda given: given is None or is_text(given), "the reason as a text, or None where there is none"
    ),
    "expected_seconds": Allowed(is_time, "a finite number of seconds, 0 or more"),
    "within": _A_PASS,
    "prepared": _A_PASS,
    "preparations": Allowed(
        lambda given: isinstance(given, Sequence) and all(map(callable, given)), "a list of functions"
    ),
    "numerics_on": Allowed(lambda given: isinstance(given, Numerics), "one of Numerics"),
}
"""What the methods of passes may answer."""

_ANSWERS_OF_ENGINES = {
    "hurried": _AN_ENGINE,
    "undivided": _AN_ENGINE,
    "divided": Allowed(
        lambda given: is_list_of(Program)(given) and len(given) > 0, "a list of one program or more"
    ),
    "send": Allowed(lambda given: given is None or isinstance(given, dict), "a dict, or None"),
}
"""What further methods of engines may answer."""


Applied = dict[tuple[Lane, tuple["Pass", ...], "Pass"], Result]
"""The results of passes on programs of one capture, by the programs' lanes and recipes."""


@exits_failed()
def replay(recipe: tuple[Pass, ...], program: Program, applied: Applied | None = None) -> Program:
    """Apply the passes of a recipe, in order, to another capture of the same model.

    A pass that changes nothing there is left out of the new program's recipe. `applied` gets all results.
    """
    for step in recipe:
        if step.why_not(program) is not None:
            continue
        result = outcome(program, step.apply)
        if applied is not None:
            applied[program.lane, program.recipe, step] = result
        if result.modified:
            program = result.program.replace(recipe=(*program.recipe, result.replay or step))
    return program


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make programs for new inputs: the lane, and the passes that were kept in it."""

    lane: Lane
    passes: tuple[Pass, ...]
    tolerance: float | None = None
    metric: Callable[[Any, Any], float] | None = None
    faults: Literal["keep", "exact", "ignore"] = "keep"
    """How NaN and infinities must propagate, see `ampopt.measure.fault_check.Faults`."""
