"""misaligned-channels: products whose sizes are no multiples of 8, which fast kernels need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ampopt.diagnosis.case import Case, trial_s
from ampopt.diagnosis.finding import Finding, counted, saved
from ampopt.diagnosis.layers import Layer
from ampopt.ir.graph import arguments, aten, calls, constant, is_constant, shape_of
from ampopt.ir.lanes import Lane
from ampopt.ir.origin import place_of
from ampopt.ir.shapes import record_shapes

MULTIPLE = 8
"""At 16 bits Tensor Cores want channels in multiples of 8; oneDNN on a CPU computes in blocks of 8 or 16."""

LARGEST = 3
"""The number of layers whose padding is executed, those that take longest."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A convolution of one group, or a linear layer (`geometry` None), with the sizes that decide."""

    name: str
    place: str
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    geometry: tuple[tuple[int, ...], ...] | None

    @property
    def sizes(self) -> tuple[int, int]:
        """Channels or features in and out."""
        return self.weight_shape[1], self.weight_shape[0]

    def call(self, lane: Lane, device: torch.device, multiple: int = 1) -> Callable[[], Tensor]:
        """The layer alone on random numbers, with its sizes padded to a multiple."""
        entering, leaving = (-(-size // multiple) * multiple for size in self.sizes)
        axis = 1 if self.geometry is not None else -1
        shape = list(self.input_shape)
        shape[axis] = entering
        x = torch.rand(shape, device=device, dtype=lane.dtype)
        weight = torch.rand(leaving, entering, *self.weight_shape[2:], device=device, dtype=lane.dtype)
        geometry = self.geometry

        def run() -> Tensor:
            with lane.scope(device):
                if geometry is None:
                    return F.linear(x, weight)
                stride, padding, dilation = geometry
                return F.conv2d(x, weight, None, stride, padding, dilation)

        return run


def find(case: Case) -> Iterator[Finding]:
    """The slowest products of such sizes; executed: each alone, as it is and padded to multiples of 8."""
    if case.program is None:
        return
    spent = {layer.name: layer for layer in case.layers}
    odd = [each for each in products(case) if any(size % MULTIPLE for size in each.sizes)]
    for name, lane in case.lanes.items():
        if name not in case.latency or (case.device.type == "cuda" and not lane.is_mixed):
            continue
        total = sum(layer.seconds(name) for layer in case.layers) or 1.0
        slowest = sorted(odd, key=lambda each: -spent[each.name].seconds(name))[:LARGEST]
        for product in slowest:
            needed_s = trial_s(spent[product.name].seconds(name))
            if not case.has_time(f"channels padded to multiples of 8 in the {name} lane", needed_s):
                break
            before, after = product.call(lane, case.device), product.call(lane, case.device, MULTIPLE)
            ran = case.counterfactual("padded to multiples of 8", before, after, of="it alone", seconds=0.3)
            if not ran.helps or ran.gain.ratio < 1.05:
                continue
            entering, leaving = product.sizes
            why = _of_kernel(spent[product.name], name)
            yield Finding(
                "misaligned-channels",
                f"{product.name} has {counted(entering, 'channel', 'channels')} in and {leaving} out, no "
                f"multiples of 8{why}",
                places=(product.place,),
                advice="give it multiples of 8 (of the padded layer's outputs the rest is cut off)",
                lane=name,
                share=saved(ran) * spent[product.name].seconds(name) / total,
                counterfactual=ran,
            )


def _of_kernel(layer: Layer, lane: str) -> str:
    """Its longest kernel, and whether that is one of Tensor Cores; nothing on a CPU."""
    if not layer.spent[lane].kernels:
        return ""
    longest = layer.spent[lane].longest
    is_one = "is" if longest.on_tensor_cores else "is not"
    return f": its kernel {is_one} one of Tensor Cores ({longest.name[:60]})"


def products(case: Case) -> Iterator[Product]:
    """The convolutions of one group and the linear layers of a graph."""
    assert case.program is not None
    module = record_shapes(case.program)
    for node in calls(module, [aten.conv2d.default, aten.linear.default]):
        own = arguments(node)
        weight = constant(module, own["weight"]) if is_constant(own["weight"]) else None
        if weight is None or own.get("groups", 1) != 1 or isinstance(own.get("padding"), str):
            continue
        is_conv = node.target is aten.conv2d.default
        geometry = tuple(tuple(own[key]) for key in ("stride", "padding", "dilation")) if is_conv else None
        source = own["input"]
        assert isinstance(source, fx.Node)
        yield Product(node.name, place_of(node), _sizes(module, source), tuple(weight.shape), geometry)


def _sizes(module: fx.GraphModule, source: fx.Node) -> tuple[int, ...]:
    value = constant(module, source) if is_constant(source) else None
    return shape_of(source) if value is None else tuple(value.shape)
