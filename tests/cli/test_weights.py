"""The weights of `--weights`: where a checkpoint has them, and what does not serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampopt.cli.weights import load_weights
from ampopt.errors import InputError

State = dict[str, Any]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": s},
        lambda s: {"epoch": 3, "model_state_dict": s, "loss": 0.5},
        lambda s: {"model": {"state_dict": s}, "epoch": 3},
        lambda s: {"state_dict": {"model": {"model_state_dict": s}}},
        lambda s: {"model": 3, "state_dict": s},
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_weights_are_loaded_from_a_checkpoint(
    tmp_path: Path, wrap: Callable[[State], State], suffix: str
) -> None:
    source, target = nn.Linear(2, 3), nn.Linear(2, 3)
    torch.save(wrap(source.state_dict()), tmp_path / f"w{suffix}")
    load_weights(target, tmp_path / f"w{suffix}")
    assert torch.equal(source.weight, target.weight)


def test_a_checkpoint_without_a_state_dict_is_refused_with_its_keys(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "net": {"weight": torch.zeros(3, 2)}}, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"'model_state_dict', 'model': it has the keys 'epoch', 'net';"):
        load_weights(nn.Linear(2, 3), tmp_path / "w.pt")


def test_keys_that_do_not_fit_are_counted_and_at_most_five_are_named(tmp_path: Path) -> None:
    torch.save({"bias": torch.zeros(3)} | {f"k{i}": torch.zeros(1) for i in range(7)}, tmp_path / "w.pt")
    with pytest.raises(InputError) as caught:
        load_weights(nn.Linear(2, 3), tmp_path / "w.pt")
    text = str(caught.value)
    assert "1 keys are missing (weight); 7 keys are unexpected (k0, k1, k2, k3, k4, …)" in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no file"),
        ({"weight": torch.zeros(1), "bias": torch.zeros(3)}, "size mismatch for weight"),
        ([1, 2], "holds no state dict"),
        ({"epoch": 3}, "holds no state dict"),
        ({0: torch.zeros(3, 2), 1: torch.zeros(3)}, "holds no state dict, .*: it has the keys 0, 1;"),
        (
            {"weight": torch.zeros(3, 2), "bias": torch.zeros(3), "epoch": 3, "best": {}, 4: torch.zeros(1)},
            r"alone: beside 2 tensors by name it has 'epoch' \(int\), 'best' \(dict\), 4 \(Tensor\);",
        ),
        (nn.Linear(2, 3), "a whole pickled model"),
    ],
)
def test_weights_that_do_not_serve_are_refused(tmp_path: Path, content: object, reason: str) -> None:
    if content is not None:
        torch.save(content, tmp_path / "w.pt")
    with pytest.raises(InputError, match=reason):
        load_weights(nn.Linear(2, 3), tmp_path / "w.pt")


def test_a_checkpoint_that_holds_itself_is_refused(tmp_path: Path) -> None:
    itself: State = {}
    itself["model"] = itself
    torch.save(itself, tmp_path / "w.pt")
    with pytest.raises(InputError, match="holds no state dict"):
        load_weights(nn.Linear(2, 3), tmp_path / "w.pt")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_the_names_of_a_wrapped_model_lose_its_prefix_with_a_note(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = nn.Linear(2, 3), nn.Linear(2, 3)
    torch.save({prefix + name: value for name, value in source.state_dict().items()}, tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert torch.equal(source.weight, target.weight)
    told = [f"note: the weights' names are without the '{each}.' of " for each in prefix.split(".") if each]
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" of ")[0] + " of " for line in lines] == told


@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_versions_of_its_modules_stay_with_a_state(prefix: str, tmp_path: Path) -> None:
    source, seen = nn.BatchNorm2d(3), list[object]()
    target = nn.BatchNorm2d(3)
    target.register_load_state_dict_pre_hook(lambda *given: seen.append(given[3]["version"]))
    torch.save((nn.DataParallel(source) if prefix else source).state_dict(), tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert seen == [2]


def test_a_prefix_that_is_the_models_own_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = (nn.ModuleDict({"module": nn.Linear(2, 3)}) for _ in range(2))
    torch.save(source.state_dict(), tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt")
    assert torch.equal(source.get_parameter("module.weight"), target.get_parameter("module.weight"))
    wrapped = {f"module.{name}": value for name, value in source.state_dict().items()}
    torch.save(wrapped, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"2 keys are unexpected \(module\.module\."):
        load_weights(target, tmp_path / "w.pt")
    assert capsys.readouterr().err == ""
