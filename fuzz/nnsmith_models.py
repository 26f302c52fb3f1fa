"""Networks that NNSmith invents, through the passes. It needs the environment of `make fuzz-nnsmith`.

NNSmith (Liu et al., ASPLOS 2023) solves constraints on shapes and dtypes, for graphs of operators that are
valid by construction. Its own module checks values in Python as it runs, which no graph can hold: the
instructions are run by a plain one instead.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.calls import Call
from fuzz.outcome import REVERTED, Outcome, short
from fuzz.pick import Pick
from fuzz.through_passes import check_model

Instruction = tuple[Callable[..., Any], list[str], list[str], Any]

MOST_NODES, MOST_ELEMENTS, TIMEOUT_MS = 12, 2048, 10_000
"""The size of a graph, of its largest tensor, and how long the solver may think."""

DRAWS = 12
"""How many random inputs are tried for each one that is wanted."""


class Instructions(nn.Module):
    """The instructions of an NNSmith graph, one after the other: named tensors in, a tuple of them out."""

    def __init__(self, steps: Sequence[Instruction], inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.functions = [(function, list(args), list(results)) for function, args, results, _ in steps]
        self.parts = nn.ModuleList(f for f, _, _ in self.functions if isinstance(f, nn.Module))
        self.inputs, self.outputs = list(inputs), list(outputs)

    def values(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Every tensor of the graph by its name."""
        found = dict(zip(self.inputs, tensors, strict=True))
        modules = iter(self.parts)
        for function, args, results in self.functions:
            run = next(modules) if isinstance(function, nn.Module) else function
            result = run(*[found[name] for name in args])
            found |= zip(results, result if isinstance(result, (list, tuple)) else [result], strict=True)
        return found

    def is_defined(self, *tensors: Tensor) -> bool:
        """Whether neither NaN nor Inf becomes an integer on the way from these inputs."""
        with torch.no_grad():
            found = self.values(*tensors)
        finite = {name: bool(torch.isfinite(tensor).all()) for name, tensor in found.items()}
        return all(
            all(finite[name] for name in args) or all(found[name].is_floating_point() for name in results)
            for _, args, results in self.functions
        )

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = self.values(*tensors)
        return tuple(found[name] for name in self.outputs)


def generate(seed: int) -> tuple[Instructions, list[tuple[tuple[int, ...], torch.dtype]], str]:
    """A model, the shapes and dtypes of its inputs, and its graph as text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = importlib.import_module("nnsmith.graph_gen")
        models = importlib.import_module("nnsmith.materialize.torch")
    torch.manual_seed(seed)
    graph = generator.model_gen(
        opset=models.TorchModelCPU.operators(),
        method="symbolic-cinit",
        seed=seed,
        max_elem_per_tensor=MOST_ELEMENTS,
        max_nodes=MOST_NODES,
        timeout_ms=TIMEOUT_MS,
    ).make_concrete()
    net = models.TorchModelCPU.from_gir(graph).native_model
    model = Instructions(net.instructions, list(net.input_like), list(net.output_like))
    kinds = [(tuple(like.shape), like.dtype.torch()) for like in net.input_like.values()]
    return model.eval(), kinds, graph.pretty()


def check(seed: int) -> Outcome:
    """What becomes of the NNSmith network of a seed under the passes.

    Numbers are not used where NaN or Inf would be cast to integers on the way: that is undefined.
    """
    try:
        model, kinds, text = generate(seed)
    except Exception as error:  # a bug in there, or no solution in time
        return Outcome("skipped", f"NNSmith fails: {short(error, 100)}")
    print(f"nnsmith {seed}:\n{text}", file=sys.stderr, flush=True)  # its seeds give other graphs by the clock
    if not kinds:
        return Outcome("skipped", "it has no inputs")
    generator = torch.Generator().manual_seed(seed)
    try:
        drawn = [_draw(kinds, generator, scale) for scale in (1.0, 0.3, 3.0) for _ in range(DRAWS)]
        calls = [Call(tuple(tensors), {}) for tensors in drawn if model.is_defined(*tensors)]
    except Exception as error:  # whatever it is: it comes from PyTorch
        return Outcome("skipped", f"eager fails: {short(error, 100)}")
    if not calls:
        return Outcome("skipped", "no inputs were found for which it is defined")
    outcome = check_model(model, calls[:3], Pick(f"nnsmith {seed}"))
    if not outcome.is_fault and outcome.kind != REVERTED:
        return outcome
    return Outcome(outcome.kind, outcome.reason, outcome.stage, {**outcome.details, "graph": text})


def _draw(
    kinds: Sequence[tuple[tuple[int, ...], torch.dtype]], generator: torch.Generator, scale: float
) -> list[Tensor]:
    tensors = []
    for shape, dtype in kinds:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        tensors.append(numbers > 0 if dtype is torch.bool else (numbers * 3).to(dtype))
    return tensors
