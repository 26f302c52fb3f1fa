"""Repairs of PyTorch for captures: sizes in exports of 2.10; masks and counts that are asked for values."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def right_sizes() -> Iterator[None]:
    """Let exports in the block give poolings and LSTMs the sizes that they have, for all sizes of an image.

    PyTorch 2.10 rounds a pooling's size down in two steps, and the second asks whether the first left a rest:
    an export is then valid for such heights and widths alone, and not for a range. The states of an LSTM get
    one dimension more than they have, for batches of more than one. Enter it within `capturing`: the
    functions are the whole process's.
    """
    from torch import _meta_registrations as shapes
    from torch._decomp import decompositions

    with contextlib.ExitStack() as undo:
        for module, name, repaired in (
            (shapes, "div_rtn", lambda _: operator.floordiv),  # Python's rounds down by itself
            (decompositions, "one_layer_lstm", _with_states_of_two_dimensions),
        ):
            if (before := getattr(module, name, None)) is not None:
                undo.callback(setattr, module, name, before)
                setattr(module, name, repaired(before))
        yield


@contextlib.contextmanager
def masks_as_given(model: nn.Module) -> Iterator[None]:
    """Let the transformers of a model use the masks that they are given, and not ask whether they are causal.

    `nn.TransformerEncoder` and `nn.TransformerDecoder` compare the values of a mask with those of a causal
    one, and no export can hold the answer. To PyTorch's own layers it is a hint: without it they use the mask
    itself, for the same results from finite numbers (`torch.nn.modules.transformer`, 2.10 to 2.14). Where a
    layer is another's, nothing changes, nor does it for hints of the caller's and in other threads. Enter it
    within `capturing`.
    """
    from torch.nn.modules import transformer

    module: Any = transformer
    detect = getattr(module, "_detect_is_causal_mask", None)
    if detect is None or not _has_own_layers(model):
        yield
        return
    owner = threading.get_ident()

    def told(mask: Tensor | None = None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if threading.get_ident() != owner:
            return bool(detect(mask, is_causal, size))
        return is_causal is True

    module._detect_is_causal_mask = told
    try:
        yield
    finally:
        module._detect_is_causal_mask = detect


@contextlib.contextmanager
def averages_of_all_batches(model: nn.Module) -> Iterator[None]:
    """Let batch norms of a model that average over all batches, `momentum=None`, divide by a tensor.

    In training they make a number of the count, 1 / n for the momentum, and no export can hold that. Here the
    statistics of the batch are those that momentum 1 leaves of zeros, and move the averages by 1 / n: the
    same numbers. Those of other batch norms and of other threads stay, and where the model has none of these,
    PyTorch does, which Dynamo could not trace so. Enter it within `capturing`.
    """
    if not any(isinstance(each, _BatchNorm) and _averages(each) for each in model.modules()):
        yield
        return
    owner = threading.get_ident()
    with contextlib.ExitStack() as undo:
        for kind in (_BatchNorm, nn.SyncBatchNorm):
            undo.callback(setattr, kind, "forward", kind.forward)
            kind.forward = _with_a_count(kind.forward, owner)  # type: ignore[method-assign]
        yield


def _with_a_count(forward: Callable[..., Tensor], owner: int) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def counting(self: Any, input: Tensor) -> Tensor:
        if not _averages(self) or threading.get_ident() != owner or _may_be_synchronized(self):
            return forward(self, input)
        self._check_input_dim(input)
        count = self.num_batches_tracked.add_(1)
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        result = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        share = count.to(torch.float64 if mean.dtype is torch.float64 else torch.float32).reciprocal()
        self.running_mean.mul_(1 - share).add_(mean * share)
        self.running_var.mul_(1 - share).add_(variance * share)
        return result

    return counting


def _averages(norm: _BatchNorm) -> bool:
    """Whether a batch norm moves its statistics by the number of batches that it has seen."""
    moves = norm.training and norm.track_running_stats and norm.momentum is None
    return moves and norm.num_batches_tracked is not None


def _may_be_synchronized(norm: nn.Module) -> bool:
    """Whether a batch norm may take the statistics of several processes' batches."""
    distributed = torch.distributed
    is_shared = isinstance(norm, nn.SyncBatchNorm) and distributed.is_available()
    return is_shared and distributed.is_initialized()


def _has_own_layers(model: nn.Module) -> bool:
    """Whether a model has transformers, all of PyTorch's own layers."""
    stacks = [m for m in model.modules() if isinstance(m, (nn.TransformerEncoder, nn.TransformerDecoder))]
    layers: list[nn.Module] = [layer for stack in stacks for layer in stack.layers]
    attentions = [m for layer in layers for m in layer.children() if isinstance(m, nn.MultiheadAttention)]
    own = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention
    parts = [*layers, *attentions]
    return bool(layers) and all(type(m) in own and not _OVERRIDDEN & vars(m).keys() for m in parts)


_OVERRIDDEN = {"forward", "_sa_block", "_mha_block"}
"""What an instance may have of its own in the place of its class's."""


def _with_states_of_two_dimensions(layer: Callable[..., Any]) -> Callable[..., Any]:
    """One layer of an LSTM, whose states are [batch, channels]."""

    def one_layer_lstm(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        result, states = layer(*args, **kwargs)
        hidden, cell = (state.squeeze(0) if state.dim() == 3 else state for state in states)
        return result, (hidden, cell)

    return one_layer_lstm
