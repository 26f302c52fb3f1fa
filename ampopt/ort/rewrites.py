"""The rewrites of ONNX Runtime's CPU graphs, applied one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ampopt.errors import BundleError
from ampopt.ort.blocked import keep_blocked
from ampopt.ort.groups import is_quicker_merged, with_merged_groups
from ampopt.ort.options import CPU, SessionOptions
from ampopt.ort.profile import optimized
from ampopt.ort.session import Array, OnnxRunner, relative_error
from ampopt.ort.winograd import quicker_by_winograd, winograd_library, with_winograd

FIELDS: Mapping[int, str] = {2: "winograd", 4: "winograd4"}
"""The fields that name the convolutions by Winograd's algorithm, by the width of their tiles."""


@dataclasses.dataclass(frozen=True)
class Rewrites:
    """The rewrites of a graph: `with_merged_groups`, `keep_blocked`, `with_winograd` for these nodes."""

    blocked: bool = False
    winograd: tuple[str, ...] = ()
    merged: bool = False
    winograd4: tuple[str, ...] = ()

    @staticmethod
    def taken_from(data: dict[str, Any]) -> Rewrites:
        """Remove a rewrite's fields, as JSON has them, from a mapping.

        Raises BundleError for invalid values.
        """
        flags = {field: data.pop(field, False) for field in ("blocked", "merged")}
        for field, value in flags.items():
            if not isinstance(value, bool):
                raise BundleError(f"{field} is true or false, not {value!r}")
        nodes = {field: data.pop(field, []) for field in FIELDS.values()}
        for field, names in nodes.items():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise BundleError(f"{field} is a list of names, not {names!r}")
        tiles = {name: tile for tile, field in FIELDS.items() for name in nodes[field]}
        return Rewrites(flags["blocked"], merged=flags["merged"]).with_tiles(tiles)

    @property
    def tiles(self) -> dict[str, int]:
        """The width of the tiles of each convolution by Winograd's algorithm."""
        return {name: tile for tile, field in FIELDS.items() for name in getattr(self, field)}

    def with_tiles(self, tiles: Mapping[str, int]) -> Rewrites:
        """These rewrites with other convolutions by Winograd's algorithm."""
        of = {tile: tuple(name for name, own in tiles.items() if own == tile) for tile in FIELDS}
        return dataclasses.replace(self, winograd=of[2], winograd4=of[4])


def rewritten(model: bytes, options: SessionOptions, rewrites: Rewrites) -> OnnxRunner:
    """A session with its graph rewritten. Raises SessionError or CompilerError."""
    graph, plain = _graph(model, options, rewrites), options.unoptimized()
    if not rewrites.tiles:
        return OnnxRunner(graph, plain)
    return OnnxRunner(with_winograd(graph, plain, rewrites.tiles), plain, library=winograd_library())


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
    """The rewrites with Winograd convolutions where they are faster; None if there are none.

    Tiles of 4x4 are used where they are faster still, unless all of them together are not precise.
    """
    if not _can_be(options):
        return None
    graph, plain = _graph(model, options, before), options.unoptimized()
    tiles = quicker_by_winograd(graph, plain, arrays)
    if 4 in tiles.values() and _error(with_winograd(graph, plain, tiles), graph, plain, arrays) > PRECISE:
        tiles = quicker_by_winograd(graph, plain, arrays, tiles=(2,))
    return before.with_tiles(tiles) if tiles else None


def _error(changed: bytes, graph: bytes, options: SessionOptions, arrays: Sequence[Array]) -> float:
    """The largest relative error of a graph with our operators against the graph that it was made of."""
    runners = OnnxRunner(changed, options, library=winograd_library()), OnnxRunner(graph, options)
    outputs = (runner(*arrays) for runner in runners)
    return max(map(relative_error, *outputs))


PRECISE = 5e-6
"""Largest error of a graph with tiles of 4x4: half of what float32 always may have (`least_error`)."""

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
