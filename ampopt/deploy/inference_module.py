"""`InferenceModule`: an `nn.Module` whose weights can be read and saved, and which refuses changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from ampopt.errors import InputError
from ampopt.ir.lane_io import original_of
from ampopt.ir.model_copy import same_tensor
from ampopt.ir.normal_form import true_copy
from ampopt.system.wording import argument

Self = TypeVar("Self", bound="InferenceModule")
Value = TypeVar("Value")

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


def copy_hooks(source: nn.Module, target: nn.Module) -> None:
    """Let the hooks on calls of a module be those of another one, too."""
    for hooks in _HOOKS:
        getattr(target, hooks).update(getattr(source, hooks))


class InferenceModule(nn.Module):
    """A module for inference. Its programs have copies of the weights folded into them.

    So its parameters, buffers and `state_dict()` are copies of those of the private original, to be read or
    saved: what is written to them changes no answer. What else would change the original is refused.
    """

    _is_complete = False
    """Whether it is made: from then on it refuses attributes that would be the original's."""

    def __init__(self) -> None:
        super().__init__()
        super().train(False)

    def _private_original(self) -> nn.Module:
        """The private copy of the model."""
        raise NotImplementedError

    @property
    def _named(self) -> nn.Module:
        """The private copy of the model, in which everything has the name that the user gave."""
        return original_of(self._private_original())

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which says where the original's attributes are."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"{error}: of its original an optimized module has the call, and copies of the weights; "
                "read, trace, script or export the original (save and export_onnx write this one)"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises InputError for what no program would heed: modules, weights, attributes of the original."""
        is_own = not self._is_complete or name in vars(self) or hasattr(type(self), name)
        if not is_own and (isinstance(value, nn.Module | nn.Parameter) or hasattr(self._named, name)):
            self._refuse_part(name)
        super().__setattr__(name, value)

    def _refuse_part(self, name: str, *_: object, **__: object) -> NoReturn:
        raise InputError(
            f"an optimized module cannot take another {name!r}, which its programs would not heed: set it in "
            "the original, and optimize that again"
        )

    add_module = register_module = register_parameter = register_buffer = _refuse_part

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by `torch.jit.script`; raises InputError."""
        raise InputError(
            "torch.jit.script cannot script an optimized module, whose programs are no Python code: script "
            "the original"
        )

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

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to(...)`, `.half()` and the like: nothing where they keep every weight, else InputError."""
        weights = itertools.chain(self.parameters(recurse), self.buffers(recurse))
        if all(fn(weight) is weight for weight in weights):
            return self
        raise InputError(
            "an optimized module keeps its device and its dtypes: optimize the original again, "
            f"with {argument('device=')} for another device, {argument('precision=')} for other dtypes"
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Copies of the original's parameters, one at a time."""
        return _copies(self._named.named_parameters(prefix, recurse, remove_duplicate))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Copies of the original's buffers as they were when it was optimized, one at a time."""
        return _copies(self._named.named_buffers(prefix, recurse, remove_duplicate))

    def get_submodule(self, target: str) -> nn.Module:
        """Itself for an empty name. Raises AttributeError for others."""
        if not target:
            return self
        raise AttributeError(
            f"an optimized module has no submodule {target!r}: its programs stand for them; trace, export or "
            "call the original with other weights"
        )

    def get_parameter(self, target: str) -> nn.Parameter:
        """A copy of the original's parameter of this name. Raises AttributeError if there is none."""
        return true_copy(self._named.get_parameter(target))  # type: ignore[return-value]

    def get_buffer(self, target: str) -> Tensor:
        """A copy of the original's buffer of this name. Raises AttributeError if there is none."""
        return true_copy(self._named.get_buffer(target))

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """A copy of the original's state when it was optimized: `torch.nn.Module.state_dict`."""
        state: Any = self._named.state_dict(prefix=prefix, keep_vars=True)
        for name, value in _copies(state.items()):
            state[name] = value.detach() if isinstance(value, Tensor) and not keep_vars else value
        if destination is None:
            return state  # type: ignore[no-any-return]
        destination.update(state)
        getattr(destination, "_metadata", {}).update(state._metadata)
        return destination  # type: ignore[no-any-return]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        _data: Any,
        _strict: bool,
        missing: list[str],
        *_: Any,
    ) -> None:
        """A part of `load_state_dict`, also of a module that holds this one. Raises InputError for other
        weights than those that it has."""
        own = self._named.state_dict(prefix=prefix)
        given = {name: value for name, value in state_dict.items() if name.startswith(prefix)}
        if not all(name in own and _is_same(own[name], value) for name, value in given.items()):
            raise InputError(
                "an optimized module cannot take other weights, which are folded into its programs: load "
                "them into the original, and optimize it again"
            )
        missing += [name for name in own if name not in given]


def _copies(named: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """Named values, tensors as copies that are made one by one; what comes again is the same copy again."""
    made: dict[int, Any] = {}
    for name, value in named:
        if id(value) not in made:
            made[id(value)] = true_copy(value) if isinstance(value, Tensor) else value
        yield name, made[id(value)]


def _is_same(a: object, b: object) -> bool:
    return same_tensor(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
