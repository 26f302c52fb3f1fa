"""`ampopt compare --baseline`: a gate, what does not fit it, and that results are told in any case."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

import ampopt
from ampopt.measure.architecture import Architecture
from ampopt.measure.compared import ComparedPass
from tests.cli.test_app import CODE, call, comparison


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The MODEL argument of a small network."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny.py").write_text(CODE)
    return f"{tmp_path / 'tiny.py'}:Tiny"


def baseline_file(path: Path, found: ampopt.Comparison) -> Path:
    """The JSON of an earlier run."""
    path.write_text(json.dumps(found.to_dict()))
    return path


@pytest.mark.parametrize(
    ("factor", "options", "code", "said"),
    [
        (1.0, (), 0, "passed: of 1 rows none is slower"),
        (1.5, (), 3, "FAILED: 1 row is slower than the baseline by more than 1.05x"),
        (1.5, ("--threshold", "2"), 0, "passed"),
        (0.5, (), 0, "1 faster by more than that"),
    ],
)
def test_a_baseline_makes_compare_a_gate(
    factor: float, options: tuple[str, ...], code: int, said: str,
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ampopt, "compare", lambda *args, **options: comparison(factor))
    old = baseline_file(tmp_path / "old.json", comparison())
    files = ("--report", tmp_path / "pr.md", "--json", tmp_path / "new.json")
    command = ("compare", model, "--input", "1x3x8x8", "--precision", "fp32", "--device", "cpu")
    result = call(*command, "--baseline", old, *options, *files)
    assert result.exit_code == code, result.output
    assert said in result.stdout
    assert said in (tmp_path / "pr.md").read_text()
    written = json.loads((tmp_path / "new.json").read_text())
    assert written["changes"]["passed"] is (code == 0)
    assert not result.stderr  # a verdict is no error
    again = call(*command, "--baseline", tmp_path / "new.json")
    assert again.exit_code == 0, "what a gate wrote is no baseline"


def test_a_gate_that_measured_nothing_is_an_error(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ComparedPass("fp32", "alone", "fold-conv-bn", None, None, None, "not tried: no time left")
    nothing = dataclasses.replace(comparison(), rows=(row,))
    monkeypatch.setattr(ampopt, "compare", lambda *args, **options: nothing)
    old = baseline_file(tmp_path / "old.json", comparison())
    result = call("compare", model, "--input", "1x3x8x8", "--precision", "fp32", "--baseline", old)
    assert result.exit_code == 1
    assert "nothing was measured in both runs" in result.stderr


@pytest.mark.parametrize(
    ("old", "options", "reason"),
    [
        (comparison(model="Other"), ("--precision", "fp32"), "of the model Other, and this is Tiny"),
        (
            dataclasses.replace(comparison(), architecture=Architecture(9, 3, "a")),
            ("--precision", "fp32"),
            "of another Tiny: it has 9 parameters in 3 modules, and this one 120",
        ),
        (comparison(), ("--precision", "amp"), "fp32 and amp, differ"),
        (comparison(), ("--precision", "fp32", "--input", "1x3x8x8"), "and these are"),
        (comparison(), ("--threshold", "0.9"), "--threshold 0.9: give a factor of 1 or more"),
        (comparison(), ("--threshold", "nan"), "--threshold nan"),
        (comparison(), ("--json", "{folder}/old.json"), "--baseline and --json are the same file"),
        (None, (), "is no comparison"),
    ],
)
def test_a_baseline_that_does_not_fit_is_refused_before_the_long_work(
    old: ampopt.Comparison | None, options: tuple[str, ...], reason: str,
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("the long work began")

    monkeypatch.setattr(ampopt, "compare", refuse)
    file = tmp_path / "old.json"
    file.write_text("{}" if old is None else json.dumps(old.to_dict()))
    shapes = () if "--input" not in options else ("--input", "1x3x8x9")
    said = [text.format(folder=tmp_path) for text in options if text not in ("--input", "1x3x8x8")]
    result = call("compare", model, "--baseline", file, *shapes, *said)
    assert result.exit_code == 1, result.output
    assert reason in result.stderr
    assert "long work" not in result.stderr


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (comparison(), "amp, fp32 and fp32, differ"),
        (
            dataclasses.replace(comparison(lane="amp"), inputs=("float32[9] on cpu",)),
            "and these are float32[9]",
        ),
    ],
    ids=["a lane could not be tried", "inputs that were inferred"],
)
def test_what_is_found_only_afterwards_is_told_after_the_results(
    found: ampopt.Comparison, reason: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ampopt, "compare", lambda *args, **options: found)
    both = dataclasses.replace(comparison(), rows=(*comparison().rows, *comparison(lane="amp").rows))
    old = baseline_file(tmp_path / "old.json", both)
    files = ("--json", tmp_path / "new.json", "--report", tmp_path / "new.md")
    result = call("compare", model, "--baseline", old, *files)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert "fold-conv-bn" in result.stdout
    assert "fold-conv-bn" in (tmp_path / "new.md").read_text()
    written = json.loads((tmp_path / "new.json").read_text())
    assert len(written["rows"]) == 1
    assert "changes" not in written


def test_a_model_in_a_training_wrapper_is_the_one_inside(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ampopt, "compare", lambda *args, **options: comparison())
    (tmp_path / "wrapped.py").write_text(
        f"{CODE}\ndef wrapped():\n    return nn.DataParallel(Tiny(), device_ids=[])\n"
    )
    old = baseline_file(tmp_path / "old.json", comparison())
    source = f"{tmp_path / 'wrapped.py'}:wrapped"
    result = call("compare", source, "--input", "1x3x8x8", "--precision", "fp32", "--baseline", old)
    assert result.exit_code == 0, result.output
