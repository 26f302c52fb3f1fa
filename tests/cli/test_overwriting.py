"""No output takes the place of what was read, or of code, models and images, whatever leads to them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ampopt
from ampopt.cli import app as cli
from ampopt.cli.options import write
from tests.support.bundles import save

CODE = """
from helper_read import width
from torch import nn

def net():
    return nn.Linear(width, 2)

def step(model, optimizer, x):
    pass

loss = sum
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder with a model's code, what that imports, a package, and links; no work is done."""

    def work(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the long work began")

    for verb in ("optimize", "compare", "diagnose", "load"):
        monkeypatch.setattr(ampopt, verb, work)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("model_read.py", "package/__init__.py", "step_read.py"):
        (tmp_path / name).write_text(CODE)
    (tmp_path / "helper_read.py").write_text("width = 4\n")
    (tmp_path / "link.json").symlink_to("model_read.py")
    (tmp_path / "link.onnx").symlink_to("model_read.py")
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "weights.pt")
    return tmp_path


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


TRAIN = ("--train", "--step", "step_read:step")
LOSS = ("--train", "--loss", "step_read.py:loss")


@pytest.mark.parametrize(
    "arguments",
    [
        *(("optimize", "model_read:net", option, "model_read.py") for option in ("--json", "--markdown")),
        ("compare", "model_read:net", "--json", "model_read.py"),
        ("diagnose", "model_read:net", "--json", "model_read.py"),
        ("diagnose", "model_read:net", "--trace", "model_read.py"),
        ("diagnose", "package:net", "--json", "package/__init__.py"),
        ("diagnose", "model_read:net", "--json", "helper_read.py"),
        ("diagnose", "model_read:net", "--json", "HELPER.PY"),
        ("diagnose", "model_read:net", "--trace", "link.json"),
        ("diagnose", "model_read:net", "--report", "link.json"),
        ("diagnose", "model_read.py:net", *TRAIN, "--json", "step_read.py"),
        ("diagnose", "model_read.py:net", *LOSS, "--json", "step_read.py"),
        ("diagnose", "torchvision:resnet18", "--json", "weights.pt"),
        ("optimize", "model_read:net", "--json", "robot.ampopt"),
        ("optimize", "model_read:net", "--markdown", "model.onnx"),
        ("optimize", "model_read:net", "--json", "image.PNG"),
        ("export", "model_read:net", "-o", "r.onnx", "--json", "model_read.py"),
        ("export", "model_read:net", "-o", "link.onnx"),
    ],
)
def test_no_output_has_the_name_of_code_or_of_a_model_or_leads_to_it(
    here: Path, arguments: tuple[str, ...]
) -> None:
    before = _contents(here)
    done = CliRunner().invoke(cli.app, [*arguments, "--input", "1x4"])
    assert done.exit_code == 1, done.output
    assert " stands for " in done.stderr
    assert _contents(here) == before


def test_nor_is_it_in_a_bundle_that_is_a_folder(here: Path) -> None:
    save(here / "robot", as_folder=True)
    before = _contents(here)
    for option, name in (("--json", "robot/manifest.json"), ("--report", "robot/new.md")):
        done = CliRunner().invoke(cli.app, ["verify", "robot", option, name])
        assert done.exit_code == 1
        assert f"{option} {name} is a file in BUNDLE: name another one" in done.stderr
    assert _contents(here) == before


def test_a_report_beside_the_modules_of_a_package_is_none_of_it(here: Path) -> None:
    done = CliRunner().invoke(cli.app, ["diagnose", "package:net", "--json", "package/r.json"])
    assert "the long work began" in done.stderr


def test_what_a_hard_link_has_in_common_stays(here: Path) -> None:
    os.link(here / "model_read.py", here / "r.json")
    write(here / "r.json", "{}")
    assert (here / "model_read.py").read_text() == CODE
    assert (here / "r.json").read_text() == "{}"


def test_python_refuses_such_a_trace_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("model_read.py", "link.json"):
        with pytest.raises(ampopt.errors.InputError, match=r"\.py stands for code or a key: name another"):
            ampopt.diagnose(nn.ReLU(), torch.ones(2), trace=here / name, progress=False)
    assert (here / "model_read.py").read_text() == CODE
    with pytest.raises(
        ampopt.errors.InputError, match=r"\.gz stands for a compressed file, which this one wo"
    ):
        ampopt.diagnose(nn.ReLU(), torch.ones(2), trace=here / "t.json.gz", progress=False)
