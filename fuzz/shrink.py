"""From a network with a fault to a small one with the same fault."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from fuzz.network import Spec, build
from fuzz.outcome import Outcome

_PLAIN = {"dtype": "float32", "values": "normal", "memory": "contiguous", "call": "one", "ending": "tensor"}


def shrink(
    spec: Spec, found: Outcome, check: Callable[[Spec], Outcome], *, seconds: float
) -> tuple[Spec, Outcome]:
    """The smallest network found in so many seconds by leaving out layers and oddities, and its outcome."""
    end, again = time.perf_counter() + seconds, True
    while again:
        again = False
        for smaller in _smaller(spec):
            if time.perf_counter() > end:
                return spec, found
            try:
                outcome = check(smaller)
            except Exception:  # a network that the oracle cannot judge is none to show
                continue
            if outcome.same_as(found):
                spec, found, again = smaller, outcome, True
                break
    return spec, found


def _smaller(spec: Spec) -> Iterator[Spec]:
    count = len(spec.layers)
    for size in (count // 2, 1):
        for start in range(0, count, max(size, 1)) if size else ():
            yield dataclasses.replace(spec, layers=spec.layers[:start] + spec.layers[start + size :])
    for field, plain in _PLAIN.items():
        if getattr(spec, field) != plain:
            yield Spec.from_json({**spec.to_json(), field: plain})


def describe(spec: Spec) -> str:
    """A network as text: what it is called with, and its layers as PyTorch prints them."""
    call = (
        f"{spec.dtype} {list(spec.shape)}, values {spec.values}, memory {spec.memory}, arguments {spec.call}"
    )
    return f"{call}\n{build(spec)}"
