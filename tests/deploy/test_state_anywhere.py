"""State in attributes, lists and dicts is kept as that in buffers is, call after call.

Each model here is first captured and served with no pass that is timed; a few go through `optimize`.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ampopt
from ampopt.deploy.kinds_of_calls import MOST_REFUSED
from ampopt.errors import CaptureError, ExportError
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import private_copy
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger
from tests.helpers import BF16
from tests.support.planted import captured_of, optimize

SIZE = 6


def inputs(count: int, rows: int = 2, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, SIZE, generator=generator) for _ in range(count)]


class Pair(NamedTuple):
    h: Tensor
    c: Tensor


class Keeping(nn.Module):
    """A linear layer and a recurrent cell, and a function with many places to remember tensors in."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.cell = nn.Linear(SIZE, SIZE), nn.GRUCell(SIZE, SIZE)
        self.lstm = nn.LSTMCell(SIZE, SIZE)
        self.function = function
        zeros = [torch.zeros(2, SIZE) for _ in range(12)]
        self.h, self.last, self.frames = zeros[0], zeros[1], zeros[2:5]
        self.window = collections.deque(zeros[5:8], maxlen=3)
        self.memory: dict[str, Any] = {"h": zeros[8], "deep": {"more": (zeros[9],)}, "gain": 0.5}
        self.pair, self.tuple = Pair(torch.ones(2, SIZE), torch.zeros(2, SIZE)), (zeros[10], zeros[11])
        self.twice = [torch.zeros(2, SIZE)] * 3
        base = torch.zeros(2, 2, SIZE)
        self.slices, self.learnt = list(base.unbind()), torch.zeros(2, SIZE, requires_grad=True)
        self.scratch: Any = None
        self.lazy: Any = None
        self.cache: dict[str, Any] = {}
        self.queue: collections.deque[Tensor] = collections.deque(maxlen=4)
        self.started, self.count, self.history = False, 0, list[Tensor]()
        self.inner = nn.Module()
        self.inner.h = torch.zeros(2, SIZE)
        self.inner.register_buffer("seen", torch.zeros(2, SIZE))
        self.shared_list = [torch.zeros(2, SIZE)]
        vars(self.inner)["frames"] = self.shared_list
        self.aside = [Own()]

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x, self.layer(x))


class Own(nn.Module):
    """A module that its owner keeps in a list, where nobody finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(())


def served(model: nn.Module, lane: Lane = FP32, x: Tensor | None = None) -> ampopt.OptimizedModule:
    """The model captured and served, with no pass that is timed."""
    original, captured = captured_of(model, inputs(1)[0] if x is None else x)
    program, recipe = lane.start(captured.program), Recipe(lane, (), 0.05)
    return ampopt.OptimizedModule(original, captured, program, recipe, Ledger("model", {}, ()))


def check(ours: Any, theirs: Any, limit: float = 1e-5) -> None:
    """Assert that two results have the same structure, and values within a relative error."""
    mine, spec = pytree.tree_flatten(ours)
    yours, other = pytree.tree_flatten(theirs)
    assert spec == other
    for a, b in zip(mine, yours, strict=True):
        assert a.shape == b.shape
        assert a.dtype is b.dtype
        assert float((a - b).norm()) <= limit * max(float(b.norm()), 1e-3)


def check_calls(fast: Any, twin: nn.Module, calls: list[Tensor], limit: float = 1e-5) -> None:
    """Assert that each of these successive calls is the original's."""
    for x in calls:
        with torch.no_grad():
            expected = pytree.tree_map(torch.clone, twin(x.clone()))
        check(fast(x), expected, limit)


def _gru(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = m.cell(x, m.h)
    return y + m.h


def _in_place(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h.mul_(0.9).add_(y)
    return y + m.h


def _lstm(m: Any, x: Tensor, y: Tensor) -> Any:
    m.pair = Pair(*m.lstm(x, m.pair))
    return {"h": m.pair.h, "y": y}


def _tuple(m: Any, x: Tensor, y: Tensor) -> Any:
    m.tuple = (y + 0.5 * m.tuple[1], m.tuple[0])
    return m.tuple[0] - m.tuple[1]


def _slicing(m: Any, x: Tensor, y: Tensor) -> Any:
    m.frames = [*m.frames[1:], y]
    return torch.stack(m.frames).mean(0)


def _popping(m: Any, x: Tensor, y: Tensor) -> Any:
    m.frames.pop(0)
    m.frames.append(y)
    return torch.cat(m.frames)


def _deque(m: Any, x: Tensor, y: Tensor) -> Any:
    m.window.append(y)
    return torch.stack(list(m.window)).amax(0)


def _nested(m: Any, x: Tensor, y: Tensor) -> Any:
    m.memory["h"] = y + m.memory["gain"] * m.memory["h"]
    m.memory["deep"]["more"] = (m.memory["h"] * m.memory["deep"]["more"][0] + 1,)
    return m.memory["deep"]["more"][0]


def _swap(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h, m.last = m.last + y, m.h
    return m.h * 2


def _of_a_submodule(m: Any, x: Tensor, y: Tensor) -> Any:
    m.inner.h = m.inner.h * 0.9 + y
    m.inner.seen = m.inner.seen + m.inner.h
    return m.inner.seen + 1


def _scratch(m: Any, x: Tensor, y: Tensor) -> Any:
    m.scratch = y.relu()  # written and never read
    m.h = m.h + m.scratch
    return m.h + 1


def _returned(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = m.h + y
    return m.h


def _returned_in_place(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h.add_(y)
    return m.h, m.h[:1]


def _of_the_input(m: Any, x: Tensor, y: Tensor) -> Any:
    moved = x - m.last
    m.last = x
    return moved + y


def _view_of_the_input(m: Any, x: Tensor, y: Tensor) -> Any:
    before = m.frames[0]
    m.frames[0] = x[:, :1].expand(2, SIZE)
    return y + before


def _view_of_a_state(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = torch.cat([m.h, y], 1)[:, 2 : SIZE + 2]
    m.last = m.h[:, :1].expand(2, SIZE)
    return m.h + m.last


def _in_two_places(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = m.last = m.memory["h"] = m.h * 0.5 + y
    return m.h + m.last + m.memory["h"]


def _one_tensor_three_times(m: Any, x: Tensor, y: Tensor) -> Any:
    m.twice = [*m.twice[1:], y]
    return torch.stack(m.twice).sum(0)


def _one_tensor_three_times_in_place(m: Any, x: Tensor, y: Tensor) -> Any:
    m.twice[0].add_(1)  # at first this is all three
    m.twice = [*m.twice[1:], y.clone()]
    return torch.stack(m.twice).sum(0)


def _slices_of_one_base(m: Any, x: Tensor, y: Tensor) -> Any:
    m.slices = [m.slices[1] + y, m.slices[0]]
    return m.slices[0] - m.slices[1]


def _slices_written(m: Any, x: Tensor, y: Tensor) -> Any:
    m.slices[0].mul_(0.5).add_(y)
    m.slices[1].add_(1)
    return m.slices[0] + m.slices[1]


def _copies(m: Any, x: Tensor, y: Tensor) -> Any:
    kept, m.last = m.h.detach(), m.h.clone()
    m.h.add_(y)  # `kept` changes, and `m.last` does not
    return kept - m.last


def _requires_grad(m: Any, x: Tensor, y: Tensor) -> Any:
    m.learnt = m.learnt * 0.5 + y
    return m.learnt.exp()


def _integers(m: Any, x: Tensor, y: Tensor) -> Any:
    m.memory["h"] = m.memory["h"] + 1
    m.h = torch.where(m.memory["h"].long() % 3 == 0, y, m.h)
    return y + m.h


FROM_THE_START = [
    *(_gru, _in_place, _lstm, _tuple, _slicing, _popping, _deque, _nested, _swap, _of_a_submodule, _scratch),
    *(_returned, _returned_in_place, _of_the_input, _view_of_the_input, _view_of_a_state, _in_two_places),
    *(_one_tensor_three_times, _slices_of_one_base, _slices_written, _copies, _requires_grad, _integers),
]


def _lazy(m: Any, x: Tensor, y: Tensor) -> Any:
    if m.lazy is None:
        m.lazy = torch.zeros_like(x)
    m.lazy = m.lazy * 0.5 + y
    return m.lazy + 1


def _lazy_by_shape(m: Any, x: Tensor, y: Tensor) -> Any:
    if m.lazy is None or m.lazy.shape != x.shape:
        m.lazy = torch.zeros_like(x)
    m.lazy = m.cell(x, m.lazy)
    return m.lazy + y


def _lazy_in_a_dict(m: Any, x: Tensor, y: Tensor) -> Any:
    before = m.cache.get("h", y)
    m.cache["h"] = y
    return y - 0.5 * before


def _first_input(m: Any, x: Tensor, y: Tensor) -> Any:
    if m.lazy is None:
        m.lazy = x.mean(0)
    return y - m.lazy


def _flag(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = 0.5 * m.h + y if m.started else y
    m.started = True
    return m.h + 1


def _filling(m: Any, x: Tensor, y: Tensor) -> Any:
    m.queue.append(y)
    return torch.stack(list(m.queue)).mean(0)


def _two_steps(m: Any, x: Tensor, y: Tensor) -> Any:
    older, m.cache["older"] = m.cache.get("older"), m.lazy
    m.lazy = y
    return y if older is None else y - older


FIRST_CALLS = {
    _lazy: 1,
    _lazy_by_shape: 1,
    _lazy_in_a_dict: 1,
    _first_input: 1,
    _flag: 1,
    _filling: 4,
    _two_steps: 2,
    _one_tensor_three_times_in_place: 2,
}
"""Models whose first calls make the state, and the number of these calls."""


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


@pytest.mark.parametrize("function", [_gru, _popping, _nested, _lazy, _filling])
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
    model = Keeping(_lazy_by_shape).eval()
    fast, twin = served(model), copy.deepcopy(model)
    fast.prepare((5, SIZE))
    check_calls(fast, twin, [*inputs(3), *inputs(4, rows=5), *inputs(4), *inputs(2, rows=5)])
    assert fast.health.served_by_original == 4  # the first call, and each after a change of shape
    fast.reset_state()
    check_calls(fast, copy.deepcopy(model), [*inputs(2, rows=5), *inputs(2)])


@pytest.mark.parametrize("function", [_slicing, _nested, _lazy, _in_place])
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


@pytest.mark.parametrize("function", [_deque, _nested, _lazy, _filling])
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


@pytest.mark.parametrize("function", [_returned, _returned_in_place, _of_the_input])
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
        if function is not _returned_in_place:
            check(ours, theirs)


def test_a_returned_state_stays_as_it_was_returned() -> None:
    fast = served(Keeping(_returned_in_place).eval())
    first = fast(inputs(1)[0])[0]
    before = first.clone()
    fast(inputs(1)[0])
    assert torch.equal(first, before)


@pytest.mark.parametrize("function", [_gru, _slicing, _lazy, _in_place])
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
    model = Keeping(_gru).eval()
    fast, twin = served(model), copy.deepcopy(model)
    check_calls(fast, twin, inputs(2))
    with pytest.raises(RuntimeError):
        fast(torch.ones(3, SIZE))  # the hidden state has two rows
    check_calls(fast, twin, inputs(2, seed=4))


def _counts(m: Any, x: Tensor, y: Tensor) -> Any:
    m.count += 1
    return y * 0 if m.count == 100 else y


def _counts_beside(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h, m.count = m.h + y, m.count + 1
    return m.h * (1 + m.count // 50)


def _counts_in_a_dict(m: Any, x: Tensor, y: Tensor) -> Any:
    m.memory["h"], m.memory["gain"] = m.memory["h"] + y, m.memory["gain"] * 0.9
    return m.memory["h"]


def _grows(m: Any, x: Tensor, y: Tensor) -> Any:
    m.history.append(y)
    return torch.stack(m.history).mean(0)


def _keyframes(m: Any, x: Tensor, y: Tensor) -> Any:
    if m.count % 3 == 0:
        m.h = y
    m.count += 1
    return y - m.h


def _an_attribute_and_more(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = m.h + y
    m.aside[0].h = m.aside[0].h + 1
    return m.h * m.aside[0].h


def _random(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = m.h + torch.rand_like(y)
    return m.h


def _first_mean_as_a_number(m: Any, x: Tensor, y: Tensor) -> Any:
    m.lazy = float(x.mean()) if m.lazy is None else m.lazy
    m.h = m.h + m.lazy
    return m.h + y


def _alias_written(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h.mul_(0.5)  # since the last call, this is m.last, too
    out = m.last + y
    m.h = m.last = y + 1
    return out


def _slices_that_overlap(m: Any, x: Tensor, y: Tensor) -> Any:
    m.frames[0] = m.frames[1][:, 1:]
    m.frames[1].add_(1)
    return y + m.frames[0].sum() + m.frames[1]


def _writes_to_an_old_input(m: Any, x: Tensor, y: Tensor) -> Any:
    m.last.mul_(0.5)
    out, m.last = y + m.last, x
    return out


def _list_of_two_modules(m: Any, x: Tensor, y: Tensor) -> Any:
    m.shared_list[0] = m.inner.frames[0] + y
    return m.shared_list[0]


REFUSED = {
    _counts: "changes its attribute count when it is called, and reads it",
    _counts_beside: "changes its attribute count when it is called, and reads it",
    _counts_in_a_dict: r"changes its attribute memory.* when it is called, and reads it",
    _grows: "changes its attribute history when it is called, and reads it",
    _keyframes: "changes its attribute count when it is called, and reads it",
    _an_attribute_and_more: "equal inputs get other answers",
    _random: "draws random numbers",
    _first_mean_as_a_number: "changes its attribute lazy when it is called, and reads it",
    _alias_written: "changes its attribute h, also the memory of last",
    _slices_that_overlap: r"changes its attribute frames\[0\], also the memory of frames\[1\]",
    _writes_to_an_old_input: "changes its input 0 in a later call",
    _list_of_two_modules: "inner.frames",
}


@pytest.mark.parametrize(("function", "message"), REFUSED.items())
def test_what_cannot_be_lifted_is_refused_by_name(function: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured_of(Keeping(function).eval(), inputs(1)[0])


def test_a_call_of_another_kind_that_shares_memory_which_others_write_to_is_the_originals() -> None:
    def function(m: Any, x: Tensor, y: Tensor) -> Any:
        if len(x) == 2:
            m.frames[0].add_(1)
        else:
            m.frames[0] = m.frames[1] = y[:2] * 1
        return y + m.frames[0].sum() + m.frames[1].sum()

    model = Keeping(function).eval()
    fast, twin = served(model), copy.deepcopy(model)
    for x, y in zip(inputs(5), inputs(5, rows=5), strict=True):
        check_calls(fast, twin, [x, x, y])
    assert any("the same memory" in reason for reason in fast.health.reasons)


def test_an_onnx_file_takes_and_returns_such_a_state(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = Keeping(_nested).eval()
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


def test_what_cannot_hold_such_a_state_says_so(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="makes a state in its attribute lazy in its first calls"):
        served(Keeping(_lazy).eval()).save(tmp_path / "m.ampopt")
    with pytest.raises(ExportError, match="makes a state in its attribute lazy in its first calls"):
        served(Keeping(_lazy).eval()).export_onnx(tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_hooks_would_see_the_state() -> None:
    model = Keeping(_gru).eval()
    model.register_forward_hook(lambda module, args, result: result * 2)
    with pytest.raises(CaptureError, match="keeps a state in its attribute h, and has forward hooks"):
        captured_of(model, inputs(1)[0])
    layer = Keeping(_gru).eval()
    layer.layer.register_forward_hook(lambda module, args, result: result * 2)
    check_calls(served(layer), copy.deepcopy(layer), inputs(10))


def test_the_users_model_goes_on_alone() -> None:
    model = private_copy(Keeping(_popping))
    fast, twin = served(model), copy.deepcopy(model)
    check_calls(model, copy.deepcopy(twin), inputs(4, seed=1))
    check_calls(fast, twin, inputs(4))


class Counted(nn.Module):
    """It has no state that a model has: its calls are counted outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        CALLS.append(x.shape)
        result: Tensor = self.conv(x) * scale
        return result


CALLS: list[torch.Size] = []


def test_sizes_that_the_original_answers_all_the_time_cost_one_call_each_and_are_not_kept() -> None:
    model = Counted().eval()
    fast: Any = optimize(model, torch.randn(1, 3, 8, 8), precision="fp32", budget_s=3)
    fast._new.max_captures = 1
    for size in (9, 10):  # the last capture, and the first that the original answers
        fast(torch.randn(1, 3, size, size))
    kept = len(fast._maker._kinds._known)
    for size in range(11, 40):
        x = torch.randn(1, 3, size, size)
        CALLS.clear()
        assert torch.equal(fast(x), model(x))
        assert len(CALLS) == 2  # one of them is the test's
    assert len(fast._maker._kinds._known) == kept
    for number in range(40):
        fast(torch.randn(1, 3, 8, 8), float(number))
    assert len(fast._maker._kinds._known) <= kept + MOST_REFUSED
