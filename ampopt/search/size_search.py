"""Decides whether one program serves a range of sizes: right at all that are tried, and about as fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ampopt.deploy.optimized import Optimized
from ampopt.deploy.sized_program import NoSizedProgramError, SizedProgram, sized_program, verify_sizes
from ampopt.errors import first_line
from ampopt.ir.model_copy import untouched_rng
from ampopt.ir.size_range import Sizes, corners, shown
from ampopt.ir.size_ranges import now
from ampopt.measure.clocks import engine_latency, latency
from ampopt.measure.headline import Compared, compare_fairly
from ampopt.measure.report import interval
from ampopt.measure.sampling import Gain, gain
from ampopt.search.subject import Subject, rest_s
from ampopt.system.budget import calls_to_verify
from ampopt.system.interrupts import check_interrupted
from ampopt.system.wording import argument

MOST_SLOWER = 1.1
"""Largest time of a program for a range of sizes, as a multiple of the static one's at the example's size."""

SHARE = 0.3
"""Share of the time budget for making, verifying and timing a program for a range of sizes."""

COMPARING_S = 10.0
"""Longest time in seconds for comparing it with the static program; on a quiet machine a second or two."""

TOO_FAR = 10.0
"""How many times the seconds that are left the end of a range has to need for the range not to be tried."""

DRAWS = 1
"""Random inputs for each size, in addition to the example's values."""


def find_sized_program(
    optimized: Optimized, static: Subject, sizes: Sizes, left_s: Callable[[], float]
) -> tuple[SizedProgram | None, str]:
    """A verified program for the ranges of sizes that is no slower than `MOST_SLOWER`, and a note on it.

    None, and the reason, where there is none: each size then gets a program of its own. `static` is the
    program for the example, `left_s` tells how many seconds are left.
    """
    try:
        _check_time(static, sizes, left_s())
        sized = sized_program(optimized, sizes)
        verified = verify_sizes(optimized, sized, lambda: left_s() > 0, draws=DRAWS)
        found = _compared(static, sized, min(COMPARING_S, left_s()))
        told = gain(found.before, found.after)
        longer = Gain(1 / told.ratio, 1 / told.high, 1 / told.low)
        text = (
            f"{longer.ratio:.2f}x ({interval(longer)}) the static program's time at "
            f"{_example(sized)}{_without(sized)}"
        )
        if not told.low >= 1 / MOST_SLOWER:
            is_sure = told.high < 1 / MOST_SLOWER
            busy = f"; {found.load}" if not is_sure and found.load is not None and found.load.is_high else ""
            raise NoSizedProgramError(
                f"it {'takes' if is_sure else 'may take'} over {MOST_SLOWER}x: {text}{busy}"
            )
    except Exception as error:  # whatever it is: the static program serves
        check_interrupted(error)
        reason = str(error) if isinstance(error, NoSizedProgramError) else first_line(error)
        return None, f"each size gets a program of its own, not one for {shown(sizes)}: {reason}"
    return sized, f"one program for {shown(sizes)}, verified at {verified} sizes, takes {text}"


def _check_time(static: Subject, sizes: Sizes, left_s: float) -> None:
    """Raise NoSizedProgramError where a range reaches so far that its end cannot be verified in time.

    A call is taken to need as much longer as its inputs are larger, which is too much for small ones.
    """
    examples = static.program.examples
    largest = max(corners(sizes), key=lambda wanted: _ratio(examples, sizes, wanted))
    ratio = _ratio(examples, sizes, largest)
    sample = latency(static.call, static.device)
    sample()
    needed_s = ratio * calls_to_verify(DRAWS) * min(sample() for _ in range(3))
    if 0 < TOO_FAR * left_s < needed_s:
        place = ", ".join(f"{name} {size}" for name, size in largest.items())
        raise NoSizedProgramError(
            f"at {place} its inputs are {ratio:.3g} times as large as the example's: to verify it would "
            f"take about {needed_s:.2g} s, and {left_s:.2g} s of the time budget are left; give a "
            f"smaller range, an example nearer to its end, or raise {argument('budget_s')}"
        )


def _ratio(examples: Sequence[Tensor], sizes: Sizes, wanted: Mapping[str, int]) -> float:
    """How many times as many elements inputs of other sizes have."""
    there = 0.0
    for tensor, named in zip(examples, sizes, strict=True):
        factors = (wanted[each.name] / max(tensor.shape[index], 1) for index, each in named.items())
        there += tensor.numel() * math.prod(factors)
    return there / max(1, sum(tensor.numel() for tensor in examples))


def _compared(static: Subject, sized: SizedProgram, seconds: float) -> Compared:
    device, subjects = static.device, (static, Subject(sized.program))
    with torch.no_grad(), untouched_rng(device):
        samplers = [
            engine_latency(subject.call, device, rest_s=rest_s(subject.program)) for subject in subjects
        ]
        return compare_fairly(*samplers, seconds=max(seconds, 0.0))


def _example(sized: SizedProgram) -> str:
    sizes = now(sized.sizes, sized.captured.program.examples)
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _without(sized: SizedProgram) -> str:
    return f"; without {', '.join(sized.left_out)}" if sized.left_out else ""
