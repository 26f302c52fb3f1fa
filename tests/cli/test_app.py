"""The command line: what it prints, writes and returns, and how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import ampopt
from ampopt.cli import app as cli
from ampopt.document.markdown import to_markdown
from ampopt.document.model import Document
from ampopt.document.render import render
from ampopt.errors import InputError
from ampopt.ir.casting import POLICIES
from ampopt.measure.compared import ComparedPass
from ampopt.measure.sampling import Gain, Measurement
from ampopt.passes import PIPELINE

CODE = """
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, image, scale=None):
        y = self.norm(self.conv(image)).relu()
        return y if scale is None else y * scale
"""
EXCLUDED = ("compile", "script", "onnx-runtime", "openvino")
QUICK = ("--budget", "3", *(word for name in EXCLUDED for word in ("--exclude", name)))


def call(*arguments: object) -> Result:
    """Run `ampopt` with these arguments."""
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The MODEL argument of a small network."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny.py").write_text(CODE)
    return f"{tmp_path / 'tiny.py'}:Tiny"


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the optimization, the long part, begins."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("the long work began")

    monkeypatch.setattr(ampopt, "optimize", refuse)


def test_the_report_goes_to_stdout_and_replaces_files(model: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("old")
    files = ("--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md", "--report", tmp_path / "r.html")
    result = call("optimize", model, "--input", "1x3x8x8", "--device", "cpu", *QUICK, *files)
    assert result.exit_code == 0, result.output
    assert "fold-conv-bn" in result.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["model"] == "Tiny"
    assert report["inputs"] == ["float32[1, 3, 8, 8] on cpu"]
    assert {entry["pass"] for entry in report["passes"]}.isdisjoint(EXCLUDED)
    assert "| lane | pass |" in (tmp_path / "r.md").read_text()
    assert "fold-conv-bn" in (tmp_path / "r.html").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_exported_model_is_optimized_on_its_own_example(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    torch.export.save(torch.export.export(net, (torch.ones(1, 3, 6, 6),)), tmp_path / "net.pt2")
    result = call("optimize", tmp_path / "net.pt2", "--trust-model-file", "--precision", "fp32", *QUICK)
    assert result.exit_code == 0, result.output
    assert "float32[1, 3, 6, 6]" in result.stdout


def test_arrays_are_passed_by_their_names(model: str, tmp_path: Path) -> None:
    image = np.ones((1, 3, 6, 6), dtype=np.float32)
    np.savez(tmp_path / "in.npz", image=image, scale=np.full((1,), 2, dtype=np.float32))
    options = ("--npz", tmp_path / "in.npz", "--precision", "fp32", "--device", "cpu", *QUICK)
    result = call("optimize", model, *options)
    assert result.exit_code == 0, result.output
    assert "inputs float32[1, 3, 6, 6] on cpu, float32[1] on cpu" in result.stdout


DOCUMENT = Document(
    "compared [bold]as it is[/bold]",
    "",
    "",
    "plain",
    (),
    {"error": float("inf"), "gains": (1.0, float("nan"))},
)


class _Comparison:
    def document(self) -> Document:
        return DOCUMENT


@pytest.mark.parametrize("option", [("--no-cache",), ("--io", "lane"), ("--dynamic", "batch=1..8")])
def test_compare_has_not_what_is_of_a_result_and_says_so(option: tuple[str, ...], model: str) -> None:
    result = call("compare", model, "--input", "1x3x8x8", *option)
    assert result.exit_code == 2
    assert f"No such option: {option[0]}" in result.output


def test_the_lanes_io_is_passed_on_and_needs_a_named_lane(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def optimize(*args: Any, **options: Any) -> Any:
        given.append(options["io"])
        raise InputError("seen")

    monkeypatch.setattr(ampopt, "optimize", optimize)
    command = ("optimize", model, "--input", "1x3x8x8")
    for options in (("--precision", "amp", "--io", "lane"), ()):
        assert "seen" in call(*command, *options).stderr
    assert given == ["lane", "original"]
    result = call(*command, "--io", "lane")
    assert result.exit_code == 1
    assert "name one lane, such as --precision amp" in result.stderr
    assert len(given) == 2, "the long work began"


def test_ranges_of_sizes_are_passed_on(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def optimize(*args: Any, **options: Any) -> Any:
        given.append(options["dynamic"])
        raise InputError("seen")

    monkeypatch.setattr(ampopt, "optimize", optimize)
    command = ("optimize", model, "--input", "1x3x8x8")
    for options in (("--dynamic", "batch=1..8", "--dynamic", "height=8..16"), ()):
        assert "seen" in call(*command, *options).stderr
    assert given == [{"batch": (1, 8), "height": (8, 16)}, None]


def test_compare_takes_the_same_options(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def compare(*args: Any, **kwargs: Any) -> _Comparison:
        calls.append((args, kwargs))
        return _Comparison()

    monkeypatch.setattr(ampopt, "compare", compare)
    options = ("--precision", "amp", "--tolerance", "0.1", "--policy", "O1", "--device", "cpu", *QUICK)
    files = ("--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md")
    result = call("compare", model, "--input", "1x3x8x8", *options, *files)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("# compared [bold]as it is[/bold]\n")
    (network, (image,)), given = calls[0]
    assert (type(network).__name__, image.shape) == ("Tiny", (1, 3, 8, 8))
    assert given.pop("example_kwargs") == {}
    assert given.pop("exclude") == EXCLUDED
    expected = {
        "passes": None,
        "precision": "amp",
        "tolerance": 0.1,
        "budget_s": 3.0,
        "policy": "O1",
        "nan": "keep",
        "device": "cpu",
    }
    assert given == expected
    assert json.loads((tmp_path / "r.json").read_text()) == {"error": None, "gains": [1.0, None]}
    assert (tmp_path / "r.md").read_text() == to_markdown(DOCUMENT)


def comparison(factor: float = 1.0, model: str = "Tiny", lane: str = "fp32") -> ampopt.Comparison:
    """A comparison whose row takes `factor` ms; of two, the intervals of that of one pass are apart."""
    timed = Measurement(tuple(1e-3 * factor * (1 + k / 1000) for k in range(20)))
    row = ComparedPass(lane, "alone", "fold-conv-bn", timed, Gain(1.2, 1.1, 1.3), 1e-7)
    return ampopt.Comparison(model, {"device": "a CPU"}, ("float32[1, 3, 8, 8] on cpu",), (row,), 1.0)


@pytest.mark.parametrize("suffix", [".html", ".md", ".json", ".txt"])
def test_a_report_is_written_in_the_format_of_its_suffix(
    suffix: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ampopt, "compare", lambda *args, **options: comparison())
    path = tmp_path / f"r{suffix}"
    path.write_text("old")
    result = call("compare", model, "--input", "1x3x8x8", "--device", "cpu", "--report", path)
    assert result.exit_code == 0, result.output
    assert path.read_text() == render(comparison().document(), path)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_compare_tells_what_a_pass_does(model: str) -> None:
    others = {step.name for step in PIPELINE} - {"fold-conv-bn"}
    excluded = [text for name in sorted(others) for text in ("--exclude", name)]
    options = ("--input", "1x3x8x8", "--precision", "fp32", "--device", "cpu", "--budget", "3", *excluded)
    result = call("compare", model, *options)
    assert result.exit_code == 0, result.output
    assert "| fold-conv-bn |" in result.stdout


def test_passes_lists_every_pass() -> None:
    steps = tuple(PIPELINE)
    table, rows = call("passes").stdout, json.loads(call("passes", "--json").stdout)
    assert [row["name"] for row in rows] == [step.name for step in steps]
    assert all(row["name"] in table and row["summary"] in table for row in rows)
    assert {row["portability"] for row in rows} == {"portable", "native"}


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_is_the_package_version(option: str) -> None:
    assert call(option).stdout == f"ampopt {ampopt.__version__}\n"


def test_the_policies_are_those_that_the_engine_knows() -> None:
    assert get_args(get_type_hints(cli.run)["policy"]) == POLICIES


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["torchvision:resnet19"], "has no model 'resnet19'"),
        (["{folder}/tiny.py:missing"], "has no 'missing'"),
        (["{folder}/missing.py:Tiny"], "missing.py"),
        (["{folder}/missing.pt2", "--trust-model-file"], "there is no file"),
        (["{folder}/weights.pt"], "file.py:make_net --weights"),
        (["{folder}/whole.pt", "--trust-model-file"], "torch.save(model.state_dict()"),
        (["{model}", "--exclude", "no-such-pass"], "there is no pass no-such-pass"),
        (["{model}", "--budget", "0"], "--budget 0: give a positive, finite number"),
        (["{model}", "--budget", "nan"], "--budget nan: give a positive, finite number"),
        (["{model}", "--device", "gpu"], "--device 'gpu' is no device"),
        (["{model}", "--device", "cuda:99"], "--device cuda:99: there"),
        (
            ["{model}", "--json", "{folder}/r", "--markdown", "{folder}/./r"],
            "--json and --markdown are the same",
        ),
        (["{model}", "--json", "{folder}/tiny.py"], "MODEL and --json are the same file"),
        (
            ["{model}", "--weights", "{folder}/weights.pt", "--json", "{folder}/weights.pt"],
            "--weights and --json",
        ),
        (["{model}", "--json", "/dev/null"], "not a regular file"),
        (["{model}", "--report", "{folder}/r.pdf"], "ends in .html, .md, .json, .txt"),
        (
            ["{model}", "--report", "{folder}/r.md", "--json", "{folder}/r.md"],
            "--report and --json are the same",
        ),
        (["{folder}/exits.py:Tiny"], "ends Python when it is imported (exit status"),
        (["{model}", "--weights", "{folder}/weights.pt"], "1 keys are unexpected (other)"),
        (["{model}", "--input", "1x3x"], "--input '1x3x' is no shape"),
        (["{model}", "--npz", "{folder}/tiny.py"], "cannot be read"),
        (["{model}", "--image", "{folder}/tiny.py"], "cannot be read"),
        (["{model}", "--json", "{folder}/missing/r.json"], "create that folder first"),
        (["{model}", "--markdown", "{folder}"], "not a regular file"),
    ],
)
def test_an_error_is_one_paragraph_on_stderr_before_the_long_work(
    model: str, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    torch.save({"other": torch.zeros(1)}, tmp_path / "weights.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    result = call("optimize", *(text.format(model=model, folder=tmp_path) for text in arguments))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert reason in result.stderr


def test_without_a_verified_program_the_report_is_given_and_the_exit_code_is_1(model: str) -> None:
    tiny = ("--tolerance", "1e-12", "--precision", "fp32")  # no program in FP32 is as right as that
    result = call("optimize", model, "--input", "1x3x8x8", "--device", "cpu", *QUICK, *tiny)
    assert result.exit_code == 1
    assert "fold-conv-bn" in result.stdout
    assert "no optimized program could be verified" in result.stderr


def test_an_error_of_the_engine_ends_with_exit_code_1(model: str) -> None:
    result = call("optimize", model, "--input", "1x4x8x8", "--device", "cpu")
    assert result.exit_code == 1
    assert "Tiny fails on the example inputs" in result.stderr


def test_an_unexpected_error_points_to_verbose(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(ampopt, "optimize", fail)
    result = call("optimize", model)
    assert result.exit_code == 1
    assert result.stderr == "error: RuntimeError: first line second line (run with --verbose for the trace)\n"
    assert isinstance(call("optimize", model, "--verbose").exception, RuntimeError)


@pytest.mark.parametrize(
    "option", ["--precision=fp8", "--policy=O3", "--tolerance=-1", "--tolerance=nan", "--no"]
)
def test_a_wrong_option_is_a_usage_error(model: str, option: str) -> None:
    assert call("optimize", model, option).exit_code == 2
