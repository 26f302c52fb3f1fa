"""What a measurement depends on: the code of every room, and the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ampopt
from ampopt.system import environment as module
from ampopt.system.environment import environment, own_code, own_files

ROOT = Path(ampopt.__file__).parent


def test_the_code_of_every_room_counts() -> None:
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    files = own_files()
    assert {name.partition("/")[0] for name in files if "/" in name} == rooms
    assert {"api.py", "ir/graph.py", "passes/degroup.py", "system/cpp/quick_call.cpp"} <= files.keys()
    assert all((ROOT / name).read_bytes() == file.read_bytes() for name, file in files.items())


def test_another_text_place_or_name_of_a_file_is_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a = 1\n")
    two.write_text("a = 2\n")
    hashes = set()
    for files in ({"ir/a.py": one}, {"ir/a.py": two}, {"ort/a.py": one}, {"ir/a.py": one, "ir/b.py": two}):
        monkeypatch.setattr(module, "own_files", lambda files=files: files)
        hashes.add(own_code.__wrapped__())
    assert len(hashes) == 4


def test_a_cpus_facts_are_named() -> None:
    facts = environment(torch.device("cpu"))
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert "cores" in facts["device"]
