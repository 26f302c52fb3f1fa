"""Every public call leaves the process as it was, the first in a process, too."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import CaptureError
from ampopt.ir.transform import Pass
from ampopt.passes import PIPELINE, Compile, FoldConvBn, OnnxRuntime, Script
from ampopt.search.worker import Worker
from ampopt.system.inductor_cache import inductor_folder
from ampopt.system.process_state import imports_kept, process_kept
from tests.helpers import Model, with_statistics
from tests.support import snapshot
from tests.support.compiler import needs_compiler
from tests.support.planted import captured_of, module_of

ROOT = Path(__file__).parents[2]

ALL_BUT_ONE = tuple({step.name for step in PIPELINE} - {"fold-conv-bn", "bake-autocast"})

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def net() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))


def image(height: int = 8) -> Tensor:
    return torch.randn(1, 3, height, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What earlier tests may have set in this process is as in a new one."""
    monkeypatch.delenv(FOLDER, raising=False)
    method, limit = multiprocessing.get_start_method(allow_none=True), sys.getrecursionlimit()
    multiprocessing.set_start_method(None, force=True)
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)
    multiprocessing.set_start_method(method, force=True)


@pytest.mark.usefixtures("quick")
def test_optimize_leaves_the_process_as_it_was() -> None:
    model = net()
    with snapshot.unchanged():
        assert ampopt.optimize(model, image(), exclude=ALL_BUT_ONE, progress=False).report.entries


class Draws(nn.Module):
    """Draws from every generator that code may draw from."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x * random.random() * np.random.rand()) + torch.rand(1)
        return out


@pytest.mark.usefixtures("quick")
def test_a_model_that_draws_changes_no_generator_while_it_is_optimized() -> None:
    model = Draws().eval()
    with snapshot.unchanged():
        ampopt.optimize(model, image(), exclude=ALL_BUT_ONE, progress=False)


@pytest.mark.usefixtures("quick")
def test_compare_leaves_the_process_as_it_was() -> None:
    model = net()
    with snapshot.unchanged():
        assert ampopt.compare(model, image(), exclude=ALL_BUT_ONE, progress=False).rows


def test_new_shapes_and_prepare_leave_the_process_as_it_was() -> None:
    model = net()
    with snapshot.unchanged():
        fast = module_of(model, image(), passes=(FoldConvBn(),))
        assert torch.allclose(fast(image(9)), model(image(9)), atol=1e-5)
        fast.prepare((2, 3, 8, 8))


def test_what_cannot_be_captured_leaves_the_process_as_it_was() -> None:
    model = Model(lambda m, x: x if x.sum() > 0 else -x)
    with snapshot.unchanged(), pytest.raises(CaptureError):
        captured_of(model, image())


def test_save_and_load_leave_the_process_as_it_was(tmp_path: Path) -> None:
    model = net()
    with snapshot.unchanged():
        fast = module_of(model, image(), passes=(FoldConvBn(),))
        fast.save(tmp_path / "a.ampopt", onnx=None, cpp=True)
        assert torch.equal(ampopt.load(tmp_path / "a.ampopt", backend="ampopt")(image()), fast(image()))


@pytest.mark.parametrize("dynamic", [None, "batch"])
def test_an_export_leaves_the_process_as_it_was(dynamic: str | None, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = net()
    with snapshot.unchanged():
        module_of(model, image()).export_onnx(tmp_path / "a.onnx", dynamic=dynamic)


@pytest.mark.parametrize(
    "step", [Script(), OnnxRuntime(), pytest.param(Compile(), marks=[needs_compiler, pytest.mark.slow])]
)
def test_ways_to_run_leave_the_process_as_it_was(
    step: Pass, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if step == OnnxRuntime():
        pytest.importorskip("onnxruntime")
    importlib.import_module("torch._inductor.codecache")  # it keeps where its compiled headers are
    model = net()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where inductor finds nothing compiled
    with snapshot.unchanged():
        with process_kept():
            fast = module_of(model, image(), passes=(FoldConvBn(), step))
        assert torch.allclose(fast(image()), model(image()), atol=1e-5)
    assert step != Compile() or list(tmp_path.glob("torchinductor_*"))


FIRST = """
import torch
from torch import nn
from tests.support import snapshot
import ampopt
model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.ones(1, 3, 8, 8)
with snapshot.unchanged():
    fast = ampopt.optimize(model, x, budget_s=3, exclude=["compile", "script"], progress=False)
    fast(torch.ones(1, 3, 9, 8))
"""


@pytest.mark.slow
@pytest.mark.parametrize("warn", ["default", "error::DeprecationWarning"])
def test_the_first_call_in_a_process_leaves_it_as_it_was(warn: str) -> None:
    variables = {name: value for name, value in os.environ.items() if name != FOLDER}
    done = subprocess.run(
        [sys.executable, "-W", warn, "-c", FIRST],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _as_inductor() -> None:
    os.environ[FOLDER] = "/a/folder"
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))
    multiprocessing.Lock()


def test_what_a_compiler_sets_is_undone_however_the_block_ends() -> None:
    def interrupted() -> None:
        with process_kept():
            _as_inductor()
            raise KeyboardInterrupt

    with snapshot.unchanged(), process_kept():
        _as_inductor()
    with snapshot.unchanged(), pytest.raises(KeyboardInterrupt):
        interrupted()


def test_what_the_user_had_set_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "a folder")
    sys.setrecursionlimit(1500)
    with process_kept():
        _as_inductor()
    assert (os.environ[FOLDER], sys.getrecursionlimit()) == ("a folder", 1500)
    with process_kept():
        del os.environ[FOLDER]
    assert os.environ[FOLDER] == "a folder"


@pytest.mark.parametrize("flushes", [False, True])
def test_denormals_are_as_they_were(flushes: bool) -> None:
    """OpenVINO's compiler changes it in the thread that calls it."""

    def vanish() -> bool:
        return not bool((torch.full((4,), 1e-40) * 1.0).any())

    if not torch.set_flush_denormal(flushes):
        pytest.skip("this processor cannot flush denormals")
    try:
        for other in (flushes, not flushes):
            with process_kept():
                torch.set_flush_denormal(other)
            assert vanish() is flushes
    finally:
        torch.set_flush_denormal(False)


def test_what_another_thread_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_ROBOT", "before")
    other = multiprocessing.get_all_start_methods()[-1]

    def users() -> None:
        os.environ["MY_ROBOT"] = "meanwhile"
        multiprocessing.set_start_method(other)

    with process_kept():
        thread = threading.Thread(target=users)
        thread.start()
        thread.join()
    assert os.environ["MY_ROBOT"] == "meanwhile"
    assert multiprocessing.get_start_method(allow_none=True) == other


def test_of_two_threads_the_last_one_puts_back_what_was_before_the_first() -> None:
    inside, leave = threading.Event(), threading.Event()

    def second() -> None:
        with process_kept():
            inside.set()
            leave.wait(timeout=10)

    thread = threading.Thread(target=second)
    with snapshot.unchanged():
        with process_kept():
            _as_inductor()
            thread.start()
            inside.wait(timeout=10)
        assert os.environ[FOLDER] == "/a/folder"  # the second one's work may still need it
        leave.set()
        thread.join()


def test_later_compilations_and_rehearsals_use_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    class Begun:
        def __init__(self, command: Any, *, env: dict[str, str], **options: Any) -> None:
            given.append(env)

    folder = inductor_folder()
    captured_of(net(), image())
    assert inductor_folder() == folder
    assert FOLDER not in os.environ
    monkeypatch.setattr("ampopt.search.worker.subprocess.Popen", Begun)
    Worker(torch.device("cpu"), 1).start().close()
    assert given[0][FOLDER] == str(folder)


@pytest.fixture
def seeding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Import a module that does what some do when they are imported."""
    lines = ("import random, warnings, numpy", "random.seed(1)", "numpy.random.seed(1)")
    (tmp_path / "seeds_all.py").write_text("\n".join([*lines, "warnings.simplefilter('once')"]))
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: __import__("seeds_all")
    sys.modules.pop("seeds_all", None)


def _drawn() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def test_modules_that_seed_when_they_are_imported_change_nothing(seeding: Callable[[], Any]) -> None:
    random.seed(7)
    np.random.seed(7)
    expected, filters = (_drawn(), _drawn()), list(warnings.filters)
    random.seed(7)
    np.random.seed(7)
    first = _drawn()
    with imports_kept():
        seeding()
    assert (first, _drawn()) == expected
    assert list(warnings.filters) == filters


def test_where_nothing_is_imported_nobody_draws_the_same_numbers_again() -> None:
    with imports_kept():
        first = _drawn()
    assert _drawn() != first
