"""What a call of a `Keeping` may do with its state so that programs can keep it: functions of that model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.keeping import SIZE, Pair


def gru(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = m.cell(x, m.h)
    return y + m.h


def in_place(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h.mul_(0.9).add_(y)
    return y + m.h


def lstm(m: Any, x: Tensor, y: Tensor) -> Any:
    m.pair = Pair(*m.lstm(x, m.pair))
    return {"h": m.pair.h, "y": y}


def in_a_tuple(m: Any, x: Tensor, y: Tensor) -> Any:
    m.tuple = (y + 0.5 * m.tuple[1], m.tuple[0])
    return m.tuple[0] - m.tuple[1]


def sliced(m: Any, x: Tensor, y: Tensor) -> Any:
    m.frames = [*m.frames[1:], y]
    return torch.stack(m.frames).mean(0)


def popped(m: Any, x: Tensor, y: Tensor) -> Any:
    m.frames.pop(0)
    m.frames.append(y)
    return torch.cat(m.frames)


def in_a_deque(m: Any, x: Tensor, y: Tensor) -> Any:
    m.window.append(y)
    return torch.stack(list(m.window)).amax(0)


def nested(m: Any, x: Tensor, y: Tensor) -> Any:
    m.memory["h"] = y + m.memory["gain"] * m.memory["h"]
    m.memory["deep"]["more"] = (m.memory["h"] * m.memory["deep"]["more"][0] + 1,)
    return m.memory["deep"]["more"][0]


def swapped(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h, m.last = m.last + y, m.h
    return m.h * 2


def of_a_submodule(m: Any, x: Tensor, y: Tensor) -> Any:
    m.inner.h = m.inner.h * 0.9 + y
    m.inner.seen = m.inner.seen + m.inner.h
    return m.inner.seen + 1


def scratch(m: Any, x: Tensor, y: Tensor) -> Any:
    m.scratch = y.relu()  # written and never read
    m.h = m.h + m.scratch
    return m.h + 1


def returned(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = m.h + y
    return m.h


def returned_in_place(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h.add_(y)
    return m.h, m.h[:1]


def of_the_input(m: Any, x: Tensor, y: Tensor) -> Any:
    moved = x - m.last
    m.last = x
    return moved + y


def view_of_the_input(m: Any, x: Tensor, y: Tensor) -> Any:
    before = m.frames[0]
    m.frames[0] = x[:, :1].expand(2, SIZE)
    return y + before


def view_of_a_state(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = torch.cat([m.h, y], 1)[:, 2 : SIZE + 2]
    m.last = m.h[:, :1].expand(2, SIZE)
    return m.h + m.last


def in_two_places(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = m.last = m.memory["h"] = m.h * 0.5 + y
    return m.h + m.last + m.memory["h"]


def one_tensor_three_times(m: Any, x: Tensor, y: Tensor) -> Any:
    m.twice = [*m.twice[1:], y]
    return torch.stack(m.twice).sum(0)


def one_tensor_three_times_in_place(m: Any, x: Tensor, y: Tensor) -> Any:
    m.twice[0].add_(1)  # at first this is all three
    m.twice = [*m.twice[1:], y.clone()]
    return torch.stack(m.twice).sum(0)


def slices_of_one_base(m: Any, x: Tensor, y: Tensor) -> Any:
    m.slices = [m.slices[1] + y, m.slices[0]]
    return m.slices[0] - m.slices[1]


def slices_written(m: Any, x: Tensor, y: Tensor) -> Any:
    m.slices[0].mul_(0.5).add_(y)
    m.slices[1].add_(1)
    return m.slices[0] + m.slices[1]


def copied(m: Any, x: Tensor, y: Tensor) -> Any:
    kept, m.last = m.h.detach(), m.h.clone()
    m.h.add_(y)  # `kept` changes, and `m.last` does not
    return kept - m.last


def requires_grad(m: Any, x: Tensor, y: Tensor) -> Any:
    m.learnt = m.learnt * 0.5 + y
    return m.learnt.exp()


def integers(m: Any, x: Tensor, y: Tensor) -> Any:
    m.memory["h"] = m.memory["h"] + 1
    m.h = torch.where(m.memory["h"].long() % 3 == 0, y, m.h)
    return y + m.h


FROM_THE_START = [
    *(gru, in_place, lstm, in_a_tuple, sliced, popped, in_a_deque, nested, swapped, of_a_submodule, scratch),
    *(returned, returned_in_place, of_the_input, view_of_the_input, view_of_a_state, in_two_places),
    *(one_tensor_three_times, slices_of_one_base, slices_written, copied, requires_grad, integers),
]


def lazy(m: Any, x: Tensor, y: Tensor) -> Any:
    if m.lazy is None:
        m.lazy = torch.zeros_like(x)
    m.lazy = m.lazy * 0.5 + y
    return m.lazy + 1


def lazy_by_shape(m: Any, x: Tensor, y: Tensor) -> Any:
    if m.lazy is None or m.lazy.shape != x.shape:
        m.lazy = torch.zeros_like(x)
    m.lazy = m.cell(x, m.lazy)
    return m.lazy + y


def lazy_in_a_dict(m: Any, x: Tensor, y: Tensor) -> Any:
    before = m.cache.get("h", y)
    m.cache["h"] = y
    return y - 0.5 * before


def first_input(m: Any, x: Tensor, y: Tensor) -> Any:
    if m.lazy is None:
        m.lazy = x.mean(0)
    return y - m.lazy


def flag(m: Any, x: Tensor, y: Tensor) -> Any:
    m.h = 0.5 * m.h + y if m.started else y
    m.started = True
    return m.h + 1


def filling(m: Any, x: Tensor, y: Tensor) -> Any:
    m.queue.append(y)
    return torch.stack(list(m.queue)).mean(0)


def two_steps(m: Any, x: Tensor, y: Tensor) -> Any:
    older, m.cache["older"] = m.cache.get("older"), m.lazy
    m.lazy = y
    return y if older is None else y - older


FIRST_CALLS = {
    lazy: 1,
    lazy_by_shape: 1,
    lazy_in_a_dict: 1,
    first_input: 1,
    flag: 1,
    filling: 4,
    two_steps: 2,
    one_tensor_three_times_in_place: 2,
}
"""Models whose first calls make the state, and the number of these calls."""
