"""CUDA's float16 autocast rules, determined on any machine with fake tensors.

`torch.autocast` keeps a list of operators for each kind of device: on CUDA softmax, layer normalization and
sums run in float32, on a CPU they do not. The lists are in every build of PyTorch, and fake tensors that
say they are on a GPU are enough to ask them.
"""

from __future__ import annotations

import contextlib
import functools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt.errors import ExportError
from ampopt.ir.graph import aten, copy_of, finish, insert_call, where
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.ir.program import Program

_CUDA = torch.device("cuda", 0)

_CELLS: frozenset[object] = frozenset({aten.lstm_cell.default, aten.gru_cell.default})

_RECURRENT: frozenset[object] = _CELLS | {
    *(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input),
    *(aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default),
}
"""Operators for which CUDA's kernels would be asked, without a GPU; autocast has them all in float16."""


class _WideningCasts(TorchDispatchMode):
    """Notes the tensors that are cast to float32 while it is active."""

    supports_higher_order_operators = True
    """They run as they are, as operators of the user's do: what they cast inside is their own business."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and kwargs.get("dtype") is torch.float32:
            self.tensors.append(args[0])
        return func(*args, **kwargs)


class _CudaRun(fx.Interpreter):
    """Runs a graph on fake CUDA tensors under CUDA's autocast and notes which inputs that widens."""

    def __init__(self, module: fx.GraphModule, fake: FakeTensorMode) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self.widened: list[tuple[fx.Node, fx.Node]] = []
        self._fake = fake

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return on_cuda(self.fetch_attr(target), self._fake)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        values = {source: self.env[source] for source in n.all_input_nodes}
        halves = [s for s, v in values.items() if isinstance(v, Tensor) and v.dtype is torch.float16]
        if FULL_PRECISION in n.meta:
            self.widened.extend((n, source) for source in halves)
            wide = values | {source: values[source].float() for source in halves}
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda source: wide[source])
            with torch.autocast("cuda", enabled=False):
                return self.call_function(n.target, args, kwargs)
        with _WideningCasts() as casts:
            try:
                result = super().run_node(n)
            except Exception as error:
                reason = textwrap.shorten(str(error), 200, placeholder=" …")
                raise ExportError(
                    f"float16 autocast cannot be followed through {where(n)}: {reason}"
                ) from error
        if isinstance(result, Tensor) and result.dtype is torch.float16:
            return result  # an operator that widens inside and rounds again does so everywhere
        if _is_float32(result) and not any(map(_is_float32, values.values())):
            self.widened.extend((n, source) for source in halves)  # asked for by `dtype=`, or by a cast
        else:
            cast = [s for s in halves if any(values[s] is tensor for tensor in casts.tensors)]
            self.widened.extend((n, source) for source in cast)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _RECURRENT:
            return self._recurrent(target, args, kwargs)
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: _CUDA, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _recurrent(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The results' shapes are those of a CPU, their dtype is autocast's, or the inputs' without it."""
        halved = torch.is_autocast_enabled("cuda")
        if halved and target in _CELLS:
            raise ExportError("a CPU's autocast leaves it in float32: use a layer with one step")
        dtype = torch.float16 if halved else next(t.dtype for t in pytree.tree_leaves(args) if _is_float(t))

        def like(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)

        there = functools.partial(like, device=torch.device("cpu"), dtype=torch.float32)
        results = super().call_function(target, *pytree.tree_map_only(Tensor, there, (args, kwargs)))
        return pytree.tree_map_only(Tensor, functools.partial(like, device=_CUDA, dtype=dtype), results)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _is_float32(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float32


def on_cuda(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """A fake CUDA tensor with the shape, strides and dtype of a real one."""
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CUDA)


@contextlib.contextmanager
def _cuda_autocast() -> Iterator[None]:
    """`torch.autocast("cuda")`, which switches itself off where there is no GPU, left on."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(cached)


def with_widening_casts(program: Program) -> Program:
    """The program with a cast to float32 wherever CUDA's float16 autocast computes in float32.

    In the FP32 program the casts change nothing; recorded under a CPU's float16 autocast they give the
    operators the precision that they have on CUDA. Raises ExportError if a fake run is impossible.
    """
    module = copy_of(program.graph)
    fake = FakeTensorMode()
    run = _CudaRun(module, fake)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        inputs = [on_cuda(b.convert(t), fake) for b, t in zip(program.entry, program.examples, strict=True)]
        with fake, _cuda_autocast():
            run.run(*inputs)
    for node, source in run.widened:
        cast = insert_call(module, node, aten._to_copy.default, source, dtype=torch.float32)
        node.replace_input_with(source, cast)
    return program.with_graph(finish(module))
