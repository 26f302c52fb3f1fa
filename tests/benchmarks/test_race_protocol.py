"""The pipe between a race and a contestant's process, and what its environment is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import engine_process, engine_venvs
from benchmarks.race_protocol import (
    CACHES,
    Racer,
    emptied,
    peak_bytes,
    racing_environment,
    resident_bytes,
    serve,
)
from benchmarks.regimes import BACK_TO_BACK, Block

REPOSITORY = Path(__file__).parents[2]


def test_caches_are_new_empty_folders_whatever_they_were(tmp_path: Path) -> None:
    found = emptied(tmp_path / "cold", {"AMPOPT_CACHE": "/warm", "PATH": "/bin"})
    assert found["PATH"] == "/bin"
    folders = [Path(found[name]) for name in CACHES]
    assert len(set(folders)) == len(CACHES)
    for folder in folders:
        assert folder.is_relative_to(tmp_path)
        assert list(folder.iterdir()) == []
    with pytest.raises(FileExistsError):
        emptied(tmp_path / "cold", {})


class Stub:
    """Answers as a contestant does."""

    def make(self) -> dict[str, Any]:
        return {"prepare_s": 1.0}

    def choose(self) -> dict[str, Any]:
        raise RuntimeError("no way\nand a long story")

    def settle(self) -> dict[str, Any]:
        raise ValueError

    def block(self, regime: str) -> Block:
        return {"seconds": [1.0], "regime": regime}


def test_answers_are_results_or_reasons() -> None:
    requests = [json.dumps(each) + "\n" for each in (["make"], ["choose"], ["settle"], ["block", "30 Hz"])]
    waiting, answers = iter([*requests, ""]), list[str]()
    serve(Stub(), lambda: next(waiting), answers.append)
    assert [json.loads(each) for each in answers] == [
        {"done": {"prepare_s": 1.0}},
        {"failed": "no way"},
        {"failed": "ValueError"},
        {"done": {"seconds": [1.0], "regime": "30 Hz"}},
    ]


def racer(tmp_path: Path, code: str, threads: int | None = None) -> Racer:
    return Racer([sys.executable, "-c", code], racing_environment("one of them", tmp_path, threads))


def test_a_process_has_caches_and_threads_of_its_own(tmp_path: Path) -> None:
    code = "import json, os; input(); print(json.dumps({'done': dict(os.environ)}))"
    racing = racer(tmp_path, code, threads=3)
    try:
        env = racing.ask("make")
    finally:
        racing.end()
    assert {env[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
    for name in CACHES:
        assert Path(env[name]).parent.parent == tmp_path
        assert Path(env[name]).parent.name.startswith("one_of_them")
        assert env[name] != os.environ.get(name)


def test_a_process_that_ends_is_a_reason(tmp_path: Path) -> None:
    racing = racer(tmp_path, "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="its process ended with status 3"):
        racing.ask("make")
    racing.end()


def test_what_failed_there_is_raised_here(tmp_path: Path) -> None:
    racing = racer(tmp_path, 'input(); print(\'{"failed": "out of memory"}\')')
    with pytest.raises(RuntimeError, match="out of memory"):
        racing.ask("make")
    racing.end()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_the_peak_is_this_processes_own(tmp_path: Path) -> None:
    held = np.ones(40_000_000)  # 320 MB that the process started here has not got
    code = (
        "import json; from benchmarks.race_protocol import peak_bytes; input(); "
        "print(json.dumps({'done': peak_bytes()}))"
    )
    racing = racer(tmp_path, code)
    try:
        assert racing.ask("make") < held.nbytes < peak_bytes()
    finally:
        racing.end()
    before = resident_bytes()
    assert held.nbytes < before <= peak_bytes()
    del held
    assert resident_bytes() < before - 300_000_000


FAKE = """#!{python}
import runpy, sys
sys.modules["torch"] = None  # whoever imports it fails
sys.executable = __file__  # the converter runs in it, too
import benchmarks.engines_on_cpu as engines
def convert(engine, folder):
    if not (folder / "model.onnx").exists():
        raise FileNotFoundError("nothing to convert")
    (folder / "converted").touch()
def load(folder, inputs, threads):
    assert (folder / "converted").exists()
    return lambda x: [x * threads, x.sum(keepdims=True)]
engines.convert, engines.ENGINES["ncnn"] = convert, load
sys.argv = sys.argv[2:]
runpy.run_module("benchmarks.engine_process", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def fake_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Racer]:
    """Starts the process of an engine in an environment whose interpreter has no PyTorch."""
    python = tmp_path / "venvs" / "ncnn" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE.format(python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "venvs" / "ncnn" / "made").touch()
    monkeypatch.setattr(engine_venvs, "ROOT", tmp_path / "venvs")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    np.savez(tmp_path / "inputs.npz", np.arange(3, dtype=np.float32))
    env = racing_environment("ncnn", tmp_path, 2)
    return lambda: Racer(engine_process.command("ncnn", tmp_path, 2), env)


def test_an_engine_in_its_own_environment_answers_without_pytorch(
    fake_venv: Callable[[], Racer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.onnx").touch()
    racing = fake_venv()
    try:
        assert racing.ask("make")["prepare_s"] > 0
        assert racing.ask("choose") == {"way": "2 threads"}
        with np.load(tmp_path / "ncnn.npz") as outputs:
            found = [array.tolist() for array in outputs.values()]
        assert found == [[0, 2, 4], [3]]
        racing.ask("settle")
        timed = racing.ask("block", BACK_TO_BACK)
        assert min(timed["seconds"]) > 0
        assert timed["cpu_s"] > 0
    finally:
        racing.end()


def test_a_network_that_is_not_converted_is_a_reason(fake_venv: Callable[[], Racer]) -> None:
    racing = fake_venv()
    with pytest.raises(RuntimeError, match="not converted: FileNotFoundError: nothing to convert"):
        racing.ask("make")
    racing.end()


def test_environments_are_made_with_what_their_converters_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        assert options["check"] is True
        commands.append(command)
        if "venv" in command:
            Path(command[-1], "site").mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, stdout=str(tmp_path / "litert" / "site") + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(engine_venvs, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["engine_venvs"])
    engine_venvs.main()
    installed = [command for command in commands if "install" in command]
    assert [command[0] for command in installed] == [
        str(tmp_path / name / "bin" / "python") for name in ("ncnn", "mnn", "litert")
    ]
    assert "--no-deps" in installed[0], "pnnx asks for PyTorch, and needs none"
    seen = (tmp_path / "litert" / "site" / "main.pth").read_text().strip()
    assert (Path(seen) / "numpy").is_dir(), "LiteRT's converter sees the packages of this environment"
    assert not (tmp_path / "mnn" / "site" / "main.pth").exists()
    for name in ("ncnn", "mnn", "litert"):
        assert engine_venvs.python_of(name) == tmp_path / name / "bin" / "python"


def test_an_environment_that_was_not_made_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_venvs, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="no environment of mnn: make peers-cpu"):
        engine_process.command("mnn", tmp_path, 1)
