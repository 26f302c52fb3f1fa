"""The C++ runner, built here with LibTorch: right outputs, exit codes, reports."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampopt.deploy.torchscript_file import write_torchscript
from ampopt.ir.program import Program
from ampopt.passes import ChannelsLast, FoldConvBn
from benchmarks.networks import EncDecMil18
from tests.helpers import Model, program_of, with_statistics

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2] / "deploy" / "cpp"
TOLERANCE = 1e-4


def _cmake(*arguments: str | Path) -> str:
    """What CMake says; skips where there is none."""
    places = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
    cmake = shutil.which("cmake", path=places)
    if cmake is None:
        pytest.skip("there is no cmake: run  pip install 'ampopt[dev]'")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("there is no C++ compiler")
    done = subprocess.run([cmake, *arguments], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def _configure(folder: Path) -> str:
    options = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    return _cmake("-S", SOURCE, "-B", folder, *options)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the runner, configured and built in a new folder."""
    folder = tmp_path_factory.mktemp("runner")
    assert "warning:" not in _configure(folder) + _cmake("--build", folder)
    return folder / "runner"


def _toolkit(place: Path, major: int) -> Path:
    """What stands for a CUDA toolkit: the files that CMake looks for."""
    contents = {
        "include/crt/host_config.h": "",
        "include/cuda_runtime_api.h": f"#define CUDART_VERSION  {major}010\n",
        f"lib64/libcudart.so.{major}": "",
        "lib64/libcudart.so": "",
    }
    for name, content in contents.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)
    return place


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built for CPUs")
@pytest.mark.parametrize("newer", [0, 1])
def test_cuda_of_another_major_version_than_torchs_is_left_out(
    newer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    major = int(str(torch.version.cuda).split(".")[0])
    toolkit = _toolkit(tmp_path / "toolkit", major + newer)
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    said = _configure(tmp_path / "build")
    found = (tmp_path / "build" / "CMakeCache.txt").read_text()
    if newer:
        assert str(toolkit) not in found
        assert "CUDA graphs: yes" in said or f"torch is for CUDA {major}" in said
    else:
        assert "CUDA graphs: yes" in said


def _run(runner: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [runner, *map(str, arguments), "--threads", "1"], capture_output=True, text=True, timeout=300
    )


def _report(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _small_program() -> Program:
    """Two inputs, one of them integers, three outputs of three dtypes."""
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model = Model(lambda m, x, i: (m.conv(x)[:, i], i + 1, x > 0.5), conv=conv)
    inputs = (torch.rand(1, 3, 16, 16), torch.tensor([2, 0]))
    return program_of(with_statistics(model), *inputs, on_top_of=(FoldConvBn(), ChannelsLast()))


def _write(path: Path, program: Program) -> Path:
    data = write_torchscript(program, program.examples, program.run(*program.examples), TOLERANCE)
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small program's file."""
    return _write(tmp_path_factory.mktemp("small") / "program.pt", _small_program())


def _check_report(report: Any, frames: int) -> None:
    assert report["self_test"]["passed"] is True
    assert 0 <= report["self_test"]["error"] <= report["self_test"]["tolerance"] == TOLERANCE
    assert 0 < report["latency"]["p50_ms"] <= report["latency"]["p99_ms"]
    assert report["latency"]["frames"] == frames
    assert (report["device"], report["cuda_graph"], report["threads"]) == ("cpu", False, 1)


def test_a_small_program_gives_pythons_outputs(runner: Path, small: Path) -> None:
    _check_report(_report(_run(runner, small, "--json", "--runs", "30", "--device", "cpu")), frames=30)


def test_encdecmil18_gives_pythons_outputs(runner: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = program_of(
        with_statistics(EncDecMil18()), torch.rand(1, 3, 64, 80), on_top_of=(FoldConvBn(), ChannelsLast())
    )
    path = _write(tmp_path / "program.pt", program)
    _check_report(_report(_run(runner, path, "--json", "--runs", "10")), frames=10)


def test_frames_come_at_the_rate_that_is_asked_for(runner: Path, small: Path) -> None:
    latency = _report(_run(runner, small, "--json", "--hz", "20", "--seconds", "0.5"))["latency"]
    assert latency["hz"] == 20
    assert latency["frames"] <= 10 <= latency["frames"] + latency["missed"]


def test_the_report_in_words_says_the_same(runner: Path, small: Path) -> None:
    done = _run(runner, small, "--runs", "5")
    assert done.returncode == 0
    for words in ("1 threads", "plain calls", "passed", "p50", "p99", "5 frames back to back"):
        assert words in done.stdout


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_failed_self_test_gives_exit_code_2_and_the_error(
    runner: Path, small: Path, tmp_path: Path, factor: float
) -> None:
    module: Any = torch.jit.load(small)
    outputs = module.self_test_outputs
    module.self_test_outputs = [outputs[0] * factor, *outputs[1:]]
    torch.jit.save(module, tmp_path / "wrong.pt")
    done = _run(runner, tmp_path / "wrong.pt", "--json")
    assert done.returncode == 2, done.stderr
    report = json.loads(done.stdout)
    assert (report["self_test"]["passed"], report["latency"]) == (False, None)
    if factor == 1.05:
        assert report["self_test"]["error"] == pytest.approx(0.05 / 1.05, rel=1e-3)
    else:
        assert report["self_test"]["error"] is None
    assert "FAILED" in _run(runner, tmp_path / "wrong.pt").stdout


def test_damaged_weights_are_never_run_as_if_nothing_was(runner: Path, tmp_path: Path) -> None:
    program = _small_program()
    data = _write(tmp_path / "program.pt", program).read_bytes()
    weight = max((t for t in program.graph.buffers()), key=torch.Tensor.numel)
    stored = weight.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).numpy().tobytes()
    assert data.count(stored) == 1
    (tmp_path / "damaged.pt").write_bytes(data.replace(stored, stored[::-1]))
    assert _run(runner, tmp_path / "damaged.pt").returncode in (1, 2)


def _foreign() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(nn.ReLU(), torch.rand(3)), buffer)
    return buffer.getvalue()


def _assert_one_paragraph(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("runner: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize("content", ["truncated", "empty", "foreign", "absent"])
def test_what_is_no_program_gives_one_paragraph_and_exit_code_1(
    runner: Path, small: Path, tmp_path: Path, content: str
) -> None:
    data, path = small.read_bytes(), tmp_path / "program.pt"
    contents = {"truncated": data[: len(data) // 2], "empty": b"", "foreign": _foreign()}
    if content in contents:
        path.write_bytes(contents[content])
    words = "not written by ampopt" if content == "foreign" else "damaged"
    _assert_one_paragraph(_run(runner, path), words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said(runner: Path, small: Path) -> None:
    _assert_one_paragraph(_run(runner, small, "--device", "cuda"), "LibTorch finds none")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--runs", "x"], "--runs takes a positive number, not 'x'"),
        (["--runs", "1.5"], "whole number"),
        (["--hz", "-3"], "--hz takes a positive number"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--frames"], "unknown argument '--frames'"),
        (["second.pt"], "unknown argument 'second.pt'"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(
    runner: Path, small: Path, arguments: Sequence[str], words: str
) -> None:
    _assert_one_paragraph(_run(runner, small, *arguments), words)


@pytest.mark.gpu
def test_a_gpu_runs_the_program_in_a_cuda_graph(runner: Path, tmp_path: Path) -> None:
    program = program_of(with_statistics(EncDecMil18()).cuda(), torch.rand(1, 3, 64, 80).cuda())
    report = _report(_run(runner, _write(tmp_path / "program.pt", program), "--json", "--runs", "50"))
    assert report["device"].startswith("cuda")
    assert report["cuda_graph"] is True
    assert report["self_test"]["passed"] is True
