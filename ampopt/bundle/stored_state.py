"""The state that a bundle's model keeps from call to call, as its manifest has it. No PyTorch.

The state is the last inputs of the model, and its new value the last outputs, in the same order. `state` in
the manifest pairs their names. The self-test's inputs of these names are the state before the first call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class StoredState:
    """The names of the inputs that take the state, and of the outputs that give the new one."""

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)


def write_state(inputs: Sequence[str], outputs: Sequence[str]) -> list[dict[str, str]]:
    """The manifest's `state`."""
    return [{"input": taken, "output": given} for taken, given in zip(inputs, outputs, strict=True)]


def read_state(manifest: Mapping[str, Any]) -> StoredState:
    """What `write_state` wrote into a manifest whose other fields are valid; nothing where it has no `state`.

    Raises ValueError with the reason for anything that it does not write.
    """
    if "state" not in manifest:
        return StoredState()
    data, inputs, outputs = manifest["state"], manifest["inputs"], manifest["outputs"]
    if "sizes" in manifest:
        raise ValueError("a model with a state is of fixed sizes, and there are both state and sizes")
    if not isinstance(data, list) or not 1 <= len(data) <= min(len(inputs), len(outputs)):
        raise ValueError("state is not a list of some of the inputs and outputs")
    for place, item in enumerate(data):
        if not isinstance(item, dict) or item.keys() != {"input", "output"}:
            raise ValueError(f"state[{place}] is not an object of input and output")
    pairs = zip(data, inputs[len(inputs) - len(data) :], outputs[len(outputs) - len(data) :], strict=True)
    for place, (item, taken, given) in enumerate(pairs):
        if (item["input"], item["output"]) != (taken["name"], given["name"]):
            raise ValueError(f"state[{place}] is not the pair of input {taken['name']!r} and its output")
        if (taken["shape"], taken["dtype"]) != (given["shape"], given["dtype"]):
            raise ValueError(
                f"state[{place}]: a call changes {taken['name']!r} from {taken['dtype']} {taken['shape']} to "
                f"{given['dtype']} {given['shape']}"
            )
    return StoredState(tuple(item["input"] for item in data), tuple(item["output"] for item in data))
