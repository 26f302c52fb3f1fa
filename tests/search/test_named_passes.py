"""Passes that users bring: named, listed, tried, cached and replayed as ours are."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ampopt
from ampopt.cli import app
from ampopt.errors import InputError
from ampopt.measure.entry import Verdict
from ampopt.passes import AllowTf32, BakeAutocast, Degroup, FoldConvBn, FuseConvTriton
from ampopt.search.named_passes import by_name, code_of, from_text, to_text
from ampopt.search.options import Options
from ampopt.search.tuning_cache import key_of
from tests.helpers import Model
from tests.support.planted import Planted, captured_of, optimize

DOCUMENT = Path(__file__).parents[2] / "docs" / "writing-a-pass.md"
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "double-relu"
version = "1.2"
[project.entry-points."ampopt.passes"]
remove-double-relu = "double_relu:RemoveDoubleRelu"
misnamed = "double_relu:RemoveDoubleRelu"
absent = "double_relu:Nothing"
no-pass = "double_relu:Path"
[tool.setuptools]
py-modules = ["double_relu"]
"""


def example() -> str:
    """The complete example of the documentation."""
    found = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (text,) = (block for block in found if "class RemoveDoubleRelu" in block)
    return str(text).replace("from torch import fx", "from pathlib import Path\n\nfrom torch import fx")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed a package with the documentation's pass."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "double_relu.py").write_text(example())
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", site, source],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def package(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package, where Python finds it."""
    monkeypatch.syspath_prepend(site)
    yield site
    sys.modules.pop("double_relu", None)


def twice() -> nn.Module:
    return Model(lambda m, x: torch.relu(torch.relu(m.conv(x))), conv=nn.Conv2d(3, 4, 3))


def test_a_package_brings_a_pass_that_is_tried_verified_and_timed(package: Path, all_kept: Any) -> None:
    model = twice()
    with all_kept:
        fast = optimize(model, X, passes="remove-double-relu", precision="fp32", cache=False)
    (entry,) = fast.report.entries
    assert (entry.name, entry.verdict, entry.rewrites) == ("remove-double-relu", Verdict.KEPT, 1)
    assert entry.before is not None
    assert [step.name for step in fast.program.recipe] == ["remove-double-relu"]
    assert torch.allclose(fast(X), model(X), atol=1e-6)
    larger = torch.randn(3, 3, 12, 12)
    assert torch.allclose(fast(larger), model(larger), atol=1e-6)
    assert fast.health.late_captures == 1  # the recipe is replayed on another shape


def test_it_is_cached_until_its_source_changes(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_kept: Any
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    options: dict[str, Any] = {"passes": "remove-double-relu", "precision": "fp32"}
    with all_kept:
        optimize(twice(), X, **options)
        (file,) = tmp_path.glob("*.json")
        assert [step["pass"] for step in json.loads(file.read_text())["facts"]["lanes"]["fp32"]] == [
            "remove-double-relu"
        ]
        again = optimize(twice(), X, **options)
    assert any("tuned by an earlier call" in note for note in again.report.notes)
    assert [step.name for step in again.program.recipe] == ["remove-double-relu"]
    step, program = by_name("remove-double-relu"), captured_of(twice(), X)[1].program
    own = code_of(step)
    assert own is not None
    assert own[:2] == ("double_relu", "double-relu 1.2")
    key = key_of(program, Options(passes=[step]).cache_facts())
    with (package / "double_relu.py").open("a") as source:
        source.write("# changed\n")
    try:
        assert key_of(program, Options(passes=[step]).cache_facts()) != key
    finally:
        (package / "double_relu.py").write_text(example())


def test_a_bundle_holds_its_program_and_never_imports_it(
    package: Path, tmp_path: Path, all_kept: Any
) -> None:
    model = twice()
    with all_kept:
        fast = optimize(
            model, X, passes=["remove-double-relu", "fold-conv-bn"], precision="fp32", cache=False
        )
    fast.save(tmp_path / "b.ampopt", onnx=None)
    with zipfile.ZipFile(tmp_path / "b.ampopt") as file:
        assert json.loads(file.read("program.json"))["recipe"] == []
    sys.modules.pop("double_relu")
    loaded = ampopt.load(tmp_path / "b.ampopt", device="cpu")
    assert torch.allclose(loaded(X), model(X), atol=1e-6)
    assert "double_relu" not in sys.modules


def test_it_is_never_imported_unless_named(package: Path, all_kept: Any) -> None:
    with all_kept:
        optimize(twice(), X, passes=["fold-conv-bn"], precision="fp32", cache=False)
    assert "double_relu" not in sys.modules
    result = CliRunner().invoke(app.app, ["passes"])
    assert "of double-relu 1.2: tried where --passes names it" in result.stdout
    assert "double_relu" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misnamed", "the entry point misnamed of double-relu 1.2 gives a pass named remove-double-relu"),
        (
            "absent",
            "the pass absent of double-relu 1.2 does not load: AttributeError: module",
        ),
        ("no-pass", "the entry point no-pass of double-relu 1.2 gives "),
        ("nowhere", "there is no pass nowhere: choose from absent, allow-tf32"),
    ],
)
def test_a_name_that_gives_no_pass_is_refused(package: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        ampopt.optimize(twice(), X, passes=name)


def test_a_pass_with_a_name_of_ours_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = EntryPoint("degroup", f"no_such_{len(sys.modules)}:Pass", "ampopt.passes")
    monkeypatch.setattr("ampopt.search.named_passes.installed", lambda: {"degroup": entry})
    for _ in range(2):
        assert by_name("degroup") == Degroup()
    assert by_name("fold-conv-bn") == FoldConvBn()
    told = f"ampopt: the pass degroup of {entry.value} is not used, ampopt's own is: let it be renamed"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_the_command_line_tries_it_and_tells_its_proof(package: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\nnet = lambda: nn.Sequential(nn.ReLU(), nn.ReLU())\n"
    )
    runner, passes = CliRunner(), "remove-double-relu,fold-conv-bn"
    options = ["--input", "1x3x8x8", "--precision", "fp32", "--budget", "3", "--device", "cpu"]
    model, file = f"{tmp_path / 'net.py'}:net", tmp_path / "r.json"
    result = runner.invoke(app.app, ["optimize", model, *options, "--passes", passes, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert {entry["pass"] for entry in json.loads(file.read_text())["passes"]} == set(passes.split(","))
    told = runner.invoke(app.app, ["passes", "remove-double-relu"]).stdout
    assert told.startswith("remove-double-relu (rewrite, bitwise, portable)\n")
    assert "Correct because: relu(x) >= 0" in told
    assert told.endswith("Options:\n  none\n")


def test_every_pass_of_ours_is_text_and_back() -> None:
    assert from_text(to_text(ampopt.PIPELINE)) == tuple(ampopt.PIPELINE)
    choices = (("conv2d_1", "merge=2"), ("conv2d", "split, in channels_last"))
    changed = (Degroup(choices=choices, least_gain=2.0), BakeAutocast("O1"), FuseConvTriton(seconds=3))
    assert from_text(to_text(changed)) == changed
    assert to_text([BakeAutocast("O1"), FoldConvBn()]) == "bake-autocast{policy=O1},fold-conv-bn"


def test_a_list_is_exactly_those_passes_and_exclude_comes_after(all_kept: Any) -> None:
    options: dict[str, Any] = {"precision": "fp32", "cache": False, "budget_s": 10.0, "progress": False}
    listed: list[Any] = ["fold-conv-bn", Planted("mine"), "script{warm-ups=2},cuda-graph"]
    with all_kept:
        report = ampopt.optimize(twice(), X, passes=listed, exclude=["script"], **options).report
    assert {entry.name for entry in report.entries} <= {"fold-conv-bn", "mine", "cuda-graph"}
    assert {entry.name for entry in report.entries} >= {"fold-conv-bn", "mine"}


def test_a_changed_pipeline_keeps_the_rest() -> None:
    options = Options(passes=ampopt.PIPELINE.without("degroup").before("channels-last", Planted("mine")))
    found = [step.name for step in options.pipeline()]
    usual = [step.name for step in Options().pipeline()]
    at = usual.index("channels-last")
    assert found == [*usual[:at], "mine", *(name for name in usual[at:] if name != "degroup")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passes": [BakeAutocast()], "policy": "O1"}, "bake-autocast in passes= has a policy"),
        ({"passes": ampopt.PIPELINE, "policy": "O1"}, "bake-autocast in passes= has a policy"),
        ({"passes": "allow-tf32"}, "needs a tolerance"),
        ({"passes": FoldConvBn()}, "give a list of passes"),
        ({"passes": 5}, "give a list of passes"),
        ({"passes": [FoldConvBn]}, "give an instance"),
        ({"passes": "degroup{least-gain=x}"}, "degroup's option least-gain is x: give one such as 1.03"),
        ({"passes": "degroup{loss=1}"}, "degroup has no option loss: its options are choices, least-gain"),
        ({"passes": "script{warm-ups=-1}"}, "script's option warm-ups is -1: give one such as 4, from 1"),
        ({"passes": "degroup{choices=5}"}, "degroup's option choices is 5: give a list of"),
        ({"passes": "degroup{choices=[1]}"}, r"degroup's option choices is \[1\]: give a list of"),
        ({"passes": "degroup{least-gain=NaN}"}, "degroup's option least-gain is NaN"),
        ({"passes": [Degroup(least_gain=-1.0)]}, "degroup's option least-gain is -1.0"),
        ({"passes": "bake-autocast{policy=O9}"}, "unknown precision policy 'O9'"),
        ({"passes": ["script", "script"]}, "two passes named script"),
        ({"passes": [Planted("mine")], "exclude": ["yours"]}, "there is no pass yours: choose from .*mine"),
    ],
)
def test_passes_that_contradict_are_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ampopt.optimize(twice(), X, **options)
    with pytest.raises(InputError, match=message):
        ampopt.compare(twice(), X, **options)


@dataclasses.dataclass(frozen=True)
class Particular(Planted):
    """A pass that checks its options itself."""

    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError("the size is 1 or more")
        if self.size > 9:
            raise SystemExit(3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("particular{size=0}", "particular{size=0}: ValueError: the size is 1 or more"),
        ("particular{size=10}", "particular{size=10}: SystemExit: 3"),
    ],
)
def test_what_a_pass_says_of_its_options_is_told_with_its_name(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.search.named_passes.by_name", Particular)
    with pytest.raises(InputError) as caught:
        from_text(text)
    assert str(caught.value) == message


def test_tf32_is_for_those_who_give_a_tolerance() -> None:
    assert "allow-tf32" not in [step.name for step in Options(passes=ampopt.PIPELINE).pipeline()]
    with_tolerance = Options(passes=[AllowTf32()], tolerance=0.1)
    assert [step.name for step in with_tolerance.pipeline()] == ["allow-tf32"]


def test_passes_whose_code_is_in_no_file_are_not_cached() -> None:
    made = dataclasses.make_dataclass("Made", [], bases=(Planted,), frozen=True)
    made.__module__ = "nowhere.at.all"
    assert Options(passes=[Planted("mine")]).is_cacheable
    assert not Options(passes=[made("mine")]).is_cacheable
    assert not Options(passes=[Planted("mine")], cache=False).is_cacheable
    assert importlib.import_module(Planted.__module__).__file__ is not None


def test_compare_tells_of_a_users_pass(all_kept: Any) -> None:
    found = ampopt.compare(twice(), X, passes=[Planted("mine")], precision="fp32", budget_s=5, progress=False)
    assert {row.name for row in found.rows} == {"mine"}
    assert {row.mode for row in found.rows} == {"alone", "cumulative", "left out"}
