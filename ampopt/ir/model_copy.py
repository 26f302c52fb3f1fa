"""Copies the user's model and finds its device; the user's model itself is never called."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ampopt.errors import InputError, UncopyableError
from ampopt.ir.deep_copy import deep_copy, shared_with
from ampopt.ir.lane_io import LaneIO
from ampopt.ir.numerics import is_rounded
from ampopt.ir.signature import tensors_of
from ampopt.system.lack import lack


def is_training(module: nn.Module) -> bool:
    """Whether a module itself is in training mode; frozen TorchScript has no mode."""
    return bool(getattr(module, "training", False))


def private_copy(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A deep copy of a model in evaluation mode, without gradients, on `device` (None: unchanged device).

    Raises UncopyableError if the model cannot be copied, or if its copy would still reach the model.
    """
    duplicate = exact_copy(model)
    if (shared := shared_with(model, duplicate)) is not None:
        raise UncopyableError(
            f"the model cannot be copied: in its copy {shared}; ampopt works on a copy so that yours stays "
            "as it is: let hooks and functions get at the model by their arguments, or by a closure"
        )
    for parameter in duplicate.parameters():
        parameter.requires_grad_(False)
    duplicate.eval()
    return duplicate if device is None else duplicate.to(device)


_writers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
"""Models that write to their own parameters when they are called, by identity."""


def working_copy(model: nn.Module) -> nn.Module:
    """A copy of a private copy that shares its parameters, but nothing else that a call could change.

    Capture, verification and timing call such copies, so that the model that serves the user does not change.
    Buffers and Python attributes are copied; parameters, too, if the model writes to them (see
    `note_writes`).
    """
    if isinstance(model, LaneIO):
        return model.around(working_copy(model.model))
    if _writers.get(id(model)) is not model:
        return exact_copy(model, {id(parameter): parameter for parameter in model.parameters()})
    duplicate = exact_copy(model)
    _writers[id(duplicate)] = duplicate
    return duplicate


def note_writes(model: nn.Module, called: nn.Module) -> None:
    """Record whether a model writes to its parameters, from `called`, an exact copy that has been called."""
    pairs = zip(model.parameters(), called.parameters(), strict=True)
    if not all(same_tensor(mine, theirs) for mine, theirs in pairs):
        _writers[id(model)] = model


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same metadata and values, with NaN equal to NaN."""
    try:
        if a.shape != b.shape or a.dtype is not b.dtype or a.device != b.device:
            return False
        if a.layout is not b.layout:
            return False
        if a.layout is not torch.strided:
            return same_tensor(a.to_dense(), b.to_dense())
        if is_rounded(a):
            return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
        return torch.equal(a, b)
    except (RuntimeError, NotImplementedError):  # quantized, fake: no such comparison
        return repr(a) == repr(b)


def exact_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy including gradients and mode; `memo` is that of `copy.deepcopy`.

    Functions that are bound to the model (hooks) are bound to the copy, see `deep_copy`. Tensors that
    autograd computed from other tensors (an old-style `weight_norm`) are cloned.
    """
    try:
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):  # a TorchScript's parameters are clones
            copied: nn.Module = deep_copy(model, {} if memo is None else memo)
            return copied
    except Exception as error:
        if (lacking := lack("a copy of the model", error)) is not None:
            raise UncopyableError(str(lacking)) from error
        raise UncopyableError(
            f"the model cannot be copied ({error}); ampopt works on a copy so that yours stays as it is: "
            "remove what cannot be deep-copied from its attributes"
        ) from error


def device_of(model: nn.Module, leaves: Sequence[Any]) -> torch.device:
    """The device of a model's weights, else of its inputs. Raises InputError if they differ."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise InputError(f"the model's weights are on several devices ({names}); ampopt optimizes for one")
    tensors = tensors_of(leaves)
    return next(iter(devices)) if devices else (tensors[0].device if tensors else torch.device("cpu"))


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators that `untouched_rng` keeps: PyTorch's, Python's and NumPy's."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


@contextlib.contextmanager
def untouched_rng(device: torch.device) -> Iterator[None]:
    """Restore the random generators after the block: PyTorch's of the CPU and the device, Python's, NumPy's.

    If blocks overlap in several threads, the last one to end restores the state before the first. Numbers
    that other threads draw meanwhile may be drawn again.
    """
    generators = [_PYTHONS, _NUMPYS, _of_torch(torch.default_generator)]
    if device.type == "cuda":
        torch.cuda.init()
        generators.append(_of_torch(torch.cuda.default_generators[_index(device)]))
    with contextlib.ExitStack() as stack:
        for generator in generators:
            stack.enter_context(_untouched(generator))
        yield


@dataclasses.dataclass(frozen=True)
class _Generator:
    """A random generator of the process: what it is known by, and how its state is read and set."""

    key: object
    get_state: Callable[[], Any] = dataclasses.field(compare=False)
    set_state: Callable[[Any], object] = dataclasses.field(compare=False)


_PYTHONS = _Generator("random", random.getstate, random.setstate)
_NUMPYS = _Generator("numpy.random", np.random.get_state, np.random.set_state)


def _of_torch(generator: torch.Generator) -> _Generator:
    return _Generator(generator, generator.get_state, generator.set_state)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


_lock = threading.Lock()
_blocks: dict[_Generator, tuple[int, Any]] = {}
"""For each generator that is put back: how many blocks go on, and its state before the first of them."""


@contextlib.contextmanager
def _untouched(generator: _Generator) -> Iterator[None]:
    with _lock:
        state = generator.get_state()
        count, first = _blocks.get(generator, (0, state))
        _blocks[generator] = count + 1, first
    try:
        yield
    finally:
        with _lock:
            count, first = _blocks[generator]
            if count > 1:
                _blocks[generator] = count - 1, first
                generator.set_state(state)
            else:
                del _blocks[generator]
                generator.set_state(first)
