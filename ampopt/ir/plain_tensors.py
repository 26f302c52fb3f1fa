"""Checks that a program can answer a call: plain tensors only, outside of transforms and tracers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad, grad_mode
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from ampopt.errors import InputError

_PLAIN = (Tensor, Parameter)

_COMPILED = "it is compiled already: compile or export the original model"


def is_transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode autograd is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_surrounded() -> bool:
    """Whether a `torch.func` transform, forward-mode autograd, a tracer or a dispatch mode is active."""
    return (
        is_transformed()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def is_simple(tensor: Any) -> bool:
    """Whether this is a plain tensor of numbers in memory, as they are, that nobody derives by."""
    if tensor.__class__ is not Tensor:
        return False
    special = tensor.requires_grad or tensor.is_nested or tensor.is_neg() or tensor.is_conj()
    return not special and tensor.layout is torch.strided


def check_plain(tensors: Sequence[Tensor]) -> None:
    """Raise InputError if a program would silently give wrong results for these tensors or this caller.

    Programs run without gradients and on engines that read memory: a derivative would be zero, and a tracer
    would record one call's numbers as a constant.
    """
    check_untraced(tensors)
    for index, tensor in enumerate(tensors):
        if reason := _why_not_plain(tensor):
            raise InputError(f"tensor {index} of the call {reason}")


def check_untraced(leaves: Iterable[object]) -> None:
    """Raise InputError if the call of these leaves is traced, whoever would answer it."""
    if any(isinstance(leaf, fx.Proxy) for leaf in leaves):
        raise InputError("an optimized module cannot be traced by torch.fx: trace the original model")
    if is_surrounded() and (tracer := _tracer()):
        raise InputError(
            f"an optimized module cannot be traced by {tracer}, which would keep the numbers of one call: "
            "trace the original model"
        )


def check_caller(leaves: Sequence[object]) -> None:
    """Raise InputError where the original may not answer a call either: it is traced, or derived by."""
    check_untraced(leaves)
    check_no_derivatives(leaves)


def check_no_derivatives(tensors: Sequence[object]) -> None:
    """Raise InputError if a derivative is requested: calls are answered without gradients."""
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor) and (reason := _why_derivative(tensor)):
            raise InputError(f"tensor {index} of the call {reason}")


class _WithoutDerivative(torch.autograd.Function):
    """Outputs that seem to depend on an input, and say what is wrong when a derivative is asked for."""

    @staticmethod
    def forward(ctx: Any, _input: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs as they are: views that a function has made may not be written to."""
        ctx.mark_dirty(*outputs)
        return outputs

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        """Refuse."""
        raise InputError(
            "an optimized module is for inference, and has no derivatives: differentiate the original model"
        )


def without_derivatives(result: Any, tensors: Sequence[object]) -> Any:
    """A call's result; if an input requires gradients, computing them raises InputError.

    Results are computed without gradients, so a derivative would silently be zero. Nothing is written to
    them, which their version says, too: a gradient of something else that needs their numbers is given.
    """
    asking = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]
    if not asking or not torch.is_grad_enabled():
        return result
    leaves, spec = pytree.tree_flatten(result)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]
    given = tuple(_of_its_own(leaves[place]) for place in places)
    with grad_mode._unsafe_preserve_version_counter(given):
        found = _WithoutDerivative.apply(asking[0], *given)
    for place, output in zip(places, found, strict=True):
        leaves[place] = output
    return pytree.tree_unflatten(leaves, spec)


def _of_its_own(tensor: Tensor) -> Tensor:
    """The tensor's memory in another one; of an inference tensor, which has no derivatives, a copy."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _tracer() -> str | None:
    """What records the operators of the call, where something does."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    modes = torch._C._TorchDispatchModeKey
    if torch._C._get_dispatch_mode(modes.PROXY) is not None:
        return "torch.export or make_fx"
    return "a FakeTensorMode" if torch._C._get_dispatch_mode(modes.FAKE) is not None else None


def _why_derivative(tensor: Tensor) -> str | None:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return (
            "belongs to a transform of torch.func (grad, jvp, vmap, …), and an optimized module is for "
            "inference: transform the original model"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return (
            "carries a tangent of forward-mode autograd, and an optimized module is for inference: "
            "use the original model"
        )
    return None


def _why_not_plain(tensor: Tensor) -> str | None:
    if reason := _why_derivative(tensor):
        return reason
    kind = type(tensor)
    if kind not in _PLAIN and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {kind.__name__}, which is no plain tensor: give a torch.Tensor with its numbers"
    if tensor.is_nested:
        return "is nested: call the module with one plain tensor after the other, or pad them"
    return why_not_dense(tensor)


def why_not_dense(tensor: Tensor) -> str | None:
    """That the numbers of a tensor do not lie in memory as they are, and what makes them; None: they do."""
    if tensor.layout is not torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}: convert it with .to_dense()"
    return "is quantized: convert it with .dequantize()" if tensor.is_quantized else None


def keep_from_dynamo(function: Callable[..., Any], why: str = _COMPILED) -> None:
    """Make `torch.compile` break its graph at `function`, and not compile what it calls.

    Another compiler's code for a program would not be verified. `torch.compiler.disable` does the same with a
    wrapper around each call, and takes a second to import.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
