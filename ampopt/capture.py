"""From a model and a call of it to a Program: `torch.export`, then `lowering`.

The user's model is never touched: everything here works on a copy in evaluation mode.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import CaptureError, InputError
from ampopt.flags import older_flags_readable
from ampopt.lowering import lower
from ampopt.program import Border, Program, autocast_scope
from ampopt.quiet import quiet
from ampopt.signature import OutputLayout, flatten_call, flatten_outputs, tensors_of


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured model: its program, and how its calls and results are put together."""

    program: Program
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """The example call's leaves; a call with other values than these, tensors aside, is another program."""
    layout: OutputLayout


def private_copy(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A deep copy of a model in evaluation mode, without gradients, on `device` (None: where it is).

    Tensors that are results of other tensors (an old-style `weight_norm`) are cloned, because PyTorch
    refuses to copy them. Raises InputError where the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        with torch.no_grad():  # TorchScript clones its parameters, which makes results of them otherwise
            duplicate = copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"the model cannot be copied ({error}); ampopt works on a copy so that yours stays as it is: "
            "remove what cannot be deep-copied from its attributes"
        ) from error
    for parameter in duplicate.parameters():
        parameter.requires_grad_(False)
    duplicate.eval()
    return duplicate if device is None else duplicate.to(device)


def device_of(model: nn.Module, leaves: Sequence[Any]) -> torch.device:
    """Where a model computes: the device of its weights, else of its inputs. InputError where they differ."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise InputError(f"the model's weights are on several devices ({names}); ampopt optimizes for one")
    tensors = tensors_of(leaves)
    return next(iter(devices)) if devices else (tensors[0].device if tensors else torch.device("cpu"))


@contextlib.contextmanager
def untouched_rng(device: torch.device) -> Iterator[None]:
    """Put the random number generators back as they were after the block."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def _plain_world(device: torch.device) -> Iterator[None]:
    """Neither gradients nor an autocast that happens to surround the call."""
    with torch.inference_mode(mode=False), torch.no_grad(), autocast_scope(device, None):
        yield


def _python_state(model: nn.Module) -> dict[str, object]:
    """The plain values among the attributes of a model and its submodules, by dotted name."""
    plain = (int, float, str, bool, type(None))
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, plain)
    }


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    if isinstance(model, torch.jit.ScriptModule):  # which torch.export itself refuses
        from torch._export.converter import TS2EPConverter

        return TS2EPConverter(model, args, kwargs).convert()
    return torch.export.export(model, args, kwargs, strict=False)


def capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Captured:
    """Capture one call of a model (a private copy, on `device`) as a Program.

    Raises CaptureError with PyTorch's own reason where the model cannot be one graph.
    """
    leaves, spec = flatten_call(args, kwargs)
    try:
        with _plain_world(device), untouched_rng(device), quiet(), older_flags_readable():
            exported = _export(model, tuple(args), dict(sorted(kwargs.items())))
            before = _python_state(model)
            result = model(*args, **kwargs)
            changed = [key for key, value in _python_state(model).items() if before.get(key) != value]
    except Exception as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" …")
        raise CaptureError(f"torch.export cannot capture {type(model).__name__}: {reason}") from error
    with _plain_world(device), untouched_rng(device), quiet(), older_flags_readable():
        graph = lower(exported)
    if changed:
        raise CaptureError(f"{type(model).__name__} changes its attribute {changed[0]} when it is called")
    outputs, layout = flatten_outputs(result)
    produced = len(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    if produced != len(outputs):
        raise CaptureError(f"{type(model).__name__} returns {len(outputs)} tensors, its graph {produced}")
    examples = tuple(t.detach() for t in tensors_of(leaves))
    program = Program(
        graph=graph,
        examples=examples,
        entry=tuple(Border(t.dtype) for t in examples),
        exit=tuple(Border(t.dtype) for t in outputs),
        device=device,
    )
    return Captured(program, spec, tuple(leaves), layout)
