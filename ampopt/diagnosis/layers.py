"""The layer table: what each operator of a model is and moves, its time in each lane, and what bounds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ampopt.diagnosis.ceilings import Bound, Ceilings
from ampopt.diagnosis.operators import Spent
from ampopt.ir.graph import is_constant
from ampopt.ir.origin import origins_of
from ampopt.ir.own_autocast import own_scope
from ampopt.ir.program import Program

NAMED = 3
"""Operators without Tensor Cores that are named, those that take longest."""

OPTIMIZED = "optimized"
"""The lane of the optimized program, whatever its precision."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What an operator computes and moves in one call.

    `flops` are those of matrix products and convolutions, as `torch.utils.flop_counter` counts them; `moved`
    are the bytes of everything that it reads and writes, 0 for a view.
    """

    operator: str
    module: str
    source: str
    shape: tuple[int, ...]
    parameters: int
    flops: int
    moved: int

    @property
    def madds(self) -> int:
        """Multiplications with an addition: half the FLOP."""
        return self.flops // 2

    @property
    def place(self) -> str:
        """`layer3.0.conv1, resnet.py:92`."""
        return ", ".join(part for part in (self.module, self.source) if part)


@dataclasses.dataclass(frozen=True)
class Layer:
    """An operator's work and its cost in each lane, by the lane's name."""

    name: str
    work: Work
    spent: Mapping[str, Spent]
    bounds: Mapping[str, Bound]
    reached: Mapping[str, float]
    """The share of the ceiling that bounds it, which it reaches: 1 is the ceiling."""

    def seconds(self, lane: str) -> float:
        """Seconds of it in one call; 0 in a lane that was not measured."""
        return self.spent[lane].seconds if lane in self.spent else 0.0

    def tensor_cores(self, lane: str) -> bool | None:
        """Whether a product or convolution runs on Tensor Cores; None for all else, and without kernels."""
        kernels = self.spent[lane].kernels if lane in self.spent else ()
        if not kernels or not self.work.flops:
            return None
        return any(kernel.on_tensor_cores for kernel in kernels)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: milliseconds, GB/s and TFLOP/s."""
        lanes = {}
        for lane, spent in self.spent.items():
            lanes[lane] = {
                "ms": round(1e3 * spent.seconds, 6),
                "bound_by": self.bounds[lane],
                "of_ceiling": round(self.reached[lane], 4),
                "gb_s": round(self.work.moved / spent.seconds / 1e9, 3) if spent.seconds else None,
                "tflop_s": round(self.work.flops / spent.seconds / 1e12, 5) if spent.seconds else None,
                "kernels": [dataclasses.asdict(kernel) for kernel in spent.kernels],
                "tensor_cores": self.tensor_cores(lane),
                "casts": spent.casts,
            }
        work = {**dataclasses.asdict(self.work), "shape": list(self.work.shape), "madds": self.work.madds}
        return {"name": self.name, **work, "lanes": lanes}


def without_tensor_cores(layers: Sequence[Layer], lane: str) -> str | None:
    """Which products and convolutions run without Tensor Cores in a lane, in words; None where none does."""
    known = [layer for layer in layers if layer.tensor_cores(lane) is not None]
    missing = [layer for layer in known if not layer.tensor_cores(lane)]
    if not missing:
        return None
    share = sum(layer.seconds(lane) for layer in missing) / sum(layer.seconds(lane) for layer in layers)
    longest = sorted(missing, key=lambda layer: -layer.seconds(lane))[:NAMED]
    names = "; ".join(
        f"{layer.name} to {list(layer.work.shape)}, {layer.work.place}: {layer.spent[lane].longest.name[:60]}"
        for layer in longest
    )
    more = f", {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return (
        f"{len(missing)} of {len(known)} convolutions and products in {lane}, {share:.0%} of the operators' "
        f"time, run no kernel of Tensor Cores: {names}{more}"
    )


def works(program: Program) -> dict[str, Work]:
    """The work of every call of a graph in FP32, by its name; costs one run."""
    with program.scope(), FlopCounterMode(display=False) as counter:
        entered = [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]
        run = _Works(program, counter)
        run.run(*entered)
    return run.found


class _Works(fx.Interpreter):
    def __init__(self, program: Program, counter: FlopCounterMode) -> None:
        super().__init__(program.graph)
        self._device, self._counter = program.device, counter
        self.found: dict[str, Work] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        before = self._counter.get_total_flops()
        read = {source: _tensors(self.env[source]) for source in n.all_input_nodes}
        with own_scope(n, self._device):
            result = super().run_node(n)
        given, taken = _tensors(result), [t for tensors in read.values() for t in tensors]
        origin = next(iter(origins_of(n)), None)
        weights = [t for source, tensors in read.items() if is_constant(source) for t in tensors]
        self.found[n.name] = Work(
            operator=str(getattr(n.target, "overloadpacket", n.target)).removeprefix("aten."),
            module=origin.module if origin else "",
            source=origin.source if origin else "",
            shape=tuple(given[0].shape) if given else (),
            parameters=sum(weight.numel() for weight in weights),
            flops=self._counter.get_total_flops() - before,
            moved=_moved(given, taken),
        )
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _moved(given: list[Tensor], taken: list[Tensor]) -> int:
    """The bytes that a call reads and writes at least: none for views; sparse tensors are not counted."""
    given, taken = ([t for t in tensors if t.layout is torch.strided] for tensors in (given, taken))
    read = {t.untyped_storage().data_ptr() for t in taken}
    if all(t.untyped_storage().data_ptr() in read for t in given):
        return 0
    return sum(t.nbytes for t in (*taken, *given))


def layers_of(
    found: Mapping[str, Work],
    spent: Mapping[str, Mapping[str, Spent]],
    dtypes: Mapping[str, torch.dtype],
    ceilings: Ceilings,
) -> tuple[Layer, ...]:
    """The rows of the table: `spent` and `dtypes` are by lane. Bytes count at the width of a lane's dtype."""
    rows = []
    for name, work in found.items():
        row = Layer(name, work, {}, {}, {})
        for lane, by_name in spent.items():
            if name in by_name:
                row = bounded(row, lane, by_name[name], dtypes[lane], ceilings)
        rows.append(row)
    return tuple(rows)


def bounded(layer: Layer, lane: str, spent: Spent, dtype: torch.dtype, ceilings: Ceilings) -> Layer:
    """A layer with its cost in one more lane, which computes in `dtype`, and what bounds it there."""
    work = layer.work
    moved = work.moved * dtype.itemsize // torch.float32.itemsize
    least = ceilings.least_s(work.flops, moved, max(len(spent.kernels), 1), dtype)
    bound = max(least, key=lambda name: least[name])
    reached = min(least[bound] / spent.seconds, 1.0) if spent.seconds > 0 else 1.0
    return dataclasses.replace(
        layer,
        spent={**layer.spent, lane: spent},
        bounds={**layer.bounds, lane: bound},
        reached={**layer.reached, lane: reached},
    )
