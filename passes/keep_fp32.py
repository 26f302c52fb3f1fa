"""keep-fp32: where a mixed lane overflows or is too inexact, keep few operators in FP32."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch

from ampopt.engines.executable import executable
from ampopt.engines.graph_capture import ReplayedProgram
from ampopt.errors import AmpoptError, PassError
from ampopt.ir.baking import Kept, bake
from ampopt.ir.casting import POLICIES, is_product
from ampopt.ir.graph import calls
from ampopt.ir.judged import Judge, Judged
from ampopt.ir.pass_options import option
from ampopt.ir.precision_search import Found, PrecisionSearch
from ampopt.ir.program import Program
from ampopt.ir.transform import Declined, Family, Numerics, Result
from ampopt.measure.clocks import device_time, latency
from ampopt.measure.sampling import Gain, gain, interleave

SAMPLE_S = 0.3
"""Time in seconds to compare the dtypes of what stays."""

KINDS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
"""What the operators that stay compute in: TF32 is FP32 whose products round their inputs."""

BACK = "back"
"""The choice for an operator whose result is cast to the lane's dtype."""

ALL = "*"
"""The name of all operators in a choice."""

MANY = 0.1
"""From this share of the products on that would stay in FP32, all of them are tried in TF32, too.

An H200 has 67 TFLOPS in FP32, 494 in TF32 and 989 in float16 (NVIDIA's data sheet, dense). An untrained
DeepLabV3-ResNet-50 with 46 operators in FP32 was slower than its original in TF32.
"""

SPARE = 3.0
"""How many times its expected time a search has to have where TF32 may do instead."""


@dataclasses.dataclass(frozen=True)
class KeepFp32(Judged):
    """Write mixed precision into the graph, with few operators in FP32: `op(x, w)` -> `op(x, w)` in FP32.

    Rewrites: the graph gets the casts that `bake-autocast` would give it, except around operators that stay
    in FP32. These are (1) operators that overflow in the lane's dtype, or come within a factor of two of it,
    on values that are exact, on the examples or on ordinary draws; what follows them stays in FP32 until the
    values are in range again, and is cast back there; (2) if the program is still over its limit (a user's
    tolerance, mostly), the operators that make most of the outputs' error, as few as keep the limit. (1)
    alone may stay in TF32 or bfloat16 instead, where that is right and measured to be faster. If (3) there is
    no such mix, or no time to find it, or if many would stay and that is faster, everything stays in FP32,
    and products on a GPU round to TF32.
    Requires: a mixed lane that runs under autocast, and whose casts alone give a wrong program.
    Declines: lanes that are right without it; lanes in which more than `most` of the matrix products and
    convolutions would have to stay, or that are wrong even so, unless TF32 is there and right.
    Correct because: every operator computes what it did, in FP32 or as autocast would: each choice is a valid
    assignment of precisions. Which one is right is not proven but verified: every candidate against the model
    in float64, and the result again like any pass. Inputs far outside of the examples' range decide nothing
    here.
    Cost: operators that stay take FP32's time, and casts at their borders. To find them: three runs of the
    graph for each of the verification's inputs, twenty for the ranking, and at most `TRIALS` + 6 programs,
    each of which is made (4 runs) and verified; never one for each operator.

    `choices` holds pairs: an operator that stays, by name, and what it computes in; or one whose result is
    cast back, and "back". "*" is the name of all operators. A replay measures nothing.
    """

    numerics = Numerics.APPROXIMATE
    family = Family.PLACEMENT
    portable = False
    enables_others = True

    policy: str = "amp"
    choices: tuple[tuple[str, str], ...] | None = None
    most: float = option(0.9, 0.0, 1.0)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise PassError(f"unknown precision policy {self.policy!r}: choose from {', '.join(POLICIES)}")
        for name, what in self.choices or ():
            if what not in (*KINDS, BACK):
                raise PassError(f"{name} cannot be kept in {what!r}: choose from {', '.join((*KINDS, BACK))}")

    def why_not(self, program: Program) -> str | None:
        """Declines programs that do not run under autocast."""
        if program.under_autocast:
            return None
        if program.lane.is_mixed:
            return "the lane's precision is in the graph already, and right"
        return "the lane computes in FP32"

    def apply(self, program: Program) -> Result:
        """Use `choices`; without them the program's own graph in float64 judges the search."""
        return super().apply(program) if self.choices is None else self._as_chosen(program, self.choices)

    def apply_judged(self, program: Program, judge: Judge) -> Result:
        """Find the operators that stay, or use `choices`; see the class."""
        if self.choices is not None:
            return self._as_chosen(program, self.choices)
        search, bits = PrecisionSearch(program, self.policy, judge, self.most), _with_fewer_bits(program)
        found, wrong = search.find(spare=SPARE if bits else 1.0), ""
        if isinstance(found, str) and bits and not search.is_right_without and judge.has_time():
            made = self._all_in_tf32._program(program)
            if (reason := judge.check(made).reason) is None:
                return self._all_result(program, made, found)
            wrong = f"; all in TF32: {reason}"
            found = search.find() if search.had_no_time else found
        if isinstance(found, str):
            return Result(program, 0, (Declined("the program", f"{found}{wrong}"),))
        kinds = [*bits, *(_with_range(program) if found.for_range_alone else [])]
        others = {f"{kind} for them": self._with(found, kind) for kind in kinds}
        if bits and _are_many(found, program):
            others["tf32 for all"] = self._all_in_tf32
        chosen, made, compared = self._fastest(self._with(found, "fp32"), others, program, judge)
        if chosen == self._all_in_tf32:
            why = f"{len(found.names)} would have to stay; {compared[-1]}"
            return self._all_result(program, made, why, (*found.reasons, *compared[:-1]))
        return Result(made, len(found.names), hints=(*found.reasons, *compared), replay=chosen)

    @property
    def _all_in_tf32(self) -> KeepFp32:
        return dataclasses.replace(self, choices=((ALL, "tf32"),))

    def _all_result(self, program: Program, made: Program, why: str, more: Sequence[str] = ()) -> Result:
        hints = (f"all of them, with products in TF32 ({why})", *more)
        return Result(made, len(list(calls(program.graph))), hints=hints, replay=self._all_in_tf32)

    def _as_chosen(self, program: Program, choices: Sequence[tuple[str, str]]) -> Result:
        known = {node.name for node in calls(program.graph)}
        kept = [name for name, what in choices if what in KINDS]
        kept = [*known] if ALL in kept else kept
        gone = [Declined(name, "the graph has no such operator") for name in kept if name not in known]
        count = len(kept) - len(gone)
        return Result(self._program(program) if count else program, count, tuple(gone))

    def _program(self, program: Program) -> Program:
        choices = self.choices or ()
        dtypes = {name: KINDS[what] for name, what in choices if what in KINDS}
        if ALL in dtypes:
            dtypes = {node.name: dtypes[ALL] for node in calls(program.graph)}
        back = frozenset(name for name, what in choices if what == BACK)
        baked, _ = bake(program, self.policy, Kept(dtypes, back))
        if any(what == "tf32" for _, what in choices):
            baked = baked.replace(settings=dataclasses.replace(baked.settings, tf32=True))
        return baked

    def _fastest(
        self, best: KeepFp32, others: Mapping[str, KeepFp32], program: Program, judge: Judge
    ) -> tuple[KeepFp32, Program, list[str]]:
        """Of a right pass and others the fastest right one, its program, and a line on each of the others."""
        fastest, told = best._program(program), list[str]()
        for name, other in others.items():
            if not judge.has_time():
                break
            candidate = other._program(program)
            if (wrong := judge.check(candidate).reason) is not None:
                told.append(f"{name} is wrong: {wrong}")
                continue
            ratio = _compared(fastest, candidate)
            told.append(f"{name}: {ratio.ratio:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})")
            if ratio.is_real:
                best, fastest = other, candidate
        return best, fastest, told

    def in_fp32(self) -> KeepFp32:
        """The pass with everything that stays in FP32, whatever was faster here."""
        choices = self.choices and tuple(
            (name, what if what == BACK else "fp32") for name, what in self.choices
        )
        return dataclasses.replace(self, choices=choices)

    def _with(self, found: Found, kind: str) -> KeepFp32:
        choices = (*((name, kind) for name in found.names), *((name, BACK) for name in found.back))
        return dataclasses.replace(self, choices=choices)


def _are_many(found: Found, program: Program) -> bool:
    """Whether so much work stays in FP32 that TF32 for all of it may be faster."""
    products = {node.name for node in calls(program.graph) if is_product(node)}
    return len(products.intersection(found.names)) > MANY * len(products)


def _with_fewer_bits(program: Program) -> list[str]:
    """What products in FP32 can compute in with float16's bits, on the program's device."""
    is_new = program.device.type == "cuda" and torch.cuda.get_device_capability(program.device) >= (8, 0)
    return ["tf32"] if is_new else []


def _with_range(program: Program) -> list[str]:
    """What has FP32's range and is as short as the lane's dtype."""
    return ["bf16"] if program.lane.dtype is torch.float16 else []


def _compared(before: Program, after: Program) -> Gain:
    """How many times faster one program is than another: kernels alone on a GPU, whole calls elsewhere."""
    device = before.device
    programs = {"before": before, "after": after}
    if device.type == "cuda":
        with contextlib.suppress(AmpoptError):
            graphs = {name: ReplayedProgram(each) for name, each in programs.items()}
            timed = interleave(
                {name: device_time(g.replay, device) for name, g in graphs.items()}, seconds=SAMPLE_S
            )
            return gain(timed["before"], timed["after"])
    runs = {name: functools.partial(executable(each), *each.examples) for name, each in programs.items()}
    timed = interleave({name: latency(run, device) for name, run in runs.items()}, seconds=SAMPLE_S)
    return gain(timed["before"], timed["after"])
