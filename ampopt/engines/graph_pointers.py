"""Changes tensor addresses inside a captured CUDA graph between launches.

A captured kernel has the addresses of its operands in its parameters, and CUDA can change the parameters of
an instantiated graph. So its kernels can read the caller's tensors and write to fresh results, without
copies.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_uint64
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
    address_of,
    check,
    destroy,
    driver,
    instantiate,
    nodes_of,
    parameter_sizes,
    type_of,
)

_WORD = 8
"""Bytes of an address; in a parameter it lies at a multiple of them."""

_COPY_WORDS, _MEMSET_WORDS = 25, 5
"""Number of words of CUDA_MEMCPY3D and CUDA_MEMSET_NODE_PARAMS, whose addresses are words."""

_BUFFER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE


class _Node:
    """A node's parameters as words that may be overwritten.

    `update` makes, of an instance, what lets that one use what they say. In C++ `handles` do: those of the
    driver's function for that, of the node, of its parameters, and of their context or 0.
    """

    def __init__(
        self,
        words: Sequence[ctypes.Array[c_uint64]],
        node: Any,
        params: Any,
        set_params: Any,
        *context: Any,
        alive: object = None,
    ) -> None:
        """`set_params` of the driver takes an instance, `node`, `params`, and `context` if there is one."""
        self.words, self._alive = words, alive
        self.handles = [address_of(set_params), int(node), params.getPtr(), *map(int, context or [0])]
        self._set_params, self._arguments = set_params, (node, params, *context)

    def update(self, ready: Any) -> Callable[[], tuple[Any, ...]]:
        """See the class."""
        return partial(self._set_params, ready, *self._arguments)


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
    """The positions of the addresses of inputs and outputs in the nodes of a captured graph."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Read the nodes of a graph that was captured with `keep_graph=True` and that the caller keeps alive.

        `inputs` and `outputs`: the tensors without gaps that it reads and writes, at their present addresses.
        An output's memory was used for other tensors before, inside the graph: the last node that uses it is
        assumed to write it, which must be tested. Raises AttributeError or RuntimeError if the driver or
        PyTorch does not provide the information.
        """
        context = Context()
        read = [_read(node, context) for node in nodes_of(graph.raw_cuda_graph())]
        nodes = [node for node in read if node is not None]
        self.uses = [_Uses(tensor, nodes) for tensor in inputs]
        self.uses += [_Uses(tensor, nodes, result=True) for tensor in outputs]


class ReadyGraph:
    """An instance of a captured graph, ready to run; addresses of inputs and outputs can be changed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, operands: Operands | None = None) -> None:
        """Instantiate a graph that was captured with `keep_graph=True` and that the caller keeps alive.

        `operands`: those of the same graph; instances share them, one thread at a time. None: addresses are
        never changed. Raises AttributeError or RuntimeError if the driver or PyTorch refuses.
        """
        self.context = Context()
        self._ready = instantiate(graph.raw_cuda_graph())
        weakref.finalize(self, destroy, self._ready, self.context).atexit = False
        self._launch = partial(driver().cuGraphLaunch, self._ready)
        self._handles = [address_of(driver().cuGraphLaunch), int(self._ready)]
        self._uses = operands.uses if operands is not None else []
        self._updates = [[node.update(self._ready) for node in use.nodes] for use in self._uses]
        self._addresses = (c_uint64 * len(self._uses))(*[use.address for use in self._uses])

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses in use now."""
        return tuple(self._addresses)

    @functools.cached_property
    def table(self) -> ctypes.Array[c_uint64]:
        """The data for launches and address changes, in words for `cpp/quick_call.cpp`: see `move` there."""
        words = [*self._handles, len(self._uses)]
        for place, use in enumerate(self._uses):
            words += [ctypes.addressof(use.written), ctypes.addressof(self._addresses) + _WORD * place]
            words += [len(use.places)]
            for array, index, offset in use.places:
                words += [ctypes.addressof(array) + _WORD * index, offset]
            words += [len(use.nodes)]
            for node in use.nodes:
                words += node.handles
        return (c_uint64 * len(words))(*words)

    def move(self, addresses: tuple[int, ...]) -> None:
        """Use these addresses in later launches, the inputs' first; launches in progress are not changed.

        `context` must be the thread's current one (the driver crashes without a context), as after a launch.
        Raises RuntimeError if the driver refuses: then the addresses in use are unknown.
        """
        changed: list[Callable[[], tuple[Any, ...]]] = []  # a generic made here takes 1 µs
        for index, address in enumerate(addresses):
            if self._uses[index].written.value != address:  # by whichever instance wrote last
                self._uses[index].write(address)
            if self._addresses[index] != address:
                changed += self._updates[index]
        self._addresses[:] = [0] * len(addresses)
        for update in changed:
            if (returned := update())[0]:
                check(returned)
        self._addresses[:] = [*addresses]

    def launch(self, stream: int) -> None:
        """Launch on a stream, by its handle; after it the thread has a context.

        Raises RuntimeError on failure.
        """
        if self._launch(stream)[0]:  # a thread that has not used the device yet
            self.context.stay()
            check(self._launch(stream))


def _read(node: Any, context: Context) -> _Node | None:
    kind = type_of(node)
    if kind == KERNEL_NODE:
        return _kernel(node)
    if kind == MEMCPY_NODE:
        (params,) = check(driver().cuGraphMemcpyNodeGetParams(node))
        return _plain(node, params, _COPY_WORDS, driver().cuGraphExecMemcpyNodeSetParams, context)
    if kind == MEMSET_NODE:
        (params,) = check(driver().cuGraphMemsetNodeGetParams(node))
        return _plain(node, params, _MEMSET_WORDS, driver().cuGraphExecMemsetNodeSetParams, context)
    if kind in NODES_WITHOUT_OPERANDS:
        return None
    raise RuntimeError(f"the operands of a node of type {kind} are not known")


def _kernel(node: Any) -> _Node:
    """A kernel: its parameters lie at an address each, or together in one buffer."""
    (params,) = check(driver().cuGraphKernelNodeGetParams(node))
    if params.kernelParams or not params.extra:
        sizes = list(parameter_sizes(params))
        owned = [_copied(_word(params.kernelParams, index), size) for index, size in enumerate(sizes)]
        table = _table(map(ctypes.addressof, owned))
        params.kernelParams = ctypes.addressof(table)
        alive: object = table
    else:
        place, size = _packed(params.extra)
        sizes, owned, length = [size], [_copied(place, size)], c_uint64(size)
        ends = ctypes.addressof(owned[0]), ctypes.addressof(length)
        table = _table([_BUFFER, ends[0], _BUFFER_SIZE, ends[1]])
        params.extra = ctypes.addressof(table)
        alive = table, length
    words = [_words(buffer, size) for buffer, size in zip(owned, sizes, strict=True)]
    set_params = driver().cuGraphExecKernelNodeSetParams
    return _Node(words, node, params, set_params, alive=(owned, alive))


def _plain(node: Any, params: Any, count: int, set_params: Any, context: Context) -> _Node:
    """A node whose parameters are one structure of so many words, without addresses of others."""
    words = [(c_uint64 * count).from_address(params.getPtr())]
    return _Node(words, node, params, set_params, context.handle)


def _packed(extra: int) -> tuple[int, int]:
    """Address and bytes of the buffer that holds all parameters of a kernel that was launched with one."""
    place = size = 0
    for index in range(0, 8, 2):
        key = _word(extra, index)
        if key == _BUFFER:
            place = _word(extra, index + 1)
        elif key == _BUFFER_SIZE:
            size = _word(_word(extra, index + 1), 0)
        else:
            break
    return place, size


def _word(address: int, index: int) -> int:
    """One of the words at an address."""
    return c_uint64.from_address(address + _WORD * index).value


def _table(words: Iterable[int]) -> ctypes.Array[c_uint64]:
    """Words with a 0 behind them."""
    found = [*words, 0]
    return (c_uint64 * len(found))(*found)


def _copied(address: int, size: int) -> ctypes.Array[c_uint64]:
    """A parameter of so many bytes, in memory of our own."""
    buffer = (c_uint64 * -(-size // _WORD))()
    ctypes.memmove(buffer, address, size)
    return buffer


def _words(buffer: ctypes.Array[c_uint64], size: int) -> ctypes.Array[c_uint64]:
    """The whole words of a buffer, which stays alive with them."""
    return (c_uint64 * (size // _WORD)).from_buffer(buffer)
