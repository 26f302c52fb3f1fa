"""The identity of a model: one hash of its graph and its weights."""

from __future__ import annotations

import hashlib
import operator

import torch
from torch import Tensor, fx

from ampopt.ir.model_copy import same_tensor
from ampopt.ir.unmarked import bytes_of


def model_hash(graph: fx.GraphModule) -> str:
    """SHA-256, in hexadecimal, of a graph's calls and of every weight's dtype, shape and bytes."""
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        target = node.name if node.op == "placeholder" else node.target  # which is a name, too
        digest.update(f"{node.op} {node.name} {target} {node.args} {node.kwargs}\n".encode())
    for name, weight in sorted(graph.named_buffers()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight_bytes(weight))
    return digest.hexdigest()


def weight_bytes(weight: Tensor) -> bytes:
    """A weight's bytes in the order of its dimensions. Its own layout does not matter."""
    return bytes_of(weight.detach().cpu().resolve_conj().resolve_neg().contiguous())


def are_equal(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two graphs have the same calls in order, by the same names, and equal weights."""
    texts = [
        [str((node.op, node.name, node.target, node.args, node.kwargs)) for node in each.graph.nodes]
        for each in (one, other)
    ]
    if texts[0] != texts[1]:
        return False
    names = {str(node.target) for node in one.graph.nodes if node.op == "get_attr"}
    pairs = [[operator.attrgetter(name)(each) for each in (one, other)] for name in names]
    return all(mine is its or _are_same(mine, its) for mine, its in pairs)


def _are_same(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or not same_tensor(one, other):
        return False
    return one.layout is not torch.strided or one.stride() == other.stride()
