"""`ServedPart`: an optimized submodule in the place of its code, as long as its model leaves it as it was."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import PassedOnError
from ampopt.ir.plain_tensors import keep_from_dynamo
from ampopt.ir.signature import call_key, flatten_call, flatten_outputs, tensors_of
from ampopt.ir.watch import Watch
from ampopt.measure.entry import ORIGINAL

_OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""The submodule's own hooks: they run around what serves."""


class ServedPart:
    """Calls an optimized submodule, or its own code where the program of the first does not hold.

    A program has for constants whatever the submodule reaches. Two calls in which that stayed as it was tell
    that the submodule itself leaves it; the code around it may still write to it, after a bright frame, or at
    night. So each call looks for that, see `Watch`. It does so after the program was launched, which a GPU
    then works on; where it has found a change, before the next one. A call for which there is no program, of
    another size or with a flag, runs the submodule's own code, which may write to it, too.

    Results lie in memory as those of its own code do: the code around it may write to a view of an input.
    """

    def __init__(self, module: nn.Module, optimized: OptimizedModule) -> None:
        """`module`: the submodule of the model that is served, whose own code answers otherwise."""
        self._optimized, self._own, self._has_changed = optimized, module.forward, False
        self._module, self._layouts = module, optimized.layouts or {}
        self._watch: Watch | None = None
        self._weights = list[Tensor]()
        self._entrance = self.__call__

    def install(self) -> None:
        """Let it answer the submodule's calls."""
        self._module.forward = self._entrance

    def begin(self) -> None:
        """Look at what the submodule reaches: from now on it has to stay as it is."""
        self._weights = weights_of(self._module)
        own = [vars(self._module)[name] for name in _OWN_HOOKS]
        self._watch = Watch(
            self._module, lambda part: part is self._entrance or any(part is each for each in own)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The submodule's result. Raises StrictError where its own code would have to run, with `strict`."""
        if self._optimized.report.chosen == ORIGINAL:
            return self._own(*args, **kwargs)
        if self._watch is None:
            self.begin()
        assert self._watch is not None
        try:
            if not self._has_changed:
                result = self._optimized(*args, **kwargs)
                if self._watch.is_unchanged():
                    return self._laid_out(result, args, kwargs)
            elif self._watch.is_unchanged():
                self._has_changed = False
                return self._laid_out(self._optimized(*args, **kwargs), args, kwargs)
            self._has_changed = True
            self._optimized.pass_on("the model has written to this part of it", args, kwargs)
        except PassedOnError:
            pass
        return self._own(*args, **kwargs)

    def _laid_out(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A program's result, in the strides, and with the views, of the submodule's own code."""
        if not self._layouts:
            return result
        leaves, spec = flatten_call(args, kwargs)
        if (layout := self._layouts.get(call_key(leaves, spec))) is None:
            reason = "its results are views, or not contiguous, and its inputs have other strides"
            self._optimized.pass_on(reason, args, kwargs)
            raise PassedOnError(reason)
        outputs, whole = flatten_outputs(result)
        own = [outputs[place] for place in layout.own]
        return whole.restore(layout.laid_out(own, [*tensors_of(leaves), *self._weights]))


def weights_of(module: nn.Module) -> list[Tensor]:
    """The tensors besides its inputs of which the results of a module may be views."""
    return [*module.parameters(), *module.buffers()]


keep_from_dynamo(ServedPart.__call__)
