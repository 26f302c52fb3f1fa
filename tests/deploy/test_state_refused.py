"""A state that no program can keep is refused by its name, and the original answers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.errors import CaptureError, ExportError
from tests.support.keeping import Keeping, check_calls, inputs, served
from tests.support.planted import captured_of
from tests.support.ways_to_keep import gru, lazy


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


def test_what_cannot_hold_such_a_state_says_so(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="makes a state in its attribute lazy in its first calls"):
        served(Keeping(lazy).eval()).save(tmp_path / "m.ampopt")
    with pytest.raises(ExportError, match="makes a state in its attribute lazy in its first calls"):
        served(Keeping(lazy).eval()).export_onnx(tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_hooks_would_see_the_state() -> None:
    model = Keeping(gru).eval()
    model.register_forward_hook(lambda module, args, result: result * 2)
    with pytest.raises(CaptureError, match="keeps a state in its attribute h, and has forward hooks"):
        captured_of(model, inputs(1)[0])
    layer = Keeping(gru).eval()
    layer.layer.register_forward_hook(lambda module, args, result: result * 2)
    check_calls(served(layer), copy.deepcopy(layer), inputs(10))
