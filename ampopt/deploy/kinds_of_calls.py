"""Whether programs for calls of several kinds can serve one model: none may leave out what another reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import KindError
from ampopt.ir.calls_of_copies import read_first
from ampopt.ir.capture import Captured
from ampopt.ir.lifted_state import Attribute
from ampopt.ir.model_copy import untouched_rng
from ampopt.ir.model_differences import Place


class KindsOfCalls:
    """The kinds of calls for which programs were made, such as those of one shape, or with `reset=True`.

    A program keeps the state that its own kind of calls reads and writes, and that of the kinds before it. It
    leaves out what its calls only write, and has as a constant what they only read.
    """

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        """`original`, on a device, is never called itself."""
        self._original, self._device = original, device
        self._known: list[tuple[Captured, list[Any]]] = []

    @property
    def state(self) -> frozenset[Attribute]:
        """Where all kinds so far keep their state."""
        lifted = [captured.lifted for captured, _ in self._known if captured.lifted is not None]
        return frozenset((slot.module, slot.attribute) for state in lifted for slot in state.slots)

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise KindError where a call reads what calls of another kind write, and programs leave out."""
        left_out = frozenset(place for captured, _ in self._known for place in captured.ignored)
        if read := self._read(self._original, left_out, args, kwargs):
            raise KindError(
                f"a call of this kind reads {_shown(read)}, which calls of another kind write, and the "
                "program for those leaves out: optimize the model with a call of this kind as the example"
            )

    def add(self, captured: Captured) -> None:
        """Take up a kind. Raises KindError where calls of another one read what its calls change."""
        for other, leaves in self._known:
            changed = captured.ignored - other.ignored
            if captured.lifted is not None and other.lifted is None:
                changed |= {(slot.module, slot.attribute) for slot in captured.lifted.slots}
            args, kwargs = pytree.tree_unflatten(leaves, other.spec)
            model = self._original if other.lifted is None else other.lifted.model
            if read := self._read(model, changed, args, kwargs):
                raise KindError(
                    f"a call of this kind changes {_shown(read)}, which is a constant of the program for "
                    "calls of another kind: optimize the model with a call of this kind as the example"
                )
        self._known.append((captured, list(captured.leaves)))

    def _read(
        self, model: nn.Module, places: Collection[Attribute], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> set[Attribute]:
        """The places that a call of a copy of the model reads before it sets them."""

        def call(copied: nn.Module) -> None:
            own_args, own_kwargs = pytree.tree_map(_copied, (tuple(args), dict(kwargs)))
            with torch.no_grad(), untouched_rng(self._device):
                copied(*own_args, **own_kwargs)

        return read_first(model, places, call) if places else set()


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _shown(places: Collection[Attribute]) -> str:
    return f"its attribute {Place(*min(places))}"
