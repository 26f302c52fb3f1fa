"""State in attributes, lists and dicts is kept as that in buffers is, call after call.

Each model here is first captured and served with no pass that is timed; a few go through `optimize`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ampopt
from ampopt.ir.model_copy import private_copy
from tests.helpers import BF16
from tests.support.keeping import SIZE, Keeping, check, check_calls, inputs, served
from tests.support.planted import optimize
from tests.support.ways_to_keep import (
    FIRST_CALLS,
    FROM_THE_START,
    filling,
    gru,
    in_a_deque,
    in_place,
    lazy,
    lazy_by_shape,
    nested,
    of_the_input,
    popped,
    returned,
    returned_in_place,
    sliced,
)


@pytest.mark.parametrize("function", FROM_THE_START)
def test_ten_calls_and_ten_after_a_reset_are_the_originals(function: Any) -> None:
    model = Keeping(function).eval()
    with torch.no_grad():
        model(inputs(1, seed=9)[0])  # the state that is taken over is not the initial one
    fast = served(model)
    assert fast._optimized.captured.lifted is not None
    assert fast._optimized.captured.lifted.from_start
    for seed in range(2):
        check_calls(fast, copy.deepcopy(model), inputs(10, seed=seed))
        fast.reset_state()
    assert fast.health.is_good


@pytest.mark.parametrize(("function", "calls"), FIRST_CALLS.items())
def test_a_state_that_first_calls_make_is_the_originals_until_then(function: Any, calls: int) -> None:
    model = Keeping(function).eval()
    fast = served(model)
    fast.strict = True
    for seed in range(2):
        check_calls(fast, copy.deepcopy(model), inputs(10, seed=seed))
        assert fast.health.served_by_original == calls * (seed + 1)
        fast.reset_state()
    assert fast.health.reasons == {"its state has no structure yet that a program takes": 2 * calls}


@pytest.mark.parametrize("function", [gru, popped, nested, lazy, filling])
def test_the_low_precision_lane_keeps_such_a_state_too(function: Any) -> None:
    model = Keeping(function).eval()
    check_calls(served(model, BF16), copy.deepcopy(model), inputs(10), 0.05)


@pytest.mark.parametrize("answered", ["by programs", "by the original"])
def test_shapes_share_a_state_of_fixed_shape(answered: str) -> None:
    def function(m: Any, x: Tensor, y: Tensor) -> Any:
        m.memory["deep"]["more"] = (m.memory["deep"]["more"][0] * 0.5 + y.mean(0),)
        return y + m.memory["deep"]["more"][0][:1]

    model = Keeping(function).eval()
    fast, twin = served(model), copy.deepcopy(model)
    if answered == "by programs":
        fast.prepare((5, SIZE))
    else:
        fast._new.max_captures = 0
    for x, y in zip(inputs(6), inputs(6, rows=5), strict=True):
        check_calls(fast, twin, [x, y])
    assert fast.health.served_by_original == (0 if answered == "by programs" else 6)


def test_a_state_that_follows_the_inputs_shape_is_made_anew_by_the_original() -> None:
    model = Keeping(lazy_by_shape).eval()
    fast, twin = served(model), copy.deepcopy(model)
    fast.prepare((5, SIZE))
    check_calls(fast, twin, [*inputs(3), *inputs(4, rows=5), *inputs(4), *inputs(2, rows=5)])
    assert fast.health.served_by_original == 4  # the first call, and each after a change of shape
    fast.reset_state()
    check_calls(fast, copy.deepcopy(model), [*inputs(2, rows=5), *inputs(2)])


@pytest.mark.parametrize("function", [sliced, nested, lazy, in_place])
def test_optimize_serves_such_a_state_and_no_work_of_it_advances_the_state(
    function: Any, quick: None
) -> None:
    model = Keeping(function).eval()
    before = copy.deepcopy(vars(model)["frames"]), model.lazy
    fast = optimize(model, inputs(1)[0], precision="fp32", budget_s=1.5)
    assert isinstance(fast, ampopt.OptimizedModule)
    assert all(map(torch.equal, model.frames, before[0]))
    assert model.lazy is before[1]
    fast.prepare((2, SIZE))
    for seed in range(2):
        check_calls(fast, copy.deepcopy(model), inputs(10, seed=seed))
        fast.reset_state()


@pytest.mark.parametrize("function", [in_a_deque, nested, lazy, filling])
@pytest.mark.parametrize("calls", [0, 1, 6])
def test_a_copy_goes_on_from_where_the_module_stands_and_alone(function: Any, calls: int) -> None:
    model = Keeping(function).eval()
    fast, twin = served(model), copy.deepcopy(model)
    check_calls(fast, twin, inputs(calls))
    other, second = copy.deepcopy(fast), copy.deepcopy(twin)
    check_calls(fast, twin, inputs(3, seed=5))
    check_calls(other, second, inputs(6, seed=6))
    check_calls(fast, twin, inputs(3, seed=7))
    other.reset_state()
    check_calls(other, copy.deepcopy(model), inputs(3, seed=8))


@pytest.mark.parametrize("function", [returned, returned_in_place, of_the_input])
def test_what_a_caller_writes_to_inputs_and_results_does_not_reach_the_state(function: Any) -> None:
    model = Keeping(function).eval()
    fast, twin, kept = served(model), copy.deepcopy(model), list[Tensor]()
    for number, x in enumerate(inputs(10)):
        given = x.clone()
        result = fast(given)
        with torch.no_grad():
            check(result, expected := pytree.tree_map(torch.clone, twin(x)))
        if number % 2:
            given.zero_()
            pytree.tree_map(torch.zero_, result)
        else:
            kept += [*pytree.tree_leaves(result), *pytree.tree_leaves(expected)]
    for ours, theirs in zip(kept[::2], kept[1::2], strict=True):
        if function is not returned_in_place:
            check(ours, theirs)


def test_a_returned_state_stays_as_it_was_returned() -> None:
    fast = served(Keeping(returned_in_place).eval())
    first = fast(inputs(1)[0])[0]
    before = first.clone()
    fast(inputs(1)[0])
    assert torch.equal(first, before)


@pytest.mark.parametrize("function", [gru, sliced, lazy, in_place])
def test_calls_in_inference_mode_and_under_autocast_advance_such_a_state_like_any_other(
    function: Any,
) -> None:
    model = Keeping(function).eval()
    fast, twin = served(model), copy.deepcopy(model)
    for number, x in enumerate(inputs(9)):
        with (
            torch.inference_mode(mode=number % 3 == 0),
            torch.no_grad(),
            torch.autocast("cpu", torch.bfloat16, enabled=number % 3 == 2),
        ):
            ours = fast(x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=number % 3 == 2):
            check(ours.float(), twin(x).float(), 0.02)


def test_a_call_that_fails_does_not_change_the_state() -> None:
    model = Keeping(gru).eval()
    fast, twin = served(model), copy.deepcopy(model)
    check_calls(fast, twin, inputs(2))
    with pytest.raises(RuntimeError):
        fast(torch.ones(3, SIZE))  # the hidden state has two rows
    check_calls(fast, twin, inputs(2, seed=4))


def test_an_onnx_file_takes_and_returns_such_a_state(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = Keeping(nested).eval()
    fast, twin = served(model), copy.deepcopy(model)
    report = fast.export_onnx(tmp_path / "m.onnx")
    assert report.inputs == ("x", "memory_h", "memory_deep_more_0")
    assert report.output_names == ("output", "memory_h_next", "memory_deep_more_0_next")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    state = [model.memory["h"].numpy(), model.memory["deep"]["more"][0].numpy()]
    for x in inputs(10):
        given = dict(zip(report.inputs, [x.numpy(), *state], strict=True))
        out, *state = session.run(None, given)
        with torch.no_grad():
            check(torch.from_numpy(out), twin(x), 1e-4)


def test_the_users_model_goes_on_alone() -> None:
    model = private_copy(Keeping(popped))
    fast, twin = served(model), copy.deepcopy(model)
    check_calls(model, copy.deepcopy(twin), inputs(4, seed=1))
    check_calls(fast, twin, inputs(4))
