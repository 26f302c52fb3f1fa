"""The ONNX Runtime options to measure for each provider, in the order of the sweep."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ampopt.ort.options import CPU, CUDA, SessionOptions
from ampopt.system.cores import threads_within_quota, usable_cpus

Knob = Mapping[str, Mapping[str, Any]]
"""Settings that exclude each other: their names in a report, and the fields that they change."""


def knobs_for(start: SessionOptions) -> list[Knob]:
    """The settings to try, in order, as changes of fields; `provider_options` are added to existing ones.

    The largest gains come first, because a sweep may end early: on a GPU a CUDA graph and the layout for
    Tensor Cores.
    """
    if start.provider == CUDA:
        graph = {"enable_cuda_graph": "1"}
        native: list[dict[str, dict[str, str]]] = [
            {"fuse_conv_bias=1": {"fuse_conv_bias": "1"}},
            {f"cudnn_conv_algo_search={s}": {"cudnn_conv_algo_search": s} for s in ("HEURISTIC", "DEFAULT")},
            {"cudnn_conv_use_max_workspace=0": {"cudnn_conv_use_max_workspace": "0"}},
        ]
        swept = [{name: {"provider_options": set_} for name, set_ in knob.items()} for knob in native]
        first: Knob = {
            "enable_cuda_graph=1": {"io_binding": True, "provider_options": graph},
            "enable_cuda_graph=1 prefer_nhwc=1": {
                "io_binding": True,
                "provider_options": {**graph, "prefer_nhwc": "1"},
            },
        }
        return [first, *swept, {"io_binding": {"io_binding": True}}]
    if start.provider == CPU:
        return [
            {f"threads={count}": {"threads": count} for count in thread_counts()},
            {"no spinning": {"spinning": False}},
            {f"optimization={level}": {"optimization": level} for level in ("extended", "basic")},
            {"parallel": {"parallel": True}},
        ]
    return []


def cores_to_pin(options: SessionOptions) -> Sequence[int]:
    """A hardware thread for each thread of a session but the caller's; none where it leaves some to others.

    Two sessions that need half of the cores each would be pinned to the same ones.
    """
    usable = usable_cpus()
    count = _cores(usable) if options.threads is None else options.threads
    can_be = hasattr(os, "sched_getaffinity") and count == len(usable) and options.provider == CPU
    return usable[1:] if can_be else ()


def start_options(provider: str, *, tf32: bool = False) -> SessionOptions:
    """The options to start from: the defaults, with threads pinned to cores where they are as many."""
    options = SessionOptions.default(provider, tf32=tf32)
    return dataclasses.replace(options, pinned=bool(cores_to_pin(options)))


def thread_counts() -> list[int]:
    """The thread counts to try: 1, half the cores, all cores, the quota, all hardware threads."""
    usable = usable_cpus()
    cores, most = _cores(usable), len(usable)
    return sorted({1, max(1, cores // 2), cores, threads_within_quota(most), most})


def _cores(cpus: Sequence[int]) -> int:
    return len({_siblings(cpu) for cpu in cpus})


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text(encoding="ascii") if path.is_file() else str(cpu)


def changed(options: SessionOptions, change: Mapping[str, Any]) -> SessionOptions:
    """`options` with other fields, and with provider options added; pinned only where they can be."""
    native = {**options.provider_options, **change.get("provider_options", {})}
    found = dataclasses.replace(options, **{**change, "provider_options": native})
    return dataclasses.replace(found, pinned=found.pinned and bool(cores_to_pin(found)))
