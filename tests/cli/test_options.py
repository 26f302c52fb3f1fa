"""What the commands share: early looks at requests, readable errors, files written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import typer
from torch import nn

from ampopt.cli import options
from ampopt.cli.options import (
    check_budget,
    check_device,
    check_is_there,
    check_request,
    check_written,
    console,
    model_and_call,
    pass_names,
    ranges,
    readable_errors,
    write,
)
from ampopt.document.render import finite
from ampopt.errors import InputError
from ampopt.ir.lanes import LANES, lanes_for
from ampopt.passes import PIPELINE

CODE = "from torch import nn\nnet = lambda: nn.Sequential(nn.Linear(4, 2))\n"


def test_the_names_of_the_passes_are_those_of_their_files() -> None:
    assert pass_names() == sorted(step.name for step in PIPELINE)


def test_ranges_are_names_with_two_ends() -> None:
    assert ranges(["batch=1..8", "height=224..512"]) == {"batch": (1, 8), "height": (224, 512)}
    assert ranges(None) is None
    assert ranges([]) is None


@pytest.mark.parametrize("text", ["batch", "batch=8", "batch=1-8", "batch=-1..8", "=1..8", "batch=1..8.0"])
def test_what_is_no_range_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is no range: give each size once, such as batch=1\.\.8"):
        ranges([text])


def test_a_size_has_one_range() -> None:
    with pytest.raises(InputError, match="is a second range for batch"):
        ranges(["batch=1..8", "batch=1..4"])


@pytest.mark.parametrize("failing", ["pathlib.Path.open", "os.replace"])
def test_a_report_that_cannot_be_written_leaves_nothing(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    (tmp_path / "r.json").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(failing, full)
        with pytest.raises(InputError, match="cannot be written: No space left"):
            write(tmp_path / "r.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert (tmp_path / "r.json").read_text() == "old"


def test_a_word_is_completed_by_those_that_begin_so() -> None:
    complete = options._completed(lambda: ("fold-conv-bn", "fold-constants", "script"))
    assert complete("fold-") == ["fold-conv-bn", "fold-constants"]
    assert complete("x") == []


@pytest.mark.parametrize("precision", ["auto", *LANES, "fp32,bf16", "fp32, amp"])
def test_the_lanes_of_the_command_line_are_those_of_the_engine(precision: str) -> None:
    assert options._lanes(precision) == precision
    assert lanes_for(precision, torch.device("cpu"))


@pytest.mark.parametrize("precision", ["fp8", "", "fp32,", "auto,fp32", "FP32"])
def test_a_lane_that_there_is_not_is_a_wrong_option(precision: str) -> None:
    with pytest.raises(typer.BadParameter, match="choose from auto, fp32, amp, bf16, or several, "):
        options._lanes(precision)


@pytest.mark.parametrize("budget", [1e-3, 1.0, 1e9])
def test_any_positive_time_is_a_budget(budget: float) -> None:
    check_budget(budget)


@pytest.mark.parametrize(
    ("budget", "text"), [(0.0, "0"), (-1.5, "-1.5"), (math.nan, "nan"), (math.inf, "inf")]
)
def test_no_time_is_no_budget(budget: float, text: str) -> None:
    with pytest.raises(InputError, match=rf"^--budget {text}: give a positive, finite number of seconds$"):
        check_budget(budget)


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:0", "cpu:0", "cuda:123"])
def test_names_of_devices_are_known(device: str | None) -> None:
    check_device(device)


@pytest.mark.parametrize(
    "device", ["", "gpu", "cuda:", "cuda:x", "cuda:1234", "meta", "CPU", " cpu", "cuda:0\n"]
)
def test_what_is_no_name_of_a_device_is_refused(device: str) -> None:
    with pytest.raises(InputError, match=r"^--device .* is no device: choose cpu or cuda$"):
        check_device(device)


@pytest.mark.parametrize(
    ("count", "device", "found"),
    [
        (0, "cuda", "no CUDA device"),
        (0, "cuda:0", "no CUDA device"),
        (2, "cuda:2", "2 CUDA devices"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(
    count: int, device: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    message = f"^--device {device}: there is {found} on this machine: leave it out, or use cpu$"
    with pytest.raises(InputError, match=message):
        check_is_there(device)


def test_a_device_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in (None, "cpu", "cuda", "cuda:1"):
        check_is_there(device)


OF_MODEL: dict[str, Any] = {
    "shapes": None,
    "image": None,
    "npz": None,
    "normalize": True,
    "weights": None,
    "trust_model_file": False,
}
"""What every command takes of a model and its inputs, as it is where nothing was said."""


def request(model: str, **changes: Any) -> None:
    """Check what a command was asked for."""
    asked: dict[str, Any] = {"device": None, "budget": 60.0, "exclude": None, "passes": None, "written": {}}
    check_request(model, **OF_MODEL | asked | changes)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The MODEL argument of a small network, in whose folder we are."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE)
    return "net.py:net"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 0.0}, "--budget 0: give a positive, finite number"),
        ({"device": "tpu"}, "--device 'tpu' is no device"),
        ({"exclude": ["nope", "also"]}, "there is no pass also, nope: choose from allow-tf32, "),
        ({"exclude": ["fold-conv-nb"], "passes": "degrup"}, "; near it are degroup, fold-conv-bn"),
        ({"passes": "fold-conv-bn,nope{x=1}"}, "there is no pass nope: choose from allow-tf32, "),
        ({"passes": "fold-conv-bn{"}, "passes='fold-conv-bn{': "),
        ({"written": {"--json": Path("net.py")}}, "MODEL and --json are the same file, net.py"),
        ({"written": {"--json": Path("r"), "--markdown": Path("./r")}}, "--json and --markdown are the same"),
        ({"written": {"--json": Path("nowhere/r")}}, "create that folder first"),
        ({"written": {"--report": Path("-")}}, "--report -: stdout has the text for people: name a file"),
        ({"shapes": ["1x3x"]}, "--input '1x3x' is no shape"),
        ({"image": Path("nowhere.png")}, "--image: there is no file"),
        ({"weights": Path("nowhere.pt")}, "--weights: there is no file"),
    ],
)
def test_what_cannot_be_done_is_refused(changes: dict[str, Any], message: str, model: str) -> None:
    with pytest.raises(InputError) as caught:
        request(model, **changes)
    assert message in str(caught.value)


def test_a_model_that_is_not_there_is_refused(model: str) -> None:
    with pytest.raises(InputError, match="there is no file"):
        request("nowhere.py:net")
    with pytest.raises(InputError, match="is none of"):
        request("net")


def test_what_can_be_done_is_not_begun(model: str) -> None:
    request(
        model, shapes=["1x4"], device="cpu", exclude=["degroup"], passes="fold-conv-bn,script",
        written={"--json": Path("r.json"), "--markdown": None},
    )  # fmt: skip
    assert [path.name for path in Path().iterdir()] == ["net.py"]


def test_a_result_may_not_go_where_something_is_read(tmp_path: Path) -> None:
    read = tmp_path / "in.npz"
    read.write_bytes(b"x")
    (tmp_path / "link").symlink_to(read)
    with pytest.raises(InputError, match="--npz and --json are the same file"):
        check_written({"--json": tmp_path / "link"}, {"--npz": read})
    with pytest.raises(InputError, match="is a folder, not a regular file"):
        check_written({"--json": tmp_path, "--markdown": None}, {})
    check_written({"--json": tmp_path / "r.json", "--markdown": None}, {"--npz": read, "--image": None})


def call(model: str, **changes: Any) -> tuple[nn.Module, tuple[Any, ...] | None, dict[str, Any], str | None]:
    return model_and_call(model, **OF_MODEL | {"device": "cpu"} | changes)


def test_a_model_comes_with_the_inputs_that_were_asked_for(model: str) -> None:
    module, args, kwargs, device = call(model, shapes=["2x4", "1:int64"])
    assert [type(part) for part in module.children()] == [nn.Linear]
    assert args is not None
    assert [(x.shape, x.dtype) for x in args] == [((2, 4), torch.float32), ((1,), torch.int64)]
    assert (kwargs, device) == ({}, "cpu")


def test_arrays_by_name_are_keyword_arguments(model: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", scale=np.ones(2, np.float32))
    _, args, kwargs, _ = call(model, npz=tmp_path / "in.npz")
    assert args is None
    assert kwargs["scale"].tolist() == [1, 1]


@pytest.fixture
def exported(tmp_path: Path) -> str:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 2).eval(), (torch.ones(3, 4),)), path)
    return str(path)


def test_an_exported_model_brings_its_own_inputs_unless_others_are_given(exported: str) -> None:
    _, args, kwargs, _ = call(exported, trust_model_file=True)
    assert args is not None
    assert torch.equal(args[0], torch.ones(3, 4))
    assert kwargs == {}
    _, args, _, _ = call(exported, trust_model_file=True, shapes=["5x4"])
    assert args is not None
    assert args[0].shape == (5, 4)


def test_a_gpu_is_taken_where_there_is_one_and_the_file_does_not_say_otherwise(
    model: str, exported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert call(model, device=None)[3] == "cuda"
    assert call(model, device="cpu")[3] == "cpu"
    assert call(exported, trust_model_file=True, device=None)[3] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(model, device=None)[3] is None


def test_without_a_terminal_the_report_is_as_wide_as_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("[bold]as it is[/bold] :smile: " + "x" * 140)
    assert capsys.readouterr().out == "[bold]as it is[/bold] :smile: " + "x" * 140 + "\n"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InputError("no such\n  thing"), "error: no such thing\n"),
        (ValueError("one\ntwo"), "error: ValueError: one two (run with --verbose for the trace)\n"),
        (SystemExit(0), "error: SystemExit: 0 (run with --verbose for the trace)\n"),
        (InputError("\x1b[31mred\x1b[0m"), "error: red\n"),
        (InputError("[/bold] no markup"), "error: [/bold] no markup\n"),
    ],
)
def test_an_error_is_one_paragraph_and_ends_with_code_1(
    error: BaseException, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, readable_errors(verbose=False):
        raise error
    assert caught.value.exit_code == 1
    assert caught.value.__cause__ is error
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), InputError("there is no file x")])
def test_where_the_current_folder_was_removed_every_error_says_so(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(typer.Exit), readable_errors(verbose=False):
        raise error
    told = capsys.readouterr().err
    assert told.startswith("error: the current folder was removed: change to one that is there (")
    assert "o such file" in told or "no file x" in told


def test_a_long_error_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), readable_errors(verbose=False):
        raise InputError("word " * 1000)
    told = capsys.readouterr().err
    assert told.endswith(" …\n")
    assert len(told) < 2020


def test_verbose_lets_an_error_through_and_ctrl_c_always_passes() -> None:
    with pytest.raises(ZeroDivisionError), readable_errors(verbose=True):
        raise ZeroDivisionError
    with pytest.raises(KeyboardInterrupt), readable_errors(verbose=False):
        raise KeyboardInterrupt


def test_a_file_is_replaced_through_a_link_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    target.write_text("old")
    (tmp_path / "link").symlink_to(target)
    write(tmp_path / "link", "µ new")
    assert target.read_text(encoding="utf-8") == "µ new"
    assert (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "link"}


def test_a_character_that_utf_8_lacks_is_written_as_its_number(tmp_path: Path) -> None:
    write(tmp_path / "r.json", f'"{os.fsdecode(b"robot-" + bytes([255]))}"')
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8")) == "robot-\udcff"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match=r"r\.json cannot be written: Permission denied"):
            write(tmp_path / "r.json", "new")
    finally:
        tmp_path.chmod(0o700)


def test_json_has_null_for_what_is_no_number() -> None:
    value = {
        "a": [1.5, math.nan, (math.inf, -math.inf)],
        "b": {"c": "nan", "d": None, "e": True},
        "f": 10**400,
    }
    found = finite(value)
    assert found == {"a": [1.5, None, [None, None]], "b": {"c": "nan", "d": None, "e": True}, "f": 10**400}
    json.dumps(found, allow_nan=False)
