"""One watched call of a model: which lines wait for the device or copy across, and which call its modules."""

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
from ampopt.system.interrupts import check_interrupted


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
    inside: list[str] = []
    seen = HostReads(watch.__code__, lambda: inside[-1] if inside else "")
    called_at: dict[str, str] = {}
    error = failed_at = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(Settings().scope(device))
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.enter_context(_noted(path, module, called_at, inside))
        stack.enter_context(seen.watching())
        try:
            model(*args, **kwargs)
        except Exception as raised:
            check_interrupted(raised)
            error, failed_at = first_line(raised), place_in_code(raised)
    return Watched(seen.reads, called_at, error, failed_at)


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
