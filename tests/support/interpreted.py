"""Cases of Triton kernels in its interpreter, which has to be switched on before Triton is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

Found = dict[str, float | str]
"""By case: the error as a share of the limit, or an exception's text."""

ANY = "any case"
"""What became of the drawn cases, where one of them is wrong."""


class HasError(Protocol):
    """A case, which computes its own error."""

    def error(self) -> float:
        """The error as a share of the limit."""


Kernel = tuple[Mapping[str, HasError], Callable[[], None]]
"""Cases of a kernel, and a function that draws others and fails where one is wrong."""


def print_all(kernels: Mapping[str, Kernel]) -> None:
    """Print what becomes of all cases, by kernel, as JSON."""
    torch.set_num_threads(1)
    read_numbers_of_one_element()
    print(json.dumps({name: _found(*kernel) for name, kernel in kernels.items()}))


def _found(cases: Mapping[str, HasError], drawn: Callable[[], None]) -> Found:
    found: Found = {}
    for name, case in cases.items():
        try:
            found[name] = case.error()
        except Exception as error:
            found[name] = repr(error)
    try:
        drawn()
    except BaseException as error:
        found[ANY] = "\n".join([repr(error), *getattr(error, "__notes__", [])])
    return found


def read_numbers_of_one_element() -> None:
    """Let Triton's interpreter read a scalar, an array of one element, as NumPy 2.4 has it.

    Triton 3.6, which comes with PyTorch 2.10, passes the array itself to `int`, and NumPy refuses it.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def interpreted(module: str) -> dict[str, Found]:
    """By kernel, what a module prints in a process of its own; skips the test where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment, root = {**os.environ, "TRITON_INTERPRET": "1"}, Path(__file__).parents[2]
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Found] = json.loads(done.stdout.splitlines()[-1])
    return result
