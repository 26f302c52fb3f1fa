"""Puts back what calls of copies have written to a user's variables, and to what these hold."""

from __future__ import annotations

import array
import collections
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ampopt.errors import first_line
from ampopt.ir.model_copy import same_tensor
from ampopt.ir.parts import ATOMS, CODE, can_be_looked_at, contents_of, is_of_the_process, slots_of, walk

logger = logging.getLogger("ampopt")

MOST_TO_COPY = 1 << 26
"""The largest tensor in bytes whose numbers are put back where calls write to them."""

_ABSENT = object()

_NUMBERS = (int, float, complex, np.number)
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_PLAIN = (*_NUMBERS, *CONTAINERS, str, bytes, type(None))

Undo = Callable[[], object]
IsLost = Callable[[Any, Any], bool]
"""Tells of what a place held and what it holds whether it has to get that back."""


def tried(step: Undo, level: int = logging.DEBUG) -> None:
    """Do what an odd object of a user's may refuse: it stays as it is then, which is told on this level."""
    try:
        step()
    except Exception as error:
        text = "ampopt: what calls of the model wrote to a variable of yours may stay there: %s"
        logger.log(level, text, first_line(error), exc_info=level < logging.WARNING)


class Before:
    """What variables, containers and objects held; of what was added since, data goes.

    Not where something else was added, too, or switched on, for that may say that the data is there: a table
    and the flag that it was made.
    """

    def __init__(self) -> None:
        self._users = list[tuple[Callable[[], Iterable[Any]], list[Any]]]()

    @functools.cached_property
    def is_set_up(self) -> bool:
        """Whether calls have left what is no data in something of the user's."""
        pairs = [(list(entries()), before) for entries, before in self._users]
        return any(not is_data(new) for now, before in pairs for new in _beyond(now, before))

    def of_variable(
        self, mapping: Mapping[str, Any], name: str, assign: Callable[[Any], None], *, is_users: bool
    ) -> Undo:
        """What gives a global variable or a class attribute what it holds."""
        before = mapping[name]
        if is_users:
            self._note(lambda: [mapping.get(name)])

        def undo() -> None:
            if (_is_changed if is_users else _is_lost)(before, mapping.get(name, _ABSENT)):
                assign(before)

        return undo

    def of_value(self, value: Any, *, is_users: bool) -> list[Undo]:
        """What gives a value its own contents."""
        undo = list[Undo]()
        tried(partial(self._look, value, undo, is_users))
        return undo

    def _note(self, entries: Callable[[], Iterable[Any]]) -> None:
        self._users.append((entries, [*entries()]))

    def _look(self, value: Any, undo: list[Undo], is_users: bool) -> None:
        if isinstance(value, (*ATOMS, ModuleType, type, nn.Parameter)) or is_of_the_process(value):
            return
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not value.is_inference() and value.nbytes <= MOST_TO_COPY:
                before, by_value = value.detach().clone(), is_users
                undo.append(partial(self._write_back, value, value._version, before, by_value=by_value))
            return
        if is_users and isinstance(value, np.ndarray) and value.nbytes <= MOST_TO_COPY:
            undo.append(partial(self._write_array_back, value, np.array(value)))
        elif is_users and isinstance(value, (bytearray, array.array)):
            undo.append(partial(self._write_bytes_back, value, value[:]))
        is_lost = _is_changed if is_users else _is_lost
        goes = self._goes if is_users else is_fake
        if is_users and isinstance(value, dict):
            self._note(partial(dict.values, value))
        elif is_users and isinstance(value, (list, set, collections.deque)):
            self._note(partial(iter, value))
        if isinstance(value, dict):
            undo.append(partial(_put_back, value, dict(dict.items(value)), is_lost, goes))
        elif isinstance(value, (list, collections.deque)):
            undo.append(partial(self._refill if is_users else _put_back_replaced, value, [*value]))
        elif isinstance(value, set) and is_users:
            undo.append(partial(self._reset, value, {*value}))
        elif isinstance(value, FunctionType):
            cells = [(cell, held) for cell in value.__closure__ or () for held in contents_of(cell)]
            undo += [partial(_set_again, cell, "cell_contents", held, is_lost) for cell, held in cells]
        if isinstance(own := getattr(value, "__dict__", None), dict):
            own_goes = goes if isinstance(value, FunctionType) else is_fake
            undo.append(partial(_put_back, own, dict(own), is_lost, own_goes))
            if is_users:
                self._note(own.values)
        names = [name for name in slots_of(type(value)) if hasattr(value, name)]
        undo += [partial(_set_again, value, name, getattr(value, name), is_lost) for name in names]

    def _goes(self, added: Any) -> bool:
        return is_fake(added) or (is_data(added) and not self.is_set_up)

    def _write_back(self, tensor: Tensor, version: int, before: Tensor, *, by_value: bool) -> None:
        """Give a tensor its numbers again, where it was written to, without a trace in its version.

        A batch norm that learns its statistics, NumPy and `.data` write without one; with `by_value` numbers
        are compared, too.
        """
        if tensor.shape != before.shape:
            return
        is_seen = tensor._version != version
        if is_seen or (by_value and not same_tensor(tensor.detach(), before) and not self.is_set_up):
            tensor.data.copy_(before)

    def _write_array_back(self, values: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> None:
        is_as_it_was = values.dtype == before.dtype and values.shape == before.shape
        if is_as_it_was and values.tobytes() != before.tobytes() and not self.is_set_up:
            values[...] = before

    def _write_bytes_back(self, values: Any, before: Any) -> None:
        if values != before and not self.is_set_up:
            values[:] = before

    def _refill(self, sequence: list[Any] | collections.deque[Any], before: list[Any]) -> None:
        """Give a list the data that it held, without data that was added or put in its place."""
        new, lost = _beyond(sequence, before), _beyond(before, sequence)
        if self.is_set_up:
            _put_back_replaced(sequence, before)
        elif any(map(is_data, (*new, *lost))):
            gone = [each for each in lost if not is_data(each)]
            sequence.clear()
            sequence.extend([*_beyond(before, gone), *(each for each in new if not is_data(each))])

    def _reset(self, kept: set[Any], before: set[Any]) -> None:
        """Give a set the data that it held, without data that was added."""
        kept -= {each for each in kept - before if self._goes(each)}
        kept |= {each for each in before - kept if is_data(each)}


def is_data(value: Any) -> bool:
    """Whether a value is what calls compute: a tensor, an array, a number, or what holds such.

    Text alone, what is true or false, layers and functions are none: they tell what was set up.
    """
    if not can_be_looked_at(value) or isinstance(value, (nn.Module, nn.Parameter, *CODE)):
        return False
    code = (nn.Module, *CODE)
    inner = walk(value, code=False, classes=False, leave_out=lambda part: isinstance(part, code))
    parts = [part for _, part in inner]
    if any(isinstance(part, (Tensor, np.ndarray)) and not isinstance(part, nn.Parameter) for part in parts):
        return True
    is_plain = all(isinstance(part, _PLAIN) and not isinstance(part, bool) for part in parts)
    return is_plain and any(isinstance(part, (*_NUMBERS, *CONTAINERS)) for part in parts)


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without numbers."""
    return isinstance(value, FakeTensor)


def _is_lost(before: Any, now: Any) -> bool:
    """Whether a place has to get back what it held: a tensor, a number, or what an export replaced."""
    if now is before or not can_be_looked_at(before):
        return now is not before
    return isinstance(before, Tensor) or type(before) in (int, float) or is_fake(now)


def _is_changed(before: Any, now: Any) -> bool:
    """The same, and a container or array of data for which another one stands: `[*frames, x]`."""
    if _is_lost(before, now):
        return True
    return (
        now is not before
        and isinstance(before, (*CONTAINERS, np.ndarray))
        and is_data(before)
        and is_data(now)
    )


def _set_again(holder: Any, name: str, before: Any, is_lost: IsLost) -> None:
    """Give a cell or an object with slots, a frozen one too, what it held."""
    if is_lost(before, getattr(holder, name, _ABSENT)):
        object.__setattr__(holder, name, before)


def _put_back(mapping: Any, before: dict[Any, Any], is_lost: IsLost, goes: Callable[[Any], bool]) -> None:
    """Give a dict its tensors and numbers again; of what is new in it, it loses what `goes`."""
    for key, value in before.items():
        if is_lost(value, dict.get(mapping, key, _ABSENT)):
            mapping[key] = value
    drop(mapping, [key for key in dict.keys(mapping) if key not in before], goes)


def drop(mapping: Any, keys: list[Any], goes: Callable[[Any], bool]) -> None:
    """Remove those of these keys whose value goes."""
    for key in keys:
        if goes(dict.get(mapping, key)):
            del mapping[key]


def _put_back_replaced(sequence: list[Any] | collections.deque[Any], before: list[Any]) -> None:
    """Give a list what it held, where its tensors or numbers are others, or where an export was at it."""
    now = [*sequence]
    is_replaced = len(now) == len(before) and any(map(_is_lost, before, now))
    if is_replaced or any(map(is_fake, now)):
        sequence.clear()
        sequence.extend(before)


def _beyond(entries: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """The entries without as many of each as the others have, by identity."""
    left = collections.Counter(map(id, others))
    found = []
    for each in entries:
        left[id(each)] -= 1
        if left[id(each)] < 0:
            found.append(each)
    return found
