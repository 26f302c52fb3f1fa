"""Kernels of inductor that are compiled together."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

from ampopt.engines import cpp_compiler
from ampopt.engines import merged_kernels as module
from ampopt.engines.cpp_compiler import NOTHING, prepared_compiler
from ampopt.engines.merged_kernels import merged_kernels
from ampopt.passes import Compile
from tests.helpers import program_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="merged on POSIX systems only")

_GUARDS: Any = torch._C._dynamo.guards
POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", str(_GUARDS._torchinductor_pyobject_tensor_data_ptr)
"""What inductor tells each module of a kernel."""


class Loops(nn.Module):
    """Four loops that are not alike, because products of matrices lie between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.linears
        made: Tensor = third(second(first((x + 1).sin()).tanh() * 2).exp() - 3)
        return made.cos().sum(1)


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty cache of inductor, whose compilers are two."""
    with fresh_cache(), config.patch(compile_threads=2):
        yield Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def compile_loops() -> None:
    """Compile the model as the pass does, and check what it computes."""
    model, x = Loops().eval(), torch.randn(4, 8)
    program = Compile(warm_ups=1).apply(program_of(model, x)).program
    with torch.no_grad():
        torch.testing.assert_close(program.run(x)[0], model(x))


def libraries(folder: Path) -> list[Path]:
    """Those of the kernels in a cache."""
    return sorted(folder.glob("*/*.main.so"))


def files_of(found: list[Path]) -> int:
    """How many files have all these names."""
    return len({file.stat().st_ino for file in found})


def loaded(library: Path, package: str) -> ModuleType:
    """A kernel's module, imported under another name."""
    spec = importlib.util.spec_from_file_location(f"{package}.kernel", library)
    assert spec is not None
    assert spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*POINTER)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    return made


def test_the_kernels_of_a_graph_are_as_many_files_as_there_are_compilers(folder: Path) -> None:
    compile_loops()
    found = libraries(folder)
    assert len(found) >= 4
    assert files_of(found) == 2
    kernels = [loaded(file, f"again{number}").kernel for number, file in enumerate(found)]
    assert len({id(kernel.__self__) for kernel in kernels}) == len(found)
    os.link(found[0], other := folder / "other.so")
    with pytest.raises(ImportError, match=r"no kernel of other\.so here"):
        loaded(other, "another")


def test_kernels_that_cannot_be_merged_are_compiled_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "merged", lambda kernels: "this is not C++")
    compile_loops()
    found = libraries(folder)
    assert files_of(found) == len(found) >= 4


def test_one_compiler_needs_no_merging_and_is_right(folder: Path) -> None:
    with config.patch(compile_threads=1):
        compile_loops()
    assert files_of(found := libraries(folder)) == len(found) >= 4


def _loop(number: int, before: str = "") -> str:
    return f'{before}\nextern "C" void kernel(float* out) {{ *out = {number} + 0.5f; }}'


def _values(*kernels: Any) -> list[float]:
    out = torch.zeros(1)
    found = list[float]()
    for kernel in kernels:
        kernel.result()(out)
        found.append(out.item())
    return found


def test_nothing_of_a_kernel_is_known_to_another_one(folder: Path) -> None:
    with merged_kernels():
        own = [f"static float half = {n};" for n in range(6)]
        made = [AsyncCompile().cpp_pybinding(["float*"], _loop(n, own[n])) for n in range(6)]
        assert _values(*made) == [n + 0.5 for n in range(6)]
    assert files_of(found := libraries(folder)) == 2
    assert len(found) == 6


def test_a_kernel_with_macros_before_its_headers_is_compiled_alone(folder: Path) -> None:
    with merged_kernels():
        own = AsyncCompile()
        plain = [own.cpp_pybinding(["float*"], _loop(number)) for number in range(4)]
        other = own.cpp_pybinding(["float*"], _loop(9, "#define out out_of_it"))
        assert _values(*plain, other) == [0.5, 1.5, 2.5, 3.5, 9.5]
    assert files_of(found := libraries(folder)) == 3
    assert len(found) == 5


def test_kernels_of_other_threads_and_of_no_block_are_inductors_own(folder: Path) -> None:
    made = list[Any]()

    def compile_here(number: int) -> None:
        made.append(AsyncCompile().cpp_pybinding(["float*"], _loop(number)))

    with merged_kernels():
        thread = threading.Thread(target=compile_here, args=(1,))
        thread.start()
        thread.join()
    compile_here(2)
    assert _values(*made) == [1.5, 2.5]
    assert files_of(libraries(folder)) == 2


def test_other_tasks_go_to_inductors_threads() -> None:
    with merged_kernels(), config.patch(compile_threads=2):
        submitted = AsyncCompile.submit(functools.partial(int, "7"))
    assert isinstance(submitted, Future)
    assert submitted.result() == 7


def test_where_a_file_has_one_name_kernels_are_copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(module, "also_named", refuse)
    alone = list[object]()
    monkeypatch.setattr(module, "_compile_alone", alone.append)
    with merged_kernels():
        made = [AsyncCompile().cpp_pybinding(["float*"], _loop(number)) for number in range(4)]
        assert _values(*made) == [0.5, 1.5, 2.5, 3.5]
    assert not alone
    assert files_of(found := libraries(folder)) == len(found) == 4


def test_many_kernels_are_more_files_than_there_are_compilers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    with merged_kernels():
        made = [AsyncCompile().cpp_pybinding(["float*"], _loop(number)) for number in range(6)]
        assert _values(*made) == [number + 0.5 for number in range(6)]
    assert files_of(libraries(folder)) == 3


def test_an_interruption_ends_the_compilation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kernels: Any) -> None:
        raise OSError("its compiler was interrupted, too")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    alone = list[object]()
    monkeypatch.setattr(module, "_compile_together", fail)
    monkeypatch.setattr(module, "_compile_alone", alone.append)
    monkeypatch.setattr(ThreadPoolExecutor, "map", interrupted)
    with merged_kernels():
        made = [AsyncCompile().cpp_pybinding(["float*"], _loop(number)) for number in range(4)]
        with pytest.raises(KeyboardInterrupt):
            made[0].result()
    assert not alone
    assert not libraries(folder)


@pytest.fixture
def nothing_prepared() -> Iterator[None]:
    """As in a new process."""
    cpp_compiler.started.cache_clear()
    yield
    cpp_compiler.started.cache_clear()


@pytest.mark.usefixtures("nothing_prepared")
def test_a_prepared_compiler_has_its_headers_and_compiles_nothing(folder: Path) -> None:
    with prepared_compiler():
        until = time.monotonic() + 60
        while not (found := list(folder.glob("*/*.main.cpp"))) and time.monotonic() < until:
            time.sleep(0.1)
    [source] = found
    assert NOTHING in source.read_text()
    assert not libraries(folder)


@pytest.mark.usefixtures("nothing_prepared")
def test_what_is_not_prepared_is_given_up_and_not_begun_again() -> None:
    child = cpp_compiler.started()
    assert child is not None
    assert child.poll() is None
    with pytest.raises(ValueError, match="traced"), prepared_compiler():
        raise ValueError("it cannot be traced")
    assert child.returncode == -signal.SIGKILL
    with prepared_compiler():
        assert cpp_compiler.started() is child
    assert child.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("nothing_prepared")
def test_without_processes_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(cpp_compiler, "start_child", refuse)
    with prepared_compiler():
        assert cpp_compiler.started() is None
