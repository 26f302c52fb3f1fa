"""The ways to run a contestant: the fastest that is right enters the race, at the border of its table."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks import ways
from benchmarks.ways import (
    CHANNELS_LAST,
    CONTIGUOUS,
    Border,
    Made,
    UnusableDeviceError,
    Ways,
    in_formats,
    make_all,
)

X = (torch.ones(1),)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "LOOK_S", 0.01)


def taking(seconds: float, result: float = 1.0, way: str = "") -> Callable[[], Made]:
    def call(x: Tensor) -> Tensor:
        time.sleep(seconds)
        return x * result

    return lambda: Made(call, X, way)


def failing(reason: str) -> Made:
    raise RuntimeError(f"{reason}\nand much more")


def error_of(found: object) -> float | None:
    assert isinstance(found, Tensor)
    return None if found.isnan().any() else float((found - 1).abs())


def test_the_fastest_way_is_kept_with_the_times_of_all() -> None:
    candidates = make_all(
        {
            "slow": taking(0.02),
            "fast": taking(0.0, way="option=1"),
            "none": functools.partial(failing, "no kernel"),
        }
    )
    name, made, tried = candidates.fastest(lambda: None)
    assert (name, made.way) == ("fast", "fast: option=1")
    assert tried["slow"] >= 20 > tried["fast"]
    assert tried["none"] == "RuntimeError: no kernel"


def test_waiting_for_the_device_decides_too() -> None:
    waits = {"queue": 0.0}

    def queueing(x: Tensor) -> None:
        waits["queue"] = 0.02

    def synchronize() -> None:
        time.sleep(waits["queue"])
        waits["queue"] = 0.0

    candidates = make_all({"returns at once": lambda: Made(queueing, X), "is done": taking(0.005)})
    assert candidates.fastest(synchronize)[0] == "is done"


def test_wrong_results_do_not_win() -> None:
    candidates = make_all(
        {
            "right": taking(0.02),
            "rounded": taking(0.015, 1.005),
            "nan": taking(0.0, float("nan")),
            "off": taking(0, 2),
        }
    )
    candidates.drop_wrong(error_of)
    name, _, tried = candidates.fastest(lambda: None)
    assert name == "rounded"
    assert tried["nan"] == "wrong results"
    assert tried["off"] == "error 1.0e+00"


def test_where_all_are_wrong_one_runs_and_shows_it() -> None:
    candidates = make_all({"nan": taking(0.0, float("nan")), "nan too": taking(0.01, float("nan"))})
    candidates.drop_wrong(error_of)
    assert candidates.fastest(lambda: None)[0] == "nan"


def test_where_no_way_is_made_the_reasons_are_said() -> None:
    candidates = make_all({name: functools.partial(failing, name) for name in ("a", "b")})
    with pytest.raises(RuntimeError, match="RuntimeError: a; RuntimeError: b"):
        candidates.fastest(lambda: None)


def test_a_way_that_takes_the_device_with_it_is_told_from_one_that_fails() -> None:
    device = {"works": True}

    def poison() -> Made:
        device["works"] = False
        return failing("device-side assert")

    def look() -> None:
        if not device["works"]:
            raise RuntimeError("nothing runs any more")

    ways: Ways = {
        "first": taking(0.0),
        "none": functools.partial(failing, "no kernel"),
        "second": taking(0.0),
    }
    with pytest.raises(UnusableDeviceError, match="bad: RuntimeError: device-side assert") as lost:
        make_all({**ways, "bad": poison, "after": taking(0.0)}, look)
    assert lost.value.place == 3
    device["works"] = True
    assert list(make_all(ways, look).made) == ["first", "second"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


IMAGE = (torch.randn(1, 3, 8, 8), torch.arange(3))


@pytest.mark.parametrize(
    ("io", "given", "results"), [("fp32", torch.float32, torch.float32), ("lane", torch.half, torch.half)]
)
def test_a_border_says_what_goes_in_and_comes_out(io: str, given: torch.dtype, results: torch.dtype) -> None:
    border, model = Border(io, torch.half), net()
    image, index = border.given(IMAGE, channels_last=True)
    assert (image.dtype, index.dtype) == (given, torch.int64)
    assert image.is_contiguous(memory_format=torch.channels_last) == (io == "lane")
    inside = border.model(model, channels_last=True)
    with torch.no_grad():
        found, expected = inside(image), model(IMAGE[0])
    assert isinstance(found, Tensor)
    assert found.dtype is results
    assert 0 < (found.float() - expected).norm() < 1e-2 * expected.norm()
    assert model[0].weight.dtype is torch.float32, "the model itself stays as it is"


def test_a_runner_sees_the_model_and_the_inputs_in_every_format() -> None:
    seen: dict[str, tuple[bool, bool]] = {}

    def runner(name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[..., object]:
        weight = next(model.parameters())
        seen[name] = (
            weight.is_contiguous(memory_format=torch.channels_last),
            inputs[0].is_contiguous(memory_format=torch.channels_last),
        )
        return model

    for memory_format in (CONTIGUOUS, CHANNELS_LAST):
        made = in_formats(
            {"as": functools.partial(runner, memory_format)},
            net(),
            IMAGE[:1],
            Border("lane", torch.half),
            [memory_format],
        )
        assert list(make_all(made).made) == [f"as, {memory_format}"]
    assert seen == {CONTIGUOUS: (False, False), CHANNELS_LAST: (True, True)}
