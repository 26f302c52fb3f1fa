"""OpenVINO's options as data: only known ones with allowed values are read from a file."""

from __future__ import annotations

from typing import Any

import pytest

from ampopt.errors import BundleError
from ampopt.ort.openvino_options import OpenVinoOptions


def test_what_is_written_is_read() -> None:
    options = OpenVinoOptions("bf16", 3, hyper_threading=True, pinning=True, latency=False)
    assert OpenVinoOptions.from_dict(options.to_dict()) == options
    assert OpenVinoOptions.from_dict({}) == OpenVinoOptions()


def test_the_precision_is_always_said_and_denormal_numbers_always_stay() -> None:
    native = OpenVinoOptions().native()
    assert native["INFERENCE_PRECISION_HINT"] == "f32"
    assert native["CPU_DENORMALS_OPTIMIZATION"] is False
    assert native["PERFORMANCE_HINT"] == "LATENCY"
    assert OpenVinoOptions(latency=False).native()["NUM_STREAMS"] == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"precision": "dynamic"}, "precision is one of f32, bf16, f16"),
        ({"precision": ["f32"]}, "precision is one of"),
        ({"threads": 0}, "threads is null or a number"),
        ({"threads": True}, "threads is null or a number"),
        ({"threads": 10**6}, "threads is null or a number"),
        ({"pinning": "YES"}, "pinning is true or false"),
        ({"hyper_threading": 1}, "hyper_threading is true or false"),
        ({"latency": None}, "latency is true or false"),
        ({"CACHE_DIR": "/tmp"}, "a mapping of hyper_threading, latency, pinning, precision, threads"),
        (["precision"], "a mapping of"),
    ],
)
def test_anything_else_is_refused(data: Any, reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        OpenVinoOptions.from_dict(data)
