"""Tensors as they were before other code had them, to tell whether it wrote to them, and to put them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ampopt.ir.model_copy import same_tensor
from ampopt.ir.program import Program
from ampopt.ir.signature import exactly_copied, without_repetitions


class KeptTensors:
    """What tensors hold, by what to call them in a message."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self._held = [(name, tensor, _look(tensor), exactly_copied(tensor)) for name, tensor in tensors]

    def put_back(self) -> str | None:
        """Give the tensors what they held; the first that held something else, or None."""
        written = []
        with torch.inference_mode(mode=False), torch.no_grad():
            for name, tensor, look, held in self._held:
                if _look(tensor) == look and same_tensor(tensor, held):
                    continue
                if _look(tensor) != look or tensor.layout is not torch.strided:
                    tensor.data = held
                else:
                    without_repetitions(tensor.data).copy_(without_repetitions(held))
                written.append(name)
        return written[0] if written else None


def _look(tensor: Tensor) -> tuple[object, ...]:
    """Shape, dtype, layout, and the strides in memory."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, tensor.dtype, tensor.layout, strides


def tensors_of_program(program: Program) -> Iterator[tuple[str, Tensor]]:
    """The weights, also before they were rounded, and the examples, by what to call them in a message."""
    graph, seen = program.graph, set[int]()
    exact = ((f"the weight {node.target}", node.meta.get("exact")) for node in graph.graph.nodes)
    own = ((f"the weight {name}", tensor) for name, tensor in graph.state_dict(keep_vars=True).items())
    given = ((f"example {place}", tensor) for place, tensor in enumerate(program.examples))
    for name, tensor in (*own, *exact, *given):
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
