"""The rewrites of ONNX Runtime's CPU graphs, applied one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ampopt.errors import BundleError
from ampopt.ort.blocked import keep_blocked
from ampopt.ort.groups import is_quicker_merged, with_merged_groups
from ampopt.ort.options import CPU, SessionOptions
from ampopt.ort.profile import optimized
from ampopt.ort.session import Array, OnnxRunner
from ampopt.ort.winograd import quicker_by_winograd, winograd_library, with_winograd


@dataclasses.dataclass(frozen=True)
class Rewrites:
    """The rewrites of a graph: `with_merged_groups`, `keep_blocked`, `with_winograd` for these nodes."""

    blocked: bool = False
    winograd: tuple[str, ...] = ()
    merged: bool = False

    @staticmethod
    def taken_from(data: dict[str, Any]) -> Rewrites:
        """Remove a rewrite's fields, as JSON has them, from a mapping.

        Raises BundleError for invalid values.
        """
        blocked, winograd = data.pop("blocked", False), data.pop("winograd", [])
        merged = data.pop("merged", False)
        for name, value in (("blocked", blocked), ("merged", merged)):
            if not isinstance(value, bool):
                raise BundleError(f"{name} is true or false, not {value!r}")
        if not isinstance(winograd, list) or not all(isinstance(name, str) for name in winograd):
            raise BundleError(f"winograd is a list of names, not {winograd!r}")
        return Rewrites(blocked, tuple(winograd), merged)


def rewritten(model: bytes, options: SessionOptions, rewrites: Rewrites) -> OnnxRunner:
    """A session with its graph rewritten. Raises SessionError or CompilerError."""
    graph, plain = _graph(model, options, rewrites), options.unoptimized()
    if not rewrites.winograd:
        return OnnxRunner(graph, plain)
    return OnnxRunner(with_winograd(graph, plain, rewrites.winograd), plain, library=winograd_library())


def merged(
    model: bytes, options: SessionOptions, arrays: Sequence[Array], before: Rewrites
) -> Rewrites | None:
    """The rewrites with narrow groups merged, if a profile of each node shows a gain; else None."""
    quicker = _can_be(options) and is_quicker_merged(model, options, arrays)
    return dataclasses.replace(before, merged=True) if quicker else None


def blocked(
    model: bytes, options: SessionOptions, _arrays: Sequence[Array], before: Rewrites
) -> Rewrites | None:
    """The rewrites with fewer reorderings; None if none can be removed."""
    changed = _can_be(options) and keep_blocked(_source(model, before), options)
    return dataclasses.replace(before, blocked=True) if changed else None


def winograd(
    model: bytes, options: SessionOptions, arrays: Sequence[Array], before: Rewrites
) -> Rewrites | None:
    """The rewrites with Winograd convolutions where they are faster; None if there are none."""
    if not _can_be(options):
        return None
    names = quicker_by_winograd(_graph(model, options, before), options.unoptimized(), arrays)
    return dataclasses.replace(before, winograd=names) if names else None


Step = Callable[[bytes, SessionOptions, Sequence[Array], Rewrites], Rewrites | None]

STEPS: tuple[Step, ...] = (merged, blocked, winograd)

SPREADING: tuple[Step, ...] = (merged, winograd)
"""Those after which NaN or an infinity may reach further results: by weights of 0, or by sums that cancel."""


def _can_be(options: SessionOptions) -> bool:
    return options.provider == CPU and options.optimization == "all"


def _source(model: bytes, rewrites: Rewrites) -> bytes:
    return (with_merged_groups(model) if rewrites.merged else None) or model


def _graph(model: bytes, options: SessionOptions, rewrites: Rewrites) -> bytes:
    source = _source(model, rewrites)
    return (keep_blocked(source, options) if rewrites.blocked else None) or optimized(source, options)
