"""Models whose loops `torch.export` unrolls, and their programs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ampopt.ir.graph import copy_of
from ampopt.ir.program import Program
from tests.helpers import program_of


def image() -> Tensor:
    return torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))


class Loop(nn.Module):
    """Refines an estimate with the same weights, or with others in each round, as a network's layers have."""

    def __init__(
        self, rounds: int, *, shared: bool = True, fresh: bool = False, kernel: tuple[int, int] = (3, 3)
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rounds, self.fresh = rounds, fresh
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        made = (nn.Conv2d(4, 4, kernel, padding="same") for _ in range(1 if shared else rounds))
        self.convs = nn.ModuleList(made)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        seen, estimate, found = self.first(x), torch.zeros_like(x), []
        for number in range(self.rounds):
            grid = torch.linspace(0, 1, 6, dtype=x.dtype) if self.fresh else 0.5
            conv = self.convs[number % len(self.convs)]
            for _ in range(9):
                estimate = estimate * 0.5 + (conv(estimate) * seen).tanh() * grid  # rounding does not grow
            found.append(estimate * 2)
        return tuple(found)


@functools.cache
def captured_once(make: Callable[[], nn.Module]) -> Program:
    return program_of(make(), image())


def copied(make: Callable[[], nn.Module]) -> Program:
    """The program of such a model, captured once, with a graph of its own."""
    program = captured_once(make)
    return program.replace(graph=copy_of(program.graph))


def eight() -> nn.Module:
    """A loop of eight rounds."""
    return Loop(8)
