"""Watched calls of a model: which lines wait for the device or copy across, and which call its modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ampopt.diagnosis.host_reads import HostRead, HostReads
from ampopt.diagnosis.module_calls import modules_inside
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
    called_at: dict[str, str] = {}
    again = map_tensors(lambda tensor: tensor.detach().clone(), args, kwargs)

    def entered(path: str) -> None:
        if path and path not in called_at and (place := place_of_call(watch.__code__)):
            called_at[path] = place

    with Settings().scope(device), modules_inside(model, entered) as inside:
        first, later = (HostReads(watch.__code__, lambda: inside[-1] if inside else "") for _ in range(2))
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
