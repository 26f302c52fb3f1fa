"""Everything about a model, about PyTorch and about the process that optimizing must leave as it was."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
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
        "default device": torch.get_default_device(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "warn always": torch.is_warn_always_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "printed": dict(vars(torch._tensor_str.PRINT_OPTS)),
        "denormals": float(torch.tensor([1e-40]) * 0.5),
        **precision_flags(),
    }


def of_process() -> dict[str, Any]:
    """What every library of a process shares."""
    return {
        **{f"environment {name}": value for name, value in os.environ.items()},
        "random": random.getstate(),
        "NumPy's random": repr(np.random.get_state()),
        "NumPy's errors": np.geterr(),
        "denormals in NumPy": float(np.float32(1e-40) * np.float32(0.5)),
        "recursion limit": sys.getrecursionlimit(),
        "streams": [(id(stream), dict(vars(stream))) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "filters": list(warnings.filters),
        "filters' list": id(warnings.filters),
        "showwarning": warnings.showwarning,
        "hooks": (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook),
        "tracing": (sys.gettrace(), sys.getprofile(), sys.getswitchinterval(), threading.stack_size()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "imports": (_path(), list(sys.meta_path), list(sys.path_hooks)),
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "collector's callbacks": list(gc.callbacks),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "faults": faulthandler.is_enabled(),
        "logging": (logging.root.manager.disable, logging.raiseExceptions, logging.getLogRecordFactory()),
        **_loggers(),
    }


def _path() -> list[str]:
    """Where modules are found, but for setuptools' own: inductor imports it, and it will look there again."""
    return [place for place in sys.path if not place.endswith(os.path.join("setuptools", "_vendor"))]


_NEW: Any = (logging.NOTSET, True, False, [], [])


def _loggers() -> dict[str, Any]:
    """Every logger that is not as new, but those that PyTorch makes for itself when it needs them."""
    known = [logging.root, *list(logging.Logger.manager.loggerDict.values())]
    found: dict[str, Any] = {}
    for logger in known:
        if isinstance(logger, logging.Logger) and ".__" not in logger.name:
            filters = [(handler, list(handler.filters)) for handler in logger.handlers]
            state = (logger.level, logger.propagate, logger.disabled, filters, list(logger.filters))
            if state != _NEW:
                found[f"logger {logger.name}"] = state
    return found


def precision_flags() -> dict[str, Any]:
    """What every interface to FP32's precision says; "raises" where PyTorch refuses to read it."""
    backends: Any = torch.backends
    readers = {
        "all": lambda: backends.fp32_precision,
        "cudnn": lambda: backends.cudnn.fp32_precision,
        "matmul": lambda: backends.cuda.matmul.fp32_precision,
        "conv": lambda: backends.cudnn.conv.fp32_precision,
        "rnn": lambda: backends.cudnn.rnn.fp32_precision,
        "oneDNN": lambda: backends.mkldnn.fp32_precision,
        "oneDNN matmul": lambda: backends.mkldnn.matmul.fp32_precision,
        "oneDNN conv": lambda: backends.mkldnn.conv.fp32_precision,
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


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Assert that PyTorch and the process are after the block as they were before it."""
    before, frozen = (of_torch(), of_process()), gc.get_freeze_count()
    yield
    after = of_torch(), of_process()
    assert gc.get_freeze_count() <= frozen  # what the tests have frozen may have gone
    changed = [name for pair in zip(before, after, strict=True) for name in differences(*pair)]
    assert not changed, changed
