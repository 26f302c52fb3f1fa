"""A made-up driver of CUDA behind made-up bindings, and graphs for it."""

from __future__ import annotations

import ctypes
from ctypes import c_uint, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

CONTEXT, GRAPH, READY, STREAM = 0xC0, 0x60, 0xE0, 0x50


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS in its second version, as the bindings have it."""

    _fields_ = (
        ("func", c_uint64),
        ("grid_block_and_shared_bytes", c_uint * 7),
        ("kernelParams", c_uint64),
        ("extra", c_uint64),
        ("kern", c_uint64),
        ("ctx", c_uint64),
    )

    def getPtr(self) -> int:  # noqa: N802
        """Where it is."""
        return ctypes.addressof(self)


class CopyParams(ctypes.Structure):
    """CUDA_MEMCPY3D as words."""

    _fields_ = (("words", c_uint64 * 25),)
    getPtr = KernelParams.getPtr  # noqa: N815


class MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS as words; the address comes first."""

    _fields_ = (("words", c_uint64 * 5),)
    getPtr = KernelParams.getPtr  # noqa: N815


class FakeDriver:
    """`cuda.bindings.driver` with nodes that are Python objects: (type, parameters).

    `set`: the parameters of each node, by its number from 1 on, as an instance got them last.
    """

    def __init__(self, nodes: list[tuple[int, Any]]) -> None:
        self.nodes, self.contexts, self.refuses = nodes, [CONTEXT], False
        self.set: dict[int, bytes] = {}
        self.sizes: dict[int, list[int]] = {}
        self.launched, self.destroyed = list[int](), list[int]()
        self.functions: dict[str, Any] = {}

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int, int]:  # noqa: N802
        assert (version, flags) == (12000, 1)
        function = self.functions.setdefault(name.decode(), self._as_c(name.decode()))
        return 0, ctypes.cast(function, c_void_p).value or 0, 0

    def _as_c(self, name: str) -> Any:
        """One of these functions as C has it, for C++ to call."""
        kinds = {
            "cuGraphExecKernelNodeSetParams": KernelParams,
            "cuGraphExecMemcpyNodeSetParams": CopyParams,
            "cuGraphExecMemsetNodeSetParams": MemsetParams,
        }

        def call(ready: int, second: int, place: int = 0, context: int = 0) -> int:
            if name not in kinds:
                return int(getattr(self, name)(ready, second)[0])
            params = kinds[name].from_address(place)
            return int(getattr(self, name)(ready, second, params, *([context] if context else []))[0])

        count = 2 if name not in kinds else 3 if kinds[name] is KernelParams else 4
        return ctypes.CFUNCTYPE(ctypes.c_int, *[c_void_p] * count)(call)

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[int, int]:  # noqa: N802
        assert (graph, flags) == (GRAPH, 0)
        return 0, READY

    def cuGraphLaunch(self, ready: int, stream: int) -> tuple[int]:  # noqa: N802
        assert (ready, stream) == (READY, STREAM)
        self.launched.append(self.contexts[-1])
        return (0 if self.contexts[-1] == CONTEXT else 201,)

    def cuGraphExecDestroy(self, ready: int) -> tuple[int]:  # noqa: N802
        assert self.contexts[-1] == CONTEXT
        self.destroyed.append(ready)
        return (0,)

    def cuCtxGetCurrent(self) -> tuple[int, int]:  # noqa: N802
        return 0, CONTEXT

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:  # noqa: N802
        self.contexts[-1] = context
        return (0,)

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:  # noqa: N802
        self.contexts.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:  # noqa: N802
        return 0, self.contexts.pop()

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[int, list[int], int]:  # noqa: N802
        assert graph == GRAPH
        return 0, [*range(1, count + 1)], len(self.nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[int, int]:  # noqa: N802
        return 0, self.nodes[node - 1][0]

    def _get(self, node: int) -> tuple[int, Any]:
        source = self.nodes[node - 1][1]
        return 0, type(source).from_buffer_copy(source)

    cuGraphKernelNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = _get  # noqa: N815

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[int, int | None, int | None]:  # noqa: N802
        sizes = self.sizes[function]
        return (0, 8 * index, sizes[index]) if index < len(sizes) else (1, None, None)

    cuKernelGetParamInfo = cuFuncGetParamInfo  # noqa: N815

    def cuGraphExecKernelNodeSetParams(self, ready: int, node: int, params: Any) -> tuple[int]:  # noqa: N802
        assert (ready, self.contexts[-1]) == (READY, CONTEXT)
        if params.kernelParams:
            sizes = self.sizes[params.func or params.kern]
            table = (c_void_p * len(sizes)).from_address(params.kernelParams)
            parts = [ctypes.string_at(place or 0, size) for place, size in zip(table, sizes, strict=True)]
        else:
            first, place, second, size, end = (c_uint64 * 5).from_address(params.extra)
            assert (first, second, end) == (1, 2, 0)
            parts = [ctypes.string_at(place, c_uint64.from_address(size).value)]
        self.set[node] = b"".join(parts)
        return (700 if self.refuses else 0,)

    def cuGraphExecMemcpyNodeSetParams(self, ready: int, node: int, params: Any, context: int) -> tuple[int]:  # noqa: N802
        assert (ready, context, self.contexts[-1]) == (READY, CONTEXT, CONTEXT)
        self.set[node] = bytes(params)
        return (0,)

    def cuGraphExecMemsetNodeSetParams(self, ready: int, node: int, params: Any, context: int) -> tuple[int]:  # noqa: N802
        return self.cuGraphExecMemcpyNodeSetParams(ready, node, params, context)


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
    params, handle = KernelParams(kernelParams=ctypes.addressof(table)), 0xF00 + len(driver.sizes)
    setattr(params, "kern" if by_handle else "func", handle)
    driver.sizes[handle] = [len(part) for part in parameters]
    return params


def packed(data: bytes) -> Any:
    """A kernel whose parameters lie in one buffer, whose size is told first."""
    buffer, size = ctypes.create_string_buffer(data, len(data)), c_uint64(len(data))
    table = (c_uint64 * 5)(2, ctypes.addressof(size), 1, ctypes.addressof(buffer), 0)
    KEPT.extend([buffer, size, table])
    return KernelParams(extra=ctypes.addressof(table))


def copying(source: int, target: int) -> Any:
    """A copy between two addresses."""
    params = CopyParams()
    params.words[6], params.words[17] = source, target
    return params


def filling(target: int) -> Any:
    """A memset at an address."""
    params = MemsetParams()
    params.words[0] = target
    return params


def of(*values: int) -> bytes:
    """Words as bytes."""
    return bytes((c_uint64 * len(values))(*values))


def captured() -> Any:
    """A graph that PyTorch has captured."""
    return SimpleNamespace(raw_cuda_graph=lambda: GRAPH)
