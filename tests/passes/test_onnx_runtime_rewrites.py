"""onnx-runtime: ONNX Runtime's own graph is rewritten where that is faster, and stays where it fails."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ampopt.deploy.recipe_file import read_recipe, write_recipe
from ampopt.engines.onnx_program import plain_model
from ampopt.errors import BundleError
from ampopt.ir.lanes import FP32
from ampopt.measure.sampling import Gain
from ampopt.ort import groups as onnx_groups
from ampopt.ort import own_convolutions
from ampopt.ort import rewrites as onnx_rewrites
from ampopt.ort.blocked import keep_blocked
from ampopt.ort.options import SessionOptions
from ampopt.ort.own_operators import own_library
from ampopt.ort.rewrites import Rewrites, Step
from ampopt.passes import OnnxRuntime, onnx_runtime
from ampopt.system import native
from tests.helpers import Model, Unpooling, check_outputs, program_of
from tests.support.compiler import needs_compiler

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.usefixtures("exports_kept")


def squeeze_and_excite() -> nn.Module:
    """What `keep_blocked` has something to do with."""
    torch.manual_seed(0)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.first(x).relu()
        return m.last(y * m.up(m.down(y.mean((2, 3), keepdim=True)).relu()).sigmoid())  # type: ignore[no-any-return]

    conv = nn.Conv2d
    return Model(
        forward, first=conv(3, 32, 3), down=conv(32, 16, 1), up=conv(16, 32, 1), last=conv(32, 16, 1)
    )


LOOKS = [
    (1.05, 1.15, False, True),
    (0.95, 1.1, False, False),
    (0.95, 1.1, True, True),
    (0.8, 0.9, True, False),
]
"""A gain's interval, whether the nodes were measured, and whether the engine is taken."""


@pytest.fixture
def default_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a short sweep takes for the best options is chance, and other graphs have no blocks."""
    found = SimpleNamespace(best=SessionOptions())
    monkeypatch.setattr(onnx_runtime, "tune", lambda *_, **__: found)


def blocked(step: object) -> bool:
    assert isinstance(step, OnnxRuntime)
    assert step.session is not None
    return bool(json.loads(dict(step.session)["blocked"]))


@pytest.mark.usefixtures("default_options")
def test_nothing_that_spreads_nan_is_tried_where_that_may_be_taken_for_a_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[tuple[str, Rewrites]]()

    def step(name: str) -> Step:
        return lambda _model, _options, _arrays, before: asked.append((name, before))

    monkeypatch.setattr(onnx_runtime, "STEPS", [step("spreads"), step("exact")])
    monkeypatch.setattr(onnx_runtime, "EXACT", [step("exact")])
    for model, exact in ((squeeze_and_excite(), False), (Unpooling().eval(), True)):
        asked.clear()
        result = OnnxRuntime().apply(program_of(model, torch.randn(1, 3, 12, 12)))
        names = ["exact"] if exact else ["spreads", "exact"]
        assert asked == [(name, Rewrites(exact=exact)) for name in names]
        told = [hint for hint in result.hints if "no rewrites that spread NaN" in hint and "(pool, " in hint]
        assert len(told) == exact


@pytest.mark.usefixtures("default_options")
def test_where_nothing_was_rewritten_a_replay_rewrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_runtime, "EXACT", [])
    program = program_of(Unpooling().eval(), torch.randn(1, 3, 12, 12))
    replay = OnnxRuntime().apply(program).replay
    monkeypatch.setattr(onnx_runtime, "rewritten", lambda *_: pytest.fail("rewritten"))
    assert replay is not None
    assert replay.apply(program).hints == ()


@pytest.mark.usefixtures("default_options")
@pytest.mark.parametrize("faster", [True, False])
def test_fewer_reorderings_are_kept_where_they_are_faster_and_in_replays(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_runtime, "_is_faster", lambda *_: faster)
    monkeypatch.setattr(onnx_runtime, "STEPS", (onnx_rewrites.blocked,))
    model, x = squeeze_and_excite(), torch.randn(1, 3, 12, 12)
    program = program_of(model, x)
    result = OnnxRuntime().apply(program)
    check_outputs(OnnxRuntime.numerics, program, result.program, model, [x], FP32)
    assert blocked(result.replay) == faster
    monkeypatch.setattr(onnx_runtime, "_is_faster", lambda *_: pytest.fail("a replay measures nothing"))
    asked: list[object] = []

    def keep(*given: Any) -> bytes | None:
        asked.append(given)
        return keep_blocked(*given)

    monkeypatch.setattr(onnx_rewrites, "keep_blocked", keep)
    again = result.replay
    assert again is not None
    there = program_of(model, torch.randn(1, 3, 16, 10))
    replayed = again.apply(there)
    assert bool(asked) == faster
    assert blocked(replayed.replay) == faster
    check_outputs(OnnxRuntime.numerics, there, replayed.program, model, list(there.examples), FP32)


@pytest.mark.usefixtures("default_options")
@pytest.mark.parametrize("failing", ["it raises", "it is wrong", "it does not load"])
def test_reorderings_stay_where_doing_without_them_fails(
    failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ampopt")
    model, x = squeeze_and_excite(), torch.randn(1, 3, 12, 12)
    program = program_of(model, x)
    mean = program_of(Model(lambda m, x: x.mean() * x, a=nn.Linear(1, 1)), x)
    other = plain_model(mean.graph, (x,))

    def keep(*_: object) -> bytes:
        if failing == "it raises":
            raise ValueError("planted")
        return other if failing == "it is wrong" else b"no model"

    monkeypatch.setattr(onnx_rewrites, "keep_blocked", keep)
    result = OnnxRuntime().apply(program)
    assert not blocked(result.replay)
    assert "graph stays as it was" in caplog.text
    assert any("graph stays as it was" in hint for hint in result.hints)
    check_outputs(OnnxRuntime.numerics, program, result.program, model, [x], FP32)


@pytest.mark.usefixtures("default_options")
def test_options_written_before_there_were_blocks_are_read() -> None:
    model, x = squeeze_and_excite(), torch.randn(1, 3, 12, 12)
    step = OnnxRuntime().apply(program_of(model, x)).replay
    assert isinstance(step, OnnxRuntime)
    assert step.session is not None
    others = [pair for pair in step.session if pair[0] not in ("blocked", "winograd", "winograd4")]
    older = OnnxRuntime(session=tuple(others))
    assert not blocked(older.apply(program_of(model, x)).replay)


def plain_convolutions() -> nn.Module:
    """What Winograd's algorithm has something to do with."""
    torch.manual_seed(0)
    conv = nn.Conv2d
    return nn.Sequential(conv(3, 16, 3), conv(16, 32, 3, padding=1), nn.ReLU(), conv(32, 16, 3)).eval()


@pytest.fixture
def winograd_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 2.0, 1.0])  # directly, with tiles of 2, of 4

    def seconds(*_: object, **__: object) -> dict[str, float]:
        time = next(times)
        return defaultdict(lambda: time)

    monkeypatch.setattr(onnx_runtime, "_is_faster", lambda *_: True)
    monkeypatch.setattr(own_convolutions, "node_seconds", seconds)


def changed_convolutions(step: object) -> list[str]:
    assert isinstance(step, OnnxRuntime)
    session = dict(step.session or ())
    assert json.loads(session["winograd"]) == []
    return list(json.loads(session["winograd4"]))


@needs_compiler
@pytest.mark.usefixtures("default_options", "winograd_is_faster")
def test_convolutions_by_winograd_are_kept_in_replays_and_in_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = plain_convolutions(), torch.randn(1, 3, 12, 12)
    program = program_of(model, x)
    result = OnnxRuntime().apply(program)
    assert len(changed_convolutions(result.replay)) == 2
    check_outputs(OnnxRuntime.numerics, program, result.program, model, [x], FP32)
    assert result.replay is not None
    (again,) = read_recipe(write_recipe((result.replay,)))
    there = program_of(model, torch.randn(1, 3, 16, 10))
    loaded: list[Path] = []

    def library() -> Path:
        loaded.append(own_library())
        return loaded[-1]

    monkeypatch.setattr(onnx_rewrites, "own_library", library)
    replayed = again.apply(there)
    assert loaded
    check_outputs(OnnxRuntime.numerics, there, replayed.program, model, list(there.examples), FP32)


@pytest.mark.usefixtures("default_options", "winograd_is_faster")
def test_without_a_compiler_the_graph_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ampopt")
    monkeypatch.setattr(native, "COMPILERS", ())
    monkeypatch.delenv("CXX", raising=False)
    model, x = plain_convolutions(), torch.randn(1, 3, 12, 12)
    program = program_of(model, x)
    result = OnnxRuntime().apply(program)
    assert changed_convolutions(result.replay) == []
    assert "there is no C++ compiler" in caplog.text
    assert any("there is no C++ compiler" in hint for hint in result.hints)
    check_outputs(OnnxRuntime.numerics, program, result.program, model, [x], FP32)
    assert isinstance(result.replay, OnnxRuntime)
    other = {**dict(result.replay.session or ()), "winograd": '["conv2d_1"]'}
    replayed = OnnxRuntime(session=tuple(other.items())).apply(program)
    check_outputs(OnnxRuntime.numerics, program, replayed.program, model, [x], FP32)


@pytest.mark.parametrize("value", ["3", '"conv"', "[1]", "null"])
def test_what_a_file_says_of_the_graph_is_checked(value: str) -> None:
    program = program_of(plain_convolutions(), torch.randn(1, 3, 12, 12))
    for field in ("winograd", "winograd4"):
        with pytest.raises(BundleError, match=f"{field} is a list of names"):
            OnnxRuntime(session=((field, value),)).apply(program)
    with pytest.raises(BundleError, match="blocked is true or false"):
        OnnxRuntime(session=(("blocked", value),)).apply(program)
    with pytest.raises(BundleError, match="merged is true or false"):
        OnnxRuntime(session=(("merged", value),)).apply(program)


@pytest.mark.usefixtures("default_options")
@pytest.mark.parametrize("faster", [True, False])
def test_narrow_groups_are_merged_where_that_is_faster_and_in_replays(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_groups, "block_size", lambda: 8)
    monkeypatch.setattr(onnx_rewrites, "is_quicker_merged", lambda *_: True)
    compared: list[object] = []

    def compare(*given: object) -> bool:
        compared.append(given[-1])
        return faster

    monkeypatch.setattr(onnx_runtime, "_is_faster", compare)
    monkeypatch.setattr(onnx_runtime, "STEPS", (onnx_rewrites.merged, onnx_rewrites.blocked))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(32, 32, 3, groups=8), nn.ReLU()), torch.randn(1, 32, 8, 8)
    program = program_of(model, x)
    result = OnnxRuntime().apply(program)
    check_outputs(OnnxRuntime.numerics, program, result.program, model, [x], FP32)
    assert compared[0] is True  # its nodes were measured
    assert stored(result.replay)["merged"] is faster
    monkeypatch.setattr(
        onnx_rewrites, "is_quicker_merged", lambda *_: pytest.fail("a replay measures nothing")
    )
    assert result.replay is not None
    there = program_of(model, torch.randn(2, 32, 6, 7))
    replayed = result.replay.apply(there)
    assert stored(replayed.replay)["merged"] is faster
    check_outputs(OnnxRuntime.numerics, there, replayed.program, model, list(there.examples), FP32)


def stored(step: object) -> dict[str, Any]:
    assert isinstance(step, OnnxRuntime)
    return {name: json.loads(value) for name, value in step.session or ()}


@pytest.mark.parametrize(("low", "high", "by_node", "taken"), LOOKS)
def test_what_was_measured_node_by_node_has_to_be_no_loss(
    low: float, high: float, by_node: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_runtime, "gain", lambda *_: Gain((low + high) / 2, low, high))
    monkeypatch.setattr(onnx_runtime, "COMPARING_S", 0.0)
    engine: Any = lambda *tensors: tensors  # noqa: E731
    assert onnx_runtime._is_faster(engine, engine, [torch.zeros(1)], by_node) is taken
