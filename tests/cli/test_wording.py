"""What the command line tells names its options; what it quotes of the user's stays as it is."""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

import ampopt
import ampopt.robot
from ampopt.cli import app as cli
from ampopt.errors import InputError
from ampopt.ir.arguments import number
from ampopt.system.wording import OPTIONS

HOSTILE = "budget_s=3, tolerance=0.1, policy='half', exclude=['a'], device=cuda, cache=False, `verify_key`"
"""What looks like arguments of ampopt's, and is the user's own."""

CODE = f"""
import torch
from torch import nn

TEXT = {HOSTILE!r}

def chosen(x, policy, force):
    return x.sum() > 0

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.budget_s, self.head = nn.Conv2d(3, 4, 3), nn.ReLU()

    def forward(self, x):
        if chosen(self.budget_s(x), policy="half", force=True):
            return self.head(x)
        return x

class Failing(nn.Module):
    def forward(self, x):
        raise ValueError(TEXT)

def unmade():
    raise ValueError(TEXT)
"""

EXAMPLE = ("--input", "1x3x8x8", "--device", "cpu")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of models, in a folder whose name looks like an argument."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "budget_s=2" / "hostile_net.py"
    file.parent.mkdir()
    file.write_text(CODE)
    return file


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_every_option_is_one_of_the_command_line() -> None:
    commands = get_command(cli.app).commands.values()  # type: ignore[attr-defined]
    known = {name for command in commands for each in command.params for name in each.opts}
    assert {*OPTIONS.values()} <= known | {"--engine", "--provider"}, "those are the robot's"


def test_what_is_quoted_in_an_error_stays_as_it_is(code: Path) -> None:
    for model in ("Failing", "unmade"):
        result = call("optimize", f"{code}:{model}", *EXAMPLE, "--budget", 3)
        assert result.exit_code == 1
        assert HOSTILE in result.stderr
    for name in ("budget_s/no.json", "policy='half'.json", "tolerance=1.json"):
        path = code.parent / "nowhere" / name
        assert str(path) in call("optimize", f"{code}:Branching", *EXAMPLE, "--json", path).stderr


def test_what_is_quoted_in_a_report_stays_as_it_is_and_options_are_told(code: Path, tmp_path: Path) -> None:
    report, markdown, data = (tmp_path / f"budget_s.{kind}" for kind in ("html", "md", "json"))
    files = ("--report", report, "--markdown", markdown, "--json", data)
    command = ("optimize", f"{code}:Branching", *EXAMPLE, "--budget", 3, "--dynamic", "batch=1..2")
    printed = call(*command, *files).stdout
    notes = " ".join(json.loads(data.read_text())["notes"])
    for text in (printed, notes, markdown.read_text(), html.unescape(report.read_text())):
        told = " ".join(text.replace("\\", "").split())  # lines are broken, and Markdown's signs escaped
        assert 'chosen(self.budget_s(x), policy="half", force=True)' in told
        assert "--dynamic has no effect" in told


def test_an_error_is_told_in_options_within_a_command_alone(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> float:
        return number("tolerance", -1e-9, positive=False, advice="0 or more")

    monkeypatch.setattr(ampopt, "optimize", refuse)
    result = call("optimize", f"{code}:Branching", *EXAMPLE)
    assert result.stderr == "error: --tolerance -1e-09: give 0 or more\n"
    with pytest.raises(InputError, match=r"^tolerance=-1e-09: give 0 or more$"):
        refuse()


def test_the_robots_command_line_names_its_options_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "engine='openvino'")
    assert ampopt.robot.main([path, "--engine", "openvino", "--provider", "X"]) == ampopt.robot.REFUSED
    assert "--provider X is ONNX Runtime's: leave it out, or --engine openvino" in capsys.readouterr().err
    assert ampopt.robot.main([path]) == ampopt.robot.REFUSED
    assert "engine='openvino'" in capsys.readouterr().err
    with pytest.raises(
        InputError, match="provider='X' is ONNX Runtime's: leave it out, or engine='openvino'"
    ):
        ampopt.robot.load(path, engine="openvino", provider="X")
