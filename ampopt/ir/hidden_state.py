"""What calls of a model leave where no attribute of it is: in closures, in classes, in global variables.

A graph leaves it out, and the results of a few calls need not show it: every tenth frame is another, or a
command that no example gives replaces what a tensor holds.
"""

from __future__ import annotations

import contextvars
import dataclasses
import re
import threading
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.ir.calls_of_copies import apart
from ampopt.ir.lifted_state import Attribute, memory_of, value_at
from ampopt.ir.model_copy import working_copy
from ampopt.ir.model_differences import differences, hidden_difference
from ampopt.ir.moments import Moment, in_words
from ampopt.ir.numerics import is_rounded
from ampopt.ir.outside import Code, is_of_a_library, variables_kept
from ampopt.ir.parts import contents_of, kept_by, walk
from ampopt.ir.run_code import RunCode
from ampopt.system.interrupts import check_interrupted

_OF_EACH_THREAD = (contextvars.ContextVar, threading.local)

_COUNTED = (int, str, bytes)
"""Values that tell of earlier calls if they differ after equal ones; a time differs anyway."""


class Outside:
    """The class attributes and global variables that a model's code names, at one moment.

    With them is what functions keep that are not copied with the model: attributes, and lists as defaults.
    """

    def __init__(self, model: nn.Module, run: RunCode) -> None:
        """`run`: what has run in calls until now, and may note later ones."""
        self._code, self._run = Code(model), run
        self._named, self._read = _Named(self._code), _Named(run.code_of(model))
        self._before = {named: named.now() for named in (self._named, self._read)}

    def change(self) -> str | None:
        """The first that is another now, or holds something else, of those that code names which has run.

        Of all, if other functions of libraries have run since then.
        """
        named = self._named if self._run.learn() else self._read
        changed = self._before[named].change_until(named.now(), by_value=True)
        return None if changed is None else changed.removeprefix("['").replace("']", "", 1)

    def of_each_thread(self) -> str | None:
        """The first that is another in each thread, or in each context; None if there is none.

        What a graph has for a constant is what it was in the thread that captured it. What a library's own
        code keeps so is its own affair.
        """
        of_classes = ((label, vars(kind), name) for label, kind, name in self._code.class_attributes())
        for label, own, name in (*self._code.global_variables(), *of_classes):
            if not is_of_a_library(own) and _holds_one_of_each_thread(own.get(name)):
                return label
        for function in self._code.functions:
            held = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            parts = [(name, part) for name, cell in held for part in contents_of(cell)]
            named = [name for name, part in parts if _holds_one_of_each_thread(part)]
            if named and not is_of_a_library(function.__globals__):
                return f"the variable {named[0]} of {function.__qualname__}"
        return None

    def held(self) -> dict[str, object]:
        """What each variable holds now, and each function, by what to call it in a message."""
        return self._named.held()


class _Named:
    """The variables and functions that some code names."""

    def __init__(self, code: Code) -> None:
        self._functions, self._variables = code.functions, code.variables()
        self._passed_over = code.passed_over

    def held(self) -> dict[str, object]:
        """What each holds now, by what to call it in a message."""
        now: dict[str, object] = {label: own.get(name) for label, own, name in self._variables.values()}
        functions = {f"what {_named(function)} keeps: ": function for function in self._functions}
        kept = {
            f"what {_named(function)}, which is not called, keeps: ": own
            for function in self._passed_over
            if (own := _kept_alone(function))
        }
        return now | functions | kept

    def now(self) -> Moment:
        """All that they hold."""
        return Moment(self.held(), lambda part: isinstance(part, nn.Module), code=False)


def _named(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _kept_alone(function: FunctionType) -> dict[str, object]:
    """What a function that does not run keeps, but for functions: these run themselves, or do not."""
    return {step: part for step, part in kept_by(function) if not isinstance(part, FunctionType)}


def _holds_one_of_each_thread(value: object) -> bool:
    """Whether a value is, or holds, what each thread or context has its own of; models are left out."""
    parts = walk(value, code=False, classes=False, leave_out=lambda part: isinstance(part, nn.Module))
    return any(isinstance(part, _OF_EACH_THREAD) for _, part in parts)


def why_hidden(
    one: nn.Module,
    other: nn.Module,
    ignored: Collection[Attribute],
    outside: Outside,
    call: Callable[[nn.Module], list[Any]],
) -> str | None:
    """That calls leave something where no attribute of the model is, or in one that they do not seem to read.

    The copies were called in different ways, and last with the same inputs: what only tells of the last call,
    such as the features that a hook notes, is the same in both. `ignored` are attributes that calls are seen
    to set before they read them; `outside` was taken after the first calls. `call` answers for a copy as it
    did last.
    """
    for place in differences(one, other) if ignored else ():
        attribute = place.module, place.attribute
        if attribute in ignored and isinstance(value_at(one, *attribute), _COUNTED):
            return f"it keeps a state from call to call in its attribute {place}"
    if (hidden := hidden_difference(one, other)) is not None:
        return f"it keeps a state from call to call in its {hidden}"
    if (own := outside.of_each_thread()) is not None:
        return f"it reads {own}, of which each thread or context has its own"
    if (changed := outside.change()) is not None:
        return f"it changes {changed} when it is called"
    replaced = _read_and_rewritten(one, outside, call)
    return None if replaced is None else f"it keeps a state from call to call in {replaced}"


def _read_and_rewritten(
    model: nn.Module, outside: Outside, call: Callable[[nn.Module], list[Any]]
) -> str | None:
    """The first hidden tensor that calls read, and write to or replace, by equal numbers, too.

    What decides whether the numbers change may be in no example. Calls read such tensors if they answer
    otherwise, or fail, where they hold other numbers, all of them or one alone.
    """
    if not _hidden_tensors(model, outside):
        return None
    called = working_copy(model)
    before = {place: _look(tensor) for place, tensor in _hidden_tensors(called, outside).items()}
    call(called)
    after = _hidden_tensors(called, outside)
    places = [place for place, seen in before.items() if place in after and not seen.is_left(after[place])]
    if not places:
        return None
    answers = [_answer(model, outside, (), call) for _ in range(2)]
    if not _reads(answers, _answer(model, outside, places, call)):
        return None
    read = (each for each in places if _reads(answers, _answer(model, outside, (each,), call)))
    return next(read, places[0])


def _hidden_tensors(model: nn.Module, outside: Outside) -> dict[str, Tensor]:
    """Tensors that a model reaches in other ways than by its modules' attributes, by where they are."""
    known = {id(tensor) for _, tensor in memory_of(model)}
    found: dict[str, Tensor] = {}
    variables = reversed(outside.held().items())
    roots = {"its ": model, **dict(variables)}  # the walk begins with the last
    for path, value in walk(roots, classes=False):
        is_hidden = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0
        if is_hidden and id(value) not in known:
            label, _, rest = path.removeprefix("[").partition("]")
            found[_WITHOUT_ADDRESS.sub("", label[1:-1] + in_words(rest))] = value
    return found


_WITHOUT_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class _Look:
    """A tensor at one moment."""

    tensor: Tensor
    version: int | None
    address: int

    def is_left(self, now: Tensor) -> bool:
        """Whether it is what it was, or a view of its memory has taken its place, and nothing was written."""
        return _version(now) == self.version and _address(now) == self.address


def _look(tensor: Tensor) -> _Look:
    return _Look(tensor, _version(tensor), _address(tensor))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _answer(
    model: nn.Module, outside: Outside, places: Collection[str], call: Callable[[nn.Module], list[Any]]
) -> list[Any] | None:
    """The answer of a copy where these hidden tensors hold other numbers; None where it fails."""
    with variables_kept(model):
        disturbed = working_copy(model)
        found = _hidden_tensors(disturbed, outside)
        there = [found[place] for place in places if place in found]
        before = [tensor.detach().clone() for tensor in there]
        generator = torch.Generator().manual_seed(0)
        try:
            for tensor in there:
                _disturb(tensor, generator)
            return call(disturbed)
        except Exception as error:
            check_interrupted(error)
            return None
        finally:
            for tensor, own in zip(there, before, strict=True):
                if tensor.shape == own.shape:
                    tensor.data.copy_(own)


def _reads(answers: Sequence[list[Any] | None], disturbed: list[Any] | None) -> bool:
    """Whether an answer differs from two that were not disturbed by more than those from each other."""
    first, second = answers
    if first is None or second is None or disturbed is None:
        return disturbed is None
    return apart(first, disturbed) > max(1.0, 2 * apart(first, second))


def _disturb(tensor: Tensor, generator: torch.Generator) -> None:
    """Give a tensor other numbers, each its own."""
    data = tensor.data
    if data.dtype is torch.bool:
        data.logical_not_()
    elif is_rounded(data):
        data.nan_to_num_(0.0, 0.0, 0.0)
        noise = torch.randn(data.shape, generator=generator).to(data.device, data.dtype)
        data.add_(noise * (1 + data.abs().mean()))
    else:
        data.add_(1)
