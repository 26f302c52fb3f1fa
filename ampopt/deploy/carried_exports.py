"""ONNX models of a recipe's engines in a bundle: a load need not export them anew, which takes seconds.

They are without the weights that the program has, so that they are small, and hold for the very program and
the same versions of all libraries; elsewhere they are not looked at. Nothing proves that they compute what
the program does but the signature of whom the bundle is believed.
"""

from __future__ import annotations

import numpy as np
import safetensors.numpy

from ampopt.bundle.files import BundleFiles
from ampopt.deploy.optimized import Optimized
from ampopt.engines.onnx_cache import Exports, exports_in
from ampopt.ir.transform import replay
from ampopt.passes import OnnxRuntime, Openvino

EXPORTS = "exports.safetensors"


def exports_file(optimized: Optimized) -> dict[str, bytes]:
    """The file of a bundle with the exports that replaying its recipe takes; nothing if it takes none."""
    recipe, found = optimized.recipe, Exports()
    if any(isinstance(step, (OnnxRuntime, Openvino)) for step in recipe.passes):
        with exports_in(found):
            replay(recipe.passes, recipe.lane.start(optimized.captured.program))
    arrays = {key: np.frombuffer(data, np.uint8) for key, data in found.items()}
    return {EXPORTS: safetensors.numpy.save(arrays)} if found else {}


def exports_of(files: BundleFiles) -> Exports:
    """The exports that a bundle holds; none for one from before that."""
    if EXPORTS not in files.names:
        return Exports()
    arrays = safetensors.numpy.load(files.read(EXPORTS))
    return Exports({key: array.tobytes() for key, array in arrays.items()})
