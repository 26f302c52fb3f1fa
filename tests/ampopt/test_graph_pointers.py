"""Addresses in a graph's nodes: every kind of node is read, and every address moves, with its offset."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_size_t, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt import cuda_driver
from ampopt.cuda_driver import CopyParams, KernelParams, MemsetParams
from ampopt.cuda_graphs import MOST_OUTPUTS
from ampopt.graph_pointers import Operands, ReadyGraph
from ampopt.native import CompilerError
from ampopt.quick_call import Answer, bind, plain
from tests.ampopt.compiler import needs_compiler

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


@pytest.fixture
def tensor() -> Tensor:
    return torch.zeros(16)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver([])
    monkeypatch.setattr("ampopt.cuda_driver.driver", lambda: fake)
    monkeypatch.setattr("ampopt.graph_pointers.driver", lambda: fake)
    yield fake
    gc.collect()  # while there still is a driver to destroy graphs with
    KEPT.clear()


def captured() -> Any:
    """A graph that PyTorch has captured."""
    return SimpleNamespace(raw_cuda_graph=lambda: GRAPH)


def read(inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = ()) -> ReadyGraph:
    """Such a graph, made ready to run."""
    return ReadyGraph(captured(), Operands(captured(), inputs, outputs))


def nodes(ready: ReadyGraph) -> list[int]:
    """How many nodes use each input and output."""
    return [len(use.nodes) for use in ready._uses]


def test_the_structures_have_the_sizes_of_cudas() -> None:
    sizes = [ctypes.sizeof(kind) for kind in (KernelParams, CopyParams, MemsetParams)]
    assert sizes == [72, 200, 48]
    assert (KernelParams.parameters.offset, KernelParams.kernel.offset) == (40, 56)


def test_addresses_in_every_kind_of_node_move_with_their_offsets(driver: FakeDriver, tensor: Tensor) -> None:
    here, there = tensor.data_ptr(), 0x7000_0000_0000
    driver.nodes += [
        (0, kernel(driver, of(here), b"\1\2\3\4", of(5, here + 8, 6))),
        (0, packed(of(7, here + 60))),
        (1, copying(here, 99)),
        (2, MemsetParams(here + 16)),
        (5, None),
        (0, kernel(driver, of(here), by_handle=True)),
    ]
    ready = read([tensor])
    assert (ready.addresses, nodes(ready)) == ((here,), [5])
    ready.move((there,))
    assert ready.addresses == (there,)
    assert driver.set[1] == of(there) + b"\1\2\3\4" + of(5, there + 8, 6)
    assert driver.set[2] == of(7, there + 60)
    assert (words(driver.set[3])[6], words(driver.set[3])[17]) == (there, 99)
    assert words(driver.set[4]) == [there + 16, 0, 0, 0, 0, 0]
    assert words(driver.set[6]) == [there]
    ready.move((here,))
    assert driver.set[1] == of(here) + b"\1\2\3\4" + of(5, here + 8, 6)


def test_what_lies_beside_a_tensor_is_not_its_own(driver: FakeDriver, tensor: Tensor) -> None:
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    driver.nodes += [(0, kernel(driver, of(start - 1, end, 0))), (0, kernel(driver, b"ab"))]
    ready = read([tensor, torch.empty(0)])
    assert nodes(ready) == [0, 0]
    ready.move((1, 2))
    assert driver.set == {}


def test_a_result_is_what_the_last_node_writes_in_its_memory(driver: FakeDriver, tensor: Tensor) -> None:
    here, other = tensor.data_ptr(), torch.zeros(16)
    driver.nodes += [
        (0, kernel(driver, of(other.data_ptr(), here))),
        (0, kernel(driver, of(here, 77))),
        (0, kernel(driver, of(77, here))),
        (0, kernel(driver, of(77, 78))),
    ]
    ready = read([other], [tensor])
    assert nodes(ready) == [1, 1]
    ready.move((other.data_ptr(), 1 << 40))
    assert {node: words(data) for node, data in driver.set.items()} == {3: [77, 1 << 40]}


def test_a_launch_finds_the_context_and_a_graph_is_destroyed_in_it(
    driver: FakeDriver, tensor: Tensor
) -> None:
    ready = read([tensor])
    ready.launch(STREAM)
    driver.contexts[:] = [0xAA]
    ready.launch(STREAM)  # another one is current
    assert driver.launched == [CONTEXT, 0xAA, CONTEXT]
    assert driver.contexts == [CONTEXT]  # as `move` wants it
    driver.contexts[:] = [0xAA]
    gc.collect()
    assert driver.destroyed == []
    del ready
    gc.collect()
    assert (driver.contexts, driver.destroyed) == ([0xAA], [READY])


def test_two_tensors_in_one_node_move_apart(driver: FakeDriver, tensor: Tensor) -> None:
    other = torch.zeros(4)
    driver.nodes += [(0, kernel(driver, of(tensor.data_ptr(), other.data_ptr())))]
    ready = read([tensor, other])
    ready.move((1 << 40, 1 << 41))
    assert words(driver.set[1]) == [1 << 40, 1 << 41]
    ready.move((1 << 42, 1 << 41))
    assert words(driver.set[1]) == [1 << 42, 1 << 41]


def test_instances_of_one_graph_move_apart(driver: FakeDriver, tensor: Tensor) -> None:
    other = torch.zeros(4)
    driver.nodes += [(0, kernel(driver, of(tensor.data_ptr(), other.data_ptr())))]
    operands = Operands(captured(), [tensor], [other])
    first, second = (ReadyGraph(captured(), operands) for _ in range(2))
    first.move((1 << 40, 1 << 41))
    second.move((tensor.data_ptr(), 1 << 42))
    assert words(driver.set[1]) == [tensor.data_ptr(), 1 << 42]
    first.move((1 << 40, 1 << 43))
    assert words(driver.set[1]) == [1 << 40, 1 << 43]


def test_a_move_that_is_refused_is_not_taken_for_done(driver: FakeDriver, tensor: Tensor) -> None:
    driver.nodes += [(0, kernel(driver, of(tensor.data_ptr())))]
    ready = read([tensor])
    driver.refuses = True
    with pytest.raises(RuntimeError, match="refuses, with status 700"):
        ready.move((1 << 40,))
    driver.refuses = False
    driver.set.clear()
    ready.move((tensor.data_ptr(),))  # nobody knows where it was
    assert words(driver.set[1]) == [tensor.data_ptr()]


def test_addresses_that_have_not_changed_are_not_sent(driver: FakeDriver, tensor: Tensor) -> None:
    driver.nodes += [(0, kernel(driver, of(tensor.data_ptr())))]
    read([tensor]).move((tensor.data_ptr(),))
    assert driver.set == {}


def test_nodes_whose_operands_are_unknown_are_refused(driver: FakeDriver) -> None:
    driver.nodes += [(4, None)]
    with pytest.raises(RuntimeError, match="node of type 4"):
        read()


def test_a_thread_without_cuda_cannot_read_nodes(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda context: 0)
    with pytest.raises(RuntimeError, match="has not used CUDA yet"):
        read()


def _as_functions(driver: FakeDriver) -> None:
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


@needs_compiler
@pytest.mark.parametrize("kind", ["kernel", "packed", "copy", "fill"])
def test_cpp_moves_and_launches_what_is_in_the_table(driver: FakeDriver, tensor: Tensor, kind: str) -> None:
    x, made = torch.zeros(4), list[Tensor]()
    here, start = tensor.data_ptr(), x.data_ptr()
    driver.nodes += [(0, kernel(driver, of(start + 8, 4)))]
    driver.nodes += {
        "kernel": [(0, kernel(driver, of(3), of(start, here + 8)))],
        "packed": [(0, packed(of(start, here + 8)))],
        "copy": [(1, copying(start, here + 8))],
        "fill": [(2, MemsetParams(here + 8))],
    }[kind]
    _as_functions(driver)
    operands = Operands(captured(), [x], [tensor])
    ready, other = (ReadyGraph(captured(), operands) for _ in range(2))
    form = SimpleNamespace(outputs=(tensor,), inference=False, table=ctypes.addressof(ready.table))

    def fresh() -> Tensor:
        made.append(torch.zeros(16))
        return made[-1]

    answer = make_answer(form, {(start,): form}, fresh)
    for count in range(1, 4):
        other.move((1 << 40, 1 << 41))  # another instance writes into the same parameters
        assert answer(x)[0] is (tensor, *made)[count - 1]
        assert driver.launched == [CONTEXT] * count
        there = made[-1].data_ptr()
        assert ready.addresses == (start, there)
        assert there + 8 in words(driver.set[2])
        assert 1 << 40 not in words(driver.set[2])
        assert form.outputs == (made[-1],)
    ready.move((start, here))
    assert here + 8 in words(driver.set[2])


@needs_compiler
def test_cpp_takes_a_refusal_for_not_done(driver: FakeDriver, tensor: Tensor) -> None:
    x = torch.zeros(4)
    driver.nodes += [(0, kernel(driver, of(x.data_ptr(), tensor.data_ptr())))]
    _as_functions(driver)
    ready = read([x], [tensor])
    form = SimpleNamespace(outputs=(tensor,), inference=False, table=ctypes.addressof(ready.table))
    answer = make_answer(form, {(x.data_ptr(),): form}, lambda: torch.zeros(16))
    driver.refuses = True
    assert answer(x)[0] is tensor
    assert (form.outputs, ready.addresses) == (None, (x.data_ptr(), 0))
    assert answer(x) == ["the other way"]


def make_answer(form: Any, forms: dict[tuple[int, ...], Any], fresh: Callable[[], Tensor]) -> Answer:
    """What `CapturedGraph` binds, around a form."""
    lock, graph, make = threading.Lock(), SimpleNamespace(raw_stream=STREAM), bind()
    assert make is not None
    parts = (torch.is_tensor, list, lambda tensor: ("the other way",), lock.acquire, lock.release, graph)
    now = (lambda index: STREAM, lambda: 0, 0, torch.is_inference_mode_enabled)
    return make((*parts, forms, (fresh,), *now))


@needs_compiler
def test_cpp_is_given_as_much_as_it_takes() -> None:
    make = bind()
    assert make is not None
    with pytest.raises(TypeError, match="a tuple of 12"):
        make(())
    with pytest.raises(TypeError, match="a tuple of 12"):
        make([0] * 12)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too many outputs"):
        make((*[None] * 7, (None,) * (MOST_OUTPUTS + 1), *[None] * 4))
    make((*[None] * 7, (None,) * MOST_OUTPUTS, *[None] * 4))


def test_without_a_compiler_calls_go_through_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object, **__: object) -> object:
        raise CompilerError("there is no C++ compiler")

    monkeypatch.setattr("ampopt.quick_call.library", missing)
    with caplog.at_level("INFO", "ampopt"):
        assert bind.__wrapped__() is None
    assert "through Python" in caplog.text
    assert "there is no C++ compiler" in caplog.text
    answer = plain(lambda tensor: (tensor, 1))(torch.is_tensor, list)  # type: ignore[arg-type, return-value]
    assert answer("nothing") is NotImplemented
    assert answer(x := torch.zeros(1)) == [x, 1]
