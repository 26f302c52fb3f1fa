"""Finds the loops of a model that have a batched form, and gives them that.

A loop of small operators whose sizes depend on values waits for the GPU in every turn, and no compiler takes
it. The batched form computes the same with fixed sizes and masks; only the numbers of results are read, once,
at the end. It is a transform like any other: the whole is compared with the original and timed, and the form
is kept only where it is right and faster.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ampopt.batched import dense, masks, rcnn, ssd
from ampopt.batched.fixed import Cut, CutForHeads, detected, detections, move_anchors
from ampopt.batched.suppression import cut, cut_lists
from ampopt.ir.model_copy import working_copy
from ampopt.kernels.row_suppression import suppress_rows

Key = tuple[str, str, str]
"""The module, the class and the method that a form replaces."""

_DETECTION = "torchvision.models.detection"

_FORMS: dict[Key, Callable[..., Any]] = {
    (f"{_DETECTION}.ssd", "SSD", "postprocess_detections"): ssd.detections,
    (f"{_DETECTION}.retinanet", "RetinaNet", "postprocess_detections"): dense.retinanet,
    (f"{_DETECTION}.fcos", "FCOS", "postprocess_detections"): dense.fcos,
    (f"{_DETECTION}.rpn", "RegionProposalNetwork", "filter_proposals"): rcnn.proposals,
    (f"{_DETECTION}.roi_heads", "RoIHeads", "postprocess_detections"): rcnn.detections,
}
"""Their results are filled up to fixed numbers: what fills up has a score of -1, and is the last."""

_CUTS: dict[str, Callable[..., Any]] = {
    "SSD": cut,
    "RetinaNet": cut,
    "FCOS": cut,
    "RegionProposalNetwork": cut_lists,
    "RoIHeads": cut_lists,
}
"""What cuts the results of a class's form to their numbers."""

_POOLED: Key = ("torchvision.ops.poolers", "MultiScaleRoIAlign", "forward")
_FORMS_ON_CUDA: dict[Key, Callable[..., Any]] = {**_FORMS, _POOLED: rcnn.pooled}

_FORMS_WITH_MASKS: dict[Key, Callable[..., Any]] = {
    (f"{_DETECTION}.transform", "GeneralizedRCNNTransform", "postprocess"): masks.postprocessed,
}

_REGIONS, _OUTPUTS = (
    (f"{_DETECTION}.generalized_rcnn", "GeneralizedRCNN", method) for method in ("forward", "eager_outputs")
)

_DETECTORS: list[Key] = [
    (f"{_DETECTION}.ssd", "SSD", "forward"),
    (f"{_DETECTION}.fcos", "FCOS", "forward"),
    (f"{_DETECTION}.retinanet", "RetinaNet", "forward"),
    _REGIONS,
]
_PARTS: list[Key] = [
    (f"{_DETECTION}.rpn", "RegionProposalNetwork", "forward"),
    (f"{_DETECTION}.roi_heads", "RoIHeads", "forward"),
]


def batched_loops(
    model: nn.Module, device: torch.device, *, is_one_graph: bool = False
) -> tuple[nn.Module, list[str]] | None:
    """A copy of a model with batched loops, in the same state, and their names; None where there are none.

    Its modules are of a subclass with other methods. One that overrides the loop keeps its own. With
    `is_one_graph`, detectors are graphs of fixed sizes that are cut at their end, see `ampopt.batched.fixed`;
    None where there is no detector that can be.
    """
    forms = _FORMS_ON_CUDA if device.type == "cuda" or is_one_graph else _FORMS
    if any(getattr(module, "mask_predictor", None) is not None for module in model.modules()):
        forms = {**forms, **_FORMS_WITH_MASKS}
    if not any(_keys_of(module, forms) for module in model.modules()):
        return None
    suppress_rows()  # the forms call it by its name, which TorchDynamo captures
    copy, names = working_copy(model), dict[str, None]()
    whole = {name: parts for name, each in copy.named_modules() if (parts := _fixed_parts(each))}
    if is_one_graph and not whole:
        return None
    filled = {id(part) for parts in whole.values() for part in parts} if is_one_graph else set()
    for module in list(copy.modules()):
        if keys := _keys_of(module, forms):
            kind, is_cut = _class_of(module), id(module) not in filled
            module.__class__ = _subclass(kind, tuple((key[2], _method(key, is_cut)) for key in keys))
            names.update({f"{kind.__name__}.{name}": None for _, _, name in keys})
    if is_one_graph:
        move_anchors(copy)
        copy = _cut_at_their_ends(copy, [copy.get_submodule(name) for name in whole])
    return copy, list(names)


def _keys_of(module: nn.Module, forms: Iterable[Key]) -> tuple[Key, ...]:
    """The forms for the methods that a module has from the library."""
    found: list[Key] = []
    for key in forms:
        file, owner, name = key
        known = getattr(getattr(sys.modules.get(file), owner, None), name, None)
        if known is not None and getattr(type(module), name, None) is known and name not in vars(module):
            found.append(key)
    return tuple(found)


def _fixed_parts(module: Any) -> list[nn.Module]:
    """The parts of a detector that fill up where it is of fixed sizes; none if anything is the user's own."""
    if not _keys_of(module, _DETECTORS):
        return []
    parts = [module]
    if hasattr(module, "roi_heads"):
        parts += [module.rpn, module.roi_heads]
        if not (_keys_of(module, [_OUTPUTS]) and _keys_of(module.roi_heads.box_roi_pool, [_POOLED])):
            return []
    forms = [_keys_of(part, _FORMS) for part in parts if part is not module or len(parts) == 1]
    forwards = [_keys_of(part, _PARTS) for part in parts[1:]]
    is_free = not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    return parts if all(forms) and all(forwards) and is_free else []


def _cut_at_their_ends(model: nn.Module, detectors: list[Any]) -> nn.Module:
    """The model with these of its detectors cut after their graphs, under every name that they have."""
    for detector in detectors:
        modules = list(model.named_modules(remove_duplicate=False))
        names = [name for name, each in modules if each is detector]
        kind, heads = Cut, getattr(detector, "roi_heads", None)
        if heads is not None:
            has_heads = heads.has_mask() or heads.has_keypoint()
            kind, form = (CutForHeads, detected) if has_heads else (Cut, detections)
            detector.__class__ = _subclass(_class_of(detector), (("forward", form),))
        whole = kind(detector)
        for name in names:
            if not name:
                return whole
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, whole)
    return model


@functools.cache
def _method(key: Key, is_cut: bool) -> Callable[..., Any]:
    """A form; without `is_cut` its results stay filled up."""
    form = {**_FORMS_ON_CUDA, **_FORMS_WITH_MASKS}[key]
    if not is_cut or key[1] not in _CUTS:
        return form
    after = _CUTS[key[1]]

    def method(*args: Any) -> Any:
        return after(form(*args))

    return method


def _class_of(module: nn.Module) -> Any:
    return type(module)


@functools.cache
def _subclass(kind: Any, methods: tuple[tuple[str, Callable[..., Any]], ...]) -> type[nn.Module]:
    made: type[nn.Module] = type(kind.__name__, (kind,), {**dict(methods), "__module__": kind.__module__})
    return made
