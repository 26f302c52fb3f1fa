"""The rewrites of ONNX Runtime's CPU graphs, applied one after another."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ampopt.errors import BundleError
from ampopt.ort.blocked import keep_blocked
from ampopt.ort.chains import parts, with_chains
from ampopt.ort.groups import is_quicker_merged, with_merged_groups
from ampopt.ort.options import CPU, SessionOptions
from ampopt.ort.own_convolutions import ALGORITHMS, quicker, with_own
from ampopt.ort.own_operators import own_library
from ampopt.ort.profile import optimized
from ampopt.ort.session import Array, OnnxRunner, relative_error


@dataclasses.dataclass(frozen=True)
class Rewrites:
    """The rewrites of a graph: `with_merged_groups`, `keep_blocked`, `with_own` and `with_chains`.

    The convolutions that operators of ours compute are named by their results, under the algorithm's name.
    `exact`: NaN and infinities reach no further results in them.
    """

    blocked: bool = False
    winograd: tuple[str, ...] = ()
    merged: bool = False
    winograd4: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    exact: bool = False

    @staticmethod
    def taken_from(data: dict[str, Any]) -> Rewrites:
        """Remove a rewrite's fields, as JSON has them, from a mapping.

        Raises BundleError for invalid values.
        """
        flags = {field: data.pop(field, False) for field in ("blocked", "merged", "exact")}
        for field, value in flags.items():
            if not isinstance(value, bool):
                raise BundleError(f"{field} is true or false, not {value!r}")
        nodes = {field: data.pop(field, []) for field in (*ALGORITHMS, "chains")}
        for field, names in nodes.items():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise BundleError(f"{field} is a list of names, not {names!r}")
        own = {name: field for field in ALGORITHMS for name in nodes[field]}
        return Rewrites(**flags, chains=tuple(nodes["chains"])).with_own(own)

    @property
    def own(self) -> dict[str, str]:
        """The algorithm of each convolution that an operator of ours computes."""
        return {name: field for field in ALGORITHMS for name in getattr(self, field)}

    def with_own(self, own: Mapping[str, str]) -> Rewrites:
        """These rewrites with other convolutions by our algorithms."""
        of: dict[str, Any] = {
            field: tuple(name for name, its in own.items() if its == field) for field in ALGORITHMS
        }
        return dataclasses.replace(self, **of)


def rewritten(model: bytes, options: SessionOptions, rewrites: Rewrites) -> OnnxRunner:
    """A session with its graph rewritten. Raises SessionError or CompilerError."""
    graph, plain, library = rewritten_model(model, options, rewrites)
    return OnnxRunner(graph, plain, library=library)


def rewritten_model(
    model: bytes, options: SessionOptions, rewrites: Rewrites
) -> tuple[bytes, SessionOptions, Path | None]:
    """The rewritten graph as ONNX Runtime has optimized it, the options to run it, and its operators.

    Raises SessionError or CompilerError.
    """
    graph, plain = _graph(model, options, rewrites), options.unoptimized()
    if rewrites.own:
        graph = with_own(graph, plain, rewrites.own, exact=rewrites.exact)
    return graph, plain, own_library() if rewrites.own else _library(rewrites)


def merged(
    model: bytes, options: SessionOptions, arrays: Sequence[Array], before: Rewrites
) -> Rewrites | None:
    """The rewrites with narrow groups merged, if a profile of each node shows a gain; else None."""
    gains = _can_be(options) and is_quicker_merged(model, options, arrays)
    return dataclasses.replace(before, merged=True) if gains else None


def blocked(
    model: bytes, options: SessionOptions, _arrays: Sequence[Array], before: Rewrites
) -> Rewrites | None:
    """The rewrites with fewer reorderings; None if none can be removed."""
    source = _can_be(options) and _source(model, options, before)
    changed = source and keep_blocked(source, options, _library(before))
    return dataclasses.replace(before, blocked=True) if changed else None


def convolved(
    model: bytes, options: SessionOptions, arrays: Sequence[Array], before: Rewrites
) -> Rewrites | None:
    """The rewrites with convolutions by our own algorithms where they are faster; None if there are none.

    Winograd's tiles of 4x4 are used where they are faster still, unless all of them together are not precise.
    Narrow groups leave out products with 0, which NaN would reach: not where that is to be exact.
    """
    if not _can_be(options):
        return None
    graph, plain = _graph(model, options, before), options.unoptimized()
    names = [name for name in ALGORITHMS if name != "narrow" or not before.exact]
    find = functools.partial(quicker, graph, plain, arrays, exact=before.exact)
    own = find(names)
    if "winograd4" in own.values() and _error(with_own(graph, plain, own), graph, plain, arrays) > PRECISE:
        own = find([name for name in names if name != "winograd4"])
    return before.with_own(own) if own else None


def chained(
    model: bytes, options: SessionOptions, arrays: Sequence[Array], before: Rewrites
) -> Rewrites | None:
    """The rewrites with chains of narrow convolutions where one is faster by itself; None if none is.

    What is beside the chains is rewritten anew as it was: it has other names then.
    """
    found = parts(model) if _can_be(options) else {}
    names = tuple(
        name for name, (part, shape) in found.items() if _is_quicker_chained(part, shape, options, before)
    )
    return _beside(model, options, arrays, before, names) if names else None


def _beside(
    model: bytes, options: SessionOptions, arrays: Sequence[Array], before: Rewrites, names: tuple[str, ...]
) -> Rewrites:
    """The rewrites with these chains, and with what there was before chosen anew."""
    found = Rewrites(merged=before.merged, chains=names, exact=before.exact)
    if before.blocked:
        found = blocked(model, options, arrays, found) or found
    if before.own:
        found = convolved(model, options, arrays, found) or found
    return found


def _is_quicker_chained(part: bytes, shape: Sequence[int], options: SessionOptions, before: Rewrites) -> bool:
    """Whether a chain that is a model by itself is faster than its convolutions, rewritten as others were."""
    arrays = [np.random.default_rng(0).standard_normal(shape, np.float32)]
    ways = Rewrites(chains=tuple(parts(part))), _beside(part, options, arrays, before, ())
    runners = [rewritten(part, options, rewrites) for rewrites in ways]
    least, end = [math.inf, math.inf], time.perf_counter() + CHAIN_S
    while time.perf_counter() < end:
        for way, runner in enumerate(runners):
            for _ in range(LOOKS):
                begun = time.perf_counter()
                runner(*arrays)
                least[way] = min(least[way], time.perf_counter() - begun)
    return least[0] < least[1]


CHAIN_S, LOOKS = 0.3, 3
"""The time for comparing a chain with its convolutions, and how many calls of each take turns."""


def _error(changed: bytes, graph: bytes, options: SessionOptions, arrays: Sequence[Array]) -> float:
    """The largest relative error of a graph with our operators against the graph that it was made of."""
    runners = (OnnxRunner(each, options, library=own_library()) for each in (changed, graph))
    outputs = (runner(*arrays) for runner in runners)
    return max(map(relative_error, *outputs))


PRECISE = 5e-6
"""Largest error of a graph with tiles of 4x4: half of what float32 always may have (`least_error`)."""

Step = Callable[[bytes, SessionOptions, Sequence[Array], Rewrites], Rewrites | None]

STEPS: tuple[Step, ...] = (merged, blocked, convolved, chained)

EXACT: tuple[Step, ...] = (blocked, convolved, chained)
"""Those that can be exact: merged groups have weights of 0, by which NaN and infinities reach more."""


def _can_be(options: SessionOptions) -> bool:
    return options.provider == CPU and options.optimization == "all"


def _library(rewrites: Rewrites) -> Path | None:
    """What ONNX Runtime needs to load a graph with these rewrites but for its own convolutions."""
    return own_library() if rewrites.chains else None


def _source(model: bytes, options: SessionOptions, rewrites: Rewrites) -> bytes:
    source = with_chains(model, options, rewrites.chains) if rewrites.chains else model
    return (with_merged_groups(source) if rewrites.merged else None) or source


def _graph(model: bytes, options: SessionOptions, rewrites: Rewrites) -> bytes:
    source, library = _source(model, options, rewrites), _library(rewrites)
    kept = keep_blocked(source, options, library) if rewrites.blocked else None
    return kept or optimized(source, options, library)
