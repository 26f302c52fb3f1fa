"""Starts modules of this package in processes of their own, with the same caches and import paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from ampopt.system.inductor_cache import inductor_folder

_START = (
    "import sys; del sys.path[:1]; import json, runpy; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""What a process does first: it takes the import paths when Python has started, as this one did.

In `PYTHONPATH` they would come before Python's own modules while it starts: a user's `types.py` beside his
script, which does no harm to that, would end each process. So would a `json.py` in the current folder, which
comes first until then.
"""


def start_child(
    module: str, *arguments: str, cores: int, pass_fds: Sequence[int] = (), stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start `python -m module` in a session of its own, so that Ctrl-C is for this process alone.

    `cores`: the number of processes in which inductor may compile there. Raises OSError.
    """
    paths = [path or os.getcwd() for path in sys.path]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    beside_script = [] if paths[:1] == given[:1] else paths[:1]
    return subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(paths), module, *arguments],
        pass_fds=pass_fds,
        env={
            "TORCHINDUCTOR_COMPILE_THREADS": str(cores),
            "TORCH_CUSTOM_PYTHONPATH": os.pathsep.join(paths[len(beside_script) :]),
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(inductor_folder()),  # not a default of its own
        },
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
