"""Finds the fewest operators of a graph that have to stay in FP32 for a mixed lane's program to be right."""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ampopt.errors import first_line
from ampopt.ir.baking import Kept, bake
from ampopt.ir.beside import Seen, contributions, observe
from ampopt.ir.casting import is_product
from ampopt.ir.graph import calls, where
from ampopt.ir.judged import Judge
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.stretches import in_range, is_low, stretches
from ampopt.system.interrupts import check_interrupted

TRIALS = 8
"""The most programs of one bisection that are made and verified."""

NEAR_ENOUGH = 0.1
"""A bisection ends within this share of the number that it has found."""

LOOKING = 4.0
"""How many times longer it takes to observe one input than a program's check and a call in float64 do."""

RANKING = 2.0
"""How many times longer `contributions` takes than `observe`: about ten runs, for three that are measured."""

SAFE = 0.8
"""The first guess aims at this share of the limit."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Operators that stay in FP32, by name, in the graph's order; those whose results are cast back; and why.

    `for_range_alone`: none of them stays for its precision.
    """

    names: tuple[str, ...]
    back: tuple[str, ...]
    reasons: tuple[str, ...]
    for_range_alone: bool


class PrecisionSearch:
    """The search for one program that runs under autocast; see `passes/keep_fp32.py` for what it costs."""

    def __init__(self, program: Program, policy: str, judge: Judge, most: float) -> None:
        """`most` is the largest share of the lane's matrix products and convolutions that may stay."""
        self._program, self._policy, self._judge, self._most = program, policy, judge, most
        self._dtype = program.lane.dtype
        self._nodes = {node.name: node for node in calls(program.graph)}
        self._seen: Mapping[str, Seen] = {}
        self._shares: Mapping[str, float] = {}
        self._looking_s = 0.0
        """Seconds in which one input was observed."""
        self.last: Check | None = None
        """The last program's check: why a search that finds nothing ends."""
        self.is_right_without = False
        """Whether no operator has to stay."""
        self.had_no_time = False
        """Whether the last search ended before it looked at anything."""

    def find(self, *, spare: float = 1.0) -> Found | str:
        """The operators that stay, of a program that the judge has passed; or why none are to be found.

        `spare`: how many times the time for looking there has to be.
        """
        plain, _ = bake(self._program, self._policy)
        began = time.perf_counter()
        self.last = self._judge.check(plain)
        if self.last.passed:
            self.is_right_without = True
            return "it is right with every operator in the lane's precision"
        looking_s = LOOKING * (time.perf_counter() - began + self._judge.exact_s)
        self.had_no_time = not self._judge.has_time(spare * looking_s)
        if self.had_no_time:
            return f"{self.last.reason}; there is no time to look for the operators that make it so"
        try:
            self._seen = self._observed(plain)
        except Exception as error:
            check_interrupted(error)
            return self._find_in_order(first_line(error))
        found = self._candidate(())
        if too_many := self._too_many(found):
            return too_many
        if found.names and self._is_right(found):
            return found
        return self._find_in_rank(plain)

    def _observed(self, plain: Program) -> dict[str, Seen]:
        """What each call gives, on as many of the judge's inputs as there is time for."""
        seen: dict[str, Seen] = {}
        for tensors in self._judge.calls:
            if seen and not self._judge.has_time(self._looking_s):
                break
            began = time.perf_counter()
            for name, found in observe(plain, [tensors]).items():
                seen[name] = found.joined(seen.get(name, Seen()))
            self._looking_s = time.perf_counter() - began
        return seen

    def _contributions(self, plain: Program) -> dict[str, float]:
        """How much each call contributes to the outputs' error; of fewer calls where there is little time."""
        shares: dict[str, float] = {}
        for tensors in (self._judge.calls[0], *self._judge.calls[1:][-1:]):
            if not self._judge.has_time(RANKING * self._looking_s):
                break
            for name, share in contributions(plain, [tensors]).items():
                shares[name] = max(share, shares.get(name, 0.0))
        return shares

    def _find_in_rank(self, plain: Program) -> Found | str:
        """Keep those that make most of the outputs' error, as few as are enough."""
        error = self.last.error if self.last else math.inf
        kept = {*self._candidate(()).names}
        inexact = [n for n, s in self._seen.items() if n in self._nodes and n not in kept and s.error > 0]
        inexact = [name for name in inexact if is_low(self._seen[name], self._dtype)]
        try:
            shares = self._contributions(plain)
        except Exception as refused:
            check_interrupted(refused)
            shares = {}  # each operator's own error has to do
        self._shares = shares
        ranked = sorted(
            inexact, key=lambda name: (shares.get(name, 0.0), self._seen[name].error), reverse=True
        )
        limit = self.last.limit if self.last else math.inf
        guess = _guess([shares.get(name, 0.0) for name in ranked], error, limit)
        return self._fewest(ranked, guess)

    def _fewest(self, ranked: Sequence[str], guess: int) -> Found | str:
        """The fewest of the first ones that make it right: upwards from a guess, then by bisection.

        The guess is always tried: to rank has taken longer.
        """

        def too_many(count: int) -> bool:
            return self._too_many(self._candidate(ranked[:count])) is not None

        most = bisect.bisect_left(range(len(ranked) + 1), True, key=too_many) - 1
        wrong, right, best = 0, most + 1, None
        count = min(max(guess, 1), most)
        for trial in range(TRIALS):
            if count == wrong or (trial and not self._judge.has_time()):
                break
            if self._is_right(found := self._candidate(ranked[:count])):
                right, best = count, found
            else:
                wrong = count
            if right - wrong <= max(1, int(NEAR_ENOUGH * wrong)):
                break
            between = max(wrong + 1, round(math.sqrt(max(wrong, 1) * right)))
            count = min(2 * count, most) if best is None else min(between, right - 1)
        if best is not None:
            return best
        reason = (self.last.reason if self.last else "") or ""
        reason += "" if self._judge.has_time() else "; the time to look for more was over"
        more = self._too_many(self._candidate(ranked[: most + 1])) if most < len(ranked) else None
        kept = f"with {wrong} of {len(ranked)} operators in FP32 for their precision: {reason}"
        return f"{kept}; with more, {more}" if more else kept

    def _find_in_order(self, why: str) -> Found | str:
        """Keep a part of the graph, whose ends bisection finds, where no values can be compared."""
        names = list(self._nodes)

        def part(first: int, end: int) -> Found:
            chosen = tuple(names[first:end])
            return Found(chosen, (), (f"{len(chosen)} operators, found by bisection: {why}",), False)

        if not self._is_right(part(0, len(names))):
            reason = self.last.reason if self.last else why
            return f"it is wrong with every operator in FP32, too: {reason}"
        end = self._bisect(0, len(names), lambda place: part(0, place))
        first = self._bisect(end, 0, lambda place: part(place, end))
        return part(first, end)

    def _bisect(self, wrong: int, right: int, part: Callable[[int], Found]) -> int:
        """The place nearest to `wrong` that is known to be right; `right` is."""
        for _ in range(TRIALS):
            if abs(right - wrong) <= 1 or not self._judge.has_time():
                break
            middle = (wrong + right) // 2
            if self._is_right(part(middle)):
                right = middle
            else:
                wrong = middle
        return right

    def _candidate(self, precise: Sequence[str]) -> Found:
        """The operators that overflow, and these, with what has to follow them."""
        found = stretches(self._program.graph, self._seen, self._dtype, self._policy, precise)
        names = [name for name in self._nodes if name in found.for_range or name in found.precise]
        reasons = [self._why(name, name in found.for_range) for name in names]
        back = [name for name in self._nodes if name in found.back]
        return Found(tuple(names), tuple(back), tuple(reasons), not precise)

    def _is_right(self, found: Found) -> bool:
        """Whether the program with these operators in FP32 can be made, and is right."""
        kept = Kept(dict.fromkeys(found.names, torch.float32), frozenset(found.back))
        try:
            program, _ = bake(self._program, self._policy, kept)
            self.last = self._judge.check(program)
        except Exception as error:
            check_interrupted(error)
            limit = self.last.limit if self.last else math.inf
            self.last = Check(math.inf, limit, f"it fails ({first_line(error)})")
        return self.last.passed

    def _too_many(self, found: Found) -> str | None:
        """Why so many operators may not stay: hardly any work would be left for the lane's dtype."""
        low = {name for name, seen in self._seen.items() if name in self._nodes and is_low(seen, self._dtype)}
        work = {name for name in low if is_product(self._nodes[name])} or low
        stay = [name for name in found.names if name in work]
        if len(stay) <= self._most * len(work):
            return None
        what = "matrix products and convolutions" if is_product(self._nodes[stay[0]]) else "operators"
        return f"{len(stay)} of its {len(work)} {what} would have to stay in FP32: {found.reasons[0]}"

    def _why(self, name: str, for_range: bool) -> str:
        place, seen = where(self._nodes[name]), self._seen[name]
        if not for_range:
            share = self._shares.get(name)
            what = "" if share is None else f", which changes the outputs by {share:.1e}"
            return f"{place} is too inexact: its error is {seen.error:.1e}{what}"
        largest, what = seen.largest, "largest"
        if in_range(seen.largest, self._dtype) and not in_range(seen.largest_read, self._dtype):
            largest, what = seen.largest_read, "it reads"
        verb = "overflows" if seen.overflows or largest > torch.finfo(self._dtype).max else "nearly overflows"
        return f"{place} {verb}: {what} {largest:,.0f}"


def _guess(shares: Sequence[float], error: float, limit: float) -> int:
    """How many of the first ones to keep so that the others' errors, if added at random, keep the limit."""
    squares = [share * share for share in shares]
    left = sum(squares)
    scale = (error * error / left) if left > 0 and math.isfinite(error) else 1.0
    for count, square in enumerate(squares):
        if left * scale <= (SAFE * limit) ** 2:
            return count
        left -= square
    return len(shares)
