"""A form of a captured graph without a GPU: Python calls it, and C++ finds it in a table."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

INSTANCE, NODE, PARAMETERS, CONTEXT = 0xE0, 5, 6, 0xC0

Word = ctypes.c_uint64


class FakeForm:
    """Doubles what lies at the first address into what lies at the second, and counts moves and launches.

    C++ finds the same in `table`: two uses, each with an address at one place and offset, and one node.
    """

    moves = launches = static = 0
    context = contextlib.nullcontext()

    def __init__(self) -> None:
        self.status = 0
        self.places, self.written, self.used = (Word * 2)(), (Word * 2)(), (Word * 2)()
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._launched)
        update = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)
        update_in = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self._updates = update(self._updated), update_in(self._updated)
        words = [_address(self._launch), INSTANCE, 2]
        for index, context in enumerate((0, CONTEXT)):
            at = 8 * index
            words += [ctypes.addressof(self.written) + at, ctypes.addressof(self.used) + at]
            words += [1, ctypes.addressof(self.places) + at, OFFSET]
            words += [1, _address(self._updates[index]), NODE, PARAMETERS, context]
        self.table = (Word * len(words))(*words)

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(place - OFFSET for place in self.places if place)

    def move(self, addresses: tuple[int, ...]) -> None:
        self.moves += 1
        for index, address in enumerate(addresses):
            self.places[index] = address + OFFSET
            self.written[index] = self.used[index] = address

    def launch(self, stream: int) -> None:
        assert stream == 7
        self.launches += 1
        addresses = (*self.addresses, self.static)[:2]
        source, target = ((ctypes.c_float * 4).from_address(address) for address in addresses)
        target[:] = [2 * value for value in source]

    def _launched(self, instance: int, stream: int) -> int:
        assert instance == INSTANCE
        if self.status:
            return self.status
        self.launch(stream)
        return 0

    def _updated(self, *handles: int) -> int:
        assert handles in ((INSTANCE, NODE, PARAMETERS), (INSTANCE, NODE, PARAMETERS, CONTEXT))
        self.moves += 1
        return self.status


OFFSET = 16


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
