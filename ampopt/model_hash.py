"""The identity of a captured model: one hash of its graph and its weights."""

from __future__ import annotations

import hashlib

import torch

from ampopt.capture import Captured


def model_hash(captured: Captured) -> str:
    """SHA-256 of the captured graph's calls and of every weight's dtype, shape and bytes, in hexadecimal."""
    graph, digest = captured.program.graph, hashlib.sha256()
    for node in graph.graph.nodes:
        digest.update(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}\n".encode())
    for name, weight in sorted(graph.named_buffers()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        flat = weight.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
