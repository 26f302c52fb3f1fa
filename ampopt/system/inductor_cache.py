"""Removes unfinished builds of killed compilers from inductor's disk cache."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ampopt.system.atomic import locked
from ampopt.system.process_state import process_kept

BUILDING = "_CxxBuild"
"""Suffix of the folder that exists next to a library during its build.

`CppBuilder.build` in torch/_inductor/cpp_builder.py (2.10 to 2.15) creates it first and removes it last.
"""

BUILT = (".so", ".o", ".gch")


def inductor_folder() -> Path:
    """The folder of inductor's cache: $TORCHINDUCTOR_CACHE_DIR, or inductor's default."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # it takes seconds to load

    with process_kept():  # it writes the default into the environment
        return Path(cache_dir())


def remove_cut_off_builds() -> None:
    """Remove unfinished builds of ended processes from inductor's cache, so that they are built again.

    Compilers write libraries, objects and precompiled headers directly into inductor's cache, and inductor
    assumes that existing files are complete: after a killed build, such as a rehearsal that runs out of time,
    every later compilation of the same kernel fails. A build in progress is recognized by its lock.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # it takes seconds to load

    if os.name != "posix":
        return
    root = inductor_folder()
    headers = Path(default_cache_dir())  # they are there also where $TORCHINDUCTOR_CACHE_DIR is another
    for folder in {each for place in (root, headers) for each in place.glob(f"*/*{BUILDING}")}:
        name = folder.name.removesuffix(BUILDING)
        own = folder.parent / "locks"  # those of headers lie beside them
        locks = own if own.is_dir() else root / "locks"
        with contextlib.suppress(OSError), _opened(locks / f"{name.partition('.')[0]}.lock") as lock:
            if locked(lock):
                for suffix in BUILT:
                    folder.with_name(name + suffix).unlink(missing_ok=True)
                shutil.rmtree(folder)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
