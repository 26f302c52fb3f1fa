"""A model that takes and gives floating-point tensors in one dtype in place of its own (`io="lane"`).

No graph holds its conversions: `capture` captures the model inside, and writes them down as the program's
borders, where a lane that computes in the dtype has nothing to convert. What calls the original (references,
unseen calls, a bundle's self-test) calls it through this module, so that all of them see the same tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.errors import InputError
from ampopt.ir.keywords import in_order, taken_by_name
from ampopt.ir.signature import flatten_call, flatten_outputs, map_tensors
from ampopt.system.wording import argument

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that are converted: complex numbers, integers and quantized ones are not."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


class LaneIO(nn.Module):
    """A model whose floating-point inputs and outputs have one `dtype` in place of its own.

    `own` holds the dtype that the model itself takes at each leaf of its example call (None: not a
    floating-point tensor). In a call of another structure, tensors are converted to the widest of them. A
    tensor of another dtype than `dtype` is given to the model as it is. Buffers and submodules are found
    under the names that they have in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        spec: pytree.TreeSpec,
        own: Sequence[torch.dtype | None],
    ) -> None:
        super().__init__()
        self.model, self.dtype, self.spec, self.own = model, dtype, spec, tuple(own)
        known = [each for each in self.own if each is not None]
        self._widest = functools.reduce(torch.promote_types, known) if known else None
        self._by_name = taken_by_name(model)
        self.training = bool(getattr(model, "training", False))

    @classmethod
    def of_call(
        cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
    ) -> LaneIO:
        """Around a model that takes the dtypes of this call."""
        leaves, spec = flatten_call(args, in_order(kwargs, taken_by_name(model)))
        return cls(model, dtype, spec, [leaf.dtype if _is_floating(leaf) else None for leaf in leaves])

    def around(self, model: nn.Module) -> LaneIO:
        """The same around a copy of the model."""
        return LaneIO(model, self.dtype, self.spec, self.own)

    def get_submodule(self, target: str) -> nn.Module:
        """The model's own submodule of this name, so that every name is what it is without this module."""
        return self.model.get_submodule(target)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for tensors in `dtype`, in `dtype`."""
        entered, named = self.entered(args, kwargs)
        return self._left(self.model(*entered, **named))

    def entered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call with the tensors in `dtype` converted to the dtypes that the model itself takes."""
        leaves, spec = flatten_call(args, in_order(kwargs, self._by_name))
        own = self.own if spec == self.spec else (self._widest,) * len(leaves)
        made: dict[object, Tensor] = {}  # what is given twice stays one tensor

        def converted(leaf: Any, wanted: torch.dtype | None) -> Any:
            if wanted is None or not _has_dtype(leaf, self.dtype):
                return leaf
            key = id(leaf), wanted
            if key not in made:
                made[key] = leaf.to(wanted)
            return made[key]

        pairs = zip(leaves, own, strict=True)  # a tensor may come where the example had None
        entered = [converted(leaf, self._widest if wanted is None else wanted) for leaf, wanted in pairs]
        return pytree.tree_unflatten(entered, spec)  # type: ignore[no-any-return]

    def outside(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """A call of the model itself as a call of this module, with every floating-point tensor in `dtype`.

        Raises InputError for numbers that are beyond the range of `dtype`.
        """

        def lowered(leaf: Tensor) -> Tensor:
            if not _is_floating(leaf):
                return leaf
            low = leaf.to(self.dtype)
            if bool((torch.isfinite(leaf) & ~torch.isfinite(low)).any()):
                name = str(self.dtype).removeprefix("torch.")
                raise InputError(
                    f"{argument('io', 'lane')}: the example inputs reach {float(leaf.abs().max()):.4g}, "
                    f"which {name} cannot hold (its largest number is {torch.finfo(self.dtype).max:.4g}): "
                    f"scale them before the model, or leave {argument('io', 'original')}"
                )
            return low

        return map_tensors(lowered, args, kwargs)

    def border(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that an output of the model's `dtype` leaves in."""
        return self.dtype if dtype in FLOATING else dtype

    def _left(self, result: Any) -> Any:
        outputs, layout = flatten_outputs(result)
        if all(output.dtype is self.border(output.dtype) for output in outputs):
            return result
        return layout.restore([output.to(self.border(output.dtype)) for output in outputs])


def original_of(model: nn.Module) -> nn.Module:
    """The model itself, which takes and gives its own dtypes."""
    return model.model if isinstance(model, LaneIO) else model


def original_call(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model itself and a call of it, for a call of what may be a `LaneIO` around it."""
    if isinstance(model, LaneIO):
        return model.model, *model.entered(args, kwargs)
    return model, tuple(args), dict(kwargs)


def with_own_dtypes(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Call:
    """Example inputs that may have been given in a lane's `dtype`, in the dtype of the model's weights."""
    weights = (t.dtype for t in (*model.parameters(), *model.buffers()) if _is_floating(t))
    own = next(weights, dtype)

    def raised(leaf: Tensor) -> Tensor:
        return leaf.to(own) if _has_dtype(leaf, dtype) else leaf

    return map_tensors(raised, args, kwargs)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in FLOATING


def _has_dtype(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype is dtype
