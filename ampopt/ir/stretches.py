"""Which calls of a graph stay in higher precision around those that a lane's dtype cannot hold."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping

import torch
from torch import fx

from ampopt.ir.beside import Seen
from ampopt.ir.casting import is_product
from ampopt.ir.graph import calls, is_constant

HEADROOM = 2.0
"""How far seen values must stay below the largest number: other inputs may give larger ones."""


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Calls by name, in the graph's order.

    `for_range` are those that overflow, or nearly so, in the lane's dtype; `back` those of the stretches
    behind them whose results are in range again, and are cast back. What lies between runs in the dtype of
    its inputs. `precise` are those that stay for their precision, without those that the dtype of their
    inputs keeps.
    """

    for_range: tuple[str, ...]
    precise: tuple[str, ...]
    back: frozenset[str]


def is_low(seen: Seen, dtype: torch.dtype) -> bool:
    """Whether a call reads or gives the lane's dtype."""
    return dtype in seen.gives or dtype in seen.reads


def is_lowered(seen: Seen, node: fx.Node, dtype: torch.dtype, policy: str) -> bool:
    """Whether the policy casts what a call reads to the lane's dtype, whatever that is in."""
    return is_low(seen, dtype) and (policy in ("O2", "half") or is_product(node))


def in_range(largest: float, dtype: torch.dtype) -> bool:
    """Whether a dtype holds values of this magnitude, with `HEADROOM`."""
    return largest * HEADROOM <= torch.finfo(dtype).max


def stretches(
    module: fx.GraphModule,
    seen: Mapping[str, Seen],
    dtype: torch.dtype,
    policy: str,
    kept: Collection[str] = (),
) -> Stretches:
    """The stretches of a graph whose calls gave `seen` in the lane's dtype.

    `kept` are calls that are kept for their precision: what follows them is not cast back.
    """
    out_of_range: set[fx.Node] = set()
    precise: set[fx.Node] = set()
    for_range, for_precision, back = list[str](), list[str](), set[str]()
    for node in calls(module):
        if (found := seen.get(node.name)) is None:
            continue
        sources = {source for source in node.all_input_nodes if not is_constant(source)}
        lowered = is_lowered(found, node, dtype, policy)
        follows_precise = not lowered and not precise.isdisjoint(sources)
        follows = not lowered and not out_of_range.isdisjoint(sources)
        fits = in_range(found.largest, dtype)
        overflows = is_low(found, dtype) and (
            found.overflows or not fits or not in_range(found.largest_read, dtype)
        )
        if node.name in kept or follows_precise:
            precise.add(node)
            if not follows_precise:
                for_precision.append(node.name)
        elif overflows and not follows:
            for_range.append(node.name)
            follows = True
        if node in precise or not follows or dtype not in found.gives:
            continue
        is_read = any(user.op != "output" for user in node.users)
        is_tuple = any(user.target is operator.getitem for user in node.users)
        if fits and is_read and not is_tuple:
            back.add(node.name)
        else:
            out_of_range.add(node)
    return Stretches(tuple(for_range), tuple(for_precision), frozenset(back))
