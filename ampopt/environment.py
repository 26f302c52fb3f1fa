"""Where a measurement was made: device, driver, library versions, as results are labelled with."""

from __future__ import annotations

import os
import platform

import torch

from ampopt.version import __version__


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
        facts["instructions"] = torch.backends.cpu.get_cpu_capability()
    return facts


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
