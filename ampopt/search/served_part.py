"""`ServedPart`: an optimized submodule in the place of its code, as long as its model leaves it as it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.ir.plain_tensors import keep_from_dynamo

_PLAIN = (bool, int, float, complex, str, type(None))
"""Classes of attributes that code decides by, and whose values are compared."""


class ServedPart:
    """Calls an optimized submodule, or its own code where the program of the first does not hold.

    A program has weights, buffers and plain attributes for constants. Two calls in which they stayed tell
    that the submodule itself leaves them; the code around it may still write to them, after a bright frame,
    or at night. So each call looks whether they are the same tensors, which nobody has written to (by
    `_version`, which does not see what is written through `.data`), and the same values. It does so after
    the program was launched, which a GPU then works on; where it has found a change, before the next one.
    """

    def __init__(self, module: nn.Module, optimized: OptimizedModule) -> None:
        """`module`: the submodule of the model that is served, whose own code answers otherwise."""
        self._optimized, self._own, self._has_changed = optimized, module.forward, False
        self._tensors: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self._values: list[tuple[dict[str, Any], Callable[[Mapping[str, Any]], object], object]] = []
        for inner in module.modules():
            for named in (inner._parameters, inner._buffers):
                self._tensors += [
                    (named, name, tensor, -1 if tensor.is_inference() else tensor._version)
                    for name, tensor in named.items()
                    if tensor is not None
                ]
            own = vars(inner)
            if names := [name for name, value in own.items() if type(value) in _PLAIN]:
                taken = operator.itemgetter(*names)  # in C: a backbone has 2,000 of them
                self._values.append((own, taken, taken(own)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The submodule's result. Raises StrictError where its own code would have to run, with `strict`."""
        if not self._has_changed:
            result = self._optimized(*args, **kwargs)
            if self._is_as_it_was():
                return result
        elif self._is_as_it_was():
            self._has_changed = False
            return self._optimized(*args, **kwargs)
        self._has_changed = True
        self._optimized.pass_on("the model has written to this part of it", args, kwargs)
        return self._own(*args, **kwargs)

    def _is_as_it_was(self) -> bool:
        for named, name, tensor, version in self._tensors:
            if named.get(name) is not tensor or (version >= 0 and tensor._version != version):
                return False
        try:
            return all(taken(own) == values for own, taken, values in self._values)
        except KeyError:  # an attribute is gone
            return False


keep_from_dynamo(ServedPart.__call__)
