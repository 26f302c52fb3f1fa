"""Raises an error where a kernel on a GPU would assert: before it runs.

What a place out of range is to an operator, an error on a CPU, is an assertion in its kernel on a GPU, which
ends the process's CUDA context, and with it everything that the process has there. Inputs that are drawn,
scaled, or have a fault in them may lead there: NaN as an integer is the smallest one.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampopt.ir.graph import calls
from ampopt.ir.index_ranges import may_miss
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes

_INDEXED = frozenset(
    {"index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put", "index_select"}
    | {"index_add", "index_copy", "index_fill", "index_reduce", "gather", "take", "put"}
    | {"scatter", "scatter_add", "scatter_reduce", "max_unpool2d", "max_unpool3d"}
    | {"embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"}
)
"""Operators with indices; a name is without the mark of what works in place."""

_OF_CLASSES = frozenset(
    {"nll_loss", "nll_loss_nd", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward", "cross_entropy_loss"}
    | {"multi_margin_loss", "multilabel_margin_loss", "multilabel_margin_loss_forward", "one_hot"}
    | {"masked_scatter"}
)
"""Operators whose kernels assert what integers and booleans by other names are."""

_OF_NUMBERS = frozenset({"binary_cross_entropy", "_assert_async"})
"""Operators whose kernels assert what all of their numbers are."""

_ASSERTING = _INDEXED | _OF_CLASSES | _OF_NUMBERS


class AssertsRaised(TorchDispatchMode):
    """A mode in which PyTorch's kernels for a CPU, which check, run before those of a device that assert.

    They get copies of integers and booleans; and no numbers where these decide nothing. Operators that run
    functions, and what is compiled, run as they do without the mode, and are not checked.
    """

    supports_higher_order_operators = True

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code may run in the mode; else PyTorch would run what it was made of."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator. Raises what PyTorch raises on a CPU."""
        kwargs = kwargs or {}
        if _name(func) in _ASSERTING:
            tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            is_dense = all(tensor.layout is torch.strided for tensor in tensors)
            if is_dense and any(tensor.device.type == self._device_type for tensor in tensors):
                self.first(func, args, kwargs)
        return func(*args, **kwargs)

    def first(self, func: Any, args: Any, kwargs: Any) -> None:
        """Call an operator on a CPU, in the place of the call that follows."""
        copied = _on_cpu if _name(func) in _OF_NUMBERS else _places_on_cpu
        with _disable_current_modes():
            own = pytree.tree_map_only(Tensor, copied, (args, kwargs))
            if func._schema.is_mutable:
                own = pytree.tree_map_only(Tensor, Tensor.contiguous, own)
            func(*own[0], **own[1])


@functools.cache
def _name(operator: object) -> str:
    """The name of one of PyTorch's operators without the mark of what works in place; nothing of others."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return ""
    return operator._schema.name.removeprefix("aten::").rstrip("_")


def _on_cpu(tensor: Tensor) -> Tensor:
    """A copy; in float32 at the least, which all kernels for a CPU take."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy.float() if copy.dtype in (torch.float16, torch.bfloat16) else copy


def _places_on_cpu(tensor: Tensor) -> Tensor:
    """A copy of integers and booleans; a number in all places, and no more memory, for others."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return _on_cpu(tensor)
    dtype = torch.float32 if tensor.is_floating_point() else torch.complex64
    return torch.ones((), dtype=dtype, device="cpu").expand(tensor.shape)


def asserts_raised(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A scope in which operators on a GPU raise, as on a CPU, what their kernels would assert.

    Each of them waits for the device. Nothing on a CPU.
    """
    return AssertsRaised() if device.type == "cuda" else contextlib.nullcontext()


def may_assert(program: Program) -> bool:
    """Whether a program's operators may be given what their kernels would assert against on a GPU."""
    inner = [part for part in program.graph.modules() if isinstance(part, fx.GraphModule)]
    inner.remove(program.graph)
    if any(_name(node.target) in _INDEXED for part in inner for node in calls(part)):
        return True
    names = {_name(node.target) for part in (program.graph, *inner) for node in calls(part)}
    if names & (_OF_CLASSES | _OF_NUMBERS):
        return True
    return bool(names & _INDEXED) and any(True for _ in may_miss(record_shapes(program)))
