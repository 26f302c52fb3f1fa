"""`ampopt export` and `ampopt verify`: what they write, print and return."""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_args

import onnx
import pytest
import torch

import ampopt
from ampopt.bundle.files import open_bundle
from ampopt.bundle.signing import generate_keys
from ampopt.bundle_load import BACKENDS
from ampopt.cli import deploy as cli_deploy
from ampopt.deploy import bundle_onnx
from ampopt.errors import InputError
from ampopt.measure.field_test import FieldReport, Latencies
from ampopt.ort.tuning import tune
from ampopt.search.partly_optimized import PartlyOptimizedModule, as_it_was
from tests.cli.test_app import CODE, QUICK, call
from tests.support.planted import module_of
from tests.support.sized import sized_module

INPUT = ("--input", "1x3x8x8", "--device", "cpu", *QUICK)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The MODEL argument of a small network."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tiny.py").write_text(CODE)
    return f"{tmp_path / 'tiny.py'}:Tiny"


def test_export_writes_verified_onnx(model: str, tmp_path: Path) -> None:
    target, report = tmp_path / "m.onnx", tmp_path / "r.json"
    result = call("export", model, "-o", target, *INPUT, "--onnx", "fp16", "--json", report)
    assert result.exit_code == 0, result.output
    assert f"{target}: verified; fp16" in result.stdout.replace("\n", "")
    facts = json.loads(report.read_text())
    assert facts["verified"]
    assert facts["precision"] == "fp16"
    loaded = onnx.load(target)
    assert [value.name for value in loaded.graph.input] == ["image"]
    assert {"ampopt.verified": "yes"}.items() <= {p.key: p.value for p in loaded.metadata_props}.items()


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sweep of the session's options finds does not matter here."""
    monkeypatch.setattr(
        bundle_onnx, "tune", lambda *given, **options: tune(*given, **options | {"seconds": 0.2})
    )


@pytest.mark.usefixtures("briefly")
def test_export_writes_a_bundle_that_verify_passes(model: str, tmp_path: Path) -> None:
    generate_keys(tmp_path / "private.pem", tmp_path / "public.pem")
    target, report = tmp_path / "robot.ampopt", tmp_path / "v.json"
    result = call("export", model, "-o", target, *INPUT, "--sign", tmp_path / "private.pem", "--cpp")
    assert result.exit_code == 0, result.output
    assert "saved" in result.stdout
    assert "program.pt" in open_bundle(target).names
    relaxed = ("--hz", "20", "--seconds", "1", "--slack", "1000", "--deadline-ms", "45")
    key = ("--verify-key", tmp_path / "public.pem")
    result = call("verify", target, "--device", "cpu", *relaxed, *key, "--json", report)
    assert result.exit_code == 0, result.output
    assert "self-test: passed" in result.stdout
    facts = json.loads(report.read_text())
    assert facts["passed"]
    assert facts["paced"]["frames"] == 20
    assert facts["back_to_back"]["p50_ms"] > 0
    assert facts["first_frame_ms"] > 0
    assert facts["memory_bytes"] > 0


@pytest.mark.usefixtures("briefly")
def test_export_writes_a_bundle_of_a_range_of_sizes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = sized_module(torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8), dynamic={"batch": (1, 8)})
    monkeypatch.setattr(ampopt, "optimize", lambda *_, **given: fast if given["dynamic"] else None)
    result = call("export", model, "-o", tmp_path / "b", *INPUT, "--dynamic", "batch=1..8")
    assert result.exit_code == 0, result.output
    assert ampopt.load(tmp_path / "b", device="cpu").sizes == {"batch": (1, 8)}


@pytest.mark.parametrize("name", ["b.ampopt", "m.onnx"])
def test_an_export_of_a_range_that_there_is_not_is_refused_with_what_this_kind_of_file_may_do(
    name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def optimize(network: torch.nn.Module, args: Any, **_: Any) -> Any:
        fast = module_of(network, *args)
        fast.report.notes.append("in training mode" if network.training else "its sizes are fixed")
        return fast

    monkeypatch.setattr(ampopt, "optimize", optimize)
    result = call("export", model, "-o", tmp_path / name, *INPUT, "--dynamic", "batch=1..4")
    assert result.exit_code == 1
    assert "for the example's sizes alone (its sizes are fixed): leave --dynamic out" in told(result)
    assert ("--dynamic-batch" in told(result)) is (name == "m.onnx")
    assert not (tmp_path / name).exists()


def test_verify_fails_where_frames_come_faster_than_answers(tmp_path: Path) -> None:
    fast = module_of(torch.nn.Conv2d(3, 8, 3), torch.randn(1, 3, 64, 64))
    fast.save(tmp_path / "b", onnx=None)
    result = call("verify", tmp_path / "b", "--hz", "100", "--seconds", "0.5", "--deadline-ms", "0.001")
    assert result.exit_code == 1
    assert "frames at 100 Hz missed the deadline of 0.001 ms" in result.stdout.replace("\n", "")
    assert not result.stderr  # a verdict is no error


@pytest.mark.parametrize("change", ["flip", "cut", "text"])
def test_verify_refuses_what_is_no_whole_bundle(change: str, bundle: Path, tmp_path: Path) -> None:
    target, data = tmp_path / "b", bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes({"flip": bytes(data), "cut": bytes(data[:-9]), "text": b"hello"}[change])
    result = call("verify", target)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the bundle")
    assert result.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a small network, without ONNX."""
    tmp_path = tmp_path_factory.mktemp("bundle")
    module_of(torch.nn.ReLU(), torch.randn(2)).save(tmp_path / "b", onnx=None)
    return tmp_path / "b"


def _field_test(slow_ms: float, missed: int) -> Callable[..., FieldReport]:
    """A field test that found these milliseconds back to back, and so many deadlines missed."""
    return lambda call, **options: FieldReport(
        options["hz"], 33.0, 9.0, Latencies((5.0,) * 300), Latencies((slow_ms,) * 300), missed, 0, 0.1, None
    )


@pytest.mark.parametrize(
    ("slow_ms", "missed", "options", "code", "line"),
    [
        (1e6, 0, (), 0, "SLOWER THAN PROMISED: p99 back to back is 1000000.000 ms"),
        (1e6, 0, ("--strict",), 1, "FAILED: p99 back to back is 1000000.000 ms"),
        (1e-6, 0, ("--strict",), 0, "passed: all 300 frames at 30 Hz met the deadline"),
        (1e-6, 2, (), 1, "FAILED: 2 of 300 frames at 30 Hz missed the deadline"),
    ],
)
def test_verify_says_which_test_failed_and_fails_on_deadlines(
    slow_ms: float, missed: int, options: tuple[str, ...], code: int, line: str,
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("ampopt.cli.deploy.field_test", _field_test(slow_ms, missed))
    files = ("--json", tmp_path / "v.json", "--report", tmp_path / "v.html")
    result = call("verify", bundle, "--device", "cpu", *files, *options)
    assert result.exit_code == code, result.output
    assert line in result.stdout
    page = (tmp_path / "v.html").read_text()
    assert ("verdict bad" in page) is (code == 1)
    assert html.escape(line.partition(": ")[2]) in page
    told = json.loads((tmp_path / "v.json").read_text())
    assert told["passed"] is (code == 0)
    assert [test["test"] for test in told["tests"]] == ["deadlines", "p50 back to back", "p99 back to back"]


def _unprintable() -> NoReturn:
    raise OSError("nothing can be printed")


def test_verify_and_export_write_files_before_anything_is_printed(
    bundle: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.cli.deploy.field_test", _field_test(1e-6, 0))
    monkeypatch.setattr(ampopt, "optimize", lambda network, args, **_: module_of(network.eval(), *args))
    monkeypatch.setattr(cli_deploy, "console", _unprintable)
    files = ("--json", tmp_path / "v.json", "--report", tmp_path / "v.html")
    assert "nothing can be printed" in call("verify", bundle, "--device", "cpu", *files).stderr
    files = ("-o", tmp_path / "m.onnx", "--json", tmp_path / "e.json")
    assert "nothing can be printed" in call("export", model, *INPUT, *files).stderr
    written = {path.name for path in tmp_path.iterdir()}
    assert {"v.json", "v.html", "m.onnx", "e.json"} <= written


def test_the_backends_are_those_that_load_knows() -> None:
    assert get_args(cli_deploy.Backend) == BACKENDS


@pytest.mark.parametrize(
    ("output", "options", "reason"),
    [
        ("out.engine", (), "an engine of TensorRT"),
        ("out.pt", (), "PyTorch weights"),
        ("m.onnx", ("--cpp",), "--cpp is for a bundle"),
        ("m.onnx", ("--sign", "key.pem"), "--sign is for a bundle"),
        ("b", ("--io", "fp16", "--dynamic-batch"), "--io, --dynamic-batch is for ONNX alone"),
        ("m.onnx", ("--io", "lane"), "name one lane"),
        ("m.onnx", ("--dynamic", "batch=1..8", "--dynamic-batch"), "give one of them"),
        ("m.onnx", ("--dynamic", "batch"), "'batch' is no range: give each size once, such as batch=1..8"),
        ("b", ("--target", "tensorrt"), "--target is for ONNX alone"),
        ("b", ("--force",), "--force is for ONNX alone"),
        ("b", ("--sign", "nowhere.pem"), "there is no file"),
        ("b", ("--sign", "tiny.py"), "no private key"),
        ("b", ("--json", "b"), "--output and --json are the same file"),
        ("b", ("--json", "tiny.py"), "MODEL and --json are the same file"),
        ("key.pem", ("--sign", "key.pem"), "--sign and --output are the same file"),
        ("tiny.py", (), "code or a key"),
        ("folder", (), "is a folder"),
        ("folder/x/m.onnx", (), "create that folder first"),
        ("text", (), "a file that is no bundle is there"),
    ],
)
def test_a_wrong_export_is_refused_before_the_work(
    output: str,
    options: tuple[str, ...],
    reason: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(*args: Any, **given: Any) -> NoReturn:
        raise AssertionError("the long work began")

    monkeypatch.setattr(ampopt, "optimize", work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("mine")
    generate_keys(tmp_path / "key.pem", tmp_path / "key.pub")
    result = call("export", model, "-o", output, *options, *INPUT)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "text").read_text() == "mine"


@pytest.mark.parametrize(
    ("io", "optimized", "exported"),
    [("original", "original", None), ("lane", "lane", None), ("fp32", "original", "fp32")],
)
def test_the_io_of_an_export_is_the_modules_or_the_files_own(
    io: str, optimized: str, exported: str | None, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def export_onnx(*args: Any, **options: Any) -> NoReturn:
        given.append(options["io"])
        raise InputError("seen")

    def optimize(network: Any, args: Any, **options: Any) -> Any:
        given.append(options["io"])
        fast = module_of(network.eval(), *args)
        monkeypatch.setattr(fast, "export_onnx", export_onnx)
        return fast

    monkeypatch.setattr(ampopt, "optimize", optimize)
    call("export", model, "-o", tmp_path / "m.onnx", *INPUT, "--precision", "amp", "--io", io)
    assert given == [optimized, exported]


def test_export_without_onnx_says_so_before_the_work(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ampopt, "optimize", lambda *args, **options: pytest.fail("the long work began"))
    monkeypatch.setitem(sys.modules, "onnx", None)
    for name in ("m.onnx", "robot.ampopt"):
        result = call("export", model, "-o", tmp_path / name, *INPUT)
        assert result.exit_code == 1
        assert "ampopt[onnx]" in result.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--slack", "-1"), "--slack -1"),
        (("--slack", "nan"), "--slack nan"),
        (("--budget", "0"), "--budget 0"),
        (("--device", "gpu"), "is no device"),
        (("--device", "cuda:77"), "--device cuda:77: there"),
        (("--json", "b"), "BUNDLE and --json are the same file"),
        (("--verify-key", "b"), "it is not signed"),
        (("--verify-key", "b"), "do without --verify-key"),
        (("--hz", "0"), "--hz 0: give a field test a positive rate"),
        (("--hz", "nan"), "--hz nan: give a field test a positive rate"),
        (("--seconds", "0"), "--seconds 0: give a field test the time for a frame, 0.0333 or more"),
        (("--deadline-ms", "-1"), "--deadline-ms -1: give a field test a positive deadline"),
        (("--json", "-"), "--json -: stdout has the text for people: name a file"),
    ],
)
def test_verify_refuses_wrong_options(
    options: tuple[str, ...], reason: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.parent)
    result = call("verify", "b", *options)
    assert result.exit_code == 1
    assert reason in result.stderr


def test_a_model_of_several_graphs_cannot_be_exported(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ampopt, "optimize", lambda *args, **given: _in_parts(*args, was_tried=True, **given))
    for file in ("m.onnx", "b.ampopt"):
        result = call("export", model, "-o", tmp_path / file, *INPUT)
        assert result.exit_code == 1
        assert "optimized as one graph, and this one is not: it reads a number; no submodule" in told(result)
        assert not (tmp_path / file).exists()
    result = call("export", model, "-o", tmp_path / "b.ampopt", *INPUT, "--part", "head")
    assert "--part head: no submodule of it is optimized" in told(result)


@pytest.mark.usefixtures("briefly")
def test_a_part_of_such_a_model_is_exported(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 3, 8, 8)
    head = torch.nn.Conv2d(3, 8, 3)
    inside = torch.nn.ModuleDict({"head": head})
    part, whole = module_of(head, x), _in_parts(inside, x)
    part.report.model = "head"
    whole.report.regions["head"] = part.report
    fast = PartlyOptimizedModule(inside, {"head": part}, None, whole.report, x.device)
    monkeypatch.setattr(ampopt, "optimize", lambda *args, **options: fast)
    target, report = tmp_path / "b.ampopt", tmp_path / "r.json"
    result = call("export", model, "-o", target, *INPUT, "--part", "head", "--json", report)
    assert result.exit_code == 0, result.output
    assert open_bundle(target).manifest["model"]["name"] == "head"
    assert json.loads(report.read_text())["model"] == "head"


def test_a_model_of_which_nothing_was_tried_is_not_said_to_be_of_several_graphs(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ampopt, "optimize", _in_parts)
    for more in ([], ["--part", "head"]):
        result = call("export", model, "-o", tmp_path / "b.ampopt", *INPUT, *more)
        assert result.exit_code == 1
        assert "a bundle holds an optimized model, and nothing of this one was: it reads a n" in told(result)


def _in_parts(model: torch.nn.Module, *args: Any, was_tried: bool = False, **_: Any) -> PartlyOptimizedModule:
    made = as_it_was(model, args, {}, "it reads a number", started=0.0)
    if not was_tried:
        return made
    return PartlyOptimizedModule(made._original[0], {}, None, made.report, torch.device("cpu"))


def told(result: Any) -> str:
    return " ".join(result.stderr.split())
