"""Copies results of an engine that share memory, where those of its graph do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ampopt.ir.aliases import joined
from ampopt.ir.program import Program


class Apart:
    """An engine of whose results some are copied: it has computed equal ones once.

    `families` are the places of these; those of one family are views of one memory, as in the graph.
    """

    def __init__(self, engine: Callable[..., Any], families: Sequence[Sequence[int]]) -> None:
        self.engine, self.families = engine, tuple(map(tuple, families))

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results, each in memory of its own but for views of others in the graph."""
        return self.copied(self.engine(*tensors))

    def copied(self, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The engine's results, with copies in the places of some."""
        apart = list(results)
        for family in self.families:
            for place, copy in zip(family, _copies([results[place] for place in family]), strict=True):
                apart[place] = copy
        return tuple(apart)


def without_copies(engine: object) -> object:
    """What computes in an engine of a program."""
    return engine.engine if isinstance(engine, Apart) else engine


def with_results_apart(program: Program, engine: Callable[..., Any]) -> Callable[..., Any]:
    """The engine, made for a program without one, itself where it keeps apart what the program's graph does.

    It is run on the examples, and the graph where results of the engine share memory.
    """
    with program.scope():
        entered = [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]
        results = engine(*entered)
        if not (found := joined(results)):
            return engine
        own = joined(program.function(*entered))
    families, wrong = _families(len(results), found & own), list[list[int]]()
    for number, family in enumerate(families):
        before = [place for each in families[:number] for place in each]
        pairs = {(min(one, other), max(one, other)) for one in before for other in family}
        if not pairs.isdisjoint(found - own):
            wrong.append(family)
    return Apart(engine, wrong) if wrong else engine


def _families(count: int, pairs: set[tuple[int, int]]) -> list[list[int]]:
    """So many places, those together that pairs connect; the larger ones first, for they are dear to copy."""
    family = {place: [place] for place in range(count)}
    for one, other in sorted(pairs):
        if family[one] is not family[other]:
            family[one] += family[other]
            for place in family[other]:
                family[place] = family[one]
    once = {id(each): each for each in family.values()}
    return sorted(once.values(), key=len, reverse=True)


def _copies(views: Sequence[Tensor]) -> list[Tensor]:
    """Copies of views of one memory that share another one."""
    if len(views) == 1:
        return [views[0].clone()]
    count = views[0].untyped_storage().nbytes() // views[0].element_size()
    whole = views[0].as_strided((count,), (1,), 0).clone()
    return [
        whole.view(view.dtype).as_strided(view.size(), view.stride(), view.storage_offset()) for view in views
    ]
