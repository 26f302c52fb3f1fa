"""The ledger: measurements before and after each pass in each lane, the verdict and its reason."""

from __future__ import annotations

import dataclasses
from typing import Any

from ampopt.document.html import to_fragment
from ampopt.document.model import Document
from ampopt.measure.entry import ORIGINAL, Entry, finite
from ampopt.measure.headline import Load
from ampopt.measure.ledger_document import to_document
from ampopt.measure.sampling import Gain, Measurement
from ampopt.measure.terminal import to_text


@dataclasses.dataclass(frozen=True)
class OutputError:
    """The relative error of an output against float64 on the example inputs, and eager's in the lane."""

    name: str
    shape: tuple[int, ...]
    error: float
    eager_error: float

    def to_dict(self) -> dict[str, Any]:
        """The errors for JSON."""
        errors = {"error": finite(self.error), "eager_error": finite(self.eager_error)}
        return {"name": self.name, "shape": list(self.shape), **errors}


@dataclasses.dataclass(frozen=True)
class LaneSummary:
    """Result of a lane: latency and error of eager and of the best program, and whether it may be used.

    `gain` is the best program's over eager in the same lane, see `headline.sure_gain`. `eager_error` is None
    if eager itself is the reference of `error`. `answered_by` names the stricter lane whose program is the
    best one of this lane, too; None: its own. `outputs` are the errors of each output.
    """

    lane: str
    dtype: str
    eager: Measurement
    eager_error: float | None
    best: Measurement
    error: float
    passes: tuple[str, ...]
    device: Measurement | None = None
    memory: int | None = None
    refused: str | None = None
    gain: Gain | None = None
    answered_by: str | None = None
    outputs: tuple[OutputError, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, times in milliseconds."""
        return {
            "lane": self.lane,
            "dtype": self.dtype,
            "eager": self.eager.to_dict(),
            "eager_error": finite(self.eager_error),
            "best": self.best.to_dict(),
            "gain": None if self.gain is None else dataclasses.asdict(self.gain),
            "device": None if self.device is None else self.device.to_dict(),
            "error": finite(self.error),
            "passes": list(self.passes),
            "memory_bytes": self.memory,
            "refused": self.refused,
            "answered_by": self.answered_by,
            "outputs": [output.to_dict() for output in self.outputs],
        }


@dataclasses.dataclass(frozen=True)
class BestSoFar:
    """A program that was the fastest of its lane, with the time of the search at which it was found.

    `at_s` is in seconds since `optimize` was called, `latency_s` the median latency in its own trial.
    """

    at_s: float
    lane: str
    name: str
    latency_s: float


@dataclasses.dataclass
class Ledger:
    """All results of `optimize` for a model. `print` it for a table.

    `baseline` is the original as the user calls it, with the present global flags; `lanes` has a summary for
    each finished lane; `chosen` names the lane of the result, or is `ORIGINAL`. `gain` is the gain of
    `chosen` over `baseline`, sampled in turn in a separate comparison, and `load` the machine's load at that
    time; `control` is the original's gain over itself, from the comparison of the lanes. `best_so_far` has
    an element for each time that a lane got a faster program. `graphs` are the lines of the captured graph,
    and of the chosen program's, see `graph_listing`. `called_error` is the original's error with the present
    global flags, where these let it round to TF32.
    """

    model: str
    environment: dict[str, str]
    inputs: tuple[str, ...]
    baseline: Measurement | None = None
    gain: Gain | None = None
    load: Load | None = None
    control: Gain | None = None
    entries: list[Entry] = dataclasses.field(default_factory=list)
    lanes: dict[str, LaneSummary] = dataclasses.field(default_factory=dict)
    chosen: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    best_so_far: list[BestSoFar] = dataclasses.field(default_factory=list)
    regions: dict[str, Ledger] = dataclasses.field(default_factory=dict)
    graphs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    called_error: float | None = None

    @property
    def speedup(self) -> float | None:
        """Lower bound of how many times faster the result is than the original as the user calls it.

        The lower end of `gain`'s interval; 1 if the original was chosen, if there is no significant
        difference, or if the machine was too busy to measure.
        """
        if self.chosen == ORIGINAL:
            return 1.0
        return None if self.chosen is None or self.gain is None else self.gain.at_least

    def steps_to_best(self) -> list[BestSoFar]:
        """The fastest program against time, over all lanes that were not refused."""
        refused = {name for name, lane in self.lanes.items() if lane.refused is not None}
        found: list[BestSoFar] = []
        for each in self.best_so_far:
            if each.lane not in refused and (not found or each.latency_s < found[-1].latency_s):
                found.append(each)
        return found

    @property
    def verified(self) -> bool:
        """Whether a lane has a verified program, faster than the original or not."""
        return any(lane.refused is None for lane in self.lanes.values())

    def to_dict(self) -> dict[str, Any]:
        """The ledger for JSON, times in milliseconds."""
        return {
            "model": self.model,
            "environment": self.environment,
            "inputs": list(self.inputs),
            "baseline": None if self.baseline is None else self.baseline.to_dict(),
            "called_error": finite(self.called_error),
            "chosen": self.chosen,
            "speedup": self.speedup,
            "gain": None if self.gain is None else dataclasses.asdict(self.gain),
            "load": None if self.load is None else dataclasses.asdict(self.load),
            "control": None if self.control is None else dataclasses.asdict(self.control),
            "lanes": {name: lane.to_dict() for name, lane in self.lanes.items()},
            "passes": [entry.to_dict() for entry in self.entries],
            "notes": self.notes,
            "seconds": round(self.seconds, 2),
            "best_so_far": [
                {
                    "at_s": round(each.at_s, 2),
                    "lane": each.lane,
                    "pass": each.name,
                    "ms": 1e3 * each.latency_s,
                }
                for each in self.steps_to_best()
            ],
            "regions": {name: region.to_dict() for name, region in self.regions.items()},
        }

    def document(self) -> Document:
        """The ledger as what every format of a report is rendered from, see `ampopt.document.render`."""
        return to_document(self)

    def _repr_html_(self) -> str | None:
        """The report in a notebook."""
        return to_fragment(self.document())

    def __str__(self) -> str:
        return to_text(self)
