"""Loads a bundle's ONNX model with OpenVINO, with the bundle's options where they hold. No PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampopt.ort.knobs import thread_counts
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner, first_unknown, openvino_version
from ampopt.ort.options import SessionError


class ComputedOtherwiseError(SessionError):
    """OpenVINO must not run a bundle's model, because it would compute something else."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"it may not run in OpenVINO: {reason}; choose another engine, such as onnxruntime")


def why_not_openvino(model: bytes | Path, onnx: Mapping[str, Any]) -> str | None:
    """Why OpenVINO must not run a bundle's model; None: it may. `onnx` is the manifest's.

    An older bundle does not say it, and then all of the model's operators have to be known, which the package
    has to be there for.
    """
    if "why_not_openvino" in onnx:
        found: str | None = onnx["why_not_openvino"]
        return found
    asked = "the bundle is of an ampopt that did not ask whether OpenVINO computes it as PyTorch does"
    if openvino_version() is None:
        return f"{asked}: save it again"
    try:
        unknown = first_unknown(model, half=onnx["precision"] == "fp16")
    except SessionError as e:
        return f"{asked}: {e}"
    return None if unknown is None else f"{asked}, and its {unknown} is none that surely is: save it again"


def openvino_runner(model: bytes | Path, onnx: Mapping[str, Any]) -> tuple[OpenVinoRunner, list[str]]:
    """The model in OpenVINO, and what there is to say of its options.

    `onnx` is the manifest's; it has no `openvino` in a bundle that was not measured with OpenVINO. The
    precision is the bundle's everywhere; the other options hold for its version of OpenVINO, and for as many
    processors. Raises ComputedOtherwiseError if OpenVINO must not run the model, another SessionError if it
    is not installed or does not load the model, BundleError if the options are none.
    """
    here, section = openvino_version(), onnx.get("openvino")
    if here is None and onnx.get("why_not_openvino") is None:
        raise SessionError("OpenVINO is not installed: run  pip install openvino")
    if (reason := why_not_openvino(model, onnx)) is not None:
        raise ComputedOtherwiseError(reason)
    if section is None:
        reason, stored = "the bundle was saved without options for it", OpenVinoOptions()
    else:
        stored = OpenVinoOptions.from_dict(section["options"])
        if section["version"] != here:
            reason = f"the bundle's own hold for openvino {section['version']}, and this is {here}"
        elif (stored.threads or 1) > (most := thread_counts()[-1]):
            reason = f"the bundle's own take {stored.threads} threads, and there are {most} here"
        else:
            return OpenVinoRunner(model, stored), []
    runner = OpenVinoRunner(model, OpenVinoOptions(precision=stored.precision))
    return runner, [f"OpenVINO runs with default options: {reason}"]
