"""The few functions of CUDA's driver that PyTorch has no call for, with their structures.

The driver is the one that this process uses already; nothing is linked.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

KERNEL_NODE, MEMCPY_NODE, MEMSET_NODE = 0, 1, 2
NODES_WITHOUT_OPERANDS = (5, 6, 7)
"""CUgraphNodeType: an empty node, waiting for an event, recording one."""

_BUFFER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS in its second version: either `parameters` or `extra` is there."""

    _fields_ = (
        ("function", c_void_p),
        ("grid_block_and_shared_bytes", c_uint * 7),
        ("parameters", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


CopyParams = c_uint64 * 25
"""CUDA_MEMCPY3D: sizes and addresses, a word each."""

MemsetParams = c_uint64 * 6
"""CUDA_MEMSET_NODE_PARAMS in its first version; the address comes first."""

_FUNCTIONS = {
    "cuGraphGetNodes": [c_void_p, POINTER(c_void_p), POINTER(c_size_t)],
    "cuGraphNodeGetType": [c_void_p, POINTER(c_int)],
    "cuGraphKernelNodeGetParams_v2": [c_void_p, POINTER(KernelParams)],
    "cuGraphExecKernelNodeSetParams_v2": [c_void_p, c_void_p, c_void_p],
    "cuGraphMemcpyNodeGetParams": [c_void_p, POINTER(CopyParams)],
    "cuGraphExecMemcpyNodeSetParams": [c_void_p, c_void_p, c_void_p, c_void_p],
    "cuGraphMemsetNodeGetParams": [c_void_p, POINTER(MemsetParams)],
    "cuGraphExecMemsetNodeSetParams": [c_void_p, c_void_p, c_void_p, c_void_p],
    "cuGraphInstantiateWithFlags": [POINTER(c_void_p), c_void_p, c_uint64],
    "cuGraphLaunch": [c_void_p, c_void_p],
    "cuGraphExecDestroy": [c_void_p],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuFuncGetParamInfo": [c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)],
    "cuKernelGetParamInfo": [c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)],
}


@functools.cache
def driver() -> Any:
    """CUDA's driver. OSError where there is none, AttributeError where it is too old."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    return library


def check(status: int) -> None:
    """RuntimeError where a function of the driver did not return 0."""
    if status:
        raise RuntimeError(f"CUDA's driver refuses, with status {status}")


class Context:
    """A context of CUDA; in a `with` block it is the thread's current one."""

    def __init__(self) -> None:
        """The one that this thread uses now. RuntimeError where it has used none yet."""
        self.handle = c_void_p()
        check(driver().cuCtxGetCurrent(byref(self.handle)))
        if not self.handle.value:
            raise RuntimeError("this thread has not used CUDA yet")
        self._push, self._pop = driver().cuCtxPushCurrent_v2, driver().cuCtxPopCurrent_v2

    def stay(self) -> None:
        """Make it the thread's, as CUDA's runtime does when a thread first uses a device."""
        check(driver().cuCtxSetCurrent(self.handle))

    def __enter__(self) -> None:
        check(self._push(self.handle))

    def __exit__(self, *_: object) -> None:
        check(self._pop(None))


def instantiate(graph: int) -> c_void_p:
    """Make a graph, by its handle, ready to run."""
    ready = c_void_p()
    check(driver().cuGraphInstantiateWithFlags(byref(ready), graph, 0))
    return ready


def destroy(ready: c_void_p, context: Context) -> None:
    """Free what `instantiate` made, as soon as it runs no more."""
    with context:
        check(driver().cuGraphExecDestroy(ready))


def nodes_of(graph: int) -> list[c_void_p]:
    """The nodes of a graph, by its handle."""
    count = c_size_t()
    check(driver().cuGraphGetNodes(graph, None, byref(count)))
    found = (c_void_p * count.value)()
    check(driver().cuGraphGetNodes(graph, found, byref(count)))
    return [c_void_p(node) for node in found]


def type_of(node: c_void_p) -> int:
    """A node's CUgraphNodeType."""
    kind = c_int()
    check(driver().cuGraphNodeGetType(node, byref(kind)))
    return kind.value


def parameter_sizes(params: KernelParams) -> Iterator[int]:
    """The bytes of each parameter of a kernel, in order."""
    offset, size, index = c_size_t(), c_size_t(), 0
    ask = driver().cuFuncGetParamInfo if params.function else driver().cuKernelGetParamInfo
    while ask(params.function or params.kernel, index, byref(offset), byref(size)) == 0:
        yield size.value
        index += 1


def packed_parameters(params: KernelParams) -> tuple[int, int]:
    """Address and bytes of the buffer that holds all parameters of a kernel that was launched with one."""
    place = size = 0
    for index in range(0, 8, 2):
        key = params.extra[index]
        if key == _BUFFER:
            place = params.extra[index + 1] or 0
        elif key == _BUFFER_SIZE:
            size = c_size_t.from_address(params.extra[index + 1] or 0).value
        else:
            break
    return place, size


def pack(params: KernelParams, buffer: Any, size: c_size_t) -> object:
    """Make a kernel's parameters those in `buffer`; what is returned has to live as long as they are used."""
    table = (c_void_p * 5)(_BUFFER, ctypes.addressof(buffer), _BUFFER_SIZE, ctypes.addressof(size), None)
    params.extra = ctypes.cast(table, POINTER(c_void_p))
    return table
