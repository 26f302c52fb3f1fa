"""A model's code may change the current folder: files are those of the folder in which the command began."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ampopt
from ampopt.cli import app as cli
from ampopt.deploy.runtime import OptimizedModule
from ampopt.system.cache_folder import cache_folder
from tests.cli.test_app import QUICK
from tests.support.cases import CEILINGS

CODE = """
import os
from torch import nn

def net():
    os.chdir("elsewhere")
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
"""

STEP = """
def step(model, optimizer, image):
    optimizer.zero_grad()
    model(image).square().mean().backward()
    optimizer.step()

def loss(result):
    return result.square().mean()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model's code that changes it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ampopt.diagnosing.ceilings_of", lambda *_: CEILINGS)
    monkeypatch.setattr("ampopt.diagnosis.findings.cold_calls.IDLE_S", 0.01)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "moving_net.py").write_text(CODE)
    (tmp_path / "step_there.py").write_text(STEP)
    return tmp_path


def _written(here: Path, *arguments: str) -> set[str]:
    done = CliRunner().invoke(cli.app, [*arguments, "--input", "1x3x8x8", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert Path.cwd() == here / "elsewhere"
    assert not [*(here / "elsewhere").iterdir()]
    not_written = {"elsewhere", "moving_net.py", "step_there.py", "__pycache__"}
    return {path.name for path in here.iterdir()} - not_written


FILES = ("--report", "d.html", "--json", "d.json")
BRIEFLY = ("moving_net.py:net", "--budget", "2")
WITHOUT_ENGINES = (*BRIEFLY, *QUICK[2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("diagnose", *BRIEFLY, *FILES, "--trace", "t.json"),
        ("optimize", *WITHOUT_ENGINES, *FILES, "--markdown", "d.md"),
        ("compare", *WITHOUT_ENGINES, *FILES, "--markdown", "d.md"),
        ("export", *WITHOUT_ENGINES, "-o", "d.onnx", "--json", "d.json"),
        ("export", *WITHOUT_ENGINES, "-o", "d.ampopt", "--json", "d.json"),
    ],
)
def test_files_are_written_to_the_folder_that_the_command_began_in(here: Path, arguments: Any) -> None:
    assert _written(here, *arguments) == {name for name in arguments if name.startswith(("d.", "t."))}


@pytest.mark.parametrize("place", ["step_there.py", "step_there"])
def test_a_step_and_a_loss_are_read_from_it(here: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (here / "elsewhere" / "step_there.py").write_text("step = loss = None")
    monkeypatch.delitem(sys.modules, "step_there", raising=False)
    given = dict[str, Any]()
    monkeypatch.setattr(ampopt, "diagnose", lambda *args, **options: given.update(options) or _stopped())
    arguments = ("--train", "--step", f"{place}:step", "--loss", f"{place}:loss")
    done = CliRunner().invoke(
        cli.app, ["diagnose", "moving_net.py:net", "--input", "1x3x8x8", "--device", "cpu", *arguments]
    )
    assert "that was all" in done.stderr
    assert given["step"].__name__ == "step"
    assert float(given["loss"](torch.ones(3))) == 1


def test_the_cache_is_read_from_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", f"cache_{here.name}")
    found = list[Any]()

    def diagnose(*_args: Any, **_options: Any) -> None:
        found.append(cache_folder())
        _stopped()

    monkeypatch.setattr(ampopt, "diagnose", diagnose)
    CliRunner().invoke(cli.app, ["diagnose", "moving_net.py:net", "--input", "1x3x8x8", "--device", "cpu"])
    assert Path.cwd() == here / "elsewhere"
    assert found == [here / f"cache_{here.name}"]


def _stopped() -> Any:
    raise RuntimeError("that was all")


def test_a_report_is_written_there_whatever_optimize_returns(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = list[Path]()

    class Fast(OptimizedModule):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def save(self, path: Any, **options: Any) -> None:
            saved.append(Path(path))
            Path(path).write_text("a bundle")

        report: Any = SimpleNamespace(notes=(), to_dict=dict)

    monkeypatch.setattr(ampopt, "optimize", lambda *args, **options: Fast())
    assert _written(here, "export", "moving_net.py:net", "-o", "d.ampopt", "--json", "d.json") == {
        "d.ampopt",
        "d.json",
    }
    assert saved == [here / "d.ampopt"]
