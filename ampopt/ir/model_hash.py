"""The identity of a model: one hash of its graph and its weights."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, fx


def model_hash(graph: fx.GraphModule) -> str:
    """SHA-256, in hexadecimal, of a graph's calls and of every weight's dtype, shape and bytes."""
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        digest.update(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}\n".encode())
    for name, weight in sorted(graph.named_buffers()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        digest.update(weight_bytes(weight))
    return digest.hexdigest()


def weight_bytes(weight: Tensor) -> bytes:
    """A weight's bytes in the order of its dimensions. Its own layout does not matter.

    PyTorch calls a tensor contiguous whatever the strides of its sizes of 1, but reads bytes only at a stride
    of 1.
    """
    plain = weight.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
