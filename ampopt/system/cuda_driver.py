"""Calls of the CUDA driver that PyTorch does not offer, through NVIDIA's Python bindings.

PyTorch's builds for CUDA bring the package `cuda-bindings`, which finds the driver of this process. It is
imported where it is needed: without it, or without a driver, everything here raises RuntimeError.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

KERNEL_NODE, MEMCPY_NODE, MEMSET_NODE = 0, 1, 2
NODES_WITHOUT_OPERANDS = (5, 6, 7)
"""CUgraphNodeType of an empty node, of waiting for an event and of recording one."""

_VERSION, _LEGACY_STREAM = 12000, 1
"""The version of driver functions whose address is requested: the one that the bindings call.

It is CUDA 12.0, without a per-thread default stream (CU_GET_PROC_ADDRESS_LEGACY_STREAM).
"""


@functools.cache
def driver() -> Any:
    """The bindings. Raises RuntimeError if they are not installed.

    Their functions also raise RuntimeError without a driver. A missing function is an AttributeError.
    """
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise RuntimeError(f"CUDA's driver needs the package cuda-bindings: {error}") from error
    return bindings


def check(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """The return values of a driver function, without its status. Raises RuntimeError if that is not 0."""
    status, *values = returned
    if int(status):
        raise RuntimeError(f"CUDA's driver refuses, with status {int(status)}")
    return tuple(values)


def address_of(function: Any) -> int:
    """The address of a driver function, for C++ to call.

    Raises RuntimeError if the driver does not have it.
    """
    address, _ = check(driver().cuGetProcAddress(function.__name__.encode(), _VERSION, _LEGACY_STREAM))
    if not address:
        raise RuntimeError(f"CUDA's driver has no {function.__name__}")
    return int(address)


class Context:
    """A CUDA context; in a `with` block it is the thread's current one."""

    def __init__(self) -> None:
        """The context that this thread uses now. Raises RuntimeError if it has used none yet."""
        (self.handle,) = check(driver().cuCtxGetCurrent())
        if not int(self.handle):
            raise RuntimeError("this thread has not used CUDA yet")
        self._push, self._pop = driver().cuCtxPushCurrent, driver().cuCtxPopCurrent

    def stay(self) -> None:
        """Make it the thread's context, as CUDA's runtime does when a thread first uses a device."""
        check(driver().cuCtxSetCurrent(self.handle))

    def __enter__(self) -> None:
        check(self._push(self.handle))

    def __exit__(self, *_: object) -> None:
        check(self._pop())


def instantiate(graph: int) -> Any:
    """Instantiate a graph, by its handle: returns a CUgraphExec that is ready to run."""
    (ready,) = check(driver().cuGraphInstantiate(graph, 0))
    return ready


def destroy(ready: Any, context: Context) -> None:
    """Free the result of `instantiate` when it is no longer running."""
    with context:
        check(driver().cuGraphExecDestroy(ready))


def nodes_of(graph: int) -> list[Any]:
    """The nodes of a graph, by its handle, as CUgraphNode values."""
    _, count = check(driver().cuGraphGetNodes(graph))
    nodes, _ = check(driver().cuGraphGetNodes(graph, count)) if count else ([], 0)
    return list(nodes)


def type_of(node: Any) -> int:
    """A node's CUgraphNodeType."""
    (kind,) = check(driver().cuGraphNodeGetType(node))
    return int(kind)


def parameter_sizes(params: Any) -> Iterator[int]:
    """The size in bytes of each parameter of a kernel, in order, from its CUDA_KERNEL_NODE_PARAMS."""
    by_function = int(params.func) != 0
    ask = driver().cuFuncGetParamInfo if by_function else driver().cuKernelGetParamInfo
    handle, index = params.func if by_function else params.kern, 0
    while not int((returned := ask(handle, index))[0]):
        yield int(returned[2])
        index += 1
