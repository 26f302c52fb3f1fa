"""The time of every call of a graph, by `torch.profiler`: a kernel belongs to the node that launched it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ampopt.errors import InputError
from ampopt.ir.own_autocast import own_scope
from ampopt.ir.program import Program
from ampopt.measure.clocks import synchronize

LABEL = "ampopt node "

_LEVEL = "KINETO_LOG_LEVEL"

_CUPTI = (12, 13)
"""Versions of the library, by its name, that PyTorch is built with."""

_PARAMETER, _NO_NAME = "p_", re.compile(r"\W")
"""How `torch.export` names the model's parameters in a graph: `p_layer1_0_weight`."""

_TENSOR_CORES = re.compile(r"tensorop|tensor\d+x\d+x\d+|16816|1688|[hs]884|[hiqw]g?mma|nvjet")

_CAST, _COPIED = "aten::to", "aten::_to_copy"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, copy or memset on a GPU, with its time in seconds."""

    name: str
    seconds: float

    @property
    def on_tensor_cores(self) -> bool:
        """Whether its name has an instruction of Tensor Cores in it, as cuBLAS, cuDNN and CUTLASS write it.

        `s16816` and `tensor16x8x16` are shapes of such instructions; `nvjet` are cuBLAS's kernels for Hopper.
        Those without are named by `sgemm`, `ffma` or `simt`, or by none of all these.
        """
        return _TENSOR_CORES.search(self.name) is not None


@dataclasses.dataclass(frozen=True)
class Spent:
    """What one call of a graph costs: seconds on its device (on a GPU of its kernels alone), and its kernels.

    `casts` counts the conversions of dtype that autocast adds to it, and `casts_s` is their time in seconds;
    those that the operator makes itself, as `mean` does in bfloat16, are not among them.
    """

    seconds: float
    kernels: tuple[Kernel, ...] = ()
    casts: int = 0
    casts_s: float = 0.0

    @property
    def longest(self) -> Kernel:
        """The kernel that takes longest. Raises ValueError where there is none."""
        return max(self.kernels, key=lambda kernel: kernel.seconds)


def refuse_profiler() -> None:
    """Raise InputError where PyTorch's profiler records already: it would lose that without a word."""
    if torch._C._autograd._profiler_enabled():
        raise InputError(
            "PyTorch's profiler is recording, and there is one for the whole process: what it has recorded "
            "would be lost. Call diagnose before or after the recording"
        )


@contextlib.contextmanager
def recording(device: torch.device) -> Iterator[profile]:
    """Record what runs in the block on the host and on a GPU.

    The profiler's library, which reads its level as it is first used, would write to standard error. It would
    stay attached to the GPU's driver, too, and from then on launches would take longer, those of graphs by a
    fifth (`benchmarks/results/h200/profiler_attached.json`): it is detached.
    """
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    level = os.environ.get(_LEVEL)
    os.environ[_LEVEL] = level or "99"
    try:
        with (
            contextlib.ExitStack() as afterwards,
            profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True) as recorded,
        ):
            if on_gpu:
                afterwards.callback(_detach, device)
            yield recorded
    finally:
        if level is None:
            del os.environ[_LEVEL]


def _detach(device: torch.device) -> None:
    """Detach CUPTI, by which the profiler records, from the driver; what records next attaches it again.

    Its documentation asks that nothing runs on the GPU meanwhile, and that what was recorded was read.
    """
    for version in _CUPTI if hasattr(os, "RTLD_NOLOAD") else ():
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(f"libcupti.so.{version}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            synchronize(device)
            library.cuptiFinalize()


def profiled(program: Program, runs: int, trained: Collection[str] = ()) -> dict[str, Spent]:
    """What each call of a program's graph costs, by its name, in `runs` runs after one more.

    It is the median of the half of the runs that took least. On a CPU the time of a short operator includes
    what its call costs, as it does in eager. `trained` are the names of the model's weights that require
    gradients: autocast casts each of them once in a call, however many operators read it.
    """
    with program.scope():
        entered = [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]
        _Labelled(program, trained).run(*entered)
        synchronize(program.device)
        with recording(program.device) as recorded:
            for _ in range(runs):
                _Labelled(program, trained).run(*entered)
            synchronize(program.device)
    found: dict[str, list[Spent]] = {}
    on_gpu = program.device.type == "cuda"
    for event in recorded.events() or ():
        if event.name.startswith(LABEL) and event.device_type == DeviceType.CPU:
            found.setdefault(event.name.removeprefix(LABEL), []).append(_spent(event, on_gpu=on_gpu))
    quick = least_disturbed(
        [sum(spent.seconds for spent in run) for run in zip(*found.values(), strict=False)]
    )
    return {name: _median([several[run] for run in quick]) for name, several in found.items()}


def least_disturbed(totals: Sequence[float]) -> list[int]:
    """The half of several runs, by number, that took least, of the seconds that each took.

    Where other work keeps a core busy, an operator with two threads waits for one of them, up to 0.02 s.
    """
    order = sorted(range(len(totals)), key=totals.__getitem__)
    return sorted(order[: (len(totals) + 1) // 2])


class _Labelled(fx.Interpreter):
    """Runs each call in a range of the profiler with the node's name, under an autocast as users enter it.

    That one keeps what it casts of weights that require gradients, until the run ends.
    """

    def __init__(self, program: Program, trained: Collection[str]) -> None:
        super().__init__(program.graph)
        self._device = program.device
        self._trained = {_PARAMETER + _NO_NAME.sub("_", name) for name in trained}

    def run(self, *args: Any, **options: Any) -> Any:
        before = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(True)
            return super().run(*args, **options)
        finally:
            torch.set_autocast_cache_enabled(before)
            torch.clear_autocast_cache()

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.detach().requires_grad_() if target in self._trained else value

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        with own_scope(n, self._device), record_function(LABEL + n.name):
            return super().run_node(n)


def _spent(event: Any, *, on_gpu: bool) -> Spent:
    kernels = tuple(kernels_of(event))
    casts = list(_casts(event))
    if not on_gpu:
        return Spent(
            1e-6 * event.cpu_time_total, (), len(casts), 1e-6 * sum(each.cpu_time_total for each in casts)
        )
    casts_s = sum(kernel.seconds for each in casts for kernel in kernels_of(each))
    return Spent(sum(kernel.seconds for kernel in kernels), kernels, len(casts), casts_s)


def kernels_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of all kernels that a call launches on a GPU, after one that is not recorded."""
    call()
    synchronize(device)
    with recording(device) as recorded:
        call()
        synchronize(device)
    launched = (event for event in recorded.events() or () if event.cpu_parent is None)
    return sum(kernel.seconds for event in launched for kernel in kernels_of(event))


def kernels_of(event: Any) -> Iterator[Kernel]:
    """The kernels that an event of the profiler, and those inside it, have launched."""
    yield from (Kernel(kernel.name, 1e-6 * kernel.duration) for kernel in event.kernels)
    for child in event.cpu_children:
        yield from kernels_of(child)


def _casts(event: Any) -> Iterator[Any]:
    """The conversions inside an event that autocast has added.

    Autocast converts what an operator takes and then calls the same operator: the conversions are before that
    call, inside the same event. What an operator converts for itself is before no call of its own name.
    """
    names = [child.name for child in event.cpu_children]
    own = names.index(event.name) if event.name in names else 0
    for child in event.cpu_children[:own]:
        if child.name == _CAST and any(copied.name == _COPIED for copied in child.cpu_children):
            yield child
    for child in event.cpu_children:
        yield from _casts(child)


def _median(several: list[Spent]) -> Spent:
    middle = statistics.median_low(spent.seconds for spent in several)
    return next(spent for spent in several if spent.seconds == middle)
