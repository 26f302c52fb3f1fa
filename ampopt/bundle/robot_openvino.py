"""Loads a bundle's ONNX model with OpenVINO, with the bundle's options where they hold. No PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampopt.ort.knobs import thread_counts
from ampopt.ort.openvino_options import OpenVinoOptions
from ampopt.ort.openvino_session import OpenVinoRunner, openvino_version
from ampopt.ort.options import SessionError


def openvino_runner(
    model: bytes | Path, section: Mapping[str, Any] | None
) -> tuple[OpenVinoRunner, list[str]]:
    """The model in OpenVINO, and what there is to say of its options.

    `section` is the manifest's `onnx.openvino`, None in a bundle that was not measured with OpenVINO. The
    precision is the bundle's everywhere; the other options hold for its version of OpenVINO, and for as many
    processors. Raises SessionError if OpenVINO is not installed or does not load the model, BundleError if
    the options are none.
    """
    if (here := openvino_version()) is None:
        raise SessionError("OpenVINO is not installed: run  pip install openvino")
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
