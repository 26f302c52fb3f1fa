"""Everything about a model and about PyTorch that optimizing must leave as it was."""

from __future__ import annotations

import copy
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_post_hooks",
)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's kind, layout, memory address and content, bit for bit."""
    content = tensor.detach().clone()
    raw = content.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b""
    return content.dtype, content.shape, tensor.stride(), tensor.data_ptr(), tensor.requires_grad, raw


def of_model(model: nn.Module) -> dict[str, Any]:
    """The state of every submodule: identity, flags, weights, gradients, buffers, attributes, hooks."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"{name} id"] = (id(module), type(module), module.training)
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in tensors.items():
                found[f"{name}.{key} {kind}"] = None if tensor is None else (id(tensor), bits(tensor))
                if tensor is not None and tensor.is_leaf:
                    found[f"{name}.{key} grad"] = None if tensor.grad is None else bits(tensor.grad)
        for kind in HOOKS:
            found[f"{name} {kind}"] = dict(vars(module).get(kind) or {})
        own = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        found[f"{name} attributes"] = {
            k: (id(v), bits(v)) if isinstance(v, Tensor) else copy.copy(v) for k, v in own.items()
        }
    return found


def of_torch() -> dict[str, Any]:
    """PyTorch's global state."""
    backends: Any = torch.backends
    return {
        "rng": torch.get_rng_state().numpy().tobytes(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "autocast dtypes": (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "mkldnn": backends.mkldnn.enabled,
        "log level": logging.getLogger("torch").level,
        "stderr": id(sys.stderr),
        **precision_flags(),
    }


def precision_flags() -> dict[str, Any]:
    """What every interface to FP32's precision says; "raises" where PyTorch refuses to read it."""
    backends: Any = torch.backends
    readers = {
        "all": lambda: backends.fp32_precision,
        "cudnn": lambda: backends.cudnn.fp32_precision,
        "matmul": lambda: backends.cuda.matmul.fp32_precision,
        "conv": lambda: backends.cudnn.conv.fp32_precision,
        "rnn": lambda: backends.cudnn.rnn.fp32_precision,
        "old matmul": lambda: backends.cuda.matmul.allow_tf32,
        "old cudnn": lambda: backends.cudnn.allow_tf32,
        "old word": torch.get_float32_matmul_precision,
    }
    found: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = "raises"
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
