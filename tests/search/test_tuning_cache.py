"""The cache of tuning results: what it finds again, what it never believes, how large it grows."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampopt
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass, Result
from ampopt.measure.sampling import Gain
from ampopt.passes import Compile, FoldConvBn, RemoveInferenceNoops
from ampopt.search.options import Options
from ampopt.search.tuning_cache import Known, TuningCache, default_cache, key_of
from ampopt.system import cache_folder
from ampopt.system.atomic import SUFFIX
from ampopt.system.cache_folder import kept_files
from tests.helpers import with_statistics
from tests.support.planted import NO_ENGINES, captured_of

KEY = "ab" * 32
RECIPES: dict[str, tuple[Pass, ...]] = {"fp32": (RemoveInferenceNoops(), FoldConvBn()), "amp": ()}
FOUND = Known(RECIPES, complete=True)
X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
WISHES = {"precision": "auto", "tolerance": None}


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path / "tuning")


def network(channels: int = 4) -> nn.Module:
    return with_statistics(nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU()))


def program(model: nn.Module | None = None, x: torch.Tensor = X) -> Program:
    return captured_of(model or network(), x)[1].program


def test_what_was_stored_is_found(cache: TuningCache) -> None:
    assert cache.find(KEY) is None
    cache.store(KEY, RECIPES)
    assert cache.find(KEY) == FOUND
    assert cache.find("cd" * 32) is None
    cache.store(KEY, {"fp32": ()})
    assert cache.find(KEY) == Known({"fp32": ()}, complete=True)
    assert len(kept_files(cache.folder)) == 1
    cache.store(KEY, RECIPES, complete=False)
    assert cache.find(KEY) == Known(RECIPES, complete=False)


def spoil_byte(data: bytes) -> bytes:
    place = data.index(b"fold-conv-bn")
    return data[:place] + b"x" + data[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data + b"}",
        spoil_byte,
        lambda data: data.replace(b'"amp": []', b'"xyz": []'),
        lambda data: data.replace(b'"complete": true', b'"complete": false'),
        lambda data: b"[1, 2]",
        lambda data: b"\xff\xfe",
        lambda data: b"[" * 100_000,
        lambda data: data + b" " * cache_folder.MOST_BYTES,
    ],
)
def test_a_damaged_file_is_never_believed_and_is_removed(
    cache: TuningCache, damage: Callable[[bytes], bytes]
) -> None:
    cache.store(KEY, RECIPES)
    (file,) = kept_files(cache.folder)
    file.write_bytes(damage(file.read_bytes()))
    assert cache.find(KEY) is None
    assert kept_files(cache.folder) == []
    cache.store(KEY, RECIPES)
    assert cache.find(KEY) == FOUND


def test_every_flipped_byte_is_noticed(cache: TuningCache) -> None:
    cache.store(KEY, RECIPES)
    (file,) = kept_files(cache.folder)
    data = file.read_bytes()
    for place in range(len(data)):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert cache.find(KEY) in (None, FOUND)


def test_a_file_under_another_key_is_not_believed(cache: TuningCache) -> None:
    cache.store(KEY, RECIPES)
    (file,) = kept_files(cache.folder)
    file.rename(file.with_name("cd" * 32 + ".json"))
    assert cache.find("cd" * 32) is None


@dataclasses.dataclass(frozen=True)
class _MyOwn(Compile):
    """A pass that no file can name."""

    def apply(self, program: Program) -> Result:
        return Result(program, 0)


def test_recipes_with_a_users_own_pass_are_not_stored(cache: TuningCache) -> None:
    cache.store(KEY, {"fp32": (FoldConvBn(), _MyOwn())})
    assert kept_files(cache.folder) == []


def test_it_stays_bounded_and_the_longest_unused_go(
    cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "MOST_FILES", 3)
    for number in range(3):
        cache.store(f"{number}" * 64, RECIPES)
        os.utime(cache.folder / f"{str(number) * 64}.json", (number, number))
    assert cache.find("0" * 64) == FOUND  # used just now
    left = cache.folder / f".{'1' * 64}.json.{'0' * 16}{SUFFIX}"
    left.write_text("of a process that was killed")
    os.utime(left, (0, 0))
    cache.store("3" * 64, RECIPES)
    assert {file.name[0] for file in kept_files(cache.folder)} == {"0", "2", "3"}


def test_parallel_writers_leave_a_whole_file(cache: TuningCache) -> None:
    others = [{"fp32": (FoldConvBn(),) * count} for count in range(1, 5)]
    found = [Known(recipes, complete=True) for recipes in others]

    def write(recipes: dict[str, tuple[Pass, ...]]) -> None:
        for _ in range(30):
            cache.store(KEY, recipes)
            assert cache.find(KEY) in found

    threads = [threading.Thread(target=write, args=(recipes,)) for recipes in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.find(KEY) in found
    assert len(kept_files(cache.folder)) == 1


def test_a_folder_that_cannot_be_written_is_an_empty_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / "file" / "tuning")
    cache.store(KEY, RECIPES)
    assert cache.find(KEY) is None
    assert cache_folder.clear(cache.folder) == 0


def test_clear_removes_everything(cache: TuningCache) -> None:
    cache.store(KEY, RECIPES)
    cache.store("cd" * 32, RECIPES)
    (cache.folder / f"onnx_ops-{'0' * 32}.so").write_text("our operators, which are kept here, too")
    assert cache_folder.clear(cache.folder) == 3
    assert kept_files(cache.folder) == list(cache.folder.iterdir()) == []


def test_the_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    assert default_cache() == TuningCache(tmp_path)
    monkeypatch.setenv("AMPOPT_CACHE", "")
    assert default_cache() is None
    monkeypatch.delenv("AMPOPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == TuningCache(tmp_path / "xdg" / "ampopt" / "tuning")


def test_the_key_is_of_structure_shapes_and_options_but_not_of_values() -> None:
    own = key_of(program(), WISHES)
    other_values = network()
    with torch.no_grad():
        next(other_values.parameters()).mul_(2)
    assert key_of(program(other_values), WISHES) == own
    different = [
        key_of(program(network(5)), WISHES),
        key_of(program(x=torch.randn(2, 3, 8, 8)), WISHES),
        key_of(program(x=X[..., :7]), WISHES),
        key_of(program(), {**WISHES, "precision": "amp"}),
        key_of(program(with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))), WISHES),
    ]
    assert len({own, *different}) == len(different) + 1


def test_other_libraries_devices_or_code_are_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    made, own = program(), key_of(program(), WISHES)
    for name, value in (
        ("environment", lambda device: {"torch": "1.0"}),
        ("library_versions", lambda: ["triton 1.0"]),
        ("own_code", lambda: "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"ampopt.system.environment.{name}", value)
            assert key_of(made, WISHES) != own
    assert key_of(made, WISHES) == own


def optimized(**options: Any) -> ampopt.OptimizedModule:
    torch.manual_seed(0)
    fast = ampopt.optimize(
        network(64).eval(), torch.randn(1, 3, 64, 64), exclude=NO_ENGINES, progress=False, **options
    )
    assert isinstance(fast, ampopt.OptimizedModule)
    return fast


def still(ratio: float) -> Callable[..., Gain]:
    """Stands for the comparison of what a cache holds: so many times as fast as eager."""
    return lambda before, after: Gain(ratio, ratio, ratio)


@pytest.mark.usefixtures("quick")
def test_a_second_call_takes_up_what_the_first_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    first = optimized(precision="fp32", budget_s=40)
    assert len(list(tmp_path.glob("*.json"))) == 1
    tried = len(first.report.entries)
    monkeypatch.setattr("ampopt.search.optimizer.gain", still(2.0))
    second = optimized(precision="fp32", budget_s=40)
    assert any("tuned by an earlier call" in note for note in second.report.notes)
    assert second.program.recipe == first.program.recipe
    assert len(second.report.entries) <= 1 < tried
    assert second.report.verified
    x = torch.randn(1, 3, 64, 64)
    assert torch.allclose(first(x), second(x), atol=1e-4)
    without = optimized(precision="fp32", budget_s=40, cache=False)
    assert not any("earlier call" in note for note in without.report.notes)


@pytest.mark.usefixtures("quick")
def test_what_is_slower_than_eager_by_now_is_tuned_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    optimized(precision="fp32", budget_s=40)
    monkeypatch.setattr("ampopt.search.optimizer.gain", still(0.5))
    second = optimized(precision="fp32", budget_s=40)
    assert any("tuned anew" in note for note in second.report.notes)
    assert len(second.report.entries) > 1


@pytest.mark.usefixtures("quick")
def test_a_recipe_that_does_not_apply_is_left_and_everything_tried_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    optimized(precision="fp32", budget_s=40)
    (file,) = tmp_path.glob("*.json")
    cache, key = TuningCache(tmp_path), file.stem
    cache.store(key, {"fp32": (ampopt.passes.MergeLinearChain(), FoldConvBn())})
    fast = optimized(precision="fp32", budget_s=40)
    assert any("tuned anew" in note for note in fast.report.notes)
    assert fast.report.verified
    found = json.loads(file.read_text())["facts"]["lanes"]["fp32"]
    assert "merge-linear-chain" not in [step["pass"] for step in found]


@pytest.mark.usefixtures("quick")
def test_what_is_found_of_a_diverged_model_is_not_kept_for_a_sound_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass can be verified on it, and the key is not of weights: the sound one would get the original."""
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    torch.manual_seed(0)
    diverged, x = network(64).eval(), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for weight in diverged.parameters():
            weight.mul_(1e30)
    fast = ampopt.optimize(diverged, x, exclude=NO_ENGINES, precision="fp32", budget_s=20, progress=False)
    assert fast.report.chosen == "original"
    assert not list(tmp_path.glob("*.json"))
    optimized(precision="fp32", budget_s=40)
    (file,) = tmp_path.glob("*.json")
    sound = file.read_text()
    ampopt.optimize(diverged, x, exclude=NO_ENGINES, precision="fp32", budget_s=20, progress=False)
    assert file.read_text() == sound


def test_a_pipeline_with_another_pass_is_another_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a pass that the user adds would never be tried on a model that was tuned without it."""
    made, options = program(), Options()
    own = key_of(made, options.cache_facts())
    assert key_of(made, Options().cache_facts()) == own
    assert key_of(made, Options(exclude=("compile",)).cache_facts()) != own
    assert key_of(made, Options(policy="O1").cache_facts()) != own
    assert key_of(made, Options(outputs="static").cache_facts()) == own
    monkeypatch.setattr("ampopt.search.options.PIPELINE", ampopt.PIPELINE.after("compile", _MyOwn()))
    assert key_of(made, options.cache_facts()) != own
