"""A dispatch mode that leaves what a model compiles as it is: in it, what the code was made of runs."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from typing_extensions import Self


class EagerMode(TorchDispatchMode):
    """A mode in which PyTorch's compiler is asked for nothing.

    It compiles nothing in a dispatch mode anyway. But PyTorch 2.10 and 2.11 remember what they left: a
    function of the user's, `@torch.compile` above it, then was never compiled, and `torch.cond`, which
    compiles its own wrapper, raised an error from then on. PyTorch 2.14 raises one in the mode, if all of a
    function is to be compiled.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asked = list[bool]()

    def __enter__(self) -> Self:
        self._asked.append(_EAGER.begin())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self._asked.pop():
            _EAGER.end()


class _Eager:
    """The compiler's stance is the whole process's: the first of all modes sets it, the last puts it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modes = 0
        self._stance: Any = None

    def begin(self) -> bool:
        """Whether it was begun: within compiled code no stance may be set."""
        if get_eval_frame_callback():
            return False
        with self._lock:
            if self._modes == 0:
                self._stance = torch.compiler.set_stance("force_eager")
            self._modes += 1
        return True

    def end(self) -> None:
        """End what was begun."""
        with self._lock:
            self._modes -= 1
            if self._modes == 0:
                self._stance.__exit__(None, None, None)


_EAGER = _Eager()
