"""What `ampopt.diagnose` found: the verdict, the findings and the tables, as JSON data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ampopt.diagnosis.accuracy import LayerError
from ampopt.diagnosis.ceilings import Ceilings
from ampopt.diagnosis.document import to_document
from ampopt.diagnosis.finding import Finding, counted
from ampopt.diagnosis.layers import Layer
from ampopt.diagnosis.own_program import OwnKernel
from ampopt.diagnosis.sweep import BatchRow
from ampopt.diagnosis.training import StepTimes
from ampopt.diagnosis.usage import Usage
from ampopt.document.html import to_fragment
from ampopt.document.model import Document
from ampopt.measure.sampling import Measurement


@dataclasses.dataclass(frozen=True)
class Launches:
    """The kernels of one call: their number and mean in seconds, and the share of it in which none runs."""

    kernels: int
    mean_s: float
    gaps: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the mean in microseconds."""
        return {"kernels": self.kernels, "mean_us": round(1e6 * self.mean_s, 3), "gaps": round(self.gaps, 4)}

    def __str__(self) -> str:
        kernels = counted(self.kernels, "kernel", "kernels")
        return f"{kernels} of {1e6 * self.mean_s:.3g} µs in the mean, {self.gaps:.0%} gaps"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`. `print` it: the verdict comes first.

    `latency` and `device_time` are by lane, of eager and of its kernels alone; `findings` are ranked, see
    `Finding`. `layers` are the operators in the order of the graph, none if the model is not one graph;
    `accuracy` are the operators of each lane, the worst first; `sweep` has a row for each batch. With
    `train=True`, `training` has the times of each way to run a training step, and `latency` its samples.
    With `optimized=`, `own` are the optimized program's kernels in order, each with its places. `usage` has
    the clocks, power and energy of each lane's calls, where the device tells them.
    """

    model: str
    environment: dict[str, str]
    inputs: tuple[str, ...]
    verdict: str
    findings: tuple[Finding, ...]
    latency: Mapping[str, Measurement]
    device_time: Mapping[str, Measurement]
    ceilings: Ceilings
    layers: tuple[Layer, ...]
    accuracy: Mapping[str, tuple[LayerError, ...]]
    sweep: tuple[BatchRow, ...]
    notes: tuple[str, ...]
    seconds: float
    training: Mapping[str, StepTimes] = dataclasses.field(default_factory=dict)
    own: tuple[OwnKernel, ...] = ()
    usage: Mapping[str, Usage] = dataclasses.field(default_factory=dict)

    @property
    def launches(self) -> dict[str, Launches]:
        """What a call of eager launches on a GPU, by lane."""
        found: dict[str, Launches] = {}
        for lane, measured in self.latency.items():
            spent = [layer.spent[lane] for layer in self.layers if lane in layer.spent]
            kernels = [kernel.seconds for each in spent for kernel in each.kernels]
            if kernels and lane in self.device_time:
                gaps = max(1 - self.device_time[lane].median / measured.median, 0.0)
                found[lane] = Launches(len(kernels), sum(kernels) / len(kernels), gaps)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON data, times in milliseconds."""
        return {
            "model": self.model,
            "environment": self.environment,
            "inputs": list(self.inputs),
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
            "latency": {lane: measured.to_dict() for lane, measured in self.latency.items()},
            "device_time": {lane: measured.to_dict() for lane, measured in self.device_time.items()},
            "usage": {lane: used.to_dict() for lane, used in self.usage.items()},
            "launches": {lane: each.to_dict() for lane, each in self.launches.items()},
            "ceilings": self.ceilings.to_dict(),
            "layers": [layer.to_dict() for layer in self.layers],
            "accuracy": {lane: [e.to_dict() for e in errors] for lane, errors in self.accuracy.items()},
            "sweep": [row.to_dict() for row in self.sweep],
            "own_kernels": [kernel.to_dict() for kernel in self.own],
            "training": {way: times.to_dict() for way, times in self.training.items()},
            "notes": list(self.notes),
            "seconds": round(self.seconds, 2),
        }

    def document(self) -> Document:
        """What every format of a report is rendered from, see `ampopt.document.render`."""
        return to_document(self)

    def _repr_html_(self) -> str | None:
        """The diagnosis in a notebook."""
        return to_fragment(self.document())

    def __str__(self) -> str:
        from ampopt.diagnosis.text import to_text

        return to_text(self)
