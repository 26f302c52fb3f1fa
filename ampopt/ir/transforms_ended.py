"""Ends the `torch.func` transforms that a tracer which failed has left open on its thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

_KINDS = torch._C._functorch.TransformType
_ENDS: dict[torch._C._functorch.TransformType, Callable[[], int]] = {
    _KINDS.Vmap: torch._C._functorch._vmap_decrement_nesting,
    _KINDS.Grad: torch._C._functorch._grad_decrement_nesting,
    _KINDS.Jvp: torch._C._functorch._jvp_decrement_nesting,
    _KINDS.Functionalize: torch._C._functorch._func_decrement_nesting,
}
"""What ends the innermost transform, which is of the kind."""


@contextlib.contextmanager
def transforms_ended() -> Iterator[None]:
    """End after the block the transforms that it has begun and not ended, with all that belongs to them.

    The graphs that TorchDynamo makes begin and end `vmap`, `grad` and `jvp` by operators of their own. A
    tracer that fails between these leaves them to the thread: from then on PyTorch refuses `requires_grad_`
    there, and another `jvp` as nested.
    """
    depth, nesting, level = len(_transforms()), eager_transforms.JVP_NESTING, forward_ad._current_level
    forward, backward = torch._C._is_fwd_grad_enabled(), torch.is_grad_enabled()
    try:
        yield
    finally:
        if left := _transforms()[depth:]:
            for each in reversed(left):  # PyTorch 2.10's own call for all of them takes two for one
                _ENDS[each.key()]()
            if level < 0 and any(each.key() == _KINDS.Jvp for each in left):
                with contextlib.suppress(RuntimeError):  # it was ended, or not begun
                    torch._C._exit_dual_level(level=0)
            eager_transforms.JVP_NESTING, forward_ad._current_level = nesting, level
            torch._C._set_fwd_grad_enabled(forward)
            torch.set_grad_enabled(backward)


def _transforms() -> list[torch._C._functorch.CInterpreter]:
    return torch._C._functorch.get_interpreter_stack() or []
