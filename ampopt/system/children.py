"""Starts modules of this package in processes of their own, with the same caches and import paths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from ampopt.system.inductor_cache import inductor_folder


def start_child(
    module: str, *arguments: str, cores: int, pass_fds: Sequence[int] = (), stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start `python -m module` in a session of its own, so that Ctrl-C is for this process alone.

    `cores`: the number of processes in which inductor may compile there. Raises OSError.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        pass_fds=pass_fds,
        env={
            "TORCHINDUCTOR_COMPILE_THREADS": str(cores),
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(inductor_folder()),  # not a default of its own
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        },
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
