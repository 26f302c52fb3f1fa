"""Options of an ONNX Runtime session as data: a bundle stores them, and only safe ones are read from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ampopt.errors import AmpoptError, BundleError

CPU, CUDA, OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"

PREFERRED = (CUDA, OPENVINO, CPU)
"""The providers that ampopt supports; without measurements, the first available one is used."""

LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
"""Graph optimization levels, in increasing order, and ONNX Runtime's names for them."""

SAFE_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    CPU: {},
    CUDA: {
        "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        "cudnn_conv_use_max_workspace": ("0", "1"),
        "enable_cuda_graph": ("0", "1"),
        "fuse_conv_bias": ("0", "1"),
        "prefer_nhwc": ("0", "1"),
        "use_tf32": ("0", "1"),
    },
    OPENVINO: {"device_type": ("CPU", "GPU", "NPU", "AUTO")},
}
"""The providers, options and values that a file may set.

Others take function addresses or paths of libraries and caches, with which a malicious file could execute
code.
"""

MOST_THREADS = 1024


class SessionError(AmpoptError):
    """ONNX Runtime is not installed, or cannot load or run a model with these options on this machine."""


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """The options of a session; the defaults are ONNX Runtime's, except that threads rest between runs.

    `threads` are those inside one operator (None: ONNX Runtime decides). `spinning` lets them busy-wait, and
    `spin_after_run` continues this for about 50 ms after a run, which takes the cores from all other
    processes (53 ms of CPU time for a call of 3 ms, on 2 cores; 3 ms without it, where threads rest after one
    millisecond since version 1.26, and at once before). `parallel` runs independent branches at the same
    time; `optimization` is one of `LEVELS`; `io_binding` keeps inputs and outputs in fixed buffers on the
    device, which CUDA graphs need. `pinned` keeps each thread but the caller's on its own core, in a session
    with a thread for every core: where cores share no cache, as in virtual machines, Linux wakes a rested
    thread on the caller's core, and the two take turns there (MobileNetV3-small at 30 Hz on two such cores:
    2.6 ms, pinned 2.2, in two runs of the race). The calling thread must not be pinned to one of those cores.
    Flushing denormal numbers to zero is not an option: the first session of a process sets it for all others,
    and for all other code in the thread, including NumPy.
    """

    provider: str = CPU
    provider_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    threads: int | None = None
    spinning: bool = True
    spin_after_run: bool = False
    parallel: bool = False
    optimization: str = "all"
    io_binding: bool = False
    pinned: bool = False

    @staticmethod
    def default(provider: str, *, tf32: bool) -> SessionOptions:
        """The initial options of a provider.

        `tf32` is for models in float16, and for users who allow TF32.

        Without it CUDA computes float32 in float32, but also does not use Tensor Cores for float16
        convolutions: DeepLabV3+ in float16 took 21 ms instead of 4 (H200, ONNX Runtime 1.31.1).
        """
        native = {"use_tf32": "0"} if provider == CUDA and not tf32 else {}
        return SessionOptions(provider, native)

    def unoptimized(self) -> SessionOptions:
        """The options for a model that is optimized already."""
        return dataclasses.replace(self, optimization="none")

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON data; `from_dict` reads them.

        `pinned` is left out where it is false: versions that do not know it read the others.
        """
        fields = {**dataclasses.asdict(self), "provider_options": dict(self.provider_options)}
        return {name: value for name, value in fields.items() if name != "pinned" or value}

    @staticmethod
    def from_dict(data: object) -> SessionOptions:
        """Read the options of `to_dict`. Raises BundleError for anything else, see `SAFE_OPTIONS`."""
        names = {field.name for field in dataclasses.fields(SessionOptions)}
        if not isinstance(data, Mapping) or not names >= set(data):
            raise BundleError(f"session options are a mapping of {', '.join(sorted(names))}, not {data!r}")
        options = SessionOptions(**data)
        if reason := options._why_not_safe():
            raise BundleError(f"session options: {reason}")
        return options

    def _why_not_safe(self) -> str | None:
        if not isinstance(self.provider, str) or self.provider not in SAFE_OPTIONS:
            return f"provider {self.provider!r} is none of {', '.join(SAFE_OPTIONS)}"
        if not isinstance(self.provider_options, Mapping):
            return f"provider_options is not a mapping but {self.provider_options!r}"
        for name, value in self.provider_options.items():
            allowed = SAFE_OPTIONS[self.provider].get(name)
            if allowed is None:
                return f"{self.provider} has no option {name!r} that a file may set"
            if value not in allowed:
                return f"{self.provider} option {name!r} is one of {', '.join(allowed)}, not {value!r}"
        if self.threads is not None and (
            type(self.threads) is not int or not 1 <= self.threads <= MOST_THREADS
        ):
            return f"threads is null or a number from 1 to {MOST_THREADS}, not {self.threads!r}"
        for name in ("spinning", "spin_after_run", "parallel", "io_binding", "pinned"):
            if not isinstance(value := getattr(self, name), bool):
                return f"{name} is true or false, not {value!r}"
        if not isinstance(self.optimization, str) or self.optimization not in LEVELS:
            return f"optimization is one of {', '.join(LEVELS)}, not {self.optimization!r}"
        return None
