"""Verification inputs: like the examples, outside of their range, and with a fault in one element.

A model that keeps a state is called several times in a row, so a draw is a sequence of calls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ampopt.ir.numerics import fresh_draw, is_rounded, may_be_regions
from ampopt.ir.signature import own_copies

Tensors = tuple[Tensor, ...]

CALLS_IN_A_ROW = 8
"""Number of successive calls, from one initial state, that verify a model with a state."""

CHANNELS = 3
"""Channels of an input with a NaN in one of them: the first, the last, and one between."""

LARGE = 2**31 + 1
"""An integer that float32 and int32 do not have."""

VERY_LARGE = 2**62 + 1
"""An integer that float64 does not have, nor most sums with it."""

MOST_ALONE = 4
"""Of so many inputs of integers each one is changed alone."""

FAULTS = {"NaN": float("nan"), "infinity": float("inf")}
"""The values written to one element of each input, in turn, to test that faults reach the outputs."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """The inputs of one call, or of several successive calls, with a name."""

    name: str
    calls: tuple[Tensors, ...]


def plain_draws(examples: Tensors, count: int, seed: int, *, in_a_row: int) -> list[Draw]:
    """The example inputs, and `count` random ones like them; successive calls get further random inputs."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> Tensors:
        return tuple(fresh_draw(example, generator) for example in examples)

    draws = [Draw("the example", (examples, *(drawn() for _ in range(in_a_row - 1))))]
    if examples:
        rows = [tuple(drawn() for _ in range(in_a_row)) for _ in range(count)]
        draws += [Draw(f"random inputs {number}", row) for number, row in enumerate(rows, start=1)]
    return draws


def range_draws(examples: Tensors, *, in_a_row: int) -> list[Draw]:
    """The examples scaled, constant, and zero except for one element; none without floating-point inputs."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "inputs of 0": torch.zeros_like,
        "inputs x0.01": lambda x: x * 0.01,
        "inputs x10": lambda x: x * 10,
        "inputs x100": lambda x: x * 100,
        "constant inputs": lambda x: torch.full_like(x, _coarse(_largest(x))),
        "constant negative inputs": lambda x: torch.full_like(x, -_coarse(_largest(x))),
        "one hot element": lambda x: _with_element(torch.zeros_like(x), _largest(x)),
    }
    return _draws(examples, ways, in_a_row)


def fault_draws(examples: Tensors, *, in_a_row: int) -> list[Draw]:
    """The examples with `FAULTS` in the middle element of every floating-point input."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        f"{name} in one element": lambda x, value=value: _with_element(x, value)  # type: ignore[misc]
        for name, value in FAULTS.items()
    }
    return _draws(examples, ways, in_a_row)


def faults_elsewhere(examples: Tensors, *, in_a_row: int) -> list[Draw]:
    """The examples with NaN in one element of one input, and with negative infinity in all inputs.

    NaN is in each of up to `CHANNELS` channels: inputs put together of several things have these in channels,
    and each may take another way. Negative infinity, in one element and in all, is what least and largest
    elements of an engine may begin with: it gives the least finite number in its place.
    """
    draws: list[Draw] = []
    for place, example in enumerate(examples):
        if not _can_vary(example):
            continue
        channels = example.shape[1] if example.dim() > 2 else 1
        for channel in sorted({round(n * (channels - 1) / (CHANNELS - 1)) for n in range(CHANNELS)}):
            spoilt = _with_element(_finite(example), math.nan, channel if channels > 1 else None)
            tensors = (*examples[:place], spoilt, *examples[place + 1 :])
            where = f" of channel {channel}" if channels > 1 else ""
            draws.append(Draw(f"NaN in one element{where} of input {place}", (tensors,) * in_a_row))
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "negative infinity in one element": lambda x: _with_element(x, -math.inf),
        "negative infinity in all elements": lambda x: torch.full_like(x, -math.inf),
    }
    nans = draws if len(draws) > 1 else []  # one alone is the first of `fault_draws`
    return [*nans, *_draws(examples, ways, in_a_row)]


def integer_draws(examples: Tensors, *, in_a_row: int, with_smallest: bool = True) -> list[Draw]:
    """The examples with one integer that they do not have, and with their dtypes' bounds in all places.

    The one is a negative, a larger and two large ones. A sum or product of bounds goes around, which that of
    one large integer and small ones need not. Of several inputs each is changed alone, too: where the model
    refuses an index out of range in one, nothing is learnt about what it makes of the others. Draws that come
    out alike are one. `with_smallest`: the smallest integers may be given to the model.
    """
    places = [place for place, example in enumerate(examples) if _is_whole(example)]
    whole = [examples[place] for place in places]
    if not whole:
        return []
    values = {"an integer above all others": max(int(example.max()) for example in whole) + 1}
    if all(example.dtype.is_signed for example in whole):
        values["-1"] = -1
    values["a large integer"] = LARGE
    if any(example.dtype is torch.int64 for example in whole):
        values["a very large integer"] = VERY_LARGE
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        name: lambda x, value=value: _with_element(x, min(value, torch.iinfo(x.dtype).max))  # type: ignore[misc]
        for name, value in values.items()
    }
    ways["the largest integers alone"] = lambda x: torch.full_like(x, torch.iinfo(x.dtype).max)
    if with_smallest:
        ways["the smallest integers alone"] = lambda x: torch.full_like(x, torch.iinfo(x.dtype).min)
    draws: list[Draw] = []

    def add(name: str, changed: Mapping[int, Tensor]) -> None:
        made = tuple(changed.get(place, example) for place, example in enumerate(examples))
        if not any(_are_equal(made, draw.calls[0]) for draw in draws):
            draws.append(Draw(name, (made,) * in_a_row))

    for name, way in ways.items():
        add(name, {place: way(examples[place]) for place in places})
    for place in places[:MOST_ALONE] if len(places) > 1 else ():
        for name, way in ways.items():
            add(f"{name} for input {place}", {place: way(examples[place])})
    return draws


def _are_equal(a: Tensors, b: Tensors) -> bool:
    """Whether two draws of the same examples have the same integers."""
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def single_valued(draws: Sequence[Draw]) -> list[tuple[int, int]]:
    """The inputs of integers that have one value in all draws: their places, and that value."""
    found = []
    for place, example in enumerate(draws[0].calls[0]):
        if _is_whole(example):
            first = int(example.flatten()[0])
            if all(bool((tensors[place] == first).all()) for draw in draws for tensors in draw.calls):
                found.append((place, first))
    return found


def _draws(examples: Tensors, ways: dict[str, Callable[[Tensor], Tensor]], in_a_row: int) -> list[Draw]:
    if not any(_can_vary(example) for example in examples):
        return []
    made = {
        name: tuple(_changed(example, way) if _can_vary(example) else example for example in examples)
        for name, way in ways.items()
    }
    return [Draw(name, (tensors,) * in_a_row) for name, tensors in made.items()]


def _changed(example: Tensor, way: Callable[[Tensor], Tensor]) -> Tensor:
    changed = way(_finite(example))
    if may_be_regions(example):
        changed = changed.clone()
        changed[:, 0] = example[:, 0]
    return changed


def _finite(example: Tensor) -> Tensor:
    """The example with 0 for NaN and infinities, which would spread, so that nothing could be told."""
    spoilt = ~torch.isfinite(example)
    return torch.empty_like(example).copy_(example).masked_fill_(spoilt, 0) if spoilt.any() else example


def _is_whole(example: Tensor) -> bool:
    """Whether a tensor is of integers, and has any; `is_rounded` has numbers with fractions."""
    return not is_rounded(example) and example.dtype is not torch.bool and example.numel() > 0


def _can_vary(example: Tensor) -> bool:
    return is_rounded(example) and example.numel() > 0


def _largest(example: Tensor) -> float:
    """The largest finite magnitude in a tensor; 1 where there is none."""
    finite = example[torch.isfinite(example)].abs()
    return float(finite.max()) if finite.numel() and float(finite.max()) > 0 else 1.0


def _coarse(value: float) -> float:
    """A number rounded towards 0 to 5 significant bits.

    A sum of 2^19 of it, or of 2^14 of its squares, is then exact in float32 in any order. Of other equal
    terms every partial sum may round to the same side, and what an engine makes of their variance is noise.
    """
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.trunc(mantissa * 32), exponent - 5)


def _with_element(tensor: Tensor, value: float, channel: int | None = None) -> Tensor:
    """A tensor of its own with its middle element set: the centre pixel of the middle channel, or of one."""
    made = torch.empty_like(tensor).copy_(tensor)
    middle = [size // 2 for size in made.shape]
    if channel is not None:
        middle[1] = channel
    made[tuple(middle)] = value
    return made


def steps_of(draw: Draw, run: Callable[..., Sequence[Tensor]], state: Tensors) -> list[list[Tensor]]:
    """The outputs of each call of a draw, in order; each call's new state is passed to the next.

    Calls get copies: what writes to its inputs spoils no draw, with which other programs are verified, too.
    """
    found: list[list[Tensor]] = []
    for tensors in draw.calls:
        outputs = list(run(*own_copies((*tensors, *state))))
        found.append(outputs)
        state = tuple(outputs[len(outputs) - len(state) :])
    return found
