"""Processes of our own start wherever the user's script lies, and import what it can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ampopt.system import children

ROOT = str(Path(children.__file__).parents[2])

SCRIPT = """
import sys
beside = sys.path.pop(0)  # Python's own pathlib imports an nt from there
sys.path.append(sys.argv[1])
from ampopt.system.children import start_child
sys.path.insert(0, beside)
print(start_child("own_module", "an argument", cores=1).wait(60))
"""

OWN_MODULE = """
import sys, types
with open(__file__.removesuffix("py") + "txt", "w") as file:
    file.write(" ".join([types.__name__, *sys.argv[1:]]))
"""


def test_modules_beside_the_script_do_not_take_the_place_of_pythons_own(tmp_path: Path) -> None:
    for name in ("types", "nt", "ntpath", "posixpath", "site", "abc"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not me')\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "own_module.py").write_text(OWN_MODULE)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    for name in ("json", "runpy", "os"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('not me')\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), ROOT],
        capture_output=True,
        text=True,
        env=environment,
        cwd=elsewhere,
        check=True,
    )
    assert done.stdout == "0\n"
    assert (tmp_path / "own_module.txt").read_text() == "types an argument"
