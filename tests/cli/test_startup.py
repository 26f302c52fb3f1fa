"""What the command line does without PyTorch, which takes seconds to import: help, completion, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ampopt

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "AMPOPT_CACHE": ""}

SCRIPT = """
import json, sys
from typer.testing import CliRunner
from ampopt.cli.app import app

for arguments in json.load(sys.stdin):
    result = CliRunner().invoke(app, arguments)
    told = [result.exit_code, result.stdout + result.stderr, "torch" in sys.modules]
    print(json.dumps(told), flush=True)
"""

ZOO = "torchvision:resnet18"
WITHOUT_TORCH: dict[str, tuple[int, str]] = {
    "--help": (0, "optimize"),
    "-V": (0, ampopt.__version__),
    "--version": (0, ampopt.__version__),
    "optimize --help": (0, "--exclude"),
    "export --help": (0, "--sign"),
    "verify --help": (0, "--strict"),
    "cache": (0, "there is no cache"),
    "optimise": (2, "No such command"),
    f"optimize {ZOO} --precision fp8": (2, "--precision"),
    f"optimize {ZOO} --input 1x3x": (1, "is no shape"),
    f"optimize {ZOO} --input 1x3x8x8:float33": (1, "there is no dtype"),
    f"optimize {ZOO} --image nowhere.png": (1, "--image: there is no file"),
    f"optimize {ZOO} --npz nowhere.npz": (1, "--npz: there is no file"),
    f"optimize {ZOO} --weights nowhere.pt": (1, "--weights: there is no file"),
    f"optimize {ZOO} --exclude nope": (1, "there is no pass nope"),
    f"optimize {ZOO} --budget -1": (1, "--budget -1"),
    f"optimize {ZOO} --device tpu": (1, "is no device"),
    f"compare {ZOO} --json nowhere/r.json": (1, "create that folder first"),
    f"compare {ZOO} --report r.pdf": (1, "no format of a report"),
    f"compare {ZOO} --baseline nowhere.json": (1, "there is no file"),
    f"optimize {ZOO} --baseline nowhere.json": (2, "No such option"),
    "verify nowhere.ampopt --report r.pdf": (1, "no format of a report"),
    "optimize nowhere.pt2": (1, "there is no file"),
    "optimize nowhere.py:net": (1, "there is no file"),
    "optimize no_such_package:net": (1, "No module named"),
    "optimize resnet18": (1, "is none of"),
    f"export {ZOO} -o out.engine": (1, "an engine of TensorRT"),
    f"export {ZOO} -o nowhere/m.onnx": (1, "create that folder first"),
    f"export {ZOO} -o m.ampopt --sign nowhere.pem": (1, "there is no file"),
    f"export {ZOO} -o m.onnx --cpp": (1, "--cpp is for a bundle"),
    "verify nowhere.ampopt": (1, "is refused"),
    "verify nowhere.ampopt --hz 0": (1, "positive rate"),
}


def test_help_and_errors_come_before_pytorch(tmp_path: Path) -> None:
    commands = list(WITHOUT_TORCH)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([command.split() for command in commands]),
        env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for command, line in zip(commands, done.stdout.splitlines(), strict=True):
        code, output, has_torch = json.loads(line)
        expected, words = WITHOUT_TORCH[command]
        assert code == expected, (command, output)
        assert words in output, (command, output)
        assert not has_torch, command
    assert not list(tmp_path.iterdir())


def test_the_package_is_run_as_the_command() -> None:
    command = [sys.executable, "-m", "ampopt", "--version"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"ampopt {ampopt.__version__}\n", done.stderr


COMPLETED = {
    "ampopt ver": ["verify"],
    "ampopt optimize --exclude fold-": ["fold-constants", "fold-conv-bn"],
    "ampopt compare x --exclude script --exclude fuse-linear": ["fuse-linear-act"],
    "ampopt optimize --precision ": ["auto", "fp32", "amp", "bf16"],
    "ampopt optimize --policy O": ["O1", "O2"],
    "ampopt optimize --device cu": ["cuda"],
    "ampopt export --target t": ["tensorrt"],
    "ampopt verify --backend o": ["onnxruntime", "openvino", "original"],
}

COMPLETE = """
import sys
from ampopt.cli.app import main

sys.argv = ["ampopt"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("typed", COMPLETED)
def test_the_shell_completes_commands_passes_and_choices(typed: str) -> None:
    asked = {"_AMPOPT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    command = [sys.executable, "-c", COMPLETE]
    done = subprocess.run(command, env=ENVIRONMENT | asked, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == COMPLETED[typed], done.stderr
    assert not done.stderr


def test_the_script_for_a_shell_is_shown() -> None:
    arguments = ["ampopt", "--show-completion", "bash"]
    script = f"import sys; from ampopt.cli.app import main; sys.argv = {arguments}; main()"
    found = {**ENVIRONMENT, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=found, capture_output=True, text=True, timeout=120
    )
    assert "_AMPOPT_COMPLETE" in done.stdout, done.stderr


SLOW = {"sympy", "torch._dynamo", "torch._inductor", "onnxruntime", "openvino", "onnx", "triton"}
"""What takes a second and more to import, and is needed by few calls, or beside other work."""


def test_what_is_slow_is_not_imported_with_the_interface() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import ampopt.api, ampopt.bundle_load\n"
        f"print(sorted({SLOW} & (set(sys.modules) - before)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
