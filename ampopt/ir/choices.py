"""Choices by values: operators that tell the places of the largest, seen in one run and followed in another.

A lane rounds what is compared, so among values that are nearly alike it takes other places than float64 does:
the 300 best of 8,400 queries, the neighbours of a point. What is computed from other places is another
result, which no error of the first tells anything about. A run that makes the same choices is its reference,
where these are as good: see `measure.followed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ampopt.ir.choice_keys import KINDS, Key
from ampopt.ir.choice_roundings import Roundings
from ampopt.ir.eager_mode import EagerMode
from ampopt.ir.numerics import relative_error

_FIRST_OF_EQUAL = {"stable sort", "max", "min"}
"""Of equal values these take the first, as PyTorch documents; the order of others is open."""

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One call of an operator that tells places.

    `places` are int64 [..., chosen] and `rows` the values [..., values] that they were chosen from, with that
    dimension last; `rows` is None where they were not kept.
    """

    key: Key
    places: Tensor
    rows: Tensor | None = None


_kept: ContextVar[dict[int, Any] | None] = ContextVar("kept", default=None)


@contextlib.contextmanager
def kept_to_tell() -> Iterator[None]:
    """Within the block, what engines make to tell their choices is kept, and freed at its end."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def made_to_tell(owner: object, make: Callable[[], T]) -> T:
    """What an engine tells its choices by: made now, or, within `kept_to_tell`, for the same owner before."""
    kept = _kept.get()
    if kept is None:
        return make()
    if id(owner) not in kept:
        kept[id(owner)] = owner, make()  # the owner lives as long, so that no other has its identity
    made: T = kept[id(owner)][1]
    return made


_watching: ContextVar[SeenChoices | None] = ContextVar("watching", default=None)


class SeenChoices(EagerMode):
    """A mode that writes down the choices of what runs in it, in their order: `seen`.

    `with_rows`: with the values that they were made from. Of compiled code what it calls is seen, as
    PyTorch's own `topk`, and what it computes itself is not. An engine that is no code of PyTorch's asks who
    is `watching`, and adds its own.
    """

    def __init__(self, *, with_rows: bool = False) -> None:
        super().__init__()
        self.seen: list[Choice] = []
        self._with_rows = with_rows

    @staticmethod
    def watching() -> SeenChoices | None:
        """The innermost such mode in this thread."""
        return _watching.get()

    def add(self, told: Callable[[], Sequence[Choice]]) -> None:
        """Add what an engine tells; what runs for that is not seen."""
        with _disable_current_modes():
            self.seen += told()

    def __enter__(self) -> Self:
        self._before = _watching.set(self)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _watching.reset(self._before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, and write down what it chooses."""
        result = func(*args, **(kwargs or {}))
        if (call := _Call.of(func, args, kwargs or {})) is not None:
            rows = call.rows.detach().clone() if self._with_rows else None
            self.seen.append(Choice(call.key, call.places(result).clone(), rows))
        return result


@dataclasses.dataclass(frozen=True)
class Follow:
    """A choice that was followed: the values that it took, and those of the choice that was made here.

    `values` and `own` have the shape [..., chosen] and the dtype of the run. `roundings` are the differences
    between both runs of the values that one of them has chosen, and `theirs` those that the other has taken;
    None where the other's were not kept. `is_valid`: places are in range, each of an order is there once, and
    of equal values the first is taken where PyTorch says so. `number` is that of the choice among all of this
    run, `among` that among those with the same key.
    """

    number: int
    among: int
    key: Key
    values: Tensor
    own: Tensor
    roundings: Roundings | None
    theirs: Tensor | None
    places: Tensor
    own_places: Tensor
    is_valid: bool

    @property
    def moved(self) -> int:
        """The number of ranks whose place is another one."""
        return int((self.own_places != self.places).sum())

    @property
    def others(self) -> int:
        """The number of places that are taken, and would not be here."""
        mine, its = (each.contiguous().sort(dim=-1).values for each in (self.own_places, self.places))
        at = torch.searchsorted(mine, its).clamp(max=mine.shape[-1] - 1)
        return int((mine.gather(-1, at) != its).sum())

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Its values and those of the choice here, each beside that of the same rank."""
        return self._ranked(self.values), self._ranked(self.own)

    @property
    def error(self) -> float:
        """The larger relative error of what was taken: of the values here, and of those the other saw."""
        seen = [self.values, *([] if self.theirs is None else [self.theirs])]
        return max(relative_error(self._ranked(each), self._ranked(self.own)) for each in seen)

    def _ranked(self, values: Tensor) -> Tensor:
        is_in_order = self.key.kind != "topk" or bool(self.key.sorted)
        return values if is_in_order else values.sort(dim=-1).values


class FollowedChoices(EagerMode):
    """A mode in which the choices of another run are made, in the order in which that made them.

    Choices here that the other run did not make, or asked otherwise, are made as ever. `is_done` tells
    whether all of the other's were found; `follows` are those.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        super().__init__()
        self.follows: list[Follow] = []
        self._choices, self._keys = list(choices), list[Key]()

    @property
    def is_done(self) -> bool:
        """Whether every choice of the other run was followed."""
        return len(self.follows) == len(self._choices)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator; one that chooses takes the other run's places."""
        result = func(*args, **(kwargs or {}))
        if (call := _Call.of(func, args, kwargs or {})) is None:
            return result
        number, among = len(self._keys), self._keys.count(call.key)
        self._keys.append(call.key)
        if self.is_done or self._choices[len(self.follows)].key != call.key:
            return result
        choice, own_places = self._choices[len(self.follows)], call.places(result)
        places = choice.places.to(own_places.device)
        is_inside = bool(((places >= 0) & (places < call.rows.shape[-1])).all())
        places = places if is_inside else own_places
        values, own = (call.rows.gather(-1, each) for each in (places, own_places))
        is_valid = is_inside and _is_proper(choice, call.rows, places, values, own)
        rows = None if choice.rows is None else choice.rows.to(call.rows.device)
        follow = Follow(
            number,
            among,
            call.key,
            values=values,
            own=own,
            roundings=None if rows is None else Roundings.of(rows, call.rows, (places, own_places)),
            theirs=None if rows is None else rows.gather(-1, places),
            places=places,
            own_places=own_places.clone(),
            is_valid=is_valid,
        )
        self.follows.append(follow)
        return call.result(result, values, places)


def _is_proper(choice: Choice, rows: Tensor, places: Tensor, values: Tensor, own: Tensor) -> bool:
    """Whether an order has each place once, and the first of equal values is taken where that is defined."""
    if choice.key.is_order and bool((places.sort(dim=-1).values.diff(dim=-1) == 0).any()):
        return False
    if choice.key.kind not in _FIRST_OF_EQUAL:
        return True
    if choice.key.is_order:
        return not bool(((values.diff(dim=-1) == 0) & (places.diff(dim=-1) < 0)).any())
    first = (rows == values).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return not bool(((first != places) & (values == own)).any())


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of an operator that tells places, with its rows of values in the last dimension."""

    key: Key
    rows: Tensor
    keeps_dim: bool

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call | None:
        """The call; None for other operators, for integers, for a single value, and where none is taken."""
        if func not in KINDS:
            return None
        given = {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}
        given |= {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        values: Tensor = given["self"]
        is_none = not values.numel() or given.get("k") == 0
        if not values.is_floating_point() or not values.dim() or is_none:
            return None
        dim = given["dim"]
        rows = values.reshape(-1) if dim is None else values.movedim(dim, -1)
        key = Key.of(func, values.shape, given)
        return cls(key, rows, key.keeps_dim(given))

    def places(self, result: Any) -> Tensor:
        """The places in a result, with the dimension last."""
        places: Tensor = result if isinstance(result, Tensor) else result[1]
        return self.key.in_rows(places, keeps_dim=self.keeps_dim)

    def result(self, own: Any, values: Tensor, places: Tensor) -> Any:
        """A result like its own, of other values and places."""
        if isinstance(own, Tensor):
            return self._laid(places, own)
        return self._laid(values, own[0]), self._laid(places, own[1])

    def _laid(self, rows: Tensor, own: Tensor) -> Tensor:
        if self.key.dim is None:
            return rows.reshape(own.shape)
        laid = rows.movedim(-1, self.key.dim) if self.keeps_dim else rows.squeeze(-1)
        return torch.empty_like(own).copy_(laid)


def seen_in(run: Callable[[], Any], *, with_rows: bool = False) -> tuple[Any, list[Choice]]:
    """What a function gives, and the choices that it makes."""
    mode = SeenChoices(with_rows=with_rows)
    with mode:
        found = run()
    return found, mode.seen
