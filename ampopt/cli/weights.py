"""Loads the weights of `--weights` into a model: a state dict, by itself or in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ampopt.bundle.file_kinds import SAFETENSORS, STATE, Kind, kind_of_file
from ampopt.errors import InputError
from ampopt.system.plain_files import open_named

if TYPE_CHECKING:
    from torch import Tensor, nn

STATES = ("state_dict", "model_state_dict", "model")
"""Keys of a checkpoint under which its state dict may be, or a checkpoint that has it."""

MOST_NESTED = 8
"""Checkpoints within checkpoints that are opened: a file may hold a mapping that holds itself."""

WRAPPERS = {"module.": "DataParallel", "_orig_mod.": "torch.compile"}
"""What wrappers of PyTorch put before the name of every weight."""

SAVING = "torch.save(model.state_dict(), 'weights.pt') writes one"


def check_weights(path: Path) -> Kind:
    """The kind of a file of weights. Raises InputError for any other; PyTorch is not imported."""
    kind = kind_of_file(path, "--weights")
    if kind.name == "pickled":
        raise InputError(
            f"--weights {path} is {kind.words}, and reading it would execute what is in it: where its code "
            "is, torch.save(model.state_dict(), 'weights.pt') writes weights only"
        )
    if kind not in (STATE, SAFETENSORS):
        raise InputError(f"--weights {path} is {kind.words}: give a state dict, as torch.save writes it")
    return kind


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict into a model, strictly; a checkpoint may hold it under one of `STATES`.

    Nothing in the file is executed. The prefix that a wrapper gave all names is removed, with a note on
    stderr, unless the model's own names have it. Raises InputError if the file or its keys do not fit.
    """
    state = _read_state(path)
    _unwrap(state, model)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as e:  # tensors of other shapes; PyTorch names them
        raise InputError(f"the weights in {path} do not fit the model: {e}") from e
    if problems := _named("missing", missing) + _named("unexpected", unexpected):
        raise InputError(f"the weights in {path} do not fit the model: {'; '.join(problems)}")


def _read_state(path: Path) -> dict[str, Tensor]:
    kind = check_weights(path)
    import torch
    from safetensors.torch import load_file

    try:
        if kind is SAFETENSORS:
            found: Any = load_file(path)
        else:
            with open_named(path, "--weights") as file:
                found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as e:
        reason = "it is no file of weights only" if "weights_only" in str(e) else str(e)
        raise InputError(f"the weights in {path} cannot be read: {reason}") from e
    return _state_in(found, path)


def _state_in(found: Any, path: Path) -> dict[str, Tensor]:
    """The state dict of a file's content. Raises InputError where there is none, or more than one."""
    import torch

    for _ in range(MOST_NESTED):
        inner = [found[key] for key in STATES if isinstance(found, dict) and key in found]
        found = next((each for each in inner if isinstance(each, dict)), found)
    if not isinstance(found, dict):
        raise _no_state(path, "is no mapping")
    others = [k for k, v in found.items() if not (isinstance(k, str) and isinstance(v, torch.Tensor))]
    if others and len(others) == len(found):
        raise _no_state(path, f"has the keys {', '.join(map(repr, others[:8]))}")
    if others:
        told = ", ".join(f"{key!r} ({type(found[key]).__name__})" for key in others[:5])
        more = ", …" if len(others) > 5 else ""
        raise InputError(
            f"{path} holds no state dict alone: beside {len(found) - len(others)} tensors by name it has "
            f"{told}{more}; {SAVING}"
        )
    return found


def _no_state(path: Path, held: str) -> InputError:
    return InputError(
        f"{path} holds no state dict, a mapping from names to tensors, by itself or under "
        f"{', '.join(map(repr, STATES))}: it {held}; {SAVING}"
    )


def _unwrap(state: dict[str, Tensor], model: nn.Module) -> None:
    """Remove the prefixes of wrappers that the model is not in from all names of the state."""
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

    expected = model.state_dict()
    for _ in WRAPPERS:
        for prefix, wrapper in WRAPPERS.items():
            is_model_in_it = all(name.startswith(prefix) for name in expected)
            if state and not is_model_in_it and all(name.startswith(prefix) for name in state):
                typer.echo(f"note: the weights' names are without the {prefix!r} of {wrapper}", err=True)
                consume_prefix_in_state_dict_if_present(state, prefix)  # also in the versions of its modules


def _named(kind: str, names: Sequence[str]) -> list[str]:
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return [f"{len(names)} keys are {kind} ({shown})"] if names else []
