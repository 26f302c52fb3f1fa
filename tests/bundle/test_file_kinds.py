"""What a file is, told without running anything in it."""

from __future__ import annotations

import argparse
import collections
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ampopt.bundle.file_kinds import kind_of_file
from ampopt.errors import InputError


def kind(path: Path) -> str:
    """The name of a file's kind."""
    return kind_of_file(path, "MODEL").name


class Evil:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (nn.BatchNorm2d(3).state_dict(), "state"),
        ({"model": nn.Linear(2, 2).state_dict(), "epoch": 3, "loss": np.float64(0.5)}, "state"),
        (collections.OrderedDict(a=nn.Parameter(torch.zeros(2))), "state"),
        (torch.zeros(2), "state"),
        (nn.Linear(2, 2), "pickled"),
        (nn.Sequential(nn.ReLU()), "pickled"),
        ({"epoch": 3, "model": nn.Linear(2, 2)}, "pickled"),
        ({"model": nn.Linear(2, 2).state_dict(), "args": argparse.Namespace(lr=1)}, "pickled"),
        (Evil(Path("made")), "pickled"),
    ],
)
def test_what_torch_saves_is_weights_or_has_code(
    content: object,
    expected: str,
    protocol: int,
    zipped: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(content, "x.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert kind(Path("x.pt")) == expected
    assert not Path("made").exists()


def test_an_optimizers_state_is_data(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    adam.step()
    torch.save({"state_dict": net.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "x.pt")
    assert kind(tmp_path / "x.pt") == "state"


def test_models_that_a_file_can_hold_are_known(tmp_path: Path) -> None:
    net, x = nn.Conv2d(3, 4, 3).eval(), torch.ones(1, 3, 4, 4)
    torch.export.save(torch.export.export(net, (x,)), tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(net), tmp_path / "b")
        torch.jit.save(torch.jit.trace(net, x), tmp_path / "c")
    assert [kind(tmp_path / name) for name in "abc"] == ["exported", "torchscript", "torchscript"]


def test_files_of_others_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "safetensors")
    np.savez(tmp_path / "arrays.npz", np.zeros(2))
    (tmp_path / "arrays.npz").rename(tmp_path / "arrays")
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [], [])
    for number, facts in enumerate([{}, {"producer_name": "me"}, {"doc_string": "a"}]):
        onnx.save(onnx.helper.make_model(graph, **facts), tmp_path / f"onnx-{number}")
        assert kind(tmp_path / f"onnx-{number}") == "onnx"
    (tmp_path / "empty").touch()
    (tmp_path / "unknown").write_text("hello")
    for name in ("safetensors", "arrays", "empty", "unknown"):
        assert kind(tmp_path / name) == name
    for start, words in {
        b"version https://git-lfs.github.com/spec/v1": "git lfs pull",
        b"<!DOCTYPE html>": "web page",
        b"<html>": "web page",
        b"\x89HDF\r\n": "HDF5",
        b"\x1c\0\0\0TFL3": "TensorFlow Lite",
    }.items():
        (tmp_path / "foreign").write_bytes(start + b"\n")
        assert words in kind_of_file(tmp_path / "foreign", "MODEL").words


@pytest.mark.parametrize("keep", [4, 100, 0.5, 0.99])
def test_a_cut_archive_is_damaged(keep: float, tmp_path: Path) -> None:
    torch.save(nn.Linear(50, 50).state_dict(), tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    assert kind(tmp_path / "x.pt") == "damaged"


def test_a_pickle_of_any_size_is_looked_at_in_part(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}, 2)[:-1] + b"N0" * (4 << 20))
    assert (tmp_path / "x.pt").stat().st_size < 1 << 20
    assert kind(tmp_path / "x.pt") == "state"


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"MODEL: there is no file nowhere\.pt"):
        kind_of_file(Path("nowhere.pt"), "MODEL")
