"""Disk cache of exported graphs, so that the same program is exported once.

The key is a hash of everything that an export depends on, including the bytes of every weight. A file holds
the ONNX model without the weights that the program has, by whatever name and also transposed, so that it is
small; a model with many other weights is not stored. Files have a checksum, and a damaged one is removed.
A bundle holds such files, too, see `exports_in`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.ir.model_hash import model_hash, weight_bytes
from ampopt.system.cache_folder import MOST_BYTES, cache_folder, drop, keep, kept
from ampopt.system.environment import library_versions, own_code

_AS_IT_IS, _TRANSPOSED = "ampopt: the program's weight ", "ampopt: transposed, the program's weight "
"""What the doc string of an initializer begins with that no file holds; the weight's name follows."""


Exports = dict[str, bytes]
"""Files by their keys."""

_HELD: ContextVar[Exports | None] = ContextVar("exports", default=None)


@contextlib.contextmanager
def exports_in(held: Exports) -> Iterator[None]:
    """A block in which exports are looked for in `held`, too, and all that are asked for are left there.

    What is held is believed: a checksum tells damage, not who has made it.
    """
    token = _HELD.set(held)
    try:
        yield
    finally:
        _HELD.reset(token)


def exported(
    graph: fx.GraphModule, examples: Sequence[Tensor], make: Callable[[], Any], dims: object = ()
) -> bytes:
    """The serialized `onnx.ModelProto` that `make` exports from a graph, or a cached one.

    `make` must depend only on the graph, its example inputs' layouts, `dims` (what may vary of these),
    ampopt's code and the libraries.
    """
    folder, held = cache_folder(), _HELD.get()
    if folder is None and held is None:
        return bytes(make().SerializeToString())
    key, weights = _key(graph, examples, dims), dict(graph.named_buffers())
    file = None if folder is None else folder / f"{key}.onnx"
    try:
        if file is not None and (small := kept(file)) is not None:
            whole = _with_weights(key, small, weights)
            if held is not None:
                held[key] = small
            return whole
    except (OSError, ValueError, KeyError):
        if file is not None:
            drop(file)
    if held is not None and key in held:
        with contextlib.suppress(ValueError, KeyError):
            return _with_weights(key, held[key], weights)
    model = make()
    data, small = bytes(model.SerializeToString()), _without_weights(key, model, weights)
    if len(small) <= MOST_BYTES:
        if file is not None:
            keep(file, small)
        if held is not None:
            held[key] = small
    return data


def _key(graph: fx.GraphModule, examples: Sequence[Tensor], dims: object) -> str:
    inputs = [(str(example.dtype), list(example.shape), example.stride()) for example in examples]
    facts = [model_hash(graph), inputs, dims, own_code(), str(torch.__version__), library_versions()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _without_weights(key: str, model: Any, weights: Mapping[str, Tensor]) -> bytes:
    """A model as a file holds it, behind a checksum; its initializers lose what the program has, too."""
    told = {_digest(own.t()): _TRANSPOSED + name for name, own in weights.items() if own.dim() == 2}
    told |= {_digest(own): _AS_IT_IS + name for name, own in weights.items()}
    for tensor in model.graph.initializer:
        if (text := told.get(hashlib.sha256(tensor.raw_data).digest())) is not None:
            tensor.raw_data, tensor.doc_string = b"", text
    data = bytes(model.SerializeToString())
    return _checksum(key, data) + data


def _with_weights(key: str, found: bytes, weights: Mapping[str, Tensor]) -> bytes:
    """The whole model of a file; ValueError or KeyError where the file is not what was written."""
    import onnx

    size = hashlib.sha256().digest_size
    checksum, data = found[:size], found[size:]
    if checksum != _checksum(key, data):
        raise ValueError("damaged")
    model = onnx.ModelProto.FromString(data)
    for tensor in model.graph.initializer:
        if tensor.doc_string.startswith(_AS_IT_IS):
            tensor.raw_data = weight_bytes(weights[tensor.doc_string.removeprefix(_AS_IT_IS)])
        elif tensor.doc_string.startswith(_TRANSPOSED):
            tensor.raw_data = weight_bytes(weights[tensor.doc_string.removeprefix(_TRANSPOSED)].t())
        else:
            continue
        tensor.ClearField("doc_string")
    return bytes(model.SerializeToString())


def _digest(weight: Tensor) -> bytes:
    return hashlib.sha256(weight_bytes(weight)).digest()


def _checksum(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + data).digest()
