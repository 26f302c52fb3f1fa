"""Convolutions of ONNX Runtime's CPU graphs that operators of our own compute, each in its fastest way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ampopt.ort import narrow_groups
from ampopt.ort import winograd as winograds
from ampopt.ort.blocked import DOMAIN, block_size
from ampopt.ort.options import SessionOptions
from ampopt.ort.own_operators import (
    ACTIVATIONS,
    OWN_DOMAIN,
    attributes,
    import_domain,
    own_library,
    threads_of,
)
from ampopt.ort.profile import named, node_seconds
from ampopt.ort.session import Array
from ampopt.ort.weights import add_weights, remove_unread


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An operator for 3x3 convolutions in blocks of channels, which reads their weights in another order.

    `suits` is asked with a convolution's attributes and its weights as ONNX Runtime has ordered them; so is
    `rearranged`, for the weights that the operator reads. `spreads`: NaN and infinities reach further
    results, unless the operator gets the convolution's own weights, too.
    """

    operator: str
    suits: Callable[[Mapping[str, Any], Array], bool]
    rearranged: Callable[[Array], Array]
    spreads: bool = False


ALGORITHMS: Mapping[str, Algorithm] = {
    **{
        name: Algorithm(
            "WinogradConv", winograds.suits, functools.partial(winograds.rearranged, tile=tile), spreads=True
        )
        for name, tile in (("winograd", 2), ("winograd4", 4))
    },
    "narrow": Algorithm("NarrowConv", narrow_groups.suits, narrow_groups.rearranged),
}
"""By the names under which files keep them; the numbers are tiles of 2x2 and of 4x4."""


def quicker(
    model: bytes,
    options: SessionOptions,
    arrays: Sequence[Array],
    among: Sequence[str] = tuple(ALGORITHMS),
    *,
    exact: bool = False,
) -> dict[str, str]:
    """The convolutions, named by their results, that are faster by one of our algorithms, and by which.

    `model`: as ONNX Runtime has optimized it; `exact`: see `with_own`. Each convolution is measured by itself
    in each way. Raises CompilerError or SessionError.
    """
    changed = {name: with_own(model, options, name, exact=exact) for name in among}
    suited = {name: _results(each, ALGORITHMS[name].operator) for name, each in changed.items()}
    if not any(suited.values()):
        return {}
    library = own_library()
    direct = node_seconds(named(model), options, arrays, library=library)
    found, fastest = dict[str, str](), dict[str, float]()
    for name, convolutions in suited.items():
        if not convolutions:
            continue
        seconds = node_seconds(named(changed[name]), options, arrays, library=library)
        for each in convolutions:
            if seconds[each] < fastest.get(each, direct[each]):
                found[each], fastest[each] = name, seconds[each]
    return found


def with_own(
    model: bytes, options: SessionOptions, chosen: Mapping[str, str] | str, *, exact: bool = False
) -> bytes:
    """The model with our algorithms for convolutions, named by their results; one name: for all it suits.

    `model`: as ONNX Runtime has optimized it. `exact`: NaN and infinities reach no further results: what
    would spread them gets its convolution's own weights, too.
    """
    from onnx import load_from_string, numpy_helper

    found = load_from_string(model)
    stored = {each.name: each for each in found.graph.initializer}
    replaced: dict[tuple[str, str], str] = {}
    for node in found.graph.node:
        name = chosen if isinstance(chosen, str) else chosen.get(node.output[0])
        if name is None or not _is_blocked_3x3(node, stored):
            continue
        algorithm, key = ALGORITHMS[name], (node.input[1], name)
        weight = numpy_helper.to_array(stored[node.input[1]])
        if not algorithm.suits(attributes(node), weight):
            continue
        if key not in replaced:
            array = algorithm.rearranged(weight)
            replaced[key] = add_weights(found.graph, f"{node.input[1]}_{name}", array)
        kept = exact and algorithm.spreads
        node.CopyFrom(_operator(node, algorithm.operator, replaced[key], options, keeps_weights=kept))
    remove_unread(found.graph, {weights for weights, _ in replaced})
    import_domain(found)
    data: bytes = found.SerializeToString()
    return data


def _is_blocked_3x3(node: Any, stored: Mapping[str, Any]) -> bool:
    """Whether a node is a blocked convolution whose padding and activation our operators have."""
    if node.domain != DOMAIN or node.op_type != "Conv" or node.input[1] not in stored:
        return False
    has, block = attributes(node), block_size()
    filters, channels = stored[node.input[1]].dims[:2]
    return (
        list(has.get("kernel_shape", [])) == [3, 3]
        and set(has.get("dilations", [1])) == {1}
        and has.get("auto_pad", b"NOTSET") == b"NOTSET"
        and has.get("activation", b"").decode() in ACTIVATIONS
        and filters % block == channels % block == 0
    )


def _operator(node: Any, operator: str, weights: str, options: SessionOptions, *, keeps_weights: bool) -> Any:
    """Our operator in the place of a convolution, whose own weights are its fifth input if it keeps them."""
    from onnx import helper

    own = [node.input[0], weights, *node.input[2:]]
    inputs = [*own, *[""] * (4 - len(own)), node.input[1]] if keeps_weights else own

    has = attributes(node)
    alpha, beta = (*has.get("activation_params", ()), 0.0, 0.0)[:2]
    pads = dict(zip(("top", "left", "bottom", "right"), has.get("pads", [0] * 4), strict=True))
    return helper.make_node(
        operator,
        inputs,
        node.output,
        name=node.name,
        domain=OWN_DOMAIN,
        stride=has.get("strides", [1])[0],
        activation=ACTIVATIONS.index(has.get("activation", b"").decode()),
        alpha=float(alpha),
        beta=float(beta),
        threads=threads_of(options),
        **{f"pad_{side}": count for side, count in pads.items()},
    )


def _results(model: bytes, operator: str) -> list[str]:
    from onnx import load_from_string

    return [node.output[0] for node in load_from_string(model).graph.node if node.op_type == operator]
