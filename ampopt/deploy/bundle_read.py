"""Reads a bundle: the captured program, its recipe, and the self-tests. Nothing of it is evaluated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampopt.bundle.call_file import read_call
from ampopt.bundle.files import BundleFiles
from ampopt.bundle.program_file import read_program
from ampopt.bundle.stored_sizes import in_corner, read_sizes
from ampopt.bundle.stored_state import read_state
from ampopt.deploy.loaded_model import SelfTestCall
from ampopt.deploy.recipe_file import read_recipe
from ampopt.errors import BundleError
from ampopt.ir.capture import Captured
from ampopt.ir.lanes import lane_of
from ampopt.ir.size_ranges import resized, with_tensors
from ampopt.ir.transform import Recipe


def read_bundle(
    files: BundleFiles, device: torch.device, types: Sequence[type], *, was_tried: bool
) -> tuple[Captured, Recipe, list[SelfTestCall]]:
    """The capture, its recipe, and the self-tests, of which the first is the example's.

    `was_tried`: an earlier load on this machine, with the same libraries, has tried the program. Raises
    BundleError where the contents are not as `OptimizedModule.save` writes them.
    """
    manifest, stored = files.manifest, read_sizes(files.manifest)
    tensors = safetensors.torch.load(files.read("self_test.safetensors"))
    examples = [_typed(tensors, "input", entry, entry["shape"]) for entry in manifest["inputs"]]
    outputs = tuple(
        _typed(tensors, "output", entry, entry["shape"]).to(device) for entry in manifest["outputs"]
    )
    data = json.loads(files.read("program.json"), object_pairs_hook=_without_repeats)
    if not isinstance(data, dict) or set(data) != {"program", "recipe"}:
        raise BundleError("program.json holds a program and a recipe, and this one does not")
    weights = safetensors.torch.load(files.read("weights.safetensors"))
    program = read_program(
        data["program"], weights, examples, device=device, stored=stored, was_tried=was_tried
    )
    count = len(read_state(manifest))
    captured = read_call(manifest["call"], program, types, states=count)
    computes_in = manifest["lane"]["dtype"]
    if computes_in not in ("float32", "float16", "bfloat16"):
        raise BundleError(f"manifest.json: a lane in {computes_in} is not known")
    lane = lane_of(getattr(torch, computes_in), device)
    recipe = Recipe(lane, read_recipe(data["recipe"]), manifest["tolerance"])
    args, kwargs = pytree.tree_unflatten(list(captured.leaves), captured.spec)
    state = program.examples[len(program.examples) - count :]
    tests = [SelfTestCall(args, kwargs, outputs, state=state)]
    for number, corner in enumerate(stored.corners):
        wanted = resized(captured.program.examples, stored.sizes, corner)
        inputs = [
            _typed(tensors, in_corner(number, "input"), entry, list(like.shape)).to(device)
            for entry, like in zip(manifest["inputs"], wanted, strict=True)
        ]
        results = [
            _typed(tensors, in_corner(number, "output"), e, None).to(device) for e in manifest["outputs"]
        ]
        args, kwargs = pytree.tree_unflatten(list(with_tensors(captured.leaves, inputs)), captured.spec)
        place = " at " + ", ".join(f"{name} {size}" for name, size in corner.items())
        tests.append(SelfTestCall(args, kwargs, tuple(results), place))
    return captured, recipe, tests


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BundleError("program.json has the same key twice in one object")
    return found


def _typed(
    tensors: Mapping[str, Tensor], kind: str, entry: Mapping[str, Any], shape: Sequence[int] | None
) -> Tensor:
    """A tensor of the self-test in the dtype of the manifest (bfloat16 is stored as float32).

    Raises BundleError where it is missing or not of `shape`; None: of any.
    """
    name = f"{kind}.{entry['name']}"
    if name not in tensors:
        raise BundleError(f"self_test.safetensors has no {name}")
    tensor = tensors[name].to(getattr(torch, entry["dtype"], tensors[name].dtype))
    if shape is not None and list(tensor.shape) != shape:
        raise BundleError(f"self_test.safetensors, {name}: not of the manifest's shape {shape}")
    return tensor
