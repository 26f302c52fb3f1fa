"""Any network of any benchmark by its name: what a cold process can be asked for."""

from __future__ import annotations

from torch import nn

from benchmarks.breadth_networks import BREADTH, subject
from benchmarks.by_hand import Inputs
from benchmarks.cold_networks import COLD, stranger
from benchmarks.race_networks import RACE, racer
from benchmarks.seeds_workloads import SEEDS


def anybody(name: str) -> tuple[nn.Module, Inputs]:
    """A network in eval mode with its inputs, on the CPU; one of the race is as it is there.

    Raises UnknownNetworkError where a stranger's package is missing or does not have it.
    """
    if name in COLD:
        model, image = stranger(name)
        return model, (image,)
    if name in SEEDS and name not in RACE:
        workload = SEEDS[name].workload
        return workload.model().eval(), workload.inputs()
    return subject(name) if name in BREADTH and name not in RACE else racer(name)
