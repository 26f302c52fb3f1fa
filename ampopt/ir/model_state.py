"""Finds the state that a model keeps between calls, so that no state is captured as a constant.

A graph computes results from inputs alone. A model gives other results in the next call if it reads a value
that an earlier call wrote to a buffer, an attribute, a list, an object, an iterator or a global, or if it
draws random numbers.
"""

from __future__ import annotations

import dataclasses
import math
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt.errors import CaptureError
from ampopt.ir.lanes import FP32
from ampopt.ir.model_copy import (
    device_of,
    exact_copy,
    private_copy,
    same_tensor,
    untouched_rng,
    working_copy,
)
from ampopt.ir.numerics import fresh_draw, least_error, relative_error, rounded_anew
from ampopt.ir.signature import copied, flatten_call, flatten_outputs, map_tensors

_DEEPEST = 40
"""Nesting of objects that is looked into."""

ROUNDINGS = 3
"""Number of runs with other rounding if a model's results for equal inputs differ by more than usual."""

Call = Callable[[nn.Module], Any]


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """A difference of two copies of a model: a submodule's name, its attribute, and the path inside it."""

    module: str
    attribute: str
    rest: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}".removeprefix(".") + self.rest


def differences(one: nn.Module, other: nn.Module) -> list[Place]:
    """The differences of two copies of a model: in tensors, numbers, containers, objects, iterators."""
    found: dict[Place, None] = {}
    others = dict(other.named_modules())
    for name, module in one.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or name not in others:
            continue  # its attributes live in C++
        for key, mine, yours in _members(vars(module), vars(others[name])):
            if key in ("_modules", "_parameters", "_buffers"):
                continue
            if (rest := _differing(mine, yours, "", set(), 0)) is not None:
                found[Place(name, key, rest)] = None
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        theirs = dict(tensors(other, remove_duplicate=False))
        mine = dict(tensors(one, remove_duplicate=False))
        for path in mine.keys() | theirs.keys():
            if path not in mine or path not in theirs or not same_tensor(mine[path], theirs[path]):
                module_name, _, attribute = path.rpartition(".")
                found[Place(module_name, attribute)] = None
    return sorted(found)


_ABSENT = object()


def _members(mine: Mapping[str, Any], yours: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in mine.keys() | yours.keys():
        yield key, mine.get(key, _ABSENT), yours.get(key, _ABSENT)


def _differing(a: Any, b: Any, path: str, seen: set[tuple[int, int]], depth: int) -> str | None:
    """The path to the first place where two values differ; None where they are alike."""
    if a is b or (id(a), id(b)) in seen or isinstance(a, (nn.Module, fx.Graph)):
        return None  # named_modules comes to modules; a copy of an fx.GraphModule is of a class of its own
    seen.add((id(a), id(b)))
    if type(a) is not type(b):
        return path
    if isinstance(a, Tensor):
        return None if same_tensor(a, b) else path
    if isinstance(a, float) and math.isnan(a) and math.isnan(b):
        return None
    if isinstance(a, _ATOMS):
        return None if a == b else path
    if depth > _DEEPEST:
        return None
    if isinstance(a, torch.Generator):
        return _differing(a.get_state(), b.get_state(), path, seen, depth + 1)
    if isinstance(a, (set, frozenset)):
        return None if sorted(map(repr, a)) == sorted(map(repr, b)) else path
    parts: list[tuple[str, Any, Any]]
    if isinstance(a, Mapping):
        if [*map(repr, a)] != [*map(repr, b)]:
            return path
        parts = [(f"[{key!r}]", x, y) for (key, x), y in zip(a.items(), b.values(), strict=True)]
    elif isinstance(a, Sequence):
        if len(a) != len(b):
            return path
        parts = [(f"[{index}]", x, y) for index, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        parts = list(_contents(a, b))
    for step, x, y in parts:
        if (rest := _differing(x, y, path + step, seen, depth + 1)) is not None:
            return rest
    return None


_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def _contents(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of two objects of one class: what they would be put together of again."""
    if isinstance(a, _CODE):
        return
    if isinstance(a, types.MethodType):
        yield "", a.__self__, b.__self__
        return
    if hasattr(a, "__dict__"):
        yield from ((f".{key}", x, y) for key, x, y in _members(vars(a), vars(b)))
    try:
        mine, yours = a.__reduce_ex__(4), b.__reduce_ex__(4)
    except Exception:  # it cannot be taken apart: what it prints tells
        yield "", _printed(a), _printed(b)
        return
    if isinstance(mine, tuple) and isinstance(yours, tuple):  # (class, arguments, state, items, …)
        listed = [tuple(part) if isinstance(part, Iterator) else part for part in mine[1:]]
        theirs = [tuple(part) if isinstance(part, Iterator) else part for part in yours[1:]]
        yield "", listed, theirs


def _printed(thing: Any) -> str:
    text = repr(thing)
    return "" if hex(id(thing))[2:] in text.lower() else text  # nothing but its address


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """How a model's results depend on earlier calls.

    `reason` says why a graph cannot represent the model, and is None if it can. `buffers` are those that a
    call writes, by their dotted names: they can be inputs and outputs of the graph.
    """

    reason: str | None
    buffers: tuple[str, ...] = ()


def behaviour_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> Behaviour:
    """Call copies of a model to find whether the graph of one call represents all calls.

    The model, a private copy, is not called itself. One copy is called with the inputs, with other inputs,
    and with the first ones again, another copy twice with the first ones, each from the initial buffers and
    with different random seeds. Results for equal inputs must agree within the FP32 rounding of an output,
    and only buffers may have changed. A value that every call writes before it reads it, or that is the same
    after any calls (a table that the first call makes), is not a state.
    """
    leaves, spec = flatten_call(args, kwargs)
    others, buffers = _other_leaves(leaves), dict(model.named_buffers(remove_duplicate=False))

    def answers(module: nn.Module, values: Sequence[Any], seed: int) -> list[Any]:
        called_args, called_kwargs = map_tensors(copied, *pytree.tree_unflatten(list(values), spec))
        given = flatten_call(called_args, called_kwargs)[0]
        for name, buffer in buffers.items():
            set_buffer(module, name, buffer.detach().clone())
        with untouched_rng(device):
            seed_all(seed, device)
            tensors, layout = flatten_outputs(module(*called_args, **called_kwargs))
        for place, (value, now) in enumerate(zip(values, given, strict=True)):
            if isinstance(value, Tensor) and not same_tensor(value, now):
                raise CaptureError(f"the model changes its input {place} when it is called")
        rest = [leaf for leaf in layout.template if leaf is not layout.TENSOR]
        return [*(tensor.detach().clone() for tensor in tensors), rest]

    one, other = exact_copy(model), working_copy(model)
    with _Noting() as noted:
        first = answers(one, leaves, 1)
    written = set(differences(model, one))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if weights := [place for place in written if str(place) in parameters]:
        return Behaviour(f"it changes its parameter {weights[0]} when it is called")
    elsewhere = first
    try:
        elsewhere = answers(one, others, 2)
    except Exception:  # indices or offsets cannot be drawn
        others = leaves
    repeated = [answers(one, leaves, 3), answers(other, leaves, 4), answers(other, leaves, 5)]
    written |= {*differences(model, one), *differences(model, other)}
    places = sorted(place for place in written if str(place) not in buffers)
    worst = max(apart(first, answer) for answer in repeated)
    if worst > 1.0 and worst > moved_by_rounding(model, first, lambda m: answers(m, leaves, 1)):
        return Behaviour(_accuse(first, repeated, places, noted.operator))
    if repr(first[-1]) != repr(elsewhere[-1]):
        return Behaviour("its result holds what is no tensor and depends on the inputs' values")
    if places:
        third = working_copy(model)
        answers(one, others, 6)
        answers(third, others, 7)
        drifting = {(p.module, p.attribute) for c in (other, third) for p in differences(one, c)}
        for place in places:
            drifts = (place.module, place.attribute) in drifting
            if drifts and _reads_first(model, place, lambda m: answers(m, leaves, 1)):
                return Behaviour(f"it changes its attribute {place} when it is called, and reads it")
    state = sorted(str(place) for place in written if str(place) in buffers)
    for name in state:
        before, after = buffers[name], dict(one.named_buffers(remove_duplicate=False)).get(name)
        if after is None or (before.shape, before.dtype) != (after.shape, after.dtype):
            now = "nothing" if after is None else f"{after.dtype} {list(after.shape)}"
            was = f"{before.dtype} {list(before.shape)}"
            return Behaviour(f"it changes its buffer {name} from {was} to {now} when it is called")
    return Behaviour(None, tuple(state))


class _Noting(TorchDispatchMode):
    """Notes the first operator that draws from PyTorch's generators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.operator is None and torch.Tag.nondeterministic_seeded in func.tags:
            self.operator = str(func)
        return func(*args, **(kwargs or {}))


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators that `untouched_rng` keeps: PyTorch's, Python's and NumPy's."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _other_leaves(leaves: Sequence[Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [fresh_draw(leaf, generator) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace the buffer with the dotted name `name` by a tensor."""
    owner, _, attribute = name.rpartition(".")
    module.get_submodule(owner)._buffers[attribute] = value


def apart(first: Sequence[Any], second: Sequence[Any]) -> float:
    """How far two answers are apart, in units of what one rounding may do to an output.

    An answer is a model's output tensors, and last whatever else is in its result.
    """
    if len(first) != len(second) or repr(first[-1]) != repr(second[-1]):
        return math.inf
    worst = 0.0
    for a, b in zip(first[:-1], second[:-1], strict=True):
        floor = max(least_error(a.dtype), least_error(torch.float32))
        worst = max(worst, relative_error(b, a) / floor)
    return worst


def moved_by_rounding(model: nn.Module, first: Sequence[Any], answer: Call) -> float:
    """How far an answer moves where the weights are rounded anew, in the same units, at most 2 % of it."""
    worst = 0.0
    for seed in range(ROUNDINGS):
        moved = private_copy(model)
        generator = torch.Generator(device_of(moved, ())).manual_seed(seed)
        with torch.no_grad():
            for tensor in moved.parameters():
                tensor.copy_(rounded_anew(tensor, torch.float32, generator))
        worst = max(worst, apart(first, answer(moved)))
    return min(worst, FP32.limits.largest / FP32.limits.always)


def _accuse(
    first: Sequence[Any], repeated: Sequence[Sequence[Any]], places: Sequence[Place], operator: str | None
) -> str:
    pairs = [pair for answer in repeated for pair in zip(first[:-1], answer[:-1], strict=False)]
    error = max((relative_error(b, a) for a, b in pairs), default=0.0)
    what = f"equal inputs get other answers (relative error {error:.2g})"
    if operator is not None:
        return f"it draws random numbers ({operator}): {what}"
    if places:
        names = ", ".join(map(str, places[:3]))
        return f"it keeps a state from call to call: {what}, and calls change its attribute {names}"
    return f"{what}: it draws random numbers, or keeps a state outside of its attributes"


def _reads_first(model: nn.Module, place: Place, call: Call) -> bool:
    """Whether a call reads an attribute before it sets it, and so what an earlier one has left there."""
    duplicate = working_copy(model)
    module = duplicate.get_submodule(place.module)
    seen: list[str] = []

    class Watched(type(module)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name == place.attribute:
                seen.append("read")
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == place.attribute:
                seen.append("written")
            super().__setattr__(name, value)

    try:
        module.__class__ = Watched
        call(duplicate)
    except Exception:  # a class that cannot be watched
        return True
    return seen[:1] != ["written"]
