"""Tells in which of a model's modules a call is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn


@contextlib.contextmanager
def modules_inside(model: nn.Module, entered: Callable[[str], object]) -> Iterator[list[str]]:
    """Within the block, the paths of the modules whose calls a call of the model is in, outermost first.

    `entered` is told the path of each as it is called. Modules of TorchScript, which have no such hooks, are
    left out.
    """
    inside: list[str] = []

    def hook(path: str, module: nn.Module) -> None:
        def enter(*_: object) -> None:
            entered(path)
            inside.append(path)

        def leave(*_: object) -> None:
            inside.pop()

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hook(path, module)
        yield inside
