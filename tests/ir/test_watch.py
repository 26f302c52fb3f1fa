"""A watch and a moment see every write to what a module reaches, and nothing where there was none."""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import decimal
import io
import itertools
import mmap
import random
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ampopt.ir.moments import Moment
from ampopt.ir.watch import Watch


class Reading(nn.Module):
    """Reaches a value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Pair(ctypes.Structure):
    """A structure of C's."""

    _fields_ = (("first", ctypes.c_double), ("second", ctypes.c_int * 2))


class Named(dict[str, float]):
    """A dict that has attributes."""


class Row(collections.namedtuple("Row", "items")):
    """A tuple that has attributes."""


class Image(np.ndarray[Any, Any]):
    """A user's own arrays."""


class Memory(bytearray):
    """A user's own bytes."""


@dataclasses.dataclass
class Slotted:
    """A gain in a slot."""

    __slots__ = ("gain",)
    gain: float


class Behind:
    """A gain behind a property."""

    def __init__(self) -> None:
        self._gain = 1.0

    @property
    def gain(self) -> float:
        """The gain."""
        return self._gain

    @gain.setter
    def gain(self, gain: float) -> None:
        self._gain = gain


class Later(Behind):
    """The same with another class."""


def _at_first(value: Any) -> None:
    value[0] = 9


def _in_field(value: Any) -> None:
    value["a"][0] = 9.0


def _with(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def _objects(*values: Any) -> np.ndarray[Any, Any]:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


class Key:
    """What a weak container may refer to."""


KEY = Key()
"""It lives as long as the tests."""

UNDER = {"gain": 1.0}
"""What a proxy shows."""

Case = tuple[Callable[[], Any], Callable[[Any], object]]

MEMORY: dict[str, Case] = {
    "an array of numbers": (lambda: array.array("d", [1.0, 2.0]), _at_first),
    "a longer array": (lambda: array.array("d", [1.0, 2.0]), lambda v: v.append(3.0)),
    "bytes": (lambda: bytearray([1, 2]), _at_first),
    "more bytes": (lambda: bytearray([1, 2]), lambda v: v.extend(b"3")),
    "bytes of a user's class": (lambda: Memory([1, 2]), _at_first),
    "a view of memory": (lambda: memoryview(bytearray([1, 2])), _at_first),
    "a view with steps": (lambda: memoryview(bytearray([1, 2, 3, 4]))[::2], _at_first),
    "an array of C's": (lambda: (ctypes.c_double * 2)(1, 2), _at_first),
    "a number of C's": (lambda: ctypes.c_int(1), lambda v: setattr(v, "value", 2)),
    "a structure": (lambda: Pair(1.0), lambda v: setattr(v, "first", 2.0)),
    "an array in a structure": (lambda: Pair(1.0), lambda v: v.second.__setitem__(1, 5)),
    "a mapped file": (lambda: mmap.mmap(-1, 16), lambda v: v.__setitem__(0, 9)),
    "a stream of bytes": (lambda: io.BytesIO(b"12"), lambda v: v.write(b"3")),
    "the place in a stream": (lambda: io.StringIO("12"), lambda v: v.read(1)),
    "a closed stream": (lambda: io.StringIO("12"), lambda v: v.close()),
}

ARRAYS: dict[str, Case] = {
    "an array": (lambda: np.array([1.0, 2.0]), _at_first),
    "its form": (lambda: np.array([1.0, 2.0]), lambda v: setattr(v, "shape", (2, 1))),
    "its dtype": (lambda: np.zeros(2), lambda v: setattr(v, "dtype", np.dtype("int64"))),
    "one number": (lambda: np.array(1.0), lambda v: v.fill(2.0)),
    "no number, and then its form": (lambda: np.zeros((0, 2)), lambda v: setattr(v, "shape", (2, 0))),
    "columns": (lambda: np.arange(6.0).reshape(2, 3).T, lambda v: v.__setitem__((0, 0), 9.0)),
    "every second number": (lambda: np.arange(6.0)[::2], _at_first),
    "dates": (lambda: np.array(["2020-01-01"], dtype="M8[s]"), lambda v: v.fill("2021-01-01")),
    "an array of a user's class": (lambda: np.zeros(2).view(Image), _at_first),
    "rows": (lambda: np.zeros(2, dtype=[("a", "f8"), ("b", "i4")]), _in_field),
    "records": (lambda: np.rec.array([(1.0, 2)], dtype=[("a", "f8"), ("b", "i4")]), _in_field),
    "one row": (lambda: np.zeros(1, dtype=[("a", "f8")])[0], lambda v: v.__setitem__("a", 9.0)),
    "masked numbers": (lambda: np.ma.array([1.0, 2.0], mask=[False, True]), _at_first),
    "a mask": (
        lambda: np.ma.array([1.0, 2.0], mask=[False, True]),
        lambda v: v.__setitem__(0, np.ma.masked),
    ),
    "objects": (lambda: np.array([1.0, 2.0], dtype=object), _at_first),
    "objects in rows and columns": (lambda: np.ones((2, 2), object).T, lambda v: v[1].fill(2.0)),
    "what an object in an array holds": (lambda: _objects([1.0], {}), lambda v: v[0].append(2.0)),
    "an array in an array": (lambda: _objects(np.ones(2), None), lambda v: v[0].fill(2.0)),
    "a tensor in an array": (lambda: _objects(torch.ones(2), None), lambda v: v[0].fill_(2.0)),
    "an object in a row": (lambda: np.zeros(2, dtype=[("a", "O"), ("b", "i4")]), _in_field),
}

CONTAINERS: dict[str, Case] = {
    "a dict with a default": (lambda: collections.defaultdict(int), lambda v: v["a"]),
    "another default": (
        lambda: collections.defaultdict(int),
        lambda v: setattr(v, "default_factory", float),
    ),
    "a counter": (lambda: collections.Counter("ab"), lambda v: v.update("a")),
    "an ordered dict": (lambda: collections.OrderedDict(a=1), lambda v: v.update(a=2)),
    "the order of a dict": (lambda: collections.OrderedDict(a=1, b=1), lambda v: v.move_to_end("a")),
    "a user's dict": (lambda: collections.UserDict(a=1), lambda v: v.update(a=2)),
    "a user's list": (lambda: collections.UserList([1.0]), _at_first),
    "a chain of dicts": (lambda: collections.ChainMap({}, {"a": 1}), lambda v: v.maps[1].update(a=2)),
    "what a proxy shows": (lambda: types.MappingProxyType(UNDER), lambda v: UNDER.update(gain=2.0)),
    "a set": (lambda: {1}, lambda v: v.add(2)),
    "a deque": (lambda: collections.deque([1, 2]), lambda v: v.rotate()),
    "a list in a tuple": (lambda: Row([1.0]), lambda v: v.items.append(2.0)),
    "an attribute of a tuple": (lambda: _with(Row([]), gain=1), lambda v: setattr(v, "gain", 2)),
    "an attribute of a dict": (lambda: _with(Named(), gain=1), lambda v: setattr(v, "gain", 2)),
    "a new attribute of a dict": (Named, lambda v: setattr(v, "gain", 2)),
    "an attribute of a tensor": (lambda: _with(torch.ones(2), gain=1), lambda v: setattr(v, "gain", 2)),
    "a new attribute of a tensor": (lambda: torch.ones(2), lambda v: setattr(v, "gain", 2)),
    "an attribute of a function": (lambda: _with(lambda: 1, gain=1), lambda v: setattr(v, "gain", 2)),
    "a weak key's value": (
        lambda: weakref.WeakKeyDictionary({KEY: 1.0}),
        lambda v: v.__setitem__(KEY, 2.0),
    ),
    "a weak value": (
        lambda: weakref.WeakValueDictionary({"a": KEY}),
        lambda v: v.__setitem__("b", KEY),
    ),
    "a weak set": (lambda: weakref.WeakSet(), lambda v: v.add(KEY)),
    "a slot": (lambda: Slotted(1.0), lambda v: setattr(v, "gain", 2.0)),
    "a property": (Behind, lambda v: setattr(v, "gain", 2.0)),
    "a class": (Behind, lambda v: setattr(v, "__class__", Later)),
    "the class of what a list holds": (lambda: [Behind()], lambda v: setattr(v[0], "__class__", Later)),
    "the class of a tensor": (lambda: torch.ones(2), lambda v: setattr(v, "__class__", nn.Parameter)),
}

GENERATORS: dict[str, Case] = {
    "a count": (itertools.count, next),
    "a cycle": (lambda: itertools.cycle([1, 2]), next),
    "a list's iterator": (lambda: iter([1, 2]), next),
    "Python's random numbers": (lambda: random.Random(0), lambda v: v.random()),
    "PyTorch's": (lambda: torch.Generator().manual_seed(0), lambda v: torch.rand(2, generator=v)),
    "NumPy's": (lambda: np.random.default_rng(0), lambda v: v.random()),
    "NumPy's older ones": (lambda: np.random.RandomState(0), lambda v: v.random()),
    "NumPy's bits": (lambda: np.random.PCG64(0), lambda v: v.random_raw()),
    "what decimals are rounded to": (decimal.Context, lambda v: setattr(v, "prec", 5)),
    "which decimals are refused": (
        decimal.Context,
        lambda v: v.traps.__setitem__(decimal.Inexact, True),
    ),
}

WRITES = {**MEMORY, **ARRAYS, **CONTAINERS, **GENERATORS}


def _watched(module: nn.Module) -> Watch:
    return Watch(module, lambda part: False)


def _moment_of(module: nn.Module) -> Moment:
    return Moment(module, lambda part: False)


@pytest.mark.parametrize("what", WRITES)
def test_a_write_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNDER, "gain", 1.0)
    make, write = WRITES[what]
    value = make()
    module = Reading(value)
    watch, moment = _watched(module), _moment_of(module)
    assert watch.is_unchanged()
    assert moment.change_until(_moment_of(module), by_value=True) is None
    write(value)
    assert not watch.is_unchanged()
    assert not watch.is_unchanged()


@pytest.mark.parametrize("what", WRITES)
def test_a_moment_tells_a_write(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNDER, "gain", 1.0)
    make, write = WRITES[what]
    value = make()
    module = Reading(value)
    moment = _moment_of(module)
    write(value)
    assert moment.change_until(_moment_of(module), by_value=True) is not None


@pytest.mark.parametrize(
    ("value", "write"),
    [
        (np.array([1.5, 2], dtype=object), lambda v: v.__setitem__(0, float("1.5"))),
        (array.array("d", [1.5]), lambda v: v.__setitem__(0, 1.5)),
        (bytearray(b"12"), lambda v: v.__setitem__(slice(None), b"12")),
        (decimal.Context(prec=3), lambda v: v.divide(1, 3)),
    ],
)
def test_what_is_written_again_is_no_change(value: Any, write: Callable[[Any], object]) -> None:
    watch = _watched(Reading(value))
    write(value)
    assert watch.is_unchanged()


def test_a_write_into_a_file_s_array_is_seen(tmp_path: Path) -> None:
    value = np.memmap(tmp_path / "table", dtype=np.float32, mode="w+", shape=4)
    watch = _watched(Reading(value))
    assert watch.is_unchanged()
    value[1] = 2
    assert not watch.is_unchanged()


def test_what_is_watched_can_be_enlarged_and_closed() -> None:
    growing, mapped = bytearray(b"12"), mmap.mmap(-1, 16)
    watch = _watched(Reading([growing, mapped]))
    assert watch.is_unchanged()
    growing += b"3"
    mapped.close()
    assert not watch.is_unchanged()


def _swap(module: Reading) -> None:
    module.layers[1].__class__ = nn.Tanh


class Doubled(nn.Module):
    """Twice a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        """Twice the weight."""
        return weight * 2


def test_another_class_of_a_layer_is_seen_until_it_has_its_own_again() -> None:
    module = Reading(None)
    watch, moment = _watched(module), _moment_of(module)
    _swap(module)
    assert not watch.is_unchanged()
    assert moment.change_until(_moment_of(module), by_value=True) == "layers.1"
    module.layers[1].__class__ = nn.ReLU
    assert watch.is_unchanged()


def test_a_parametrization_is_seen_where_it_comes_and_where_it_goes() -> None:
    module = Reading(None)
    before = _watched(module)
    parametrize.register_parametrization(module.layers[0], "weight", Doubled())
    assert not before.is_unchanged()
    with_it = _watched(module)
    assert with_it.is_unchanged()
    parametrize.remove_parametrizations(module.layers[0], "weight")
    assert not with_it.is_unchanged()
