"""Ranges of sizes: which dimensions of a call's tensors may vary, and between which bounds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampopt.errors import InputError
from ampopt.ir.signature import call_key
from ampopt.ir.size_range import MOST_RANGES, SizeRange, Sizes, ranges_of
from ampopt.system.wording import argument

Asked = Mapping[str, Any]
"""A user's ranges: {"batch": (low, high)}, "height" or "width"; or {input: {dimension: (low, high)}}."""

_NAMED: dict[str, tuple[int, int | None]] = {"batch": (0, None), "height": (2, 4), "width": (3, 4)}
"""The dimension that each name stands for, and of inputs of which rank; None: of any but 0."""

DRAWN = 3
"""Number of sizes within the ranges that are verified, besides the corners and the example's."""

_FORMS = '{"batch": (1, 8)}, {"height": (224, 512)} or {"image": {2: (224, 512)}}'


def checked(asked: object) -> Asked | None:
    """A user's ranges. Raises InputError for unknown names, and for what is not a pair of sizes."""
    if asked is None:
        return None
    if not isinstance(asked, Mapping) or not asked:
        raise InputError(f"{argument('dynamic', asked)}: give the range of each size, such as {_FORMS}")
    for key, value in asked.items():
        if not isinstance(value, Mapping):
            if key not in _NAMED:
                names = ", ".join(_NAMED)
                raise _wrong(f"there is no size {key!r}: choose from {names}, or give {_FORMS}")
            _range(str(key), value)
        elif not value:
            raise _wrong(f"no dimension of input {key!r} is named: give {_FORMS}")
        for index, pair in value.items() if isinstance(value, Mapping) else ():
            _range(f"{key}_{index}", pair)
    return asked


def _range(name: str, pair: object) -> SizeRange:
    if not isinstance(pair, Sequence) or len(pair) != 2 or not all(type(size) is int for size in pair):
        raise _wrong(f"{name} is {pair!r}: give two whole numbers, such as (1, 8)")
    low, high = pair
    if not 1 <= low <= high:
        raise _wrong(f"{name} from {low} to {high} is no range: give (low, high), 1 <= low <= high")
    return SizeRange(name, low, high)


def _wrong(what: str) -> InputError:
    return InputError(f"{argument('dynamic')}: {what}")


def sizes_of(asked: Asked, names: Sequence[str], examples: Sequence[Tensor]) -> Sizes:
    """The dimensions of the example inputs, which have these names, that a user's ranges are about.

    Raises InputError where an input or a dimension is not there, an example is outside of its range, or
    inputs that share a named size differ in it.
    """
    found: list[dict[int, SizeRange]] = [{} for _ in examples]
    for key, value in asked.items():
        if isinstance(value, Mapping):
            _add_of_input(found, str(key), value, names, examples)
        else:
            _add_named(found, _range(key, value), examples)
    ranges = ranges_of(found)
    if len(ranges) > MOST_RANGES:
        raise _wrong(f"{len(ranges)} sizes vary: at most {MOST_RANGES} may")
    for name, named, example in zip(names, found, examples, strict=True):
        for index, each in named.items():
            if example.shape[index] not in each:
                raise _wrong(
                    f"dimension {index} of input {name!r} is {example.shape[index]} in the example, "
                    f"which is outside of {each}: widen the range, or give another example"
                )
    _check_shared(found, names, examples)
    return tuple(found)


def _add_of_input(
    found: list[dict[int, SizeRange]],
    key: str,
    dims: Mapping[Any, Any],
    names: Sequence[str],
    examples: Sequence[Tensor],
) -> None:
    if key not in names:
        raise _wrong(f"there is no input {key!r}; the inputs are {', '.join(names)}")
    place = list(names).index(key)
    for index, pair in dims.items():
        if type(index) is not int or not 0 <= index < examples[place].dim():
            raise _wrong(f"input {key!r} of shape {list(examples[place].shape)} has no dimension {index!r}")
        if index in found[place]:
            raise _wrong(f"dimension {index} of input {key!r} has two ranges: give one")
        found[place][index] = _range(f"{key}_{index}", pair)


def _add_named(found: list[dict[int, SizeRange]], named: SizeRange, examples: Sequence[Tensor]) -> None:
    index, rank = _NAMED[named.name]
    places = [
        place
        for place, example in enumerate(examples)
        if (example.dim() == rank if rank is not None else example.dim() > 0)
    ]
    if not places:
        raise _wrong(
            f"no input has a {named.name}, which is dimension {index}"
            f"{f' of {rank}' if rank else ''}: give {_FORMS}"
        )
    for place in places:
        if index in found[place]:
            raise _wrong(f"dimension {index} of input {place} has two ranges: give one")
        found[place][index] = named


def _check_shared(
    found: Sequence[Mapping[int, SizeRange]], names: Sequence[str], examples: Sequence[Tensor]
) -> None:
    """Raise InputError where tensors that share a named size have several."""
    seen: dict[str, tuple[str, int]] = {}
    for name, named, example in zip(names, found, examples, strict=True):
        for index, each in named.items():
            first, size = seen.setdefault(each.name, (name, example.shape[index]))
            if size != example.shape[index]:
                raise _wrong(
                    f"the {each.name} of input {first!r} is {size}, and that of {name!r} is "
                    f"{example.shape[index]}: name the dimensions of each, {_FORMS}"
                )


def now(sizes: Sizes, tensors: Sequence[Tensor]) -> dict[str, int]:
    """The present size of each range, by its name."""
    pairs = zip(sizes, tensors, strict=True)
    return {each.name: tensor.shape[index] for named, tensor in pairs for index, each in named.items()}


def drawn_within(sizes: Sizes, seed: int = 0) -> list[dict[str, int]]:
    """`DRAWN` combinations of sizes within the ranges, the same for the same seed."""
    order = random.Random(seed)
    return [
        {each.name: order.randint(each.low, each.high) for each in ranges_of(sizes)} for _ in range(DRAWN)
    ]


def resized(tensors: Sequence[Tensor], sizes: Sizes, wanted: Mapping[str, int]) -> tuple[Tensor, ...]:
    """Tensors like these in other sizes, by the ranges' names: cut off, or repeated from the beginning.

    So every element is one of the example's, and indices stay valid. Other tensors stay as they are.
    """
    made = []
    for tensor, named in zip(tensors, sizes, strict=True):
        for index, each in named.items():
            if (size := wanted[each.name]) != tensor.shape[index]:
                rows = torch.arange(size, device=tensor.device) % tensor.shape[index]
                tensor = tensor.index_select(index, rows)
        made.append(tensor)
    return tuple(made)


def with_tensors(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """A call's leaves with other tensors in the places of its own."""
    remaining = iter(tensors)
    return tuple(next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves)


def hold(
    sizes: Sizes,
    own: Sequence[Any],
    own_spec: pytree.TreeSpec,
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
) -> bool:
    """Whether a call differs from one's `own` leaves in tensors' values, strides and sizes in range alone."""
    if spec != own_spec or len(own) != len(leaves):
        return False
    found: dict[str, int] = {}
    each_of = iter(sizes)
    for mine, theirs in zip(own, leaves, strict=True):
        if not isinstance(mine, Tensor):
            if isinstance(theirs, Tensor) or call_key([mine], spec) != call_key([theirs], spec):
                return False
            continue
        named = next(each_of)
        if type(theirs) is not Tensor or theirs.dim() != mine.dim():
            return False
        if (mine.dtype, mine.device) != (theirs.dtype, theirs.device):
            return False
        for index, size in enumerate(theirs.shape):
            each = named.get(index)
            if each is None:
                if size != mine.shape[index]:
                    return False
            elif size not in each or found.setdefault(each.name, size) != size:
                return False
    return True
