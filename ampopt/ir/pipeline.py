"""Pipelines: the passes to try, and their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from ampopt.errors import InputError, near
from ampopt.ir.transform import Engine, Family, Pass


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Passes in the order in which they are tried; iterating over it gives all of them.

    `rewrites` change the program, one after another. `engines` are alternatives that run the rewritten graph.
    `launches` are applied on top of every engine. A pass's family decides which of these it belongs to. Each
    name occurs once. Raises InputError for a pass in the wrong group and for a repeated name.
    """

    rewrites: tuple[Pass, ...] = ()
    engines: tuple[Engine, ...] = ()
    launches: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for group in _GROUPS:
            for step in getattr(self, group):
                if not isinstance(step, Pass):
                    raise InputError(f"passes: {step!r} is no pass: give an instance, as FoldConvBn()")
                if _group_of(step) != group:
                    raise InputError(
                        f"{step.name} belongs to the pipeline's {_group_of(step)}, not its {group}"
                    )
                if group == "engines" and not isinstance(step, Engine):
                    raise InputError(f"{step.name} is an engine: let its class be one of ampopt.Engine")
                if step.name in seen:
                    raise InputError(f"there are two passes named {step.name}: a pipeline holds a name once")
                seen.add(step.name)

    @classmethod
    def of(cls, passes: Iterable[Pass]) -> Pipeline:
        """A pipeline of exactly these passes, in this order."""
        groups: dict[str, list[Pass]] = {group: [] for group in _GROUPS}
        for step in passes:
            if not isinstance(step, Pass):
                raise InputError(f"passes: {step!r} is no pass: give an instance, as FoldConvBn()")
            groups[_group_of(step)].append(step)
        return cls(**{group: tuple(steps) for group, steps in groups.items()})  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Pass]:
        return iter((*self.rewrites, *self.engines, *self.launches))

    def __getitem__(self, name: str) -> Pass:
        """The pass with this name. Raises InputError if there is none."""
        for step in self:
            if step.name == name:
                return step
        names = sorted(step.name for step in self)
        has = f"{', '.join(names) or 'none'}{near([name], names)}"
        raise InputError(f"there is no pass {name} in this pipeline: it has {has}")

    def without(self, *names: str) -> Pipeline:
        """The pipeline without the passes of these names. Raises InputError for an unknown name."""
        left_out = [self[name] for name in names]
        return Pipeline.of(step for step in self if step not in left_out)

    def before(self, name: str, *passes: Pass) -> Pipeline:
        """The pipeline with more passes directly before the named one.

        Raises InputError for an unknown name.
        """
        return self._with(name, passes, after=False)

    def after(self, name: str, *passes: Pass) -> Pipeline:
        """The pipeline with more passes directly after the named one.

        Raises InputError for an unknown name.
        """
        return self._with(name, passes, after=True)

    def _with(self, name: str, passes: tuple[Pass, ...], *, after: bool) -> Pipeline:
        group = _group_of(self[name])
        steps: list[Any] = list(getattr(self, group))
        place = steps.index(self[name]) + after
        return dataclasses.replace(self, **{group: (*steps[:place], *passes, *steps[place:])})


_GROUPS = ("rewrites", "engines", "launches")


def _group_of(step: Pass) -> str:
    return {Family.ENGINE: "engines", Family.LAUNCH: "launches"}.get(step.family, "rewrites")
