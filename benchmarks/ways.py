"""The ways to run a contestant, of which the fastest enters the race, and the border of the table it is in.

An expert who tries TorchScript tries both memory formats, and a plain CUDA graph around it, and keeps what
is fastest. So does the race: every way is made first, maybe beside others; then, alone, they are timed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.errors import first_line
from benchmarks.by_hand import Call, as_channels_last, as_float, cuda_graph
from benchmarks.results_files import exact_enough

IN_FP32, IN_LANE = "fp32", "lane"

IOS = (IN_FP32, IN_LANE)
"""What goes into a call and comes out of it: float32, or the lane's own dtype."""

LOOK_S, LEAST_LOOKS = 0.15, 7
"""How long each way is timed, and the fewest calls of it."""


@dataclasses.dataclass(frozen=True)
class Border:
    """The interface of a table: what goes in and comes out where a model computes in `dtype`."""

    io: str
    dtype: torch.dtype

    @property
    def casts(self) -> bool:
        """Whether a call takes float32 and gives float32 though the model computes in another dtype."""
        return self.io == IN_FP32 and self.dtype is not torch.float32

    def given(self, inputs: tuple[Tensor, ...], *, channels_last: bool = False) -> tuple[Tensor, ...]:
        """The tensors that a call gets; images in the format it wants where it gets the lane's dtype."""
        if self.io == IN_FP32:
            return inputs
        return self.inside(inputs, channels_last=channels_last)

    def inside(self, inputs: tuple[Tensor, ...], *, channels_last: bool = False) -> tuple[Tensor, ...]:
        """The tensors that the model computes with."""
        cast = (tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in inputs)
        return tuple(map(as_channels_last, cast) if channels_last else cast)

    def model(self, model: nn.Module, *, channels_last: bool = False) -> nn.Module:
        """A copy of the model that computes in the dtype, with the casts of the border in it."""
        return Inside(model, self, channels_last).eval()


class Inside(nn.Module):
    """A model in a dtype and a memory format; its casts at the border are part of it."""

    def __init__(self, model: nn.Module, border: Border, channels_last: bool) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).to(border.dtype)
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self._border, self._channels_last = border, channels_last

    def forward(self, *tensors: Tensor) -> object:
        """Cast, run, cast back."""
        found = self.model(*self._border.inside(tensors, channels_last=self._channels_last))
        return as_float(found) if self._border.casts else found


@dataclasses.dataclass(frozen=True)
class Made:
    """A call with the tensors it is called with, and what way it was made."""

    call: Call
    inputs: tuple[Tensor, ...]
    way: str = ""


Ways = Mapping[str, Callable[[], Made]]
"""How each way is made, by its name."""

Runner = Callable[[nn.Module, tuple[Tensor, ...]], Call]
"""Makes a call of a model and example inputs."""


def in_formats(
    runners: Mapping[str, Runner],
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    border: Border,
    formats: Sequence[str],
) -> Ways:
    """Every runner on the model in every one of these memory formats."""

    def make(runner: Runner, channels_last: bool) -> Made:
        given = border.given(inputs, channels_last=channels_last)
        return Made(runner(border.model(model, channels_last=channels_last), given), given)

    return {
        ", ".join(filter(None, (name, memory_format))): functools.partial(
            make, runner, memory_format == CHANNELS_LAST
        )
        for name, runner in runners.items()
        for memory_format in formats
    }


CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"

FORMATS = (CHANNELS_LAST, CONTIGUOUS)


def graphed(runner: Runner, border: Border) -> Runner:
    """A plain CUDA graph around what a runner makes; inputs are cast as they enter its buffers."""

    def run(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
        assert isinstance(model, Inside)
        inner = border.inside(inputs, channels_last=model._channels_last)
        return cuda_graph(runner(model, inner), inner)

    return run


@dataclasses.dataclass
class Candidates:
    """Ways that were made, and why others were not."""

    made: dict[str, Made]
    failed: dict[str, str]

    def drop_wrong(self, error_of: Callable[[object], float | None]) -> None:
        """Leave out ways with NaN, infinities or a larger error than rounding gives, if others have none."""
        errors = {name: error_of(each.call(*each.inputs)) for name, each in self.made.items()}
        least = min((error for error in errors.values() if error is not None), default=None)
        for name, error in errors.items():
            if least is not None and not exact_enough(error, least):
                del self.made[name]
                self.failed[name] = "wrong results" if error is None else f"error {error:.1e}"

    def fastest(self, synchronize: Callable[[], None]) -> tuple[str, Made, dict[str, Any]]:
        """The fastest way by its name, called back to back; the milliseconds of each or why it has none.

        One that is alone is not timed. Raises RuntimeError with the reasons where none runs.
        """
        if len(self.made) == 1:
            ((name, only),) = self.made.items()
            return name, _named(name, only), dict(self.failed)
        times: dict[str, float] = {}
        for name, each in self.made.items():
            try:
                times[name] = seconds_of(functools.partial(each.call, *each.inputs), synchronize)
            except Exception as failure:
                self.failed[name] = first_line(failure)
        if not times:
            raise RuntimeError("; ".join(dict.fromkeys(self.failed.values())) or "there is no way to run it")
        best = min(times, key=times.__getitem__)
        tried = {name: round(1e3 * value, 6) for name, value in times.items()}
        return best, _named(best, self.made[best]), {**tried, **self.failed}


def _named(name: str, made: Made) -> Made:
    return dataclasses.replace(made, way=": ".join(filter(None, (name, made.way))))


class UnusableDeviceError(Exception):
    """A way failed and took the device with it: nothing more runs on it in this process."""

    def __init__(self, place: int, why: str) -> None:
        """`place`: how many ways come before it."""
        super().__init__(why)
        self.place = place


def make_all(ways: Ways, look: Callable[[], object] = lambda: None) -> Candidates:
    """Make every way and call it once; what fails is noted.

    Raises UnusableDeviceError where `look`, which uses the device, fails after a way did.
    """
    made: dict[str, Made] = {}
    failed: dict[str, str] = {}
    for place, (name, make) in enumerate(ways.items()):
        try:
            each = make()
            each.call(*each.inputs)
            look()
            made[name] = each
        except Exception as failure:
            failed[name] = first_line(failure)
            try:
                look()
            except Exception as lost:
                raise UnusableDeviceError(place, f"{name}: {first_line(failure)}") from lost
    return Candidates(made, failed)


def seconds_of(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Median seconds of a synchronised call in a loop, after a few that are not timed."""

    def once() -> float:
        start = time.perf_counter()
        call()
        synchronize()
        return time.perf_counter() - start

    for _ in range(3):
        once()
    taken, end = list[float](), time.perf_counter() + LOOK_S
    while len(taken) < LEAST_LOOKS or time.perf_counter() < end:
        taken.append(once())
    return statistics.median(taken)
