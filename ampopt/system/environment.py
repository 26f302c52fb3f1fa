"""The environment of a measurement: device, driver and library versions."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from ampopt.system.cores import cpu_quota
from ampopt.version import __version__

LIBRARIES = (
    "triton",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "openvino",
)
"""Libraries whose versions are recorded in addition to torch and its CUDA libraries."""


def environment(device: torch.device) -> dict[str, str]:
    """Names and versions that a timing depends on."""
    facts = {
        "ampopt": __version__,
        "device": device_name(device),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        facts["compute_capability"] = f"{major}.{minor}"
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["driver"] = _driver()
    else:
        facts["threads"] = str(torch.get_num_threads())
        if (quota := cpu_quota()) is not None:
            facts["cpu_quota"] = f"{quota:.3g}"
        facts["instructions"] = torch.backends.cpu.get_cpu_capability()
    return facts


def machine_facts(device: torch.device) -> list[object]:
    """All of a machine, and of what is installed on it, that decides what is fastest there."""
    return [
        own_code(),
        *library_versions(),
        *sorted(environment(device).items()),
        device.index,
        os.cpu_count(),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
    ]


def device_name(device: torch.device) -> str:
    """The processor's own name, such as `NVIDIA H200` or `AMD EPYC`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()} ({os.cpu_count()} cores)"


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
        return next((word for word in words if word[0].isdigit() and "." in word), "unknown")
    except OSError:
        return "unknown"


@functools.cache
def own_code() -> str:
    """A hash of ampopt's source files, because another version of a pass may decide differently."""
    digest = hashlib.sha256()
    for name, file in sorted(own_files().items()):
        digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()


def own_files() -> dict[str, Path]:
    """The source files of ampopt, in all its folders, by relative path."""
    root = Path(__file__).parent.parent
    passes = root / "passes"  # a link in a checkout, which `rglob` does not follow
    sources = {file for folder in (root, passes) for file in folder.rglob("*.py")}
    native = {file for file in (root / "system" / "cpp").iterdir() if file.is_file()}
    return {file.relative_to(root).as_posix(): file for file in sources | native}


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages by import name; "absent" for a package that is not installed."""
    found: dict[str, str] = {}
    for name in sorted(set(packages)):
        if importlib.util.find_spec(name) is None:
            found[name] = "absent"
            continue
        owners = [name] if _version(name) else importlib.metadata.packages_distributions().get(name, [])
        found[name] = ", ".join(f"{owner} {_version(owner)}" for owner in sorted(set(owners)))
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def library_versions() -> list[str]:
    """The versions of those `LIBRARIES` that are installed."""
    return [f"{name} {version}" for name in LIBRARIES if (version := _version(name))]
