"""Addresses inside a captured CUDA graph that can be changed between its launches.

A captured kernel has the addresses of its operands among its parameters, and CUDA can change the parameters
of a graph that is ready to run. So its kernels can read the caller's tensors and write fresh results in
their place, and nothing is copied.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ampopt.cuda_driver import (
    KERNEL_NODE,
    MEMCPY_NODE,
    MEMSET_NODE,
    NODES_WITHOUT_OPERANDS,
    CopyParams,
    KernelParams,
    MemsetParams,
    check,
    current_context,
    destroy,
    driver,
    in_context,
    instantiate,
    nodes_of,
    pack,
    packed_parameters,
    parameter_sizes,
    type_of,
)

_WORD = 8
"""Bytes of an address; in a parameter it lies at a multiple of them."""


class _Node:
    """A node's parameters as words that may be overwritten; `update` makes the graph use them from now on."""

    def __init__(self, words: Sequence[c_uint64], update: Callable[[], int], alive: object) -> None:
        self.words, self.update, self._alive = words, update, alive


class Pointer:
    """Places in a graph's nodes that hold an address inside one tensor's memory."""

    def __init__(self, tensor: Tensor, nodes: Sequence[_Node], *, result: bool = False) -> None:
        """`result`: of the last node alone; those before it have used the memory for other tensors."""
        self.address = start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        inside = {node: [w for w in node.words if start <= w.value < end] for node in nodes}
        found = [(node, words) for node, words in inside.items() if words][-1 if result else 0 :]
        self._nodes = [node for node, _ in found]
        self._places = [(word, word.value - start) for _, words in found for word in words]

    @property
    def nodes(self) -> int:
        """The number of nodes that hold such an address."""
        return len(self._nodes)

    def move(self, address: int) -> None:
        """Let later launches find the tensor at another address; those under way are not changed.

        The graph's context has to be current. RuntimeError where the driver refuses.
        """
        self.address = 0  # where that fails, it is at neither place
        for word, offset in self._places:
            word.value = address + offset
        for node in self._nodes:
            check(node.update())
        self.address = address


class ReadyGraph:
    """A captured graph, ready to run on inputs and outputs whose addresses can be changed."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Instantiate a graph that was captured with `keep_graph=True`, and that has to stay alive.

        `inputs` and `outputs`: the tensors without gaps that it reads and writes, where they are now. An
        output's memory has been other tensors' before, inside the graph: only the last node that uses it
        is taken for the one that writes it. Whether that is so has to be tried. Raises OSError,
        AttributeError or RuntimeError where the driver or PyTorch does not tell what is needed.
        """
        self._context = current_context()
        self._ready = instantiate(graph.raw_cuda_graph())
        weakref.finalize(self, destroy, self._ready, self._context).atexit = False
        self._launch = functools.partial(driver().cuGraphLaunch, self._ready)
        read = [self._read(node) for node in nodes_of(graph.raw_cuda_graph())]
        nodes = [node for node in read if node is not None]
        self.inputs = [Pointer(tensor, nodes) for tensor in inputs]
        self.outputs = [Pointer(tensor, nodes, result=True) for tensor in outputs]

    def move(self, addresses: Sequence[int]) -> None:
        """Let later launches use these addresses, those of the inputs first; see `Pointer.move`."""
        with in_context(self._context):  # a thread may have none, or another device's
            for pointer, address in zip((*self.inputs, *self.outputs), addresses, strict=True):
                if address != pointer.address:
                    pointer.move(address)

    def launch(self, stream: int) -> None:
        """Run on a stream, by its handle. RuntimeError where the driver refuses."""
        if self._launch(stream):  # a thread that has not used the device yet
            with in_context(self._context):
                check(self._launch(stream))

    def _read(self, node: c_void_p) -> _Node | None:
        kind = type_of(node)
        if kind == KERNEL_NODE:
            return self._kernel(node)
        if kind == MEMCPY_NODE:
            return self._plain(node, CopyParams(), "cuGraph{}MemcpyNode{}Params")
        if kind == MEMSET_NODE:
            return self._plain(node, MemsetParams(), "cuGraph{}MemsetNode{}Params")
        if kind in NODES_WITHOUT_OPERANDS:
            return None
        raise RuntimeError(f"the operands of a node of type {kind} are not known")

    def _kernel(self, node: c_void_p) -> _Node:
        params = KernelParams()
        check(driver().cuGraphKernelNodeGetParams_v2(node, byref(params)))
        if params.parameters or not params.extra:
            sizes = list(parameter_sizes(params))
            owned = [_copied(params.parameters[index], size) for index, size in enumerate(sizes)]
            table: object = (c_void_p * max(1, len(owned)))(*map(ctypes.addressof, owned))
            params.parameters = ctypes.cast(table, POINTER(c_void_p))  # type: ignore[arg-type]
        else:
            place, size = packed_parameters(params)
            sizes, owned = [size], [_copied(place, size)]
            length = c_size_t(size)
            table = (pack(params, owned[0], length), length)
        words = [word for buffer, size in zip(owned, sizes, strict=True) for word in _words(buffer, size)]
        set_params = driver().cuGraphExecKernelNodeSetParams_v2
        update = functools.partial(set_params, self._ready, node, ctypes.addressof(params))
        return _Node(words, update, (params, owned, table))

    def _plain(self, node: c_void_p, params: Any, name: str) -> _Node:
        """A node whose parameters are one structure without addresses of others."""
        check(getattr(driver(), name.format("", "Get"))(node, byref(params)))
        set_params = getattr(driver(), name.format("Exec", "Set"))
        update = functools.partial(set_params, self._ready, node, ctypes.addressof(params), self._context)
        return _Node(_words(params, ctypes.sizeof(params)), update, params)


def _copied(address: int | None, size: int) -> Any:
    """A parameter of so many bytes, in memory of our own."""
    buffer = (c_uint64 * -(-size // _WORD))()
    ctypes.memmove(buffer, address or 0, size)
    return buffer


def _words(buffer: Any, size: int) -> list[c_uint64]:
    return [c_uint64.from_buffer(buffer, _WORD * place) for place in range(size // _WORD)]
