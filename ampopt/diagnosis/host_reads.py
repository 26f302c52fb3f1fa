"""What the host waits for while code of the user's runs, and copies between devices: each with its line."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ampopt.ir.eager_mode import EagerMode
from ampopt.ir.place_in_code import place_of_call

_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""The tags of operators whose result, or its shape, the host has to wait for."""

_aten = torch.ops.aten
_WRITING = (
    *(_aten.index_put_.default, _aten.index_put.default),
    *(_aten._index_put_impl_.default, _aten._unsafe_index_put.default),
)

_MASKS = (torch.bool, torch.uint8)

_READING: dict[Any, str] = {Tensor.__repr__: "printing a tensor", Tensor.tolist: ".tolist()"}


@dataclasses.dataclass(frozen=True)
class HostRead:
    """An operator that the host waits for, or a copy between devices.

    `what` names it, `place` is the line of the user's code and `module` the path of the module that called
    it; `count` and `seconds` are those of one call of the model, or of one training step. `is_own`: PyTorch's
    optimizer or `GradScaler` does it, and not the line itself.
    """

    what: str
    place: str
    module: str
    is_own: bool = False
    count: int = 1
    seconds: float = 0.0
    is_copy: bool = False

    @property
    def key(self) -> tuple[str, str, str, bool]:
        """What it has in common with the same line's reads in other calls."""
        return self.what, self.place, self.module, self.is_own


class HostReads:
    """Notes what the host waits for, and copies between devices, in a `with` block inside a call of `within`.

    `module` tells the path of the module that is called now, and `is_own` whether PyTorch's optimizer or
    `GradScaler` is: these read numbers that are on the host anyway, which is nothing to be told.
    """

    def __init__(
        self,
        within: CodeType,
        module: Callable[[], str] = lambda: "",
        is_own: Callable[[], bool] = lambda: False,
    ) -> None:
        self._within, self._module, self._is_own = within, module, is_own
        self._found: dict[tuple[str, str, str, bool], HostRead] = {}

    @property
    def reads(self) -> tuple[HostRead, ...]:
        """What was seen, in its order."""
        return tuple(self._found.values())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See the class."""
        with _Operators(self), _Methods(self):
            yield

    def note(self, what: str, given: tuple[Any, ...], seconds: float, *, is_copy: bool = False) -> None:
        """Add a read, or a copy, of a tensor that is the first of those given."""
        is_own = self._is_own()
        if is_own and given and isinstance(given[0], Tensor) and given[0].device.type == "cpu":
            return
        key = (what, place_of_call(self._within) or "", self._module(), is_own)
        known = self._found.get(key, HostRead(*key, count=0, is_copy=is_copy))
        self._found[key] = dataclasses.replace(known, count=known.count + 1, seconds=known.seconds + seconds)


class _Operators(EagerMode):
    """Sees operators, whoever calls them, but not those of functions that an operator runs."""

    supports_higher_order_operators = True

    def __init__(self, seen: HostReads) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the class."""
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        copied = _copied(func, args, result)
        if copied or _waits(func, args):
            seconds = time.perf_counter() - start
            self._seen.note(copied or _name(func), args, seconds, is_copy=bool(copied))
        return result


class _Methods(TorchFunctionMode):
    """Sees the methods that read tensors without an operator that a mode would see."""

    def __init__(self, seen: HostReads) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the class."""
        if func not in _READING:
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        with _disable_current_modes():
            result = func(*args, **(kwargs or {}))
        self._seen.note(_READING[func], args, time.perf_counter() - start)
        return result


def is_inside(code: CodeType, within: CodeType) -> bool:
    """Whether a call of a function has led here, from inside of a call of `within`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not within:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def waits_to_write(
    indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *_: bool
) -> bool:
    """Whether `x[indices] = values` waits for a device: to count what masks choose, as many are written.

    PyTorch fills what one mask chooses, without counting it, where the value is one number on the host.
    """
    chosen = [index for index in indices if index is not None]
    masks = [index for index in chosen if index.dtype in _MASKS and index.device.type != "cpu"]
    is_number = values.numel() == 1 and values.device.type == "cpu"
    return bool(masks) and not (is_number and len(chosen) == 1 and not accumulate)


def _waits(func: Any, args: tuple[Any, ...]) -> bool:
    if func in _WRITING:
        return waits_to_write(*args[1:])
    if not _WAITING.intersection(func.tags):
        return False
    if func is not _aten.index.Tensor:
        return True
    indices = [leaf for leaf in pytree.tree_leaves(args[1:]) if isinstance(leaf, Tensor)]
    return any(index.dtype in _MASKS for index in indices)  # integers need no counting


def _copied(func: Any, args: tuple[Any, ...], result: Any) -> str:
    """`copy from cuda:0 to cpu`; empty where nothing goes from one device to another."""
    source = args[0] if args else None
    if func is _aten.copy_.default:
        source, result = args[1], args[0]
    elif func is not _aten._to_copy.default:
        return ""
    if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.device == result.device:
        return ""
    return f"copy from {source.device} to {result.device}"


def _name(func: Any) -> str:
    """What a user writes for an operator."""
    if func in _WRITING:
        return "x[mask] = y"
    packet = str(func.overloadpacket).removeprefix("aten.")
    return {"_local_scalar_dense": ".item()"}.get(packet, packet)
