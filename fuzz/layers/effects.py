"""Layers with effects: writes in place, modules used again, and state that calls leave behind."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.layers.step import Builder, DoesNotFit, Step, World, need
from fuzz.pick import Pick

Way = tuple[str, Any]


def _do(statement: Any) -> Any:
    """A function that does something to its argument and returns it."""

    def run(s: Any, x: Tensor, seen: Any) -> Any:
        statement(s, x, seen)
        return x

    return run


def _after(prepare: Any, statement: Any) -> Any:
    def run(s: Any, x: Tensor, seen: Any) -> Any:
        y: Tensor = prepare(x)
        statement(s, y, seen)
        return y

    return run


def _first_plus_one(s: Any, y: Tensor, seen: Any) -> None:
    y[:, 0] += 1


def _set_slice(s: Any, y: Tensor, seen: Any) -> None:
    y[..., 1:] = y[..., :-1].clone()


def _set_masked(s: Any, y: Tensor, seen: Any) -> None:
    y[y < 0] = 0.25


def _set_number(s: Any, y: Tensor, seen: Any) -> None:
    y[0] = 3


def in_place(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Writes into a tensor, or a view of it, that the model has made for itself."""
    need(x.dim() > 0)
    prepare: Any = pick.one(torch.clone, torch.clone, lambda x: x + 1, lambda x: x.reshape(x.shape) * 1)
    ways: list[Way] = [
        ("y[:, 0] += 1", _first_plus_one),
        ("y[..., 1:] = y[..., :-1].clone()", _set_slice),
        ("y[y < 0] = 0.25", _set_masked),
        ("y[0] = 3", _set_number),
        ("y[:, :1].mul_(0.5)", lambda s, y, seen: y[:, :1].mul_(0.5)),
        ("y.transpose(0, -1).add_(2)", lambda s, y, seen: y.transpose(0, -1).add_(2)),
        ("y.view(-1)[0].fill_(5)", lambda s, y, seen: y.view(-1)[:1].fill_(5)),
        ("y.add_(y)", lambda s, y, seen: y.add_(y)),
        ("y.mul_(2).sub_(1).div_(3)", lambda s, y, seen: y.mul_(2).sub_(1).div_(3)),
        ("y.copy_(y.flip(0))", lambda s, y, seen: y.copy_(y.flip(0))),
        ("y.clamp_(-1, 1)", lambda s, y, seen: y.clamp_(-1, 1)),
        ("y.masked_fill_(y > 1, 1)", lambda s, y, seen: y.masked_fill_(y > 1, 1)),
        ("y.zero_()", lambda s, y, seen: y.zero_()),
        ("y.relu_()", lambda s, y, seen: y.relu_()),
        ("y.sigmoid_().neg_()", lambda s, y, seen: y.sigmoid_().neg_()),
        ("y.index_fill_(0, [0], 2)", lambda s, y, seen: y.index_fill_(0, s.index, 2.0)),
        ("y.index_add_(0, [0], y[:1])", lambda s, y, seen: y.index_add_(0, s.index, y[:1].clone())),
        ("y.unsqueeze_(0).squeeze_(0)", lambda s, y, seen: y.unsqueeze_(0).squeeze_(0)),
        ("y.t_()", lambda s, y, seen: y.transpose_(0, -1)),
        ("torch.add(y, 1, out=y)", lambda s, y, seen: torch.add(y, 1, out=y)),
        ("y.diagonal().add_(1)", lambda s, y, seen: y.diagonal().add_(1)),
        ("y.bernoulli-free exp_", lambda s, y, seen: y.clamp_(max=2).exp_()),
        ("y.addcmul_(y, y)", lambda s, y, seen: y.addcmul_(y, y, value=0.1)),
        ("y.cumsum_(0)", lambda s, y, seen: y.cumsum_(0)),
    ]
    words, statement = pick.one(*ways)
    return Step(f"y = copy of x; {words}", _after(prepare, statement), index=torch.tensor([0]))


def in_place_on_earlier(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Writes into a tensor that something else reads, too: an earlier result, or a view of one."""
    need(x.dim() > 0)

    def late_write(s: Any, x: Tensor, seen: Any) -> Any:
        y = x * 2
        view = y[:, :1] if y.dim() > 1 else y[:1]
        z = view + 1
        y.add_(1)
        return y + z.sum() + view.sum()

    def read_before(s: Any, x: Tensor, seen: Any) -> Any:
        y = x + 1
        before = y.sigmoid()
        y.mul_(before)
        return y - before

    def through_list(s: Any, x: Tensor, seen: Any) -> Any:
        pieces = list((x * 1).unbind(0))
        for number, piece in enumerate(pieces):
            piece.add_(number)
        return torch.stack(pieces)

    def overlapping(s: Any, x: Tensor, seen: Any) -> Any:
        y = x.clone().contiguous()
        y[..., :1] += y[..., -1:]
        y[..., -1:] *= y[..., :1]
        return y

    def buffer_row(s: Any, x: Tensor, seen: Any) -> Any:
        table = s.table.clone()
        table[0] += x.mean()
        return x + table.sum()

    ways: list[Way] = [
        ("a view read after a write to its base", late_write),
        ("a result read after a write to its source", read_before),
        ("pieces of unbind written to", through_list),
        ("overlapping slices", overlapping),
        ("a row of a buffer's copy", buffer_row),
    ]
    words, function = pick.one(*ways)
    return Step(words, function, table=torch.randn(3, 2))


def writes_to_earlier(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """A write to the tensor that the layer was given, which may be the model's input or an earlier result."""
    need(x.dim() > 0)
    ways: list[Way] = [
        ("x.add_(1)", lambda s, x, seen: x.add_(1)),
        ("x[..., :1].zero_()", lambda s, x, seen: x[..., :1].zero_()),
        ("seen[-1].mul_(2)", lambda s, x, seen: seen[-1].mul_(2)),
    ]
    words, statement = pick.one(*ways)
    return Step(words, _do(statement))


def again(pick: Pick, x: Tensor, world: World) -> nn.Module:
    """A module that the network has called before."""
    if not world.made:
        raise DoesNotFit
    return pick.one(*world.made[-6:])


def once_more(pick: Pick, x: Tensor, world: World) -> nn.Module:
    """A module that the network has called before, copied: equal weights in other memory."""
    if not world.made:
        raise DoesNotFit
    return copy.deepcopy(pick.one(*world.made[-6:]))


def state(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """Something that every call changes, and that the next one reads."""
    ways: list[Way] = [
        ("a counter in a buffer", _count_in_buffer),
        ("a moving mean in a buffer", _moving_mean),
        ("a buffer replaced", _replace_buffer),
        ("a counter in an attribute", _count_in_attribute),
        ("a list that grows", _grow_list),
        ("a dict of counts", _count_in_dict),
        ("the last mean in an attribute", _keep_last),
        ("a parameter written to", _write_parameter),
    ]
    words, function = pick.one(*ways)
    return Step(
        words,
        function,
        buffer=torch.zeros(1),
        weight=nn.Parameter(torch.ones(1), requires_grad=False),
        count=0,
        history=[],
        counts={},
        last=None,
    )


def _count_in_buffer(s: Any, x: Tensor, seen: Any) -> Any:
    s.buffer += 1
    return x + s.buffer


def _moving_mean(s: Any, x: Tensor, seen: Any) -> Any:
    s.buffer.mul_(0.5).add_(0.5 * x.mean())
    return x - s.buffer


def _replace_buffer(s: Any, x: Tensor, seen: Any) -> Any:
    s.buffer = s.buffer + 1
    return x * s.buffer


def _count_in_attribute(s: Any, x: Tensor, seen: Any) -> Any:
    s.count += 1
    return x * s.count


def _grow_list(s: Any, x: Tensor, seen: Any) -> Any:
    s.history.append(1.0)
    return x + len(s.history)


def _count_in_dict(s: Any, x: Tensor, seen: Any) -> Any:
    s.counts[x.dim()] = s.counts.get(x.dim(), 0) + 1
    return x - sum(s.counts.values())


def _keep_last(s: Any, x: Tensor, seen: Any) -> Any:
    y = x if s.last is None else x + s.last
    s.last = x.mean()
    return y


def _write_parameter(s: Any, x: Tensor, seen: Any) -> Any:
    with torch.no_grad():
        s.weight.mul_(1.5)
    return x * s.weight


def refused_by_graphs(pick: Pick, x: Tensor, _: World) -> nn.Module:
    """What no one graph can hold: branches and shapes that depend on values."""
    need(x.dim() > 0)
    ways: list[Way] = [
        ("if x.sum() > 0", lambda s, x, seen: x * 2 if x.sum() > 0 else x - 1),
        ("x * x.mean().item()", lambda s, x, seen: x * x.mean().item()),
        ("x[x > 0]", lambda s, x, seen: torch.cat([x[x > 0], x.flatten()[:1]])),
        ("x + count of positive", lambda s, x, seen: x + int((x > 0).sum())),
        ("by strides", lambda s, x, seen: x * (2.0 if x.is_contiguous() else 3.0)),
        ("as_strided", lambda s, x, seen: x.contiguous().as_strided((1, 2), (1, 1)) if x.numel() > 2 else x),
    ]
    words, function = pick.one(*ways)
    return Step(words, function)


EFFECTS: dict[str, tuple[float, Builder]] = {
    "in_place": (3, in_place),
    "in_place_on_earlier": (1.5, in_place_on_earlier),
    "writes_to_earlier": (0.3, writes_to_earlier),
    "again": (2, again),
    "once_more": (0.5, once_more),
    "state": (0.4, state),
    "refused_by_graphs": (0.3, refused_by_graphs),
}
"""By name: how often it is drawn, in proportion, and what makes it."""
