"""What an optimized module is as a `torch.nn.Module`: weights to be read, and nothing that changes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from ampopt.errors import InputError
from ampopt.ir.lane_io import original_of

Self = TypeVar("Self", bound="InferenceModule")


class InferenceModule(nn.Module):
    """A module for inference. Its programs have copies of the weights folded into them.

    So its parameters, buffers and `state_dict()` are those of the private copy of the original, to be read or
    saved, and what would change them is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        super().train(False)

    def _private_original(self) -> nn.Module:
        """The private copy of the model."""
        raise NotImplementedError

    def train(self: Self, mode: bool = True) -> Self:
        """Raises an error for training mode: the weights are folded and shared between programs."""
        if mode:
            raise InputError(
                "an optimized module cannot be trained: train the original and optimize it again"
            )
        return self

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Raises an error for derivatives, as `train` does."""
        return self.train(requires_grad)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise InputError(
            "an optimized module keeps its device and its dtypes: optimize the original again, "
            "with device= for another device, precision= for other dtypes"
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The original's parameters, to be read: programs do not see changes of them."""
        original = original_of(self._private_original())
        return original.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The original's buffers, to be read, as they were when it was optimized."""
        original = original_of(self._private_original())
        return original.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The original's state, as it was when it was optimized: `torch.nn.Module.state_dict`."""
        state: dict[str, Any] = original_of(self._private_original()).state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InputError: weights are folded into programs."""
        raise InputError(
            "an optimized module cannot take other weights, which are folded into its programs: load them "
            "into the original, and optimize it again"
        )
