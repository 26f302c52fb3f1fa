"""Puts back the tensors of a program to which a pass of another package has written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampopt.errors import PassError
from ampopt.ir.model_copy import same_tensor
from ampopt.ir.program import Program


def with_weights_kept(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A pass's `apply`, after which every tensor of the program that it was given holds what it held.

    Programs share their weights with the model that they are verified against: both would be wrong, and
    agree. Raises PassError where the pass has written to one; it has to register a new weight.
    """

    @functools.wraps(apply)
    def guarded(self: Any, program: Program, *more: Any, **options: Any) -> Any:
        with torch.inference_mode(mode=False), torch.no_grad():
            before = [(name, tensor, tensor.detach().clone()) for name, tensor in _tensors_of(program)]
        failed: Exception | None = None
        try:
            result = apply(self, program, *more, **options)
        except Exception as error:
            failed = error
        finally:
            written = _put_back(before)
        if written:
            raise PassError(
                f"{self.name} has written to {written[0]}, which other programs and the original read: a "
                "pass gives a graph new weights (ampopt.ir.graph.add_constant) and writes to none"
            ) from failed
        if failed is not None:
            raise failed
        return result

    return guarded


def _put_back(before: list[tuple[str, Tensor, Tensor]]) -> list[str]:
    """Give tensors what they held; the names of those that held something else."""
    written = []
    with torch.inference_mode(mode=False), torch.no_grad():
        for name, tensor, held in before:
            if not same_tensor(tensor, held):
                written.append(name)
                if (tensor.shape, tensor.dtype, tensor.layout) == (held.shape, held.dtype, held.layout):
                    tensor.data.copy_(held)
                else:
                    tensor.data = held
    return written


def _tensors_of(program: Program) -> Iterator[tuple[str, Tensor]]:
    """The weights, also before they were rounded, and the examples, by what to call them in a message."""
    graph, seen = program.graph, set[int]()
    exact = ((f"the weight {node.target}", node.meta.get("exact")) for node in graph.graph.nodes)
    own = ((f"the weight {name}", tensor) for name, tensor in graph.state_dict(keep_vars=True).items())
    given = ((f"example {place}", tensor) for place, tensor in enumerate(program.examples))
    for name, tensor in (*own, *exact, *given):
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
