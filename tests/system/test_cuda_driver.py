"""CUDA's driver through NVIDIA's bindings: their results are read, and why there are none is said."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from ctypes import c_uint64
from typing import Any

import pytest
import torch

from ampopt.engines import graph_pointers
from ampopt.engines.graph_capture import REFUSALS
from ampopt.system import cuda_driver
from ampopt.system.cuda_driver import Context, address_of, check, driver, nodes_of, parameter_sizes, type_of
from tests.support.fake_driver import CONTEXT, GRAPH, FakeDriver, KernelParams, kernel, of


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver([])
    monkeypatch.setattr(cuda_driver, "driver", lambda: made)
    return made


@pytest.fixture
def _asked_anew() -> Iterator[None]:
    driver.cache_clear()
    yield
    driver.cache_clear()


def test_a_result_is_what_stands_behind_the_status() -> None:
    assert check((0,)) == ()
    assert check((0, 5)) == (5,)
    assert check((0, [1], 1)) == ([1], 1)


@pytest.mark.parametrize("returned", [(719,), (719, None), (719, None, None)])
def test_a_status_that_is_not_0_is_an_error_whatever_comes_with_it(returned: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match="CUDA's driver refuses, with status 719"):
        check(returned)


@pytest.mark.usefixtures("_asked_anew")
def test_without_the_bindings_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(REFUSALS, match=r"needs the package cuda-bindings: .*halted"):
        driver()
    with pytest.raises(REFUSALS, match="needs the package cuda-bindings"):
        Context()


def test_nodes_are_counted_and_then_read(fake: FakeDriver) -> None:
    assert nodes_of(GRAPH) == []
    fake.nodes += [(2, None), (7, None)]
    assert [type_of(node) for node in nodes_of(GRAPH)] == [2, 7]


def test_a_context_is_the_threads_within_its_block(fake: FakeDriver) -> None:
    context, before = Context(), fake.contexts
    before[:] = [0xAA]
    with context:
        assert before == [0xAA, CONTEXT]
    assert before == [0xAA]
    context.stay()
    assert before == [CONTEXT]


@pytest.mark.parametrize("by_handle", [False, True])
def test_the_sizes_of_parameters_end_with_the_first_refusal(fake: FakeDriver, by_handle: bool) -> None:
    assert list(parameter_sizes(kernel(fake, of(1), b"abc", of(1, 2), by_handle=by_handle))) == [8, 3, 16]
    assert list(parameter_sizes(kernel(fake, by_handle=by_handle))) == []


def test_a_function_is_asked_for_by_its_name(fake: FakeDriver) -> None:
    assert address_of(fake.cuGraphLaunch) == address_of(fake.cuGraphLaunch) != 0
    assert list(fake.functions) == ["cuGraphLaunch"]
    fake.cuGetProcAddress = lambda *_: (500, None, None)  # type: ignore[assignment, method-assign]
    with pytest.raises(RuntimeError, match="status 500"):
        address_of(fake.cuGraphLaunch)


@pytest.fixture
def bindings() -> Any:
    """NVIDIA's own; their structures and names need no driver."""
    pytest.importorskip("cuda.bindings.driver")
    return driver()


def test_the_bindings_structures_are_the_words_that_are_moved(bindings: Any) -> None:
    copy, fill = bindings.CUDA_MEMCPY3D(), bindings.CUDA_MEMSET_NODE_PARAMS()
    copy.srcDevice, copy.dstDevice, copy.Depth, fill.dst, fill.height = 5, 6, 7, 8, 9
    copied = (c_uint64 * graph_pointers._COPY_WORDS).from_address(copy.getPtr())
    filled = (c_uint64 * graph_pointers._MEMSET_WORDS).from_address(fill.getPtr())
    assert (copied[6], copied[17], copied[24]) == (5, 6, 7)
    assert (filled[0], filled[4]) == (8, 9)
    copied[6] = filled[0] = 10
    assert (int(copy.srcDevice), int(fill.dst)) == (10, 10)


def test_the_bindings_take_addresses_for_a_kernels_parameters(bindings: Any) -> None:
    params, table = bindings.CUDA_KERNEL_NODE_PARAMS(), (c_uint64 * 2)()
    assert (params.kernelParams, params.extra, int(params.func), int(params.kern)) == (0, 0, 0, 0)
    params.kernelParams = params.extra = ctypes.addressof(table)
    params.func, params.kern = bindings.CUfunction(1), bindings.CUkernel(2)
    found = KernelParams.from_address(params.getPtr())
    assert found.kernelParams == found.extra == params.kernelParams == ctypes.addressof(table)
    assert (found.func, found.kern) == (1, 2)


def test_the_bindings_have_every_function_under_its_own_name(bindings: Any) -> None:
    names = (
        *("cuGraphLaunch", "cuGraphInstantiate", "cuGraphExecDestroy", "cuGraphGetNodes"),
        *("cuGraphNodeGetType", "cuGraphKernelNodeGetParams", "cuGraphExecKernelNodeSetParams"),
        *("cuGraphMemcpyNodeGetParams", "cuGraphExecMemcpyNodeSetParams", "cuGraphMemsetNodeGetParams"),
        *("cuGraphExecMemsetNodeSetParams", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxPushCurrent"),
        *("cuCtxPopCurrent", "cuFuncGetParamInfo", "cuKernelGetParamInfo", "cuGetProcAddress"),
    )
    assert [getattr(bindings, name).__name__ for name in names] == list(names)
    assert not bindings.CUresult.CUDA_SUCCESS
    assert bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT


def test_a_refusal_of_the_bindings_own_kind_is_told_by_its_number(bindings: Any) -> None:
    with pytest.raises(RuntimeError, match="with status 201"):
        check((bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT, None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_it_is_a_refusal() -> None:
    with pytest.raises(REFUSALS):
        Context()
