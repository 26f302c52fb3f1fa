"""Whether operators that select by tensors raise exactly where those by numbers did, or a check of these.

An export states of a number what it has assumed, as `0 <= i` and `i < 4`, and the model may state more. The
numbers of a tensor that such conditions and places are computed from lie in ranges, in each of which a place
is one of those counted from the end, one from the beginning, or none. In each range every check has to be
known to pass, or one known to fail.

Correct because: these ranges are all numbers that the tensor may hold but those that old and new operators
refuse alike. In one where all checks pass, both take the place; in one where a check fails, so does a new
operator, which counts no places from the end if the old one did so for numbers that a check refused alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ampopt.ir.graph import arguments, aten
from ampopt.ir.integer_ranges import FAR, Range, both, lies_in, range_of, ranges_of, source_range

_LIMITS = (aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)

CHECKS = (aten._assert_scalar.default, *_LIMITS)
"""Calls without a result that raise where a number is not as it is stated."""

_MOST = 16
"""The most ranges that are looked at: each selection by one number cuts them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """A call that reads or writes `length` places of a tensor's dimension, from a number on."""

    node: fx.Node
    start: fx.Node
    dim: int
    size: Any
    """How many places there are; a symbol where that varies."""
    length: int
    is_one: bool
    """Whether the dimension is gone in the result."""
    wraps: bool
    """Whether it counts negative places from the end, and raises for those out of range; others clamp."""
    may_wrap: bool = False
    """Whether its form with tensors has to count from the end, too."""

    @property
    def taken(self) -> list[Range]:
        """The first places that both forms take, counted from the end and from the beginning."""
        last = self.size - self.length
        return [*([(-self.size, -self.length)] if self.wraps else []), (0, last)]

    @property
    def clamped(self) -> list[Range]:
        """The first places of which a slice has fewer, and that its form with tensors refuses."""
        return [] if self.wraps else [(-FAR, -1), (self.size - self.length + 1, FAR)]


def decided(
    numbers: Sequence[fx.Node],
    selections: Sequence[Selection],
    items: Mapping[fx.Node, Range],
    needed: Collection[fx.Node],
) -> list[Selection] | None:
    """The selections, with how their forms count, if these make the checks superfluous; None if not.

    `numbers`: all that is computed from the numbers of tensors, in order, with checks and selections.
    `items`: what these numbers may be. `needed`: what is sure to be computed, so that what it refuses is an
    error.
    """
    sources = _sources(numbers)
    checks = [node for node in numbers if node.target in CHECKS]
    refusing = [each for each in selections if each.node in needed]
    whole = ranges_of(numbers, items)
    passing, failing = dict[fx.Node, list[_Known]](), list[_Known]()
    for item in items:
        about = [each for each in refusing if sources[each.start] == {item}]
        passing[item] = []
        for part in _ranges(item, items[item], about):
            known = ranges_of(numbers, {item: part})
            verdicts = [_verdict(check, known) for check in checks if sources[check] == {item}]
            if all(verdict == (1, 1) for verdict in verdicts):
                passing[item].append(known)
            elif (0, 0) in verdicts:
                failing.append(known)
            else:
                return None
    apart = [check for check in checks if len(sources[check]) != 1 or not sources[check] <= items.keys()]
    if not all(_verdict(check, whole) == (1, 1) for check in apart):
        return None
    forms = list[Selection]()
    for each in selections:
        one = next(iter(sources[each.start])) if len(sources[each.start]) == 1 else None
        starts = [case[each.start] for case in (passing[one] if one is not None else [whole])]
        if not each.wraps and not all(lies_in(start, each.taken[0]) for start in starts):
            return None
        may_wrap = each.wraps and not all(lies_in(start, (0, FAR)) for start in starts)
        forms.append(dataclasses.replace(each, may_wrap=may_wrap))
    sure = [form for form in forms if form.node in needed]
    return forms if all(_is_refused(known, sure) for known in failing) else None


_Known = dict[fx.Node, Range | None]


def _ranges(item: fx.Node, whole: Range, about: Sequence[Selection]) -> list[Range]:
    """What a number may be, in ranges in each of which a place is of one kind, but for what all forms refuse.

    `about`: selections at places that are computed from it alone. After `_MOST` ranges they are as they are:
    then one may hold places of several kinds.
    """
    found = [whole]
    for each in about:
        if not isinstance(each.size, int) or len(found) > _MOST:
            continue
        cuts = [source_range(each.start, item, part) for part in (*each.taken, *each.clamped)]
        parts = [both(one, cut) for one in found for cut in cuts if cut is not None]
        if None not in cuts:
            found = [part for part in parts if part[0] <= part[1]]
    return found


def _is_refused(known: _Known, forms: Sequence[Selection]) -> bool:
    """Whether a form refuses all numbers that are so."""
    for form in forms:
        from_the_end = [(-FAR, -1)] if form.wraps and not form.may_wrap else []
        if any(lies_in(known[form.start], part) for part in (*form.clamped, *from_the_end)):
            return True
    return False


def _verdict(check: fx.Node, known: _Known) -> Range | None:
    """Whether a check passes: (1, 1) for always, (0, 0) for never."""
    if check.target not in _LIMITS:
        return range_of(check.args[0], known)
    own = arguments(check)
    least = 0 if check.target is aten.sym_constrain_range_for_size.default else -FAR
    low, high = (own["min"] if own["min"] is not None else least), own["max"]
    allowed = low, FAR if high is None else high
    if (number := range_of(own["size"], known)) is None or lies_in(number, allowed):
        return None if number is None else (1, 1)
    least, most = both(number, allowed)
    return (0, 0) if least > most else None


def _sources(numbers: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """The numbers of tensors, and places in memory, that each number or check is computed from."""
    found = dict[fx.Node, set[fx.Node]]()
    for node in numbers:
        given = [found[each] for each in node.all_input_nodes if each in found and not _is_tensor(each)]
        found[node] = set().union(*given) if given else {node}
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
