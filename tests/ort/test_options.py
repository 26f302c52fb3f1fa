"""A session's options as data: what was stored comes back, and what no stranger may ask for is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ampopt.errors import BundleError
from ampopt.ort.options import (
    CPU,
    CUDA,
    LEVELS,
    MOST_THREADS,
    OPENVINO,
    PREFERRED,
    SAFE_OPTIONS,
    SessionOptions,
)


def test_options_survive_json() -> None:
    options = SessionOptions(CUDA, {"prefer_nhwc": "1"}, 3, False, True, True, "layout", True)
    assert SessionOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert SessionOptions.from_dict({}) == SessionOptions()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"provider": "EvilExecutionProvider"}, "EvilExecutionProvider"),
        ({"provider": ["CPUExecutionProvider"]}, "provider"),
        ({"provider": CUDA, "provider_options": {"gpu_external_alloc": "4096"}}, "gpu_external_alloc"),
        ({"provider": CUDA, "provider_options": {"prefer_nhwc": "2"}}, "prefer_nhwc"),
        ({"provider": CUDA, "provider_options": {"prefer_nhwc": 1}}, "prefer_nhwc"),
        ({"provider_options": {"prefer_nhwc": "1"}}, "prefer_nhwc"),
        ({"provider_options": None}, "provider_options"),
        ({"threads": 0}, "threads"),
        ({"threads": 10**9}, "threads"),
        ({"threads": True}, "threads"),
        ({"threads": 1.5}, "threads"),
        ({"spinning": 1}, "spinning"),
        ({"parallel": "yes"}, "parallel"),
        ({"io_binding": None}, "io_binding"),
        ({"optimization": "most"}, "optimization"),
        ({"optimization": {}}, "optimization"),
        ({"library": "evil.so"}, "library"),
    ],
)
def test_nonsense_and_dangerous_options_of_a_file_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BundleError, match=named):
        SessionOptions.from_dict({**SessionOptions().to_dict(), **change})


@pytest.mark.parametrize("data", [None, [], "CPUExecutionProvider", 3])
def test_options_that_are_no_mapping_are_refused(data: object) -> None:
    with pytest.raises(BundleError, match="mapping"):
        SessionOptions.from_dict(data)


@pytest.mark.parametrize("provider", SAFE_OPTIONS)
def test_what_a_sweep_starts_from_can_be_stored(provider: str) -> None:
    options = SessionOptions.default(provider, tf32=False)
    assert SessionOptions.from_dict(options.to_dict()) == options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"provider": "Evil"}, "session options: provider 'Evil' is none of CPUExecutionProvider, CUDA"),
        ({"threads": 0}, f"session options: threads is null or a number from 1 to {MOST_THREADS}, not 0"),
        ({"spinning": 1}, "session options: spinning is true or false, not 1"),
        (
            {"optimization": "most"},
            "session options: optimization is one of none, basic, extended, layout, all",
        ),
        (
            {"provider": OPENVINO, "provider_options": {"device_type": "MYRIAD"}},
            "OpenVINOExecutionProvider option 'device_type' is one of CPU, GPU, NPU, AUTO, not 'MYRIAD'",
        ),
        (
            {"provider": OPENVINO, "provider_options": {"cache_dir": "/etc"}},
            "OpenVINOExecutionProvider has no option 'cache_dir' that a file may set",
        ),
        ({"library": "evil.so"}, "session options are a mapping of io_binding, optimization, parallel, "),
    ],
)
def test_a_refusal_says_what_would_serve(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError) as caught:
        SessionOptions.from_dict({**SessionOptions().to_dict(), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("threads", [None, 1, MOST_THREADS])
@pytest.mark.parametrize("level", LEVELS)
def test_what_may_be_asked_for_is_taken(threads: int | None, level: str) -> None:
    options = SessionOptions.from_dict({"threads": threads, "optimization": level})
    assert (options.threads, options.optimization) == (threads, level)


def test_every_safe_option_is_taken_with_every_safe_value() -> None:
    for provider, known in SAFE_OPTIONS.items():
        for name, values in known.items():
            for value in values:
                data = {"provider": provider, "provider_options": {name: value}}
                assert SessionOptions.from_dict(data) == SessionOptions(provider, {name: value})


def test_no_option_of_a_file_names_a_path_an_address_or_a_library() -> None:
    names = {name for known in SAFE_OPTIONS.values() for name in known}
    assert not {name for name in names for word in ("path", "dir", "alloc", "file", "ptr") if word in name}


def test_what_a_session_gives_away_for_json_is_a_copy() -> None:
    given = {"use_tf32": "0"}
    data = SessionOptions(CUDA, given).to_dict()
    data["provider_options"]["use_tf32"] = "1"
    assert given == {"use_tf32": "0"}


@pytest.mark.parametrize(
    ("provider", "tf32", "native"),
    [(CUDA, False, {"use_tf32": "0"}), (CUDA, True, {}), (CPU, False, {}), (OPENVINO, False, {})],
)
def test_a_session_starts_in_strict_float32(provider: str, tf32: bool, native: dict[str, str]) -> None:
    assert SessionOptions.default(provider, tf32=tf32) == SessionOptions(provider, native)


def test_an_optimized_model_is_not_optimized_again_and_all_else_stays() -> None:
    options = SessionOptions(CUDA, {"prefer_nhwc": "1"}, threads=3, io_binding=True)
    assert options.unoptimized() == SessionOptions(
        CUDA, {"prefer_nhwc": "1"}, threads=3, io_binding=True, optimization="none"
    )


def test_the_providers_that_are_preferred_are_those_that_a_file_may_ask_for() -> None:
    assert set(PREFERRED) == set(SAFE_OPTIONS)
    assert PREFERRED[-1] == CPU  # it is always there
