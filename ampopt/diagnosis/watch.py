"""One watched call of a model: which lines wait for the device or copy across, and which call its modules."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt.errors import first_line
from ampopt.ir.place_in_code import place_in_code, place_of_call
from ampopt.ir.settings import Settings
from ampopt.system.interrupts import check_interrupted

_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""The tags of operators whose result, or its shape, the host has to wait for."""


@dataclasses.dataclass(frozen=True)
class HostRead:
    """An operator that the host waits for, or a copy between devices.

    `what` names it, `place` is the line of the user's code and `module` the path of the module that called
    it; `count` and `seconds` are those of one call of the model.
    """

    what: str
    place: str
    module: str
    count: int = 1
    seconds: float = 0.0
    is_copy: bool = False


@dataclasses.dataclass(frozen=True)
class Watched:
    """What was seen. `called_at`: for each module's path the line that calls it, if the user's code does.

    `error` and `failed_at` tell why and on which line the call failed; None if it did not.
    """

    reads: tuple[HostRead, ...]
    called_at: Mapping[str, str]
    error: str | None = None
    failed_at: str | None = None

    def place(self, module: str) -> str:
        """A module with its line: `layer1.0.bn1, resnet.py:93, "out = self.bn1(out)"`."""
        return ", ".join(part for part in (module, self.called_at.get(module, "")) if part)


def watch(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> Watched:
    """Call a model, a copy that nothing else uses, once as its user does, on tensors that it may change."""
    seen = _Seen()
    called_at: dict[str, str] = {}
    error = failed_at = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(Settings().scope(device))
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.enter_context(_noted(path, module, called_at, seen.inside))
        stack.enter_context(seen)
        try:
            model(*args, **kwargs)
        except Exception as raised:
            check_interrupted(raised)
            error, failed_at = first_line(raised), place_in_code(raised)
    return Watched(tuple(seen.reads.values()), called_at, error, failed_at)


@contextlib.contextmanager
def _noted(path: str, module: nn.Module, called_at: dict[str, str], inside: list[str]) -> Iterator[None]:
    """Note where a module is called, and while it is that it is."""

    def enter(*_: object) -> None:
        if path and path not in called_at and (place := place_of_call(watch.__code__)):
            called_at[path] = place
        inside.append(path)

    def leave(*_: object) -> None:
        inside.pop()

    handles = module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Seen(TorchDispatchMode):
    """Notes what the host waits for, and copies between devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: list[str] = []
        self.reads: dict[tuple[str, str, str], HostRead] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        copied = _copied(func, args, result)
        if copied or _waits(func, args):
            key = (copied or _name(func), self._place(), self.inside[-1] if self.inside else "")
            known = self.reads.get(key, HostRead(*key, count=0, is_copy=bool(copied)))
            seconds = known.seconds + time.perf_counter() - start
            self.reads[key] = dataclasses.replace(known, count=known.count + 1, seconds=seconds)
        return result

    def _place(self) -> str:
        return place_of_call(watch.__code__) or ""


def _waits(func: Any, args: tuple[Any, ...]) -> bool:
    if not _WAITING.intersection(func.tags):
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    indices = [leaf for leaf in pytree.tree_leaves(args[1:]) if isinstance(leaf, Tensor)]
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)  # integers need no counting


def _copied(func: Any, args: tuple[Any, ...], result: Any) -> str:
    """`copy from cuda:0 to cpu`; empty where nothing goes from one device to another."""
    source = args[0] if args else None
    if func is torch.ops.aten.copy_.default:
        source, result = args[1], args[0]
    elif func is not torch.ops.aten._to_copy.default:
        return ""
    if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.device == result.device:
        return ""
    return f"copy from {source.device} to {result.device}"


def _name(func: Any) -> str:
    """What a user writes for an operator."""
    packet = str(func.overloadpacket).removeprefix("aten.")
    return {"_local_scalar_dense": ".item()"}.get(packet, packet)
