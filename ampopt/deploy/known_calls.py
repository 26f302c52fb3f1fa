"""Bounded cache of an optimized module: maps each call signature to its program or to the original."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampopt.engines.executable import Executable, quick
from ampopt.engines.quick_call import Answer, Quick, plain
from ampopt.ir.asked import Asked, has_attributes
from ampopt.ir.capture import Captured
from ampopt.ir.graph import reads_strides
from ampopt.ir.normal_form import is_normal
from ampopt.ir.program import Program
from ampopt.ir.signature import OutputLayout, call_key, flatten_call, recognizer, tensor_key, tensors_of

MOST_KEYS = 4
"""Largest number of call signatures (strides, calls that the original answers) stored for each program."""


@dataclasses.dataclass
class Served:
    """The entry for one call signature; without `layout` and `captured` the original, for a `reason`.

    `bare` is the callable that `run` calls, with the model's state among its tensors. `casts`: for the dtype
    of an outer autocast, the dtypes that the results have under it; None: the original has to answer.
    `compared`: other strides that the program was compared for. `is_kept`: the example or `prepare` has asked
    for it, and it stays.
    """

    run: Callable[..., Any]
    layout: OutputLayout | None = None
    captured: Captured | None = None
    program: Program | None = None
    asked: Asked = dataclasses.field(default_factory=Asked)
    bare: Executable | None = None
    casts: dict[torch.dtype, tuple[torch.dtype, ...] | None] = dataclasses.field(default_factory=dict)
    compared: int = 0
    reason: str = ""
    is_kept: bool = False

    @property
    def keeps_state(self) -> bool:
        """Whether its program keeps a state between calls."""
        return self.captured is not None and self.captured.lifted is not None


@dataclasses.dataclass(frozen=True)
class _Short:
    """The short way of one kind of call: what makes an answer, what makes a result, and the call's key."""

    way: Quick
    restore: Callable[[Sequence[Tensor]], Any]
    key: object


class KnownCalls:
    """Finds what answers a call signature, with the fastest lookup first.

    `latest` recognizes tensors like the last ones, for each number of them; `short` finds a call of nothing
    but positional plain tensors by their own keys; `find` finds every call by its leaves. A program is valid
    for all strides (`of_any_strides`), except if the model reads a tensor's layout: then keys also include
    storage offsets, and the fast lookups, which do not see these, are not used. Nor are they if it asks for
    attributes that a user may have set.

    At most `max_programs` programs are kept, or one more than were asked for, and `MOST_KEYS` call signatures
    for each; the least recently used of the others are removed. Code that changes the cache holds `lock`.
    """

    def __init__(self, max_programs: int) -> None:
        """Create an empty cache."""
        self.max_programs = max_programs
        self.lock = threading.RLock()
        self.latest: dict[int, Answer] = {}
        self.failures: dict[object, int] = {}
        """Number of failures to make a program, by the call's key; a later attempt may succeed."""
        self._served: OrderedDict[object, Served] = OrderedDict()
        self._short: dict[object, _Short] = {}
        self._any_strides: dict[object, Served] = {}
        self._by_layout: set[object] = set()
        self.looks: tuple[Callable[[Tensor], object], ...] = ()
        """What keys tell of each tensor besides its `tensor_key`: what the model's code asks for."""

    @property
    def answers(self) -> tuple[Served, ...]:
        """The entries of all call signatures, least recently used first."""
        return tuple(self._served.values())

    @property
    def programs(self) -> int:
        """Number of programs in the cache, without the original."""
        return len({id(served) for served in self._served.values() if served.layout is not None})

    def key(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> object:
        """The cache key of a call: `call_key`, and more of its tensors if that matters, see `looks`."""
        key = call_key(leaves, spec)
        if not self.looks:
            return key
        return key, tuple([look(tensor) for tensor in tensors_of(leaves) for look in self.looks])

    def short(self, tensors: Sequence[Tensor]) -> Answer | None:
        """The answer for a call of plain tensors, none given twice; it becomes the `latest` of so many."""
        found = self._short.get(_short_key(tensors))
        if found is None:
            return None
        if len(self._served) > 1:
            self._touch(found.key)
        answer = found.way(recognizer(*tensors), found.restore)
        self.latest[len(tensors)] = answer
        return answer

    def find(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Served | None:
        """The entry for calls of this signature, marked as recently used; None for a new signature."""
        key = self.key(leaves, spec)
        served = self._served.get(key)
        if served is not None and len(self._served) > 1:
            self._touch(key)
        return served

    def _touch(self, key: object) -> None:
        with self.lock:
            if key in self._served:
                self._served.move_to_end(key)

    def of_any_strides(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Served | None:
        """The program that answers calls of this signature with any strides."""
        return self._any_strides.get(call_key(leaves, spec, strides=False))

    def distinguish_strides(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        """From now on, make separate programs for different strides of this signature."""
        key = call_key(leaves, spec, strides=False)
        self._any_strides.pop(key, None)
        self._by_layout.add(key)

    def admit(self, served: Served) -> Served:
        """Add a new program for the call that it was captured for, and for calls of the same signature."""
        assert served.captured is not None
        leaves, spec = served.captured.leaves, served.captured.spec
        key = call_key(leaves, spec, strides=False)
        if served.asked.layout:
            self._look_at(_lies)
        if served.asked.attributes:
            self._look_at(has_attributes)
        if served.asked.layout or reads_strides(served.captured.program.graph) is not None:
            self._by_layout.add(key)
        elif key not in self._by_layout:  # the border brings any strides into order
            self._any_strides[key] = served
        return self.remember(leaves, spec, served)

    def take(self, other: KnownCalls, anew: Callable[[Served], Served]) -> None:
        """Add the programs of another cache that were asked for, as `anew` makes each, for all its calls."""
        with other.lock:
            theirs, kept = dict(other._served), other._kept()
            self._by_layout |= other._by_layout
        self._any_strides = {k: s for k, s in self._any_strides.items() if k not in self._by_layout}
        own = {id(served.captured): served for served in self._kept()}
        for served in kept:
            if id(served.captured) not in own:
                own[id(served.captured)] = self.admit(anew(served))
        if self.looks == other.looks:
            for key, served in theirs.items():
                if served.is_kept:
                    self._served.setdefault(key, own[id(served.captured)])

    def _look_at(self, look: Callable[[Tensor], object]) -> None:
        """From now on keys tell this of tensors, too, and the short ways are not taken."""
        if look in self.looks:
            return
        known = {id(served): served for served in self._served.values()}
        self.looks += (look,)
        self._served.clear()
        self._short, self.latest = {}, {}
        for served in known.values():
            if served.captured is not None:
                self.remember(served.captured.leaves, served.captured.spec, served)

    def remember(self, leaves: Sequence[Any], spec: pytree.TreeSpec, served: Served) -> Served:
        """Use `served` for every call of this signature; the least recently used signatures are removed."""
        key = self.key(leaves, spec)
        self._served[key] = served
        self.failures.pop(key, None)
        if served.layout is not None and not self.looks and _is_short(leaves, spec):
            self._short[_short_key(leaves)] = _Short(_way(served, leaves), served.layout.restore, key)
        while self.programs > max(self.max_programs, len(self._kept()) + 1):
            programs = (key for key, found in self._served.items() if found.layout is not None)
            self._forget(next(key for key in programs if not self._served[key].is_kept))
        if len(self._served) > MOST_KEYS * self.max_programs:
            captured = [each.captured for each in self._kept() if each.captured is not None]
            asked_for = {self.key(each.leaves, each.spec) for each in captured}
            others = [key for key in self._served if key not in asked_for]
            for old in others[: len(self._served) - MOST_KEYS * self.max_programs]:
                self._forget(old)
        return served

    def _kept(self) -> list[Served]:
        """The programs that were asked for."""
        return list({id(served): served for served in self._served.values() if served.is_kept}.values())

    def _forget(self, key: object) -> None:
        served = self._served.pop(key)
        self.latest = {}
        self._short = {k: found for k, found in self._short.items() if found.key != key}
        if all(other is not served for other in self._served.values()):
            self._any_strides = {k: s for k, s in self._any_strides.items() if s is not served}

    def count_failure(self, leaves: Sequence[Any], spec: pytree.TreeSpec, *, most: int) -> bool:
        """Count a failure to make a program; returns whether to try again, at most `most` times in all."""
        key = self.key(leaves, spec)
        failures = self.failures.pop(key, 0) + 1
        if failures < most:
            self.failures[key] = failures
        while len(self.failures) > MOST_KEYS * self.max_programs:
            del self.failures[next(iter(self.failures))]
        return failures < most


def _lies(tensor: Tensor) -> object:
    return tensor.storage_offset(), tensor._is_view()


def _is_short(leaves: Sequence[Any], spec: pytree.TreeSpec) -> bool:
    """Whether a call gives positional plain tensors, none of them twice, and nothing else."""
    if not leaves or len(tensors_of(leaves)) < len(leaves) or not is_normal(leaves, spec):
        return False
    return spec == flatten_call(tuple(leaves), {})[1]


def _short_key(tensors: Sequence[Tensor]) -> object:
    return tuple([tensor_key(tensor) for tensor in tensors])


def _way(served: Served, tensors: Sequence[Tensor]) -> Quick:
    """The shortest way from tensors to a program's flat outputs; a state's goes through Python."""
    assert served.captured is not None
    assert served.program is not None
    if served.keeps_state or len(tensors) > 1:
        return plain(served.run)
    return quick(served.program, served.run, tensors[0])
