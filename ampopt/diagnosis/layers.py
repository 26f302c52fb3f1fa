"""The layer table: what each operator of a model is and moves, its time in each lane, and what bounds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ampopt.diagnosis.ceilings import Bound, Ceilings
from ampopt.diagnosis.finding import counted
from ampopt.diagnosis.operators import Spent
from ampopt.diagnosis.work import Work

NAMED = 3
"""Operators without Tensor Cores that are named, those that take longest."""

LITTLE = 0.2
"""Of an operator that reaches less of every ceiling, none of them explains the time."""

OPTIMIZED = "optimized"
"""The lane of the optimized program, whatever its precision."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """An operator's work in FP32 and its cost in each lane, by the lane's name."""

    name: str
    work: Work
    spent: Mapping[str, Spent]
    bounds: Mapping[str, Bound]
    reached: Mapping[str, float]
    """The share of the ceiling that bounds it, which it reaches: 1 is the ceiling."""
    moved: Mapping[str, int]
    """The bytes that it reads and writes at least, in a lane's own dtypes."""

    def cause(self, lane: str) -> Bound | None:
        """What bounds it in a lane; None where it is far from every ceiling, and in a lane not measured."""
        return self.bounds[lane] if self.reached.get(lane, 0.0) >= LITTLE else None

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
                "moved": self.moved[lane],
                "gb_s": round(self.moved[lane] / spent.seconds / 1e9, 3) if spent.seconds else None,
                "tflop_s": round(self.work.flops / spent.seconds / 1e12, 5) if spent.seconds else None,
                "kernels": [dataclasses.asdict(kernel) for kernel in spent.kernels],
                "tensor_cores": self.tensor_cores(lane),
                "casts": spent.casts,
            }
        work = {**dataclasses.asdict(self.work), "shape": list(self.work.shape), "madds": self.work.madds}
        del work["floats"]
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
    runs = counted(len(known), "convolution or product", "convolutions and products")
    return (
        f"{len(missing)} of {runs} in {lane}, {share:.0%} of the operators' time, run no kernel of Tensor "
        f"Cores: {names}{more}"
    )


def layers_of(
    found: Mapping[str, Mapping[str, Work]],
    spent: Mapping[str, Mapping[str, Spent]],
    dtypes: Mapping[str, torch.dtype],
    ceilings: Ceilings,
) -> tuple[Layer, ...]:
    """The rows of the table: all are by lane, `found` and `spent` then by the operator's name.

    The first lane of `found` is FP32, which has every operator.
    """
    rows = []
    for name, work in next(iter(found.values())).items():
        row = Layer(name, work, {}, {}, {}, {})
        for lane, by_name in spent.items():
            if name in by_name:
                row = bounded(row, lane, by_name[name], found[lane][name].moved, dtypes[lane], ceilings)
        rows.append(row)
    return tuple(rows)


def bounded(
    layer: Layer, lane: str, spent: Spent, moved: int, dtype: torch.dtype, ceilings: Ceilings
) -> Layer:
    """A layer with its cost in one more lane, which computes in `dtype`, and what bounds it there."""
    least = ceilings.least_s(layer.work.flops, moved, max(len(spent.kernels), 1), dtype)
    bound = max(least, key=lambda name: least[name])
    reached = min(least[bound] / spent.seconds, 1.0) if spent.seconds > 0 else 1.0
    return dataclasses.replace(
        layer,
        spent={**layer.spent, lane: spent},
        bounds={**layer.bounds, lane: bound},
        reached={**layer.reached, lane: reached},
        moved={**layer.moved, lane: moved},
    )
