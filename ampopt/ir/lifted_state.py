"""The state of a model that its program takes and gives back: where it lies, and how to read and set it.

A state is a set of tensors in buffers and attributes of submodules, alone or in nested lists, tuples, deques
and dicts, whose structure is the same after every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import CaptureError
from ampopt.ir.lane_io import original_of
from ampopt.ir.model_differences import Place, differences
from ampopt.ir.moments import in_words
from ampopt.ir.parts import is_empty, parts_of, walk
from ampopt.ir.signature import OutputLayout, flatten_outputs

_ABSENT = object()

_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""What may lie beside tensors in a container whose tensors are state."""

_REGISTERED = ("_modules", "_parameters", "_buffers")
"""Attributes that hold what a module has registered."""

Kind = tuple[torch.Size, torch.dtype, torch.device]

Attribute = tuple[str, str]
"""The name of a submodule, and that of its attribute or buffer."""


def kind_of(tensor: Tensor) -> Kind:
    """What no call may change of a tensor that is state."""
    return tensor.shape, tensor.dtype, tensor.device


def change(before: Tensor, after: Tensor) -> str:
    """A change of kind in words: `from torch.float32 [1] to torch.float32 [2]`."""
    was, now = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (before, after))
    return f"from {was} to {now}"


def submodule_of(model: nn.Module, name: str) -> nn.Module:
    """A submodule by its name, `""` for the model itself; of a scripted model, too."""
    if isinstance(model, torch.jit.ScriptModule):  # its `get_submodule` raises an error
        modules: dict[str, nn.Module] = dict(model.named_modules())
        return modules[name]
    return model.get_submodule(name)


def value_at(model: nn.Module, module: str, attribute: str) -> Any:
    """What a buffer or an attribute of a submodule holds; an object of its own where there is none."""
    holder = submodule_of(model, module)
    if isinstance(holder, torch.jit.ScriptModule):
        return getattr(holder, attribute, _ABSENT)  # it lies in C++
    return _holder(holder, attribute).get(attribute, _ABSENT)


def _holder(module: nn.Module, attribute: str) -> dict[str, Any]:
    """The dict of a module that an attribute or a buffer lies in."""
    return module._buffers if attribute in module._buffers else vars(module)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A buffer or an attribute with tensors that are state: how to take them out and to put in others."""

    module: str
    attribute: str
    layout: OutputLayout
    kinds: tuple[Kind, ...]
    is_buffer: bool

    @classmethod
    def of(cls, model: nn.Module, module: str, attribute: str) -> Slot | None:
        """The slot for what an attribute holds; None where that is more than plain tensors and constants.

        None also for state in TorchScript, which no call can be given.
        """
        if isinstance(submodule_of(model, module), torch.jit.ScriptModule):
            return None
        tensors, layout = flatten_outputs(value_at(model, module, attribute))
        rest = (leaf for leaf in layout.template if leaf is not OutputLayout.TENSOR)
        if not tensors or not all(isinstance(leaf, _ATOMS) for leaf in rest):
            return None
        if not all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in tensors):
            return None
        is_buffer = attribute in model.get_submodule(module)._buffers
        return cls(module, attribute, layout, tuple(map(kind_of, tensors)), is_buffer)

    @property
    def places(self) -> list[Place]:
        """The place of each tensor, in order."""
        numbered = pytree.tree_unflatten(list(range(len(self.layout.template))), self.layout.spec)
        paths = [path for path, _ in pytree.tree_flatten_with_path(numbered)[0]]
        kept = zip(paths, self.layout.template, strict=True)
        return [
            Place(self.module, self.attribute, pytree.keystr(path))
            for path, leaf in kept
            if leaf is OutputLayout.TENSOR
        ]

    def read(self, model: nn.Module) -> list[Tensor]:
        """The tensors that a model holds here. Raises CaptureError where it holds something else."""
        tensors, layout = flatten_outputs(value_at(model, self.module, self.attribute))
        if layout != self.layout:
            raise CaptureError(f"a call gives its {self.name} another structure")
        return tensors

    def write(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Let a model hold these tensors here, in new containers."""
        _holder(model.get_submodule(self.module), self.attribute)[self.attribute] = self.layout.restore(
            tensors
        )

    @property
    def name(self) -> str:
        """What to call it in a message: `buffer inner.h`, `attribute frames`."""
        return f"{'buffer' if self.is_buffer else 'attribute'} {Place(self.module, self.attribute)}"


@dataclasses.dataclass(frozen=True, eq=False)
class LiftedState:
    """The state of a model between two calls of one kind: the tensors of its `slots`, in order.

    `model`, a private copy that is never called, holds an example of it; everything else in it is as the
    program has it. `called` is the same after calls. What differs in `ignored` attributes (submodule, name)
    is never read. `from_start`: the model as it was given has this state; otherwise its first calls make it.
    `writes`: a call writes to these tensors in place, `shares`: it leaves some of them in the same memory.
    """

    slots: tuple[Slot, ...]
    model: nn.Module
    called: nn.Module
    ignored: frozenset[Attribute]
    from_start: bool
    writes: bool = False
    shares: bool = False

    @functools.cached_property
    def places(self) -> tuple[str, ...]:
        """The place of each tensor: `h`, `inner.frames[0]`, `memory['h']`."""
        return tuple(str(place) for slot in self.slots for place in slot.places)

    @property
    def owners(self) -> list[Slot]:
        """The slot of each tensor."""
        return [slot for slot in self.slots for _ in slot.kinds]

    @property
    def identifiers(self) -> tuple[str, ...]:
        """A different name for each tensor that is an identifier: `h`, `inner_frames_0`, `memory_h`."""
        found: list[str] = []
        for place in self.places:
            name = re.sub(r"\W+", "_", place).strip("_")
            name = name if name.isidentifier() else f"state_{name}"
            numbered = (f"{name}_{number}" for number in itertools.count(1))
            found.append(next(each for each in itertools.chain([name], numbered) if each not in found))
        return tuple(found)

    @property
    def named(self) -> str:
        """The first of its slots in a message."""
        return self.slots[0].name

    @property
    def initial(self) -> list[Tensor]:
        """The example of the state, in tensors of its own."""
        return [tensor.detach().clone() for tensor in self.read(self.model)]

    def read(self, model: nn.Module) -> list[Tensor]:
        """The state that a copy of the model holds. Raises CaptureError where it has another structure."""
        return [tensor for slot in self.slots for tensor in slot.read(model)]

    def write(self, model: nn.Module, tensors: Iterable[Tensor]) -> None:
        """Let a copy of the model hold this state; it keeps the tensors themselves."""
        remaining = iter(tensors)
        for slot in self.slots:
            slot.write(model, [next(remaining) for _ in slot.kinds])

    def fits(self, model: nn.Module) -> bool:
        """Whether a copy of the model differs from `model` in the values of this state alone."""
        held, own = original_of(model), original_of(self.model)
        try:
            if any(tuple(map(kind_of, slot.read(held))) != slot.kinds for slot in self.slots):
                return False
        except CaptureError:
            return False
        if self.writes and self.shared_memory(held) is not None:
            return False
        lifted = {(slot.module, slot.attribute) for slot in self.slots}
        apart = attributes(differences(own, held)) - lifted - self.ignored
        return not apart or apart.isdisjoint(attributes(differences(original_of(self.called), held)))

    def shared_memory(self, model: nn.Module) -> tuple[str, str] | None:
        """A tensor of the state and another one that have memory in common; None where no two have."""
        lifted = {(slot.module, slot.attribute): slot for slot in self.slots}
        memory = [(place, _addresses(tensor)) for place, tensor in memory_of(original_of(model))]
        own = [(place, its) for place, its in memory if (place.module, place.attribute) in lifted]
        for (place, its), (other, their) in itertools.product(own, memory):
            if place != other and its.start < their.stop and their.start < its.stop:
                return lifted[place.module, place.attribute].name + place.rest, str(other)
        return None

    def shared_container(self, model: nn.Module) -> tuple[str, str] | None:
        """Two ways to a list or dict with tensors of the state; None: there is one to each.

        A call would put what it makes of a state into one of two containers, see `Slot.write`.
        """
        model = original_of(model)
        values = (value_at(model, slot.module, slot.attribute) for slot in self.slots)
        own = {id(container) for value in values for container in _containers(value)}
        ways = dict[int, str]()
        for path, holder in walk(model, classes=False) if own else ():
            for step, part in parts_of(holder, classes=False):
                if id(part) not in own:
                    continue
                if (first := ways.setdefault(id(part), path + step)) != path + step:
                    return in_words(first), in_words(path + step)
        return None

    def is_like(self, other: LiftedState) -> bool:
        """Whether two states are one, so that a call of one kind goes on where one of the other ended."""
        return self.slots == other.slots and self.fits(other.model) and other.fits(self.model)


def _containers(value: Any) -> Iterator[Any]:
    """The lists, deques and dicts that a value is made of."""
    if isinstance(value, (list, tuple, deque, dict)):
        if not isinstance(value, tuple):
            yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _containers(part)


def memory_of(model: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """Each tensor in the buffers, parameters and attributes of a model, and where it is."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its attributes live in C++
        own = {key: value for key, value in vars(module).items() if key not in _REGISTERED}
        for attribute, value in {**own, **module._buffers, **module._parameters}.items():
            if isinstance(value, _ATOMS) or is_empty(value):
                continue
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
                    yield Place(name, attribute, pytree.keystr(path)), leaf


def _addresses(tensor: Tensor) -> range:
    """The addresses from a tensor's first element to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return range(tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size())


def attributes(places: Iterable[Place]) -> set[Attribute]:
    """The submodule and attribute of each place."""
    return {(place.module, place.attribute) for place in places}


ARGUMENT = "ampopt_state"
"""The name of the argument of a model `with_state`."""


def with_state(model: nn.Module, state: LiftedState) -> nn.Module:
    """Let a working copy take its state as another keyword argument, a list, and return (result, new state).

    A call leaves the model as it was, so that an export of it sees a function. Raises CaptureError if the
    model has hooks, which would see the state.
    """
    if model._forward_hooks or model._forward_pre_hooks:
        raise CaptureError(f"it keeps a state in its {state.named}, and has forward hooks")
    inside, signature = model.forward, inspect.signature(model.forward)

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
        given = [tensor.clone() for tensor in kwargs.pop(ARGUMENT)]
        with _put_back(model, state):
            state.write(model, given)
            result, left = inside(*args, **kwargs), state.read(model)
        for slot, before, after in zip(state.owners, given, left, strict=True):
            if kind_of(before) != kind_of(after):
                raise CaptureError(f"a call changes its {slot.name} {change(before, after)}")
        return result, left

    extra = inspect.Parameter(ARGUMENT, inspect.Parameter.KEYWORD_ONLY)
    own = list(signature.parameters.values())
    place = next((i for i, p in enumerate(own) if p.kind is inspect.Parameter.VAR_KEYWORD), len(own))
    forward.__signature__ = signature.replace(parameters=[*own[:place], extra, *own[place:]])  # type: ignore[attr-defined]
    model.forward = forward
    return model


@contextlib.contextmanager
def _put_back(model: nn.Module, state: LiftedState) -> Iterator[None]:
    """Undo after the block what it does to state and to ignored attributes, so that an export sees no write.

    An export's own hook on buffers, which would make a write of an assignment, is off in the block.
    """
    places = [*((slot.module, slot.attribute) for slot in state.slots), *state.ignored]
    owners = [(_holder(model.get_submodule(module), name), name) for module, name in places]
    before = [(holder, name, holder.get(name, _ABSENT)) for holder, name in owners]
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    noting = dict(hooks)
    hooks.clear()
    try:
        yield
    finally:
        hooks.update(noting)
        for holder, name, value in before:
            holder.pop(name, None) if value is _ABSENT else holder.update({name: value})
