"""What every test gets: its share of the cores, a fixed seed, and a stated reason where there is no GPU."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = max(1, CORES // WORKERS)
# The libraries read these once, as they load, hence before torch. Not `setdefault`: the workers of xdist
# inherit the environment of the process that starts them, in which this file has already run.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = str(THREADS)

# A shell ignores Ctrl-C in what it starts in the background, where tests of Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What one test tunes must not answer another.
os.environ["AMPOPT_CACHE"] = ""

import pytest  # noqa: E402
import torch  # noqa: E402

from ampopt.system import flags  # noqa: E402
from ampopt.system.cache_folder import cache_folder  # noqa: E402
from tests.engine_fixtures import all_kept, fast, few_samples, model, quick, through_dynamo  # noqa: E402, F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where torch finds no CUDA GPU."""
    if torch.cuda.is_available():
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    skip = pytest.mark.skip(reason=f"needs a CUDA GPU, and torch {torch.__version__} ({build}) finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Leave a million objects, all of which stay, out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


GROWN = 100_000
"""So many objects more make each collection of garbage 50 ms longer; every `optimize` ends with one."""


@pytest.fixture(autouse=True, scope="module")
def _leave_imports_out_of_collections() -> None:
    """Leave what stays, also of the modules that earlier tests have imported, out of later collections."""
    if len(gc.get_objects()) > GROWN:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random draws in every test, whatever ran before it in the same process."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a traceback for each accelerator: 1 ms
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True, scope="session")
def _code_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile our C++ once for all workers where a test has no cache: it takes seconds, and tunes nothing.

    A library's name is a hash of all that it depends on.
    """
    folder = tmp_path_factory.getbasetemp()
    shared = (folder if WORKERS == 1 else folder.parent) / "compiled"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ampopt.system.native.cache_folder", lambda: cache_folder() or shared)
        yield


@pytest.fixture(autouse=True, scope="session")
def _briefly_chosen() -> Iterator[None]:
    """Choose a bundle's backend in a tenth of the time: no test asks which is really the fastest."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ampopt.deploy.known_backend.CHOOSING_S", 0.2)
        yield


@pytest.fixture(autouse=True)
def _no_searched_plans() -> None:
    """No test is told that one before it has searched cuDNN's plans in this thread."""
    flags.searched.dtypes.clear()


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `exports_kept` keeps them."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture
def exports_kept(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export equal programs to ONNX once for all tests that ask for this: what they test comes afterwards."""
    monkeypatch.setattr("ampopt.engines.onnx_cache.cache_folder", lambda: exports)
