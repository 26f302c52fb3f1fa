"""`ampopt diagnose`: what it prints and writes, and how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from typer.testing import CliRunner, Result

import ampopt
from ampopt.cli import app as cli
from ampopt.cli import diagnose as cli_diagnose
from ampopt.cli.diagnose import load_optimizer
from ampopt.diagnosis.result import Diagnosis
from ampopt.errors import InputError
from tests.support.cases import CEILINGS

CODE = """
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, image):
        return self.norm(self.conv(image)).relu()
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["diagnose", *map(str, arguments)])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The MODEL argument of a small network."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny_diagnosed.py").write_text(CODE)
    return f"{tmp_path / 'tiny_diagnosed.py'}:Tiny"


@pytest.mark.slow
def test_the_verdict_comes_first_and_files_are_written(model: str, tmp_path: Path) -> None:
    report, trace = tmp_path / "d.json", tmp_path / "t.json"
    files = ("--json", report, "--trace", trace)
    done = call(model, "--input", "1x3x16x16", "--device", "cpu", "--budget", 60, "--batches", "1,2", *files)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("verdict: FP32 ")
    found = json.loads(report.read_text())
    assert found["model"] == "Tiny"
    assert [row["batch"] for row in found["sweep"]] == [1, 2]
    assert not any(finding["name"].endswith("in-training-mode") for finding in found["findings"])
    assert "conv" in {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}


def test_files_are_written_before_anything_is_printed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unprintable() -> NoReturn:
        raise OSError("nothing can be printed")

    found = Diagnosis(
        *("Tiny", {"device": "a CPU"}, ("x",), "verdict", (), {}, {}, CEILINGS, (), {}, (), (), 1.0)
    )
    monkeypatch.setattr(ampopt, "diagnose", lambda *args, **options: found)
    monkeypatch.setattr(cli_diagnose, "console", unprintable)
    files = ("--json", tmp_path / "d.json", "--report", tmp_path / "d.html")
    assert "nothing can be printed" in call(model, "--input", "1x3x16x16", *files).stderr
    assert {"d.json", "d.html"} <= {path.name for path in tmp_path.iterdir()}


STEP = """
def step(model, optimizer, image):
    optimizer.zero_grad()
    model(image).square().mean().backward()
    optimizer.step()
    optimizer.step()
"""


def test_a_training_step_and_the_users_own(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.5)
    (tmp_path / "own_step.py").write_text(STEP)
    options = ("--train", "--optimizer", "adamw", "--step", f"{tmp_path / 'own_step.py'}:step")
    report = tmp_path / "d.json"
    done = call(model, "--input", "2x3x16x16", "--device", "cpu", *options, "--json", report)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("verdict: YOURS ")
    assert 'own_step.py:6, "optimizer.step()"' in json.loads(report.read_text())["findings"][0]["places"]
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]


def test_an_optimizer_that_torch_does_not_have() -> None:
    with pytest.raises(InputError, match=r"--optimizer lion: choose one of .*AdamW"):
        load_optimizer("lion")
    assert load_optimizer("sgd") is torch.optim.SGD


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batches", "1,x"), "--batches 1,x: give whole numbers from 1 on"),
        (("--batches", "0"), "--batches 0: give whole numbers from 1 on"),
        (("--precision", "fp32"), "--precision fp32: choose amp or bf16"),
        (("--budget", "0"), "--budget 0: give a positive, finite number of seconds"),
        (("--json", "same.json", "--trace", "same.json"), "same.json"),
        (("--optimizer", "SGD"), "--optimizer is of a training step: add --train"),
        (("--train", "--batches", "1"), "--batches is of a call, not of a training step"),
        (("--train", "--step", "my_step"), "--step my_step: name a file and a function in it"),
        (("--train", "--loss", "none.py:f"), "none.py"),
    ],
)
def test_what_is_wrong_is_said_before_the_work(
    model: str, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("the long work began")

    monkeypatch.setattr(ampopt, "diagnose", refuse)
    done = call(model, "--input", "1x3x16x16", *options)
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split())
