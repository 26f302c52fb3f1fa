"""Options of an OpenVINO model as data: a bundle stores them, and only these are read from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ampopt.errors import BundleError
from ampopt.ort.options import MOST_THREADS

PRECISIONS = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
"""The precisions that OpenVINO may compute in, and what a processor that has them says of itself."""


@dataclasses.dataclass(frozen=True)
class OpenVinoOptions:
    """The options of a model on the CPU; the defaults are OpenVINO's, except that its threads are not pinned.

    `precision` is one of `PRECISIONS`; OpenVINO by itself takes the lowest that the processor computes fast.
    `threads` are those of a call (None: one for each core), `hyper_threading` lets two of them share a core,
    `pinning` binds each to one core, and `latency` asks for OpenVINO's settings for one call at a time, such
    as one socket of several.
    """

    precision: str = "f32"
    threads: int | None = None
    hyper_threading: bool = False
    pinning: bool = False
    latency: bool = True

    @property
    def provider(self) -> str:
        """What runs the model, as `SessionOptions.provider` names one of ONNX Runtime's."""
        return "OpenVINO"

    def native(self) -> dict[str, Any]:
        """OpenVINO's properties: one stream, and denormal numbers as they are."""
        return {
            "INFERENCE_PRECISION_HINT": self.precision,
            "INFERENCE_NUM_THREADS": self.threads or 0,
            "ENABLE_HYPER_THREADING": self.hyper_threading,
            "ENABLE_CPU_PINNING": self.pinning,
            "CPU_DENORMALS_OPTIMIZATION": False,
            **({"PERFORMANCE_HINT": "LATENCY"} if self.latency else {"NUM_STREAMS": 1}),
        }

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON data; `from_dict` reads them."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: object) -> OpenVinoOptions:
        """Read the options of `to_dict`. Raises BundleError for anything else."""
        names = {field.name for field in dataclasses.fields(OpenVinoOptions)}
        if not isinstance(data, Mapping) or not names >= set(data):
            raise BundleError(f"OpenVINO's options are a mapping of {', '.join(sorted(names))}, not {data!r}")
        options = OpenVinoOptions(**data)
        if reason := options._why_not():
            raise BundleError(f"OpenVINO's options: {reason}")
        return options

    def _why_not(self) -> str | None:
        if not isinstance(self.precision, str) or self.precision not in PRECISIONS:
            return f"precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}"
        if self.threads is not None and (
            type(self.threads) is not int or not 1 <= self.threads <= MOST_THREADS
        ):
            return f"threads is null or a number from 1 to {MOST_THREADS}, not {self.threads!r}"
        for name in ("hyper_threading", "pinning", "latency"):
            if not isinstance(value := getattr(self, name), bool):
                return f"{name} is true or false, not {value!r}"
        return None
