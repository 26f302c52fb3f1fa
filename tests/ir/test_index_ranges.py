"""Operators that read or write where values say, and whether these may be out of range."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.ir.index_ranges import may_miss
from ampopt.ir.shapes import record_shapes
from tests.helpers import Model, program_of
from tests.support.later_pytorch import needs_places_of_values

IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])
X = torch.tensor([[0.1, 0.5, 0.2, 0.3, 0.4], [0.9, 0.1, 0.2, 0.3, 0.4]])
TABLE, CONSTANT = torch.randn(5, 4), torch.tensor([0, 4, 2])

I16 = torch.tensor([1, 2, 3, 4])
WIDE = torch.tensor(4 + 2**40)
CUBE, UP = torch.ones(2, 5, 3), torch.tensor([[0, 1, 2]])


def _added_often(i: Tensor) -> Tensor:
    for _ in range(400):
        i = i + 0 * i
    return i


MISSES: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "embedding": (lambda m, i: F.embedding(i, m.table), IDS),
    "32 bits": (lambda m, i: F.embedding(i, m.table), IDS.int()),
    "index": (lambda m, i: m.table[i], IDS),
    "second of two": (lambda m, i: m.table[m.constant, i.reshape(2, 3) - 1], IDS),
    "index_select": (lambda m, i: m.table.index_select(0, i.reshape(-1)), IDS),
    "gather": (lambda m, i: m.table.gather(0, i), IDS),
    "take": (lambda m, i: torch.take(m.table, i), IDS),
    "index_put": (lambda m, i: m.table.index_put((i,), torch.ones(4)), IDS),
    "scatter_add": (lambda m, i: m.table.scatter_add(0, i, torch.ones(2, 3)), IDS),
    "index_add": (lambda m, i: m.table.index_add(0, i.reshape(-1), torch.ones(6, 4)), IDS),
    "numbers": (lambda m, x: m.table[(x * 4).long()], X),
    "bounded too late": (lambda m, i: m.table[i.clamp(0, 5)], IDS),
    "bounded on one side": (lambda m, i: m.table[i.clamp(max=4)], IDS),
    "negative": (lambda m, i: m.table.gather(0, i.clamp(-1, 4)), IDS),
    "too negative": (lambda m, i: m.table[i.clamp(-6, 4)], IDS),
    "of a longer dimension": (lambda m, x: m.table[x.repeat(1, 2).argmax(1)], X),
    "moved": (lambda m, x: m.table[x.argmax(1) + 1], X),
    "goes around": (lambda m, i: m.table[(i.clamp(0, 1) + 2**62) * 4], IDS),
    "of bytes by more": (lambda m, i: m.table[(i // 300).long()], UP.to(torch.uint8)),
    "bytes above less": (lambda m, i: m.table[i.clamp(0, 3).clamp(min=-5).long()[:0]], UP.to(torch.uint8)),
    "short below more": (lambda m, i: m.table[torch.minimum(i.clamp(0, 3), WIDE).long()], UP.to(torch.int8)),
    "short or wide": (
        lambda m, i: m.table[torch.where(i > 9, WIDE, i.clamp(0, 3)).long()],
        UP.to(torch.int8),
    ),
    "negated view": (lambda m, i: m.table[torch._neg_view(i.clamp(0, 4))], UP),
    "largest values": (lambda m, i: m.table[i.max(1)[0]], IDS),
    "values in order": (lambda m, i: m.table[i.sort(1)[0]], IDS),
    "numbers by a mask": (lambda m, x: m.table[torch.where(x > 9, 50, 1)], X),
    "squares": (lambda m, i: m.table[torch.square(i.clamp(0, 4))], UP),
    "a mask times": (lambda m, x: m.table[torch.multiply((x > 9).long(), 50)], X),
    "differences": (lambda m, i: m.table.gather(0, torch.diff(i.clamp(0, 4))), UP),
    "other bits": (lambda m, i: m.table[i.to(torch.uint8).view(torch.int16).long().clamp(max=4)], I16),
    "after a mask": (
        lambda m, x: (x[:, :, None] + CUBE).index_put((x > 0, x[0].argmax()[None]), torch.ones(())),
        X,
    ),
    "divided": (lambda m, i: m.table[i.clamp(0, 11) // 2], IDS),
    "remainder": (lambda m, i: m.table[i % 6], IDS),
    "counted": (lambda m, x: m.table[(x > 0.5).long().cumsum(1)], X),
    "a number": (lambda m, x: x[:, x[0].argmax().item() & 1], X),
    "windows in the padding": (
        lambda m, x: F.max_unpool2d(
            torch.ones(1, 2, 5),
            F.max_pool2d(x[None], (1, 2), 1, (0, 1), (1, 2), return_indices=True)[1],
            (1, 1),
        ),
        torch.ones(2, 5),
    ),
    "unpooling": (lambda m, i: F.max_unpool2d(torch.ones(1, 2, 3), i[None], [1, 1], [1, 1]), IDS),
}
HITS: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "a constant": (lambda m, x: m.table[m.constant] + x.sum(), X),
    "bounded": (lambda m, i: m.table[i.clamp(-5, 4)], IDS),
    "largest": (lambda m, x: m.table[x.argmax(1)], X),
    "largest few": (lambda m, x: x.gather(1, x.topk(3, 1)[1]), X),
    "in order": (lambda m, x: x.gather(1, x.sort(1)[1].flip(1)), X),
    "views": (lambda m, x: m.table.gather(0, x.argmax(1)[:, None].expand(2, 4)), X),
    "rows of a batch": (
        lambda m, x: x.reshape(-1)[x.argmax(1) + torch.arange(2) * 5],
        X,
    ),
    "pooled and unpooled": (
        lambda m, x: F.max_unpool2d(*F.max_pool2d(x[None], (1, 5), return_indices=True), (1, 5)),
        X,
    ),
    "joined": (lambda m, x: m.table[torch.cat([x.argmax(1), x.argmin(1) - 5])], X),
    "a mask": (lambda m, x: torch.where(x > 0.5, x, 0.0), X),
    "filled": (lambda m, x: m.table[torch.zeros(2, dtype=torch.long) + 4] * x.sum(), X),
    "bounded by both": (lambda m, i: m.table[i.clamp_min(0).clamp_max(4)], IDS),
    "quotient": (lambda m, x: m.table[x.reshape(-1).topk(3)[1] // 2], X),
    "rounded quotient": (
        lambda m, x: m.table[torch.div(x.reshape(-1).topk(3)[1], 2, rounding_mode="trunc")],
        X,
    ),
    "remainder that fits": (lambda m, i: m.table[i % 5], IDS),
    "counted in range": (lambda m, x: m.table[(x[0, :3] > 0.5).long().cumsum(0)], X),
    "chosen": (lambda m, x: m.table[torch.where(x[:, :3] > 0.5, m.constant, x.argsort(1)[:, :3])], X),
    "chunks": (lambda m, x: m.table[x.argsort(1).chunk(2, 1)[0]], X),
    "of constants by places": (lambda m, x: m.table[m.constant[x.topk(2, 1)[1] % 3]], X),
    "far along": (lambda m, x: m.table[_added_often(x.argmax(1))], X),
    "a place of all": (lambda m, x: x[:, x[0].argmax()], X),
    "copied": (lambda m, x: m.table[x.argmax(1).clone().int()], X),
}


def missing(function: Callable[..., Any], x: Tensor) -> list[str]:
    model = Model(function, table=TABLE.clone(), constant=CONSTANT.clone()).eval()
    return [str(node.target) for node in may_miss(record_shapes(program_of(model, x)))]


def _marked(names: Iterable[str]) -> list[Any]:
    of_values = ("a number", "a place of all")
    return [pytest.param(name, marks=needs_places_of_values) if name in of_values else name for name in names]


@pytest.mark.parametrize("name", _marked(MISSES))
def test_a_place_that_may_be_out_of_range_is_found(name: str) -> None:
    assert len(missing(*MISSES[name])) == 1


@pytest.mark.parametrize("name", _marked(HITS))
def test_a_place_that_is_in_range_is_none(name: str) -> None:
    assert missing(*HITS[name]) == []


@pytest.mark.parametrize("selected", [lambda x: x[x > 0.3], lambda x: x[:1].nonzero()[:, 1] % 3])
def test_a_place_of_as_many_as_values_select_may_be_out_of_range(
    selected: Callable[[Tensor], Tensor],
) -> None:
    function = HITS["largest"][0], lambda m, x: m.table.index_select(0, selected(x).argmax()[None])
    assert "aten.index_select.default" not in missing(function[0], X)
    assert "aten.index_select.default" in missing(function[1], X)


def test_sizes_that_vary_leave_constants_alone() -> None:
    def missed(function: Callable[..., Any], *, varies: bool) -> int:
        model = Model(function, table=TABLE.clone(), constant=CONSTANT.clone()).eval()
        return len(list(may_miss(record_shapes(program_of(model, X)), varies=varies)))

    assert missed(HITS["largest"][0], varies=False) == 0
    assert missed(HITS["largest"][0], varies=True) == 1
    assert missed(HITS["a constant"][0], varies=True) == 0


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_of_unsigned_constants_nothing_is_known(dtype: torch.dtype) -> None:
    model = Model(lambda m, x: m.table[m.places.long()] + x.sum(), table=TABLE.clone())
    model.register_buffer("places", torch.tensor([0, 4]).to(dtype))
    assert len(list(may_miss(record_shapes(program_of(model.eval(), X))))) == 1
