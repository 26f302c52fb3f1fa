"""onnx-runtime: ONNX Runtime runs the program."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ampopt
from ampopt.deploy.recipe_file import read_recipe, write_recipe
from ampopt.engines.onnx_program import plain_model
from ampopt.errors import AmpoptError
from ampopt.ir.graph import copy_of
from ampopt.ir.lanes import FP32
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass, Result, replay
from ampopt.measure.sampling import Gain, interleave
from ampopt.ort.tuning import tune
from ampopt.passes import BakeAutocast, ChannelsLast, FoldConvBn, OnnxRuntime, onnx_runtime
from tests.helpers import BF16, Model, Unpooling, apply_to_untouched, check_outputs, program_of, several_kinds

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def quick(exports_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sweep of the options and of the rewrites finds does not matter here."""
    monkeypatch.setattr(onnx_runtime, "TUNING_S", 0.05)
    monkeypatch.setattr(onnx_runtime, "interleave", lambda calls, seconds: interleave(calls, seconds=0.05))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one output": (several_kinds, (2, 3, 10, 10)),
    "several outputs": (
        lambda: Model(lambda m, x: (m.a(x).relu(), {"max": x.max(1), "mask": x > 0}), a=nn.Linear(4, 4)),
        (3, 4),
    ),
    "an output that is an input": (lambda: Model(lambda m, x: (x, m.a(x)), a=nn.Linear(4, 4)), (3, 4)),
    "an output without dimensions": (lambda: Model(lambda m, x: m.a(x).sum(), a=nn.Linear(4, 4)), (3, 4)),
    "unpooling": (Unpooling, (1, 3, 8, 8)),
    "attention": (lambda: Model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2)), (3, 2, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_computes_what_the_model_does(name: str) -> None:
    build, shape = MODELS[name]
    model, x = build().eval(), torch.randn(shape)
    program = program_of(model, x)
    result = apply_to_untouched(OnnxRuntime(), program)
    assert result.rewrites == 1
    assert result.program.graph is program.graph
    assert result.program.engine is not None
    check_outputs(OnnxRuntime.numerics, program, result.program, model, [x], FP32)


@pytest.mark.parametrize("before", [(FoldConvBn(), ChannelsLast()), (FoldConvBn(),)])
def test_it_runs_rewritten_programs(before: tuple[Pass, ...]) -> None:
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program = program_of(model, x, on_top_of=before)
    check_outputs(OnnxRuntime.numerics, program, OnnxRuntime().apply(program).program, model, [x], FP32)


def test_integers_stay_integers() -> None:
    model = Model(lambda m, x: (m.table(x), x + 1), table=nn.Embedding(7, 4)).eval()
    ids = torch.tensor([[1, 6, 0], [2, 2, 5]])
    program = program_of(model, ids)
    _, plus = (done := OnnxRuntime().apply(program).program).run(ids)
    assert torch.equal(plus, ids + 1)
    assert plus.dtype is torch.int64
    check_outputs(OnnxRuntime.numerics, program, done, model, [ids], FP32)


def test_results_are_the_callers_own() -> None:
    program = OnnxRuntime().apply(program_of(several_kinds(), torch.randn(2, 3, 10, 10))).program
    x = torch.randn(2, 3, 10, 10)
    (first,) = program.run(x)
    kept = first.clone()
    (second,) = program.run(torch.randn(2, 3, 10, 10))
    second.zero_()
    assert torch.equal(first, kept)
    assert torch.equal(program.run(x)[0], kept)


def test_its_replay_has_the_options_and_is_right_for_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, elsewhere = several_kinds(), torch.randn(2, 3, 10, 10), torch.randn(1, 3, 12, 8)
    step = OnnxRuntime().apply(program_of(model, x)).replay
    assert isinstance(step, OnnxRuntime)
    assert step.session is not None
    assert dict(step.session)["provider"].endswith('ExecutionProvider"')

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a replay measures nothing")

    monkeypatch.setattr(onnx_runtime, "tune", refuse)
    there = program_of(model, elsewhere)
    replayed = replay(read_recipe(json.loads(json.dumps(write_recipe((step,))))), there)
    assert replayed.recipe == (step,)
    check_outputs(OnnxRuntime.numerics, there, replayed, model, [elsewhere], FP32)


def test_a_second_apply_does_nothing() -> None:
    once = OnnxRuntime().apply(program_of(several_kinds(), torch.randn(2, 3, 10, 10))).program
    assert apply_to_untouched(OnnxRuntime(), once).rewrites == 0


def test_what_it_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, step = torch.randn(2, 3, 10, 10), OnnxRuntime()
    low = program_of(several_kinds(), x, lane=BF16)
    assert step.why_not(low) == "it still runs under autocast"
    assert "computes in float32" in str(step.why_not(BakeAutocast().apply(low).program))
    program = program_of(several_kinds(), x)
    module = copy_of(program.graph)
    next(
        iter(module.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default))
    ).target = torch.ops.mkldnn._convolution_pointwise.default
    assert "ONNX does not know mkldnn" in str(step.why_not(program.with_graph(module)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else object())
    assert step.why_not(program) == "onnxscript is not installed: run  pip install 'ampopt[onnx]'"


def test_what_onnx_cannot_express_fails_with_its_name() -> None:
    model = Model(lambda m, x: torch.linalg.eigvals(m.a(x)).abs(), a=nn.Linear(4, 4)).eval()
    with pytest.raises(AmpoptError, match="eig"):
        OnnxRuntime().apply(program_of(model, torch.randn(4, 4)))


class _OtherWeights(OnnxRuntime):
    """An engine made from weights that are a little off."""

    def apply(self, program: Program) -> Result:
        module = copy.deepcopy(program.graph)
        for weight in module.buffers():
            weight.mul_(1 + 1e-4)
        result = super().apply(program.with_graph(module))
        return Result(program.replace(engine=result.program.engine), result.rewrites)


def test_the_check_catches_an_engine_with_other_weights() -> None:
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program = program_of(model, x)
    with pytest.raises(AssertionError, match="the error is"):
        check_outputs(OnnxRuntime.numerics, program, _OtherWeights().apply(program).program, model, [x], FP32)


@pytest.mark.slow
def test_an_optimized_model_that_runs_in_it_is_copied_saved_and_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    monkeypatch.setattr(onnx_runtime, "TUNING_S", 1.0)
    monkeypatch.setattr("ampopt.search.trial_timer.gain", lambda before, after: Gain(2.0, 1.9, 2.1))
    fast = ampopt.optimize(model, x, precision="fp32", passes=(OnnxRuntime(),), budget_s=60, progress=False)
    assert isinstance(fast, ampopt.OptimizedModule)
    assert [step.name for step in fast.program.recipe] == ["onnx-runtime"]
    with torch.no_grad():
        expected, found = model(x), fast(x)
        assert torch.allclose(found, expected, atol=1e-4)
        assert torch.equal(copy.deepcopy(fast)(x), found)
        fast.save(tmp_path / "robot.ampopt", tune_s=0.1)
        assert torch.allclose(ampopt.load(tmp_path / "robot.ampopt")(x), expected, atol=1e-4)


def test_hurried_it_runs_with_default_options_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_runtime, "tune", lambda *_, **__: pytest.fail("measured"))
    model, x = several_kinds(), torch.randn(2, 3, 10, 10)
    program, step = program_of(model, x), OnnxRuntime().hurried()
    assert step.expected_seconds(program) < OnnxRuntime().expected_seconds(program) / 2
    result = step.apply(program)
    check_outputs(OnnxRuntime.numerics, program, result.program, model, [x], FP32)
    assert any("default options" in hint for hint in result.hints)
    (again,) = read_recipe(write_recipe((result.replay or step,)))
    assert isinstance(again, OnnxRuntime)
    assert again == result.replay
    assert again.hurried() == again


def test_what_does_not_fit_into_the_time_that_is_left_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An export may take longer than was expected of it."""
    clock, model, x = [0.0], several_kinds(), torch.randn(2, 3, 10, 10)

    def slowly(*given: Any) -> bytes:
        clock[0] += 40.0
        return plain_model(*given)

    def quickly(*given: Any, **how: Any) -> Any:
        clock[0] += how["seconds"]
        return tune(*given, **{**how, "seconds": 0.1})

    monkeypatch.setattr(onnx_runtime, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(onnx_runtime, "plain_model", slowly)
    monkeypatch.setattr(onnx_runtime, "tune", quickly)
    program = program_of(model, x)
    for seconds, measures, tells in ((40.0, False, "default options"), (42.0, True, "not all rewrites")):
        before = clock[0]
        result = OnnxRuntime().within(seconds).apply(program)
        assert (clock[0] - before > 40.0) == measures
        assert any(tells in hint for hint in result.hints)
        check_outputs(OnnxRuntime.numerics, program, result.program, model, [x], FP32)
        assert result.replay == OnnxRuntime(session=result.replay.session)  # type: ignore[union-attr]
    ready = OnnxRuntime(session=())
    assert ready.within(1.0) is ready
