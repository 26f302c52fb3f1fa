"""What a sweep tries of ONNX Runtime's options, in which order, and how a setting changes the others."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from ampopt.ort import knobs as onnx_knobs
from ampopt.ort.knobs import changed, cores_to_pin, knobs_for, start_options, thread_counts
from ampopt.ort.options import CPU, CUDA, LEVELS, OPENVINO, SessionOptions


def test_a_provider_without_knobs_runs_at_its_defaults() -> None:
    assert knobs_for(SessionOptions(OPENVINO)) == []


def test_a_change_adds_to_the_providers_options() -> None:
    before = SessionOptions(CUDA, {"use_tf32": "0"})
    after = changed(before, {"provider_options": {"prefer_nhwc": "1"}, "io_binding": True})
    assert after == SessionOptions(CUDA, {"use_tf32": "0", "prefer_nhwc": "1"}, io_binding=True)
    assert before == SessionOptions(CUDA, {"use_tf32": "0"})


def test_thread_counts_are_of_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2", 3: "3"}
    monkeypatch.setattr(onnx_knobs, "_siblings", lambda cpu: siblings[cpu])
    monkeypatch.setattr("ampopt.ort.knobs.os.sched_getaffinity", lambda _: set(siblings), raising=False)
    assert thread_counts() == [1, 2, 4, 6]
    monkeypatch.setattr("ampopt.ort.knobs.os.sched_getaffinity", lambda _: {0, 4}, raising=False)
    assert thread_counts() == [1, 2]


@pytest.mark.parametrize(
    ("cpus", "siblings", "threads", "pinned_to"),
    [
        ([0, 1, 2], "{}", 3, [1, 2]),
        ([2, 5], "{}", None, [5]),
        ([0, 1, 2], "{}", 2, []),  # it leaves a core to others
        ([0, 1], "{}", 3, []),  # more threads than cores
        ([0, 1], "0,1", None, []),  # ONNX Runtime's own choice is a thread for each core, not for each half
        ([3], "{}", 1, []),
    ],
)
def test_threads_are_pinned_where_there_is_one_for_every_core(
    cpus: list[int], siblings: str, threads: int | None, pinned_to: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_knobs, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(onnx_knobs, "_siblings", siblings.format)
    options = SessionOptions(threads=threads)
    assert list(cores_to_pin(options)) == pinned_to
    assert list(cores_to_pin(dataclasses.replace(options, provider=CUDA))) == []
    assert changed(SessionOptions(pinned=True), {"threads": threads}).pinned == bool(pinned_to)
    if threads is None:
        assert start_options(CPU) == SessionOptions(pinned=bool(pinned_to))


@pytest.mark.parametrize("provider", [CPU, CUDA])
def test_every_setting_differs_from_the_start_and_can_be_stored(provider: str) -> None:
    start = SessionOptions.default(provider, tf32=False)
    for knob in knobs_for(start):
        for setting, change in knob.items():
            after = changed(start, change)
            assert after != start, setting
            assert SessionOptions.from_dict(after.to_dict()) == after


def test_settings_of_one_knob_exclude_each_other_and_have_names_of_their_own() -> None:
    for provider in (CPU, CUDA):
        knobs = knobs_for(SessionOptions(provider))
        names = [name for knob in knobs for name in knob]
        assert len(set(names)) == len(names)
        for knob in knobs:
            fields = [frozenset(change) for change in knob.values()]
            assert len(set(fields)) == 1  # they change the same fields


def test_on_a_cpu_threads_come_first_and_are_named_by_their_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_knobs, "thread_counts", lambda: [1, 2, 4])
    first, *others = knobs_for(SessionOptions())
    assert first == {f"threads={count}": {"threads": count} for count in (1, 2, 4)}
    assert [list(knob) for knob in others] == [
        ["no spinning"],
        ["optimization=extended", "optimization=basic"],
        ["parallel"],
    ]
    assert {level for knob in others for c in knob.values() if (level := c.get("optimization"))} < set(LEVELS)


def test_on_a_gpu_a_graph_comes_first_and_never_without_fixed_buffers() -> None:
    start = SessionOptions.default(CUDA, tf32=False)
    first, *others = knobs_for(start)
    assert len(first) == 2
    for change in first.values():
        after = changed(start, change)
        assert after.io_binding
        assert after.provider_options["enable_cuda_graph"] == "1"
        assert after.provider_options["use_tf32"] == "0"
    assert all("enable_cuda_graph" not in str(knob) for knob in others)


def test_a_field_is_replaced_and_the_rest_stays() -> None:
    before = SessionOptions(threads=2, spinning=False)
    assert changed(before, {"threads": 4}) == dataclasses.replace(before, threads=4)
    assert changed(before, {}) == before


def test_threads_of_one_core_are_read_from_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"cpu0": "0,2", "cpu2": "0,2"}
    for cpu, siblings in told.items():
        (tmp_path / cpu).write_text(siblings)
    paths = {f"/sys/devices/system/cpu/{cpu}/topology/thread_siblings_list": tmp_path / cpu for cpu in told}
    monkeypatch.setattr(onnx_knobs, "Path", lambda path: paths.get(path, tmp_path / "missing"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert thread_counts() == [1, 2, 3]  # cpu1 says nothing of itself, and counts as a core


def test_on_one_core_there_is_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert thread_counts() == [1]
