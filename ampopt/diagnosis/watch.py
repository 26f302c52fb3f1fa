"""Watched calls of a model: which lines wait for the device or copy across, and which call its modules."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ampopt.diagnosis.host_reads import HostRead, HostReads
from ampopt.errors import first_line
from ampopt.ir.place_in_code import place_in_code, place_of_call
from ampopt.ir.settings import Settings
from ampopt.ir.signature import map_tensors
from ampopt.system.interrupts import check_interrupted


@dataclasses.dataclass(frozen=True)
class Watched:
    """What was seen. `called_at`: for each module's path the line that calls it, if the user's code does.

    `reads` are those of the second call, and `at_first` what the first one reads and the second does not,
    such as a scale that a model keeps. `error` and `failed_at` tell why and on which line the first call
    failed; None if it did not.
    """

    reads: tuple[HostRead, ...]
    called_at: Mapping[str, str]
    error: str | None = None
    failed_at: str | None = None
    at_first: tuple[HostRead, ...] = ()

    def place(self, module: str) -> str:
        """A module with its line: `layer1.0.bn1, resnet.py:93, "out = self.bn1(out)"`."""
        return ", ".join(part for part in (module, self.called_at.get(module, "")) if part)


def watch(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> Watched:
    """Call a model, a copy that nothing else uses, twice as its user does, on tensors that it may change.

    Where the second call fails, which others tell, the first one's reads are taken for those of every call.
    """
    inside: list[str] = []
    first, later = (HostReads(watch.__code__, lambda: inside[-1] if inside else "") for _ in range(2))
    again = map_tensors(lambda tensor: tensor.detach().clone(), args, kwargs)
    called_at: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(Settings().scope(device))
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.enter_context(_noted(path, module, called_at, inside))
        if (failed := _fails(model, args, kwargs, first)) is not None:
            return Watched(first.reads, called_at, first_line(failed), place_in_code(failed))
        if _fails(model, *again, later) is not None:
            return Watched(first.reads, called_at)
    always = {read.key for read in later.reads}
    at_first = tuple(read for read in first.reads if read.key not in always)
    return Watched(later.reads, called_at, at_first=at_first)


def _fails(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seen: HostReads
) -> Exception | None:
    """Call a model while its reads are noted; the error, if it fails."""
    try:
        with seen.watching():
            model(*args, **kwargs)
    except Exception as raised:
        check_interrupted(raised)
        return raised
    return None


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
