"""Detects model code that reads strides, the autocast state, or attributes of its arguments.

A captured graph makes them constants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampopt.ir.model_copy import untouched_rng
from ampopt.ir.settings import Settings
from ampopt.ir.signature import map_tensors

logger = logging.getLogger("ampopt")


@dataclasses.dataclass
class Asked:
    """`layout`: how a tensor lies in memory; `autocast`: the autocast state of the call.

    `attributes`: those that a plain tensor has not, and a user may have set.
    """

    layout: bool = False
    autocast: bool = False
    attributes: bool = False


def has_attributes(tensor: Tensor) -> bool:
    """Whether a user has set attributes of a tensor."""
    return bool(vars(tensor))


def _getter(name: str) -> object:
    return getattr(Tensor, name).__get__


_LAYOUT = {
    *(Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset, Tensor.dim_order, Tensor.data_ptr),
    *(Tensor.untyped_storage, Tensor.storage, Tensor.is_set_to, Tensor._is_view, _getter("_base")),
}

_AUTOCAST = {
    *(torch.is_autocast_enabled, torch.get_autocast_dtype, torch.is_autocast_cache_enabled),
    *(torch.is_autocast_cpu_enabled, torch.get_autocast_cpu_dtype, torch.get_autocast_gpu_dtype),
}


class _LayoutWatch(TorchFunctionMode):
    """Sees what is asked of every tensor but a model's own, which stay as they are."""

    def __init__(self, model: nn.Module, asked: Asked) -> None:
        super().__init__()
        self._asked = asked
        self._own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note it, and answer as ever."""
        if func in _LAYOUT and any(id(tensor) not in self._own for tensor in args[:1]):
            self._asked.layout = True
        return func(*args, **(kwargs or {}))


def _is_of_torch(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("torch.")


def _is_of_library(frame: types.FrameType) -> bool:
    """Whether PyTorch asks, or what tells tensors of one framework from another's, as in transformers."""
    return _is_of_torch(frame) or str(frame.f_globals.get("__name__")).startswith("transformers.utils.")


def is_profiled() -> bool:
    """Whether a profiler written in C watches the thread: `cProfile` before Python 3.12, or PyTorch's."""
    return not (sys.getprofile() is None or callable(sys.getprofile()))


@contextlib.contextmanager
def watching_calls(watch: Callable[[types.FrameType, str, Any], None] | None) -> Iterator[None]:
    """Within the block, tell `watch` of the thread's calls, as `sys.setprofile` does; None: tell nobody.

    A profiler that is written in C, which could not be put back, is left alone: nothing is told then.
    """
    before = sys.getprofile()
    if is_profiled():
        yield
        return
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def noting_what_is_asked(model: nn.Module) -> Iterator[Asked]:
    """Within the block, record which of these the thread's code reads when it calls `model`.

    TorchScript reads without being observed, so such a model is assumed to read layouts. Reads of the
    autocast state in PyTorch's own modules do not count: they only select between equivalent implementations.
    Attributes are not noted here. Under a profiler written in C the autocast state counts as read.
    """
    is_scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    asked = Asked(layout=is_scripted, autocast=is_profiled())

    def watch(frame: types.FrameType, event: str, what: Any) -> None:
        if event == "c_call" and isinstance(what, types.BuiltinFunctionType) and what in _AUTOCAST:
            asked.autocast |= not _is_of_torch(frame)

    with watching_calls(watch), _LayoutWatch(model, asked):
        yield asked


def what_is_asked(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Asked:
    """What the code of a model, which is called, asks in a call; everything where that cannot be known."""
    try:
        with Settings().scope(device), untouched_rng(device), noting_what_is_asked(model) as asked:
            model(*args, **kwargs)
            asked.attributes = _asks_for_attributes(model, args, kwargs)
    except Exception as error:
        logger.debug("ampopt: what a model asks is not known: %s", error)
        return Asked(layout=True, autocast=True, attributes=True)
    return asked


def _asks_for_attributes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a model's code asks its arguments for attributes that they have not, and a user's may have.

    So it is assumed where it fails on tensors of the class that notes it.
    """
    asked_for = list[str]()

    class Watched(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__") and not _is_of_library(sys._getframe(1)):
                asked_for.append(name)
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")

    args, kwargs = map_tensors(lambda tensor: tensor.as_subclass(Watched), args, kwargs)
    try:
        model(*args, **kwargs)
    except Exception as error:
        logger.debug("ampopt: what a model asks its arguments for is not known: %s", error)
        return True
    return bool(asked_for)
