"""Models by their names, factories and files, and the weights loaded into them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ampopt.cli.model_source import load_function, load_model
from ampopt.cli.weights import load_weights
from ampopt.errors import InputError, MissingExtraError
from tests.system.test_plain_files import ODD

CODE = """
from torch import nn
from beside import CHANNELS

class Tiny(nn.Module):
    def __init__(self, channels=CHANNELS):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)

    def forward(self, image):
        return self.conv(image).relu()

def factory():
    return Tiny()

def needs(argument):
    return Tiny()

def no_module():
    return 3

ready = Tiny(1)
number = 3
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with models, which imports another one that lies beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("CHANNELS = 3")
    path = tmp_path / "some_models.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize(("name", "channels"), [("factory", 3), ("Tiny", 3), ("ready", 1)])
def test_a_function_a_class_and_a_ready_module_are_taken(code: Path, name: str, channels: int) -> None:
    model = load_model(f"{code}:{name}").model
    assert model(torch.ones(1, channels, 4, 4)).shape == (1, 4, 2, 2)


def test_a_model_that_was_made_is_in_evaluation_mode(code: Path) -> None:
    assert not load_model(f"{code}:factory").model.training
    assert not load_model(f"{code}:ready").model.training


FROZEN = """
from torch import nn

def frozen():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout())
    model[1].eval()
    return model

def evaluated():
    return frozen().eval()
"""


def test_a_model_to_be_trained_has_frozen_what_its_factory_has(tmp_path: Path) -> None:
    (tmp_path / "freezing.py").write_text(FROZEN)
    model = load_model(f"{tmp_path}/freezing.py:frozen", train=True).model
    assert [module.training for module in model.modules()] == [True, True, False, True]
    model = load_model(f"{tmp_path}/freezing.py:evaluated", train=True).model
    assert all(module.training for module in model.modules())
    model = load_model(f"{tmp_path}/freezing.py:frozen").model
    assert not any(module.training for module in model.modules())


NETS = """
from torch import nn

print("nets runs")

class Net(nn.Sequential):
    pass

def step(model, optimizer, x):
    assert isinstance(model, Net)
"""

STEPS = """
from nets_of_a_step import Net

def step(model, optimizer, x):
    assert isinstance(model, Net)
"""


@pytest.mark.parametrize("file", ["nets_of_a_step.py", "steps.py", "sub/../nets_of_a_step.py"])
def test_a_file_is_run_once_for_the_model_and_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "sub").mkdir()
    (tmp_path / "nets_of_a_step.py").write_text(NETS)
    (tmp_path / "steps.py").write_text(STEPS)
    model = load_model(f"{tmp_path}/nets_of_a_step.py:Net").model
    load_function(f"{tmp_path}/{file}:step", "--step")(model, None, None)
    assert capsys.readouterr().out == "nets runs\n"


CIRCLES = {
    "from": "from circle_{kind} import Net\n",
    "import": "import circle_{kind}\n\nclass Wide(circle_{kind}.Net):\n    pass\n\nNet = circle_{kind}.Net\n",
}


@pytest.mark.parametrize("kind", CIRCLES)
def test_a_file_in_a_circle_of_imports_is_a_model_and_its_step_knows_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    step = "\ndef step(model, optimizer, x):\n    assert isinstance(model, Net)\n"
    (tmp_path / f"circle_{kind}.py").write_text(f"import train_{kind}\n{NETS}")
    (tmp_path / f"train_{kind}.py").write_text(CIRCLES[kind].format(kind=kind) + step)
    model = load_model(f"{tmp_path}/circle_{kind}.py:Net").model
    load_function(f"{tmp_path}/train_{kind}.py:step", "--step")(model, None, None)


def test_a_file_that_cannot_be_imported_leaves_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "lacking.py").write_text("from torch import no_such_thing")
    before = set(sys.modules)
    with pytest.raises(InputError, match="cannot import name 'no_such_thing'"):
        load_model(f"{tmp_path}/lacking.py:Net")
    assert set(sys.modules) == before


def test_a_file_that_was_imported_by_a_link_to_its_folder_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "nets_by_a_link.py").write_text(NETS)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "link"), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    model = load_model("nets_by_a_link:Net").model
    load_function(f"{tmp_path}/real/nets_by_a_link.py:step", "--step")(model, None, None)
    assert capsys.readouterr().out == "nets runs\n"


def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"{NETS}\nFOLDER = {folder!r}\nfolder = lambda: FOLDER")
    model = load_model(f"{tmp_path}/one/same.py:Net").model
    assert load_function(f"{tmp_path}/two/same.py:folder", "--loss")() == "two"
    assert load_function(f"{tmp_path}/one/same.py:folder", "--loss")() == "one"
    assert getattr(sys.modules[type(model).__module__], "Net", None) is type(model)


def test_weights_are_those_of_the_folder_that_the_command_began_in(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code.parent / "moved").mkdir()
    (code.parent / "moving.py").write_text(f"import os\nfrom some_models import Tiny\nos.chdir({'moved'!r})")
    torch.save(load_model(f"{code}:Tiny").model.state_dict(), code.parent / "w.pt")
    monkeypatch.chdir(code.parent)
    load_model("moving.py:Tiny", weights=Path("w.pt"))
    assert Path.cwd().name == "moved"


def test_a_module_is_imported_from_the_current_directory(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code.parent)
    assert type(load_model("some_models:factory").model).__name__ == "Tiny"
    del sys.modules["some_models"]


def test_random_weights_are_the_same_in_every_run_and_the_random_state_is_untouched(code: Path) -> None:
    state = torch.get_rng_state()
    first, second = (load_model(f"{code}:Tiny").model for _ in range(2))
    assert torch.equal(first.get_parameter("conv.weight"), second.get_parameter("conv.weight"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("resnet18", "is none of: torchvision:NAME"),
        (":factory", "is none of"),
        ("torchvision:", "is none of"),
        ("no_such_package.models:factory", "No module named 'no_such_package'"),
        ("missing.py:factory", "there is no file missing.py"),
        ("{code}:missing", "has no 'missing'"),
        ("{code}:needs", "fails when called without arguments"),
        ("{code}:number", "not callable"),
        ("{code}:no_module", "returns int"),
        ("{folder}/broken.py:factory", "SyntaxError"),
        ("missing.pt2", "there is no file"),
    ],
)
def test_what_names_no_model_is_refused_with_the_reason(code: Path, source: str, reason: str) -> None:
    (code.parent / "broken.py").write_text("def")
    with pytest.raises(InputError, match=reason):
        load_model(source.format(code=code, folder=code.parent))


def test_zoo_models_have_random_weights_and_download_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    for source in ("torchvision:squeezenet1_1", "torchvision:lraspp_mobilenet_v3_large", "timm:test_vit"):
        assert any(True for _ in load_model(source).model.parameters())


@pytest.mark.parametrize("source", ["torchvision:resnet19", "timm:resnet19"])
def test_an_unknown_name_is_answered_with_near_ones(source: str) -> None:
    with pytest.raises(InputError, match="has no model 'resnet19'; near it are resnet18"):
        load_model(source)


@pytest.mark.parametrize("zoo", ["torchvision.models", "timm"])
def test_where_none_is_near_it_is_told_what_lists_them(zoo: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(f"{zoo.partition('.')[0]}:qqqq")
    assert f"has no model 'qqqq': {zoo}.list_models() gives the names of all" in str(caught.value)


@pytest.mark.parametrize(("package", "extra"), [("torchvision", "vision"), ("timm", "timm")])
def test_a_zoo_that_is_not_installed_is_named_with_its_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"ampopt\[{extra}\]"):
        load_model(f"{package}:resnet18")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with one model, `net`, as a program of torch.export, as TorchScript, and as a state dict."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    torch.export.save(torch.export.export(net, (torch.ones(1, 3, 4, 4),)), tmp_path / "net.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(net), tmp_path / "net.ts")
    (tmp_path / "net.pt").write_bytes((tmp_path / "net.ts").read_bytes())
    torch.save(net.state_dict(), tmp_path / "state.pt")
    return tmp_path


@pytest.mark.parametrize("name", ["net.pt2", "net.ts", "net.pt"])
def test_a_model_file_is_loaded_only_where_it_is_trusted(saved: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"can execute code that is in it .*--trust-model-file"):
        load_model(str(saved / name))
    reference = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    load_weights(reference, saved / "state.pt")
    x = torch.randn(1, 3, 4, 4)
    assert torch.equal(load_model(str(saved / name), trust_file=True).model(x), reference(x))


def test_an_exported_model_brings_the_call_that_it_was_exported_with(saved: Path) -> None:
    loaded = load_model(str(saved / "net.pt2"), trust_file=True)
    assert torch.equal(loaded.args[0], torch.ones(1, 3, 4, 4))
    assert not loaded.kwargs


@pytest.mark.parametrize(("name", "other"), [("net.pt2", "a.pt"), ("net.ts", "a.pt2")])
def test_a_model_file_is_known_by_its_content(saved: Path, name: str, other: str) -> None:
    (saved / name).rename(saved / other)
    x = torch.randn(1, 3, 4, 4)
    assert load_model(str(saved / other), trust_file=True).model(x).shape == (1, 4, 2, 2)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.ckpt"])
def test_a_state_dict_is_no_model_but_its_weights(name: str, trusted: bool, tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / name)
    with pytest.raises(InputError, match=rf"state dict .*make_net --weights .*{name}"):
        load_model(str(tmp_path / name), trust_file=trusted)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_pickled_model_is_told_from_weights(trusted: bool, zipped: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(nn.Linear(2, 3), tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    advice = r"torch.nn.modules.linear.Linear.*torch.save\(model.state_dict\(\)"
    with pytest.raises(InputError, match=advice):
        load_model(str(tmp_path / "w.pt"), trust_file=trusted)
    with pytest.raises(InputError, match=advice):
        load_weights(nn.Linear(2, 3), tmp_path / "w.pt")


def test_a_file_of_code_without_a_name_is_answered_with_one(code: Path) -> None:
    with pytest.raises(InputError, match=r"some_models\.py:make_net"):
        load_model(str(code))


@pytest.mark.parametrize("made", ["import", "call"])
def test_code_that_ends_python_is_told_of(tmp_path: Path, made: str) -> None:
    body = "raise SystemExit(2)" if made == "import" else "def net():\n    raise SystemExit(2)"
    (tmp_path / "ends.py").write_text(body)
    with pytest.raises(InputError, match=r"exit status 2|SystemExit: 2"):
        load_model(f"{tmp_path}/ends.py:net")


def test_weights_are_loaded_from_safetensors(code: Path) -> None:
    weights = {"conv.weight": torch.ones(4, 3, 3, 3), "conv.bias": torch.ones(4)}
    save_file(weights, code.parent / "w.safetensors")
    model = load_model(f"{code}:Tiny", weights=code.parent / "w.safetensors").model
    assert torch.equal(model.get_parameter("conv.weight"), weights["conv.weight"])


@pytest.mark.parametrize("case", ODD)
def test_what_is_no_plain_file_is_no_model_and_no_weights(case: str, tmp_path: Path) -> None:
    make, reason = ODD[case]
    make(tmp_path / "w.pt")
    with pytest.raises(InputError, match=reason):
        load_weights(nn.Linear(2, 3), tmp_path / "w.pt")
    with pytest.raises(InputError, match=reason):
        load_model(str(tmp_path / "w.pt"), trust_file=True)
