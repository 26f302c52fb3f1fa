"""Finds the loops of a model that have a batched form, and gives them that.

A loop of small operators whose sizes depend on values waits for the GPU in every turn, and no compiler takes
it. The batched form computes the same with fixed sizes and masks; only the numbers of results are read, once,
at the end. It is a transform like any other: the whole is compared with the original and timed, and the form
is kept only where it is right and faster.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampopt.batched import dense, masks, rcnn, ssd
from ampopt.ir.model_copy import working_copy
from ampopt.kernels.row_suppression import suppress_rows

Key = tuple[str, str, str]
"""The module, the class and the method that a form replaces."""

_FORMS: dict[Key, Callable[..., Any]] = {
    ("torchvision.models.detection.ssd", "SSD", "postprocess_detections"): ssd.detections,
    ("torchvision.models.detection.retinanet", "RetinaNet", "postprocess_detections"): dense.retinanet,
    ("torchvision.models.detection.fcos", "FCOS", "postprocess_detections"): dense.fcos,
    ("torchvision.models.detection.rpn", "RegionProposalNetwork", "filter_proposals"): rcnn.proposals,
    ("torchvision.models.detection.roi_heads", "RoIHeads", "postprocess_detections"): rcnn.detections,
}

_FORMS_ON_CUDA: dict[Key, Callable[..., Any]] = {
    **_FORMS,
    ("torchvision.ops.poolers", "MultiScaleRoIAlign", "forward"): rcnn.pooled,
}

_FORMS_WITH_MASKS: dict[Key, Callable[..., Any]] = {
    (
        "torchvision.models.detection.transform",
        "GeneralizedRCNNTransform",
        "postprocess",
    ): masks.postprocessed,
}


def batched_loops(model: nn.Module, device: torch.device) -> tuple[nn.Module, list[str]] | None:
    """A copy of a model with batched loops, in the same state, and their names; None where there are none.

    Its modules are of a subclass with other methods. One that overrides the loop keeps its own.
    """
    forms = _FORMS_ON_CUDA if device.type == "cuda" else _FORMS
    if any(getattr(module, "mask_predictor", None) is not None for module in model.modules()):
        forms = {**forms, **_FORMS_WITH_MASKS}
    if not any(_keys_of(module, forms) for module in model.modules()):
        return None
    suppress_rows()  # the forms call it by its name, which TorchDynamo captures
    copy, names = working_copy(model), dict[str, None]()
    for module in copy.modules():
        if keys := _keys_of(module, forms):
            kind: Any = type(module)
            module.__class__ = _subclass(kind, keys)
            names.update({f"{kind.__name__}.{name}": None for _, _, name in keys})
    return copy, list(names)


def _keys_of(module: nn.Module, forms: dict[Key, Callable[..., Any]]) -> tuple[Key, ...]:
    """The forms for the methods that a module has from the library."""
    found: list[Key] = []
    for key in forms:
        file, owner, name = key
        known = getattr(getattr(sys.modules.get(file), owner, None), name, None)
        if known is not None and getattr(type(module), name, None) is known and name not in vars(module):
            found.append(key)
    return tuple(found)


@functools.cache
def _subclass(kind: Any, keys: tuple[Key, ...]) -> type[nn.Module]:
    forms = {**_FORMS_ON_CUDA, **_FORMS_WITH_MASKS}
    methods = {key[2]: forms[key] for key in keys}
    made: type[nn.Module] = type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})
    return made
