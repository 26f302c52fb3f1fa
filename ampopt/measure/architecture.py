"""What two models of one class must share so that their times can be compared: not the values of weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

DIGITS = 16
"""Of the hash: two models that differ share them once in 2⁶⁴ pairs."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The numbers of parameters and modules, and a hash of all names, classes and shapes.

    Weights may be trained further between two runs, and versions of PyTorch capture different graphs: neither
    is in it.
    """

    parameters: int
    modules: int
    hash: str

    @classmethod
    def read(cls, data: object) -> Architecture | None:
        """From JSON data; None if it is something else."""
        if not isinstance(data, Mapping) or set(data) != {each.name for each in dataclasses.fields(cls)}:
            return None
        counts = data["parameters"], data["modules"]
        if not all(type(count) is int for count in counts) or not isinstance(data["hash"], str):
            return None
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.parameters} parameters in {self.modules} modules"


def architecture_of(model: nn.Module) -> Architecture:
    """The architecture of a model without training wrappers, whose weights all have shapes."""
    digest = hashlib.sha256("\n".join(_lines(model)).encode()).hexdigest()
    count = sum(weight.numel() for weight in model.parameters())
    return Architecture(count, sum(1 for _ in model.modules()), digest[:DIGITS])


def _lines(model: nn.Module) -> Iterator[str]:
    """The class of each module, and the shape of each parameter and buffer, by name."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield f"{name} {_class_of(module)}"
    for name, weight in model.named_parameters(remove_duplicate=False):
        yield f"{name} {list(weight.shape)}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"{name} {list(buffer.shape)}"


def _class_of(module: nn.Module) -> str:
    from torch.jit import ScriptModule

    return str(module.original_name) if isinstance(module, ScriptModule) else type(module).__name__
