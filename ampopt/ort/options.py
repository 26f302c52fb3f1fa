"""Options of an ONNX Runtime session as data: a bundle stores them, and only safe ones are read from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ampopt.errors import AmpoptError, BundleError

CPU, CUDA, OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"

PREFERRED = (CUDA, OPENVINO, CPU)
"""The providers that ampopt knows; where nothing was measured, the first that is there is taken."""

LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
"""Graph optimization levels, each of which includes those before it, and ONNX Runtime's names for them."""

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
"""The providers, options and values that a file may ask for. Some others take addresses of functions or
paths of libraries and caches: a stranger's file could have them run code."""

MOST_THREADS = 1024


class SessionError(AmpoptError):
    """ONNX Runtime is not there, or cannot load or run a model as asked on this machine."""


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """How a session is set up; the defaults are those of ONNX Runtime, except that threads rest between runs.

    `threads` are those inside one operator (None: ONNX Runtime decides); `spinning` lets them burn time while
    they wait, and `spin_after_run` goes on with that for some 50 ms after a run, which takes the cores from
    everybody else (53 ms of CPU time for a call of 3 ms, on 2 cores; 3 ms without, where they rest after one
    millisecond: from version 1.26 on, before that at once); `parallel` runs independent branches at
    the same time; `optimization` is one of `LEVELS`; `io_binding` keeps inputs and outputs in fixed buffers
    on the device, which CUDA graphs need. Treating denormal numbers as zero is left out: the first session of
    a process decides it for all others, and sets it for everything else that runs in the thread, NumPy
    included.
    """

    provider: str = CPU
    provider_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    threads: int | None = None
    spinning: bool = True
    spin_after_run: bool = False
    parallel: bool = False
    optimization: str = "all"
    io_binding: bool = False

    @staticmethod
    def default(provider: str, *, tf32: bool) -> SessionOptions:
        """What a session starts from. `tf32` is for models in float16, and for those who ask for it.

        Without it CUDA computes float32 in float32, and leaves the Tensor Cores out of float16 convolutions
        as well: DeepLabV3+ in float16 took 21 ms in place of 4 (H200, ONNX Runtime 1.31.1).
        """
        native = {"use_tf32": "0"} if provider == CUDA and not tf32 else {}
        return SessionOptions(provider, native)

    def unoptimized(self) -> SessionOptions:
        """For a model that is optimized already."""
        return dataclasses.replace(self, optimization="none")

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        return {**dataclasses.asdict(self), "provider_options": dict(self.provider_options)}

    @staticmethod
    def from_dict(data: object) -> SessionOptions:
        """Options as `to_dict` wrote them. Raises BundleError for anything else, see `SAFE_OPTIONS`."""
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
        for name in ("spinning", "spin_after_run", "parallel", "io_binding"):
            if not isinstance(value := getattr(self, name), bool):
                return f"{name} is true or false, not {value!r}"
        if not isinstance(self.optimization, str) or self.optimization not in LEVELS:
            return f"optimization is one of {', '.join(LEVELS)}, not {self.optimization!r}"
        return None
