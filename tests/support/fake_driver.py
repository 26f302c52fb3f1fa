"""A made-up driver of CUDA, and graphs for it."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

from ampopt.system import cuda_driver
from ampopt.system.cuda_driver import CopyParams, KernelParams

CONTEXT, GRAPH, READY, STREAM = 0xC0, 0x60, 0xE0, 0x50


class FakeDriver:
    """CUDA's driver with nodes that are Python objects: (type, parameters as `set` last saw them)."""

    def __init__(self, nodes: list[tuple[int, Any]]) -> None:
        self.nodes, self.contexts, self.refuses = nodes, [CONTEXT], False
        self.set: dict[int, bytes] = {}
        self.sizes: dict[int, list[int]] = {}
        self.launched, self.destroyed = list[int](), list[int]()

    def cuGraphInstantiateWithFlags(self, ready: Any, graph: int, flags: int) -> int:  # noqa: N802
        assert (graph, flags) == (GRAPH, 0)
        ready._obj.value = READY
        return 0

    def cuGraphLaunch(self, ready: c_void_p, stream: int) -> int:  # noqa: N802
        assert (ready.value, stream) == (READY, STREAM)
        self.launched.append(self.contexts[-1])
        return 0 if self.contexts[-1] == CONTEXT else 201

    def cuGraphExecDestroy(self, ready: c_void_p) -> int:  # noqa: N802
        assert self.contexts[-1] == CONTEXT
        self.destroyed.append(ready.value or 0)
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = CONTEXT
        return 0

    def cuCtxSetCurrent(self, context: c_void_p) -> int:  # noqa: N802
        self.contexts[-1] = context.value or 0
        return 0

    def cuCtxPushCurrent_v2(self, context: c_void_p) -> int:  # noqa: N802
        self.contexts.append(context.value or 0)
        return 0

    def cuCtxPopCurrent_v2(self, context: None) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuGraphGetNodes(self, graph: int, nodes: Any, count: Any) -> int:  # noqa: N802
        assert graph == GRAPH
        count._obj.value = len(self.nodes)
        for index in range(len(self.nodes) if nodes is not None else 0):
            nodes[index] = index + 1
        return 0

    def _node(self, handle: c_void_p) -> tuple[int, Any]:
        return self.nodes[(handle.value or 0) - 1]

    def cuGraphNodeGetType(self, node: c_void_p, kind: Any) -> int:  # noqa: N802
        kind._obj.value = self._node(node)[0]
        return 0

    def _get(self, node: c_void_p, params: Any) -> int:
        source = self._node(node)[1]
        ctypes.memmove(ctypes.addressof(params._obj), ctypes.addressof(source), ctypes.sizeof(source))
        return 0

    cuGraphKernelNodeGetParams_v2 = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = _get  # noqa: N815

    def cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:  # noqa: N802
        sizes = self.sizes[function]
        if index >= len(sizes):
            return 1
        size._obj.value = sizes[index]
        return 0

    cuKernelGetParamInfo = cuFuncGetParamInfo  # noqa: N815

    def cuGraphExecKernelNodeSetParams_v2(self, ready: c_void_p, node: c_void_p, place: int) -> int:  # noqa: N802
        assert (ready.value, self.contexts[-1]) == (READY, CONTEXT)
        params = KernelParams.from_address(place)
        if params.parameters:
            sizes = self.sizes[params.function or params.kernel]
            parts = [ctypes.string_at(params.parameters[i], size) for i, size in enumerate(sizes)]
        else:
            parts = [ctypes.string_at(*cuda_driver.packed_parameters(params))]
        self.set[node.value or 0] = b"".join(parts)
        return 700 if self.refuses else 0

    def _set_plain(self, ready: c_void_p, node: c_void_p, place: int, context: c_void_p) -> int:
        assert (ready.value, context.value, self.contexts[-1]) == (READY, CONTEXT, CONTEXT)
        self.set[node.value or 0] = ctypes.string_at(place, ctypes.sizeof(self._node(node)[1]))
        return 0

    cuGraphExecMemcpyNodeSetParams = cuGraphExecMemsetNodeSetParams = _set_plain  # noqa: N815


def words(data: bytes) -> list[int]:
    """The words of a parameter."""
    return list((c_uint64 * (len(data) // 8)).from_buffer_copy(data))


KEPT: list[object] = []
"""What lies behind bare addresses."""


def kernel(driver: FakeDriver, *parameters: bytes, by_handle: bool = False) -> KernelParams:
    """A kernel with these parameters, each at an address of its own."""
    buffers = [ctypes.create_string_buffer(part, len(part)) for part in parameters]
    table = (c_void_p * max(1, len(buffers)))(*map(ctypes.addressof, buffers))
    KEPT.extend([buffers, table])
    params, handle = KernelParams(), 0xF00 + len(driver.sizes)
    setattr(params, "kernel" if by_handle else "function", handle)
    params.parameters = ctypes.cast(table, ctypes.POINTER(c_void_p))
    driver.sizes[handle] = [len(part) for part in parameters]
    return params


def packed(data: bytes) -> KernelParams:
    """A kernel whose parameters lie in one buffer."""
    params, buffer, size = KernelParams(), ctypes.create_string_buffer(data, len(data)), c_size_t(len(data))
    KEPT.extend([buffer, size, cuda_driver.pack(params, buffer, size)])
    return params


def copying(source: int, target: int) -> Any:
    """A copy between two addresses."""
    params = CopyParams()
    params[6], params[17] = source, target
    return params


def of(*values: int) -> bytes:
    """Words as bytes."""
    return bytes((c_uint64 * len(values))(*values))


def captured() -> Any:
    """A graph that PyTorch has captured."""
    return SimpleNamespace(raw_cuda_graph=lambda: GRAPH)


def as_functions(driver: FakeDriver) -> None:
    """Let the driver's functions be C's, so that C++ can call them."""
    for name, count in (
        ("cuGraphLaunch", 2),
        ("cuGraphExecKernelNodeSetParams_v2", 3),
        ("cuGraphExecMemcpyNodeSetParams", 4),
        ("cuGraphExecMemsetNodeSetParams", 4),
    ):
        made: Any = getattr(driver, name)
        kinds = [c_void_p] * count

        def call(*handles: int, made: Any = made, last: Any = int if count < 4 else c_void_p) -> int:
            first, *others = handles
            wrapped = [c_void_p(first), *others]
            if len(handles) > 2:
                wrapped[1] = c_void_p(others[0])
            return int(made(*wrapped[:-1], last(wrapped[-1])))

        setattr(driver, name, ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call))
