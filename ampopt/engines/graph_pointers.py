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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampopt.system.cuda_driver import (
    KERNEL_NODE,
    MEMCPY_NODE,
    MEMSET_NODE,
    NODES_WITHOUT_OPERANDS,
    Context,
    CopyParams,
    KernelParams,
    MemsetParams,
    check,
    destroy,
    driver,
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
    """A node's parameters as words that may be overwritten.

    `update` makes, of an instance, what lets that one use what they say.
    """

    def __init__(
        self,
        words: Sequence[ctypes.Array[c_uint64]],
        update: Callable[[c_void_p], partial[int]],
        alive: object,
    ) -> None:
        self.words, self.update, self._alive = words, update, alive


class _Uses:
    """The nodes of a graph that hold addresses inside a tensor's memory; `places`: words, index, offset.

    `written`: what they say now.
    """

    def __init__(self, tensor: Tensor, nodes: Sequence[_Node], *, result: bool = False) -> None:
        """`result`: of the last node alone; those before it have used the memory for other tensors."""
        self.address = start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        found = {
            node: [
                (words, place, word - start)
                for words in node.words
                for place, word in enumerate(words)
                if start <= word < end
            ]
            for node in nodes
        }
        self.nodes = [node for node, places in found.items() if places][-1 if result else 0 :]
        self.places = [place for node in self.nodes for place in found[node]]
        self.written = c_uint64(start)

    def write(self, address: int) -> None:
        """Let the nodes' parameters, which all instances share, say that the tensor is at another address."""
        for words, place, offset in self.places:
            words[place] = address + offset
        self.written.value = address


class Operands:
    """Where the nodes of a captured graph have the addresses of its inputs and outputs."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Read the nodes of a graph that was captured with `keep_graph=True`, and that has to stay alive.

        `inputs` and `outputs`: the tensors without gaps that it reads and writes, where they are now. An
        output's memory has been other tensors' before, inside the graph: only the last node that uses it
        is taken for the one that writes it. Whether that is so has to be tried. Raises OSError,
        AttributeError or RuntimeError where the driver or PyTorch does not tell what is needed.
        """
        context = Context()
        read = [_read(node, context) for node in nodes_of(graph.raw_cuda_graph())]
        nodes = [node for node in read if node is not None]
        self.uses = [_Uses(tensor, nodes) for tensor in inputs]
        self.uses += [_Uses(tensor, nodes, result=True) for tensor in outputs]


class ReadyGraph:
    """An instance of a captured graph: ready to run, on inputs and outputs whose addresses can be changed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, operands: Operands | None = None) -> None:
        """Instantiate a graph that was captured with `keep_graph=True`, and that has to stay alive.

        `operands`: those of the same graph; instances share them, one thread at a time. None: nothing moves.
        Raises OSError, AttributeError or RuntimeError where the driver or PyTorch refuses.
        """
        self.context = Context()
        self._ready = instantiate(graph.raw_cuda_graph())
        weakref.finalize(self, destroy, self._ready, self.context).atexit = False
        self._launch = partial(driver().cuGraphLaunch, self._ready)
        self._uses = operands.uses if operands is not None else []
        self._updates = [[node.update(self._ready) for node in use.nodes] for use in self._uses]
        self._addresses = (c_uint64 * len(self._uses))(*[use.address for use in self._uses])

    @property
    def addresses(self) -> tuple[int, ...]:
        """Those that it uses now."""
        return tuple(self._addresses)

    @functools.cached_property
    def table(self) -> ctypes.Array[c_uint64]:
        """All that a launch and a move need, in words for `cpp/quick_call.cpp`: see `move` there."""
        words: list[int] = [_address_of(self._launch.func), self._ready.value or 0, len(self._uses)]
        for place, (use, updates) in enumerate(zip(self._uses, self._updates, strict=True)):
            words += [ctypes.addressof(use.written), ctypes.addressof(self._addresses) + _WORD * place]
            words += [len(use.places)]
            for array, index, offset in use.places:
                words += [ctypes.addressof(array) + _WORD * index, offset]
            words += [len(updates)]
            for update in updates:
                _instance, node, params, *context = update.args
                words += [
                    _address_of(update.func),
                    node.value,
                    params,
                    *([each.value for each in context] or [0]),
                ]
        return (c_uint64 * len(words))(*words)

    def move(self, addresses: tuple[int, ...]) -> None:
        """Let later launches use these addresses, the inputs' first; those under way are not changed.

        `context` has to be the thread's (the driver crashes in one without any), as it is after a launch.
        RuntimeError where the driver refuses: then it is not known which ones are used.
        """
        changed: list[Callable[[], int]] = []  # a generic made here takes 1 µs
        for index, address in enumerate(addresses):
            if self._uses[index].written.value != address:  # by whichever instance wrote last
                self._uses[index].write(address)
            if self._addresses[index] != address:
                changed += self._updates[index]
        self._addresses[:] = [0] * len(addresses)
        for update in changed:
            if status := update():
                check(status)
        self._addresses[:] = [*addresses]

    def launch(self, stream: int) -> None:
        """Run on a stream, by its handle; after it the thread has a context. RuntimeError where it fails."""
        if self._launch(stream):  # a thread that has not used the device yet
            self.context.stay()
            check(self._launch(stream))


def _read(node: c_void_p, context: Context) -> _Node | None:
    kind = type_of(node)
    if kind == KERNEL_NODE:
        return _kernel(node)
    if kind == MEMCPY_NODE:
        return _plain(node, CopyParams(), "cuGraph{}MemcpyNode{}Params", context)
    if kind == MEMSET_NODE:
        return _plain(node, MemsetParams(), "cuGraph{}MemsetNode{}Params", context)
    if kind in NODES_WITHOUT_OPERANDS:
        return None
    raise RuntimeError(f"the operands of a node of type {kind} are not known")


def _kernel(node: c_void_p) -> _Node:
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
    words = [_words(buffer, size) for buffer, size in zip(owned, sizes, strict=True)]
    set_params, place = driver().cuGraphExecKernelNodeSetParams_v2, ctypes.addressof(params)
    return _Node(words, lambda ready: partial(set_params, ready, node, place), (params, owned, table))


def _plain(node: c_void_p, params: Any, name: str, context: Context) -> _Node:
    """A node whose parameters are one structure without addresses of others."""
    check(getattr(driver(), name.format("", "Get"))(node, byref(params)))
    set_params, place = getattr(driver(), name.format("Exec", "Set")), ctypes.addressof(params)
    words = [_words(params, ctypes.sizeof(params))]
    return _Node(words, lambda ready: partial(set_params, ready, node, place, context.handle), params)


def _copied(address: int | None, size: int) -> Any:
    """A parameter of so many bytes, in memory of our own."""
    buffer = (c_uint64 * -(-size // _WORD))()
    ctypes.memmove(buffer, address or 0, size)
    return buffer


def _words(buffer: Any, size: int) -> ctypes.Array[c_uint64]:
    """The whole words of a buffer, which stays alive with them."""
    return (c_uint64 * (size // _WORD)).from_buffer(buffer)


def _address_of(function: Any) -> int:
    """Where a function of a shared library is."""
    return ctypes.cast(function, c_void_p).value or 0
