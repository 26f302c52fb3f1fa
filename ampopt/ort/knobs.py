"""The ONNX Runtime options to measure for each provider, in the order of the sweep."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampopt.ort.options import CPU, CUDA, SessionOptions

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


def thread_counts() -> list[int]:
    """The thread counts to try: 1, half the cores, all cores, all hardware threads that are available."""
    usable = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = len({_siblings(cpu) for cpu in usable})
    return sorted({1, max(1, cores // 2), cores, len(usable)})


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text(encoding="ascii") if path.is_file() else str(cpu)


def changed(options: SessionOptions, change: Mapping[str, Any]) -> SessionOptions:
    """`options` with other fields, and with provider options added."""
    native = {**options.provider_options, **change.get("provider_options", {})}
    return dataclasses.replace(options, **{**change, "provider_options": native})
