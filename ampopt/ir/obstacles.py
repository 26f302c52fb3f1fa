"""What keeps a model from being one graph, in words, where PyTorch's own error does not say it.

Told from the error of a capture: sequences that are packed, code of TorchScript that decides by values, and
operators of which PyTorch's capture would have to know values.
Higher-order operators (`torch.cond`) raise `HigherOrderError` when the model is watched before its capture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampopt.ir.place_in_code import place_of_line

_PACKING = str(Path("torch", "nn", "utils", "rnn.py"))
_RECURRENT = str(Path("torch", "nn", "modules", "rnn.py"))

PACKED = (
    "it computes on packed sequences (torch.nn.utils.rnn), whose sizes are values of a tensor; those of "
    "padded ones are not"
)

_PUBLIC = {"cond": "torch.cond", "while_loop": "torch.while_loop", "map_impl": "torch.map"}
"""The functions that users call, by the names of their operators."""

_BY_VALUES = ("data-dependent", "DataDependent", ".item()", "_local_scalar_dense")
"""Words of PyTorch's errors about a path that values decide."""


class HigherOrderError(Exception):
    """A model calls an operator that runs functions of its own, which a graph of ATen operators has not."""

    def __init__(self, operator: str) -> None:
        name = _PUBLIC.get(operator, f"the operator {operator}")
        super().__init__(f"{name} decides which functions of the model run, and a graph has one path")


class ScriptBranchError(Exception):
    """Code of TorchScript takes a path that values decide."""

    def __init__(self, place: str | None) -> None:
        super().__init__(f"its TorchScript code decides by values{f' at {place}' if place else ''}")


def obstacle(error: BaseException) -> str | None:
    """What in the model's code an error of its capture is about; None where that is not known better."""
    for each in _chain(error):
        if any(map(_packs, _frames(each))):
            return PACKED
        if (found := _in_torchscript(each) or _averages(each) or _asks_for_values(each)) is not None:
            return found
    return None


def _averages(error: BaseException) -> str | None:
    """That a batch norm makes a number of how many batches it has seen, where an error is about values."""
    if not any(words in str(error) for words in _BY_VALUES):
        return None
    found = (frame.f_locals.get("self") for frame in _frames(error))
    inside = [each for each in found if isinstance(each, nn.Module) and not _is_of_an_export(each)]
    if not inside or not isinstance(norm := inside[-1], _BatchNorm) or norm.momentum is not None:
        return None
    path = next((name for name, each in inside[0].named_modules() if each is norm), "")
    return (
        f"{path or 'it'} ({type(norm).__name__}) averages over all batches, momentum=None, by a number that "
        "it reads from a tensor: give it a momentum, or let eval() end its training"
    )


def _is_of_an_export(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.export", "torch._export"))


def _asks_for_values(error: BaseException) -> str | None:
    """What needs a tensor's values, where PyTorch's error is a bare name or its compiler's own words."""
    lacks = f"which are not known when PyTorch {torch.__version__} captures"
    if type(error).__name__ == "DataDependentOutputException":
        return f"{error} asks for values of tensors, {lacks}"
    if "Could not extract specialized integer from data-dependent expression" in str(error):
        return f"a place or a size is computed of values of tensors, {lacks}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised from."""
    seen, now = set[int](), error
    while id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or now.__context__ or now


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _packs(frame: FrameType) -> bool:
    """Whether a call packs or unpacks sequences, or is of a recurrent layer that was given packed ones."""
    file = frame.f_code.co_filename
    if file.endswith(_PACKING):
        return "pack" in frame.f_code.co_name
    return file.endswith(_RECURRENT) and isinstance(frame.f_locals.get("batch_sizes"), Tensor)


def _in_torchscript(error: BaseException) -> str | None:
    """Which line of TorchScript an error is about, and what PyTorch says."""
    text = str(error)
    if "TorchScript interpreter" not in text:
        return None
    lines = re.findall(r'File "([^"]+)", line (\d+)', text)
    places = [place for file, line in lines if (place := place_of_line(file, int(line))) is not None]
    if any(words in text for words in _BY_VALUES):
        return str(ScriptBranchError(places[-1] if places else None))
    last = [line.strip() for line in text.splitlines() if line.strip()][-1]
    return f"its TorchScript code fails in a capture{f' at {places[-1]}' if places else ''}: {last[:200]}"


_READS = ("aten::Bool", "aten::item", "aten::Int", "aten::Float")
"""Operators of TorchScript that make a number of a tensor."""


def branch_by_values(script: Any) -> str | None:
    """The first line of a scripted module that takes a path by a tensor's values; None if none does."""
    graph = script.inlined_graph
    for kind in ("prim::If", "prim::Loop"):
        for node in graph.findAllNodes(kind):
            if _reads_a_tensor(node):
                found = re.search(r'File "([^"]+)", line (\d+)', node.sourceRange())
                return found and place_of_line(found[1], int(found[2]))
    return None


def _reads_a_tensor(node: Any) -> bool:
    """Whether what a node takes is computed of a number that was made of a tensor."""
    waiting, seen = [value.node() for value in node.inputs()], set[str]()
    while waiting:
        each = waiting.pop()
        taken = list(each.inputs())
        if each.kind() in _READS and any(value.type().kind() == "TensorType" for value in taken):
            return True
        for value in taken:
            if (name := value.debugName()) not in seen:
                seen.add(name)
                waiting.append(value.node())
    return False
