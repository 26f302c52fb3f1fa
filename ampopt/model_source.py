"""Where the command line's MODEL comes from: a model zoo, a factory in Python code, or a saved model file."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ampopt.errors import InputError, need

MODEL_FILES = (".pt2", ".pt", ".ts")
FORMS = "torchvision:NAME, timm:NAME, package.module:factory, file.py:factory, FILE.pt2, FILE.pt or FILE.ts"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model, and the call that it was exported with where its file holds one."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def is_model_file(source: str) -> bool:
    """Whether a MODEL names a saved model, which may hold code, rather than Python code or a zoo's entry."""
    return Path(source).suffix in MODEL_FILES


def load_model(source: str, *, trust_file: bool = False, weights: Path | None = None) -> Loaded:
    """The model that a MODEL argument names.

    A model that is built has random weights from a fixed seed, until `weights` are loaded into it.
    Raises InputError where it cannot be made or loaded, MissingExtraError where the zoo is not installed.
    """
    if is_model_file(source):
        loaded = _load_file(Path(source), trust_file)
    else:
        # Not `torch.manual_seed`, which would seed every accelerator, too.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            loaded = Loaded(_build(source))
    if weights is not None:
        load_weights(loaded.model, weights)
    return loaded


def _build(source: str) -> nn.Module:
    where, _, name = source.rpartition(":")
    if not where or not name:
        raise InputError(f"MODEL {source!r} is none of: {FORMS}")
    if where == "torchvision":
        return _torchvision(name)
    if where == "timm":
        return _timm(name)
    return _call_factory(_import(where), name, source)


def _unknown(zoo: str, name: str, names: Sequence[str]) -> InputError:
    near = difflib.get_close_matches(name, names)
    return InputError(f"{zoo} has no model {name!r}" + (f"; near it are {', '.join(near)}" if near else ""))


def _torchvision(name: str) -> nn.Module:
    models = need("torchvision", "vision").models
    if name not in models.list_models():
        raise _unknown("torchvision", name, models.list_models())
    builder = models.get_model_builder(name)
    # By default a backbone's weights are downloaded although the model's are not.
    parts = {"weights", "weights_backbone"} & inspect.signature(builder).parameters.keys()
    model: nn.Module = builder(**dict.fromkeys(parts))
    return model


def _timm(name: str) -> nn.Module:
    timm = need("timm", "timm")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    model: nn.Module = timm.create_model(name, pretrained=False)
    return model


def _import(where: str) -> ModuleType:
    """A module by its name or its file; like `python`, it can import what lies beside it, also later on."""
    path = Path(where)
    is_file = path.suffix == ".py"
    beside = str(path.resolve().parent if is_file else Path.cwd())
    if beside not in sys.path:
        sys.path.insert(0, beside)
    try:
        return _run_file(path) if is_file else importlib.import_module(where)
    except Exception as e:
        raise InputError(f"{where} cannot be imported: {type(e).__name__}: {e}") from e


def _run_file(path: Path) -> ModuleType:
    # A name of its own, so that model files called torch.py or test.py hide nothing.
    spec = importlib.util.spec_from_file_location(f"ampopt_model_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # copying, pickling and scripting a model look its class up there
    spec.loader.exec_module(module)
    return module


def _call_factory(module: ModuleType, name: str, source: str) -> nn.Module:
    """The module that a factory returns; a class is called likewise, a ready module is taken as it is."""
    if not hasattr(module, name):
        raise InputError(f"{source.rpartition(':')[0]} has no {name!r}")
    factory = getattr(module, name)
    if isinstance(factory, nn.Module):
        return factory
    try:
        model = factory()
    except Exception as e:
        raise InputError(f"{source} fails when called without arguments: {type(e).__name__}: {e}") from e
    if not isinstance(model, nn.Module):
        raise InputError(f"{source} returns {type(model).__name__}, not a torch.nn.Module")
    return model


def _load_file(path: Path, trusted: bool) -> Loaded:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    exported = path.suffix == ".pt2"
    if not trusted:
        why = "torch.export.load unpickles it" if exported else "TorchScript is a program"
        raise InputError(
            f"loading {path} can execute code that is in it ({why}): if you trust its origin, add "
            "--trust-model-file; if it holds weights only, name the model's code and pass it as --weights"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.jit.load calls itself deprecated
            if exported:
                program = torch.export.load(path)
                args, kwargs = program.example_inputs or ((), {})
                return Loaded(program.module(), tuple(args), kwargs)
            return Loaded(torch.jit.load(path, map_location=None if torch.cuda.is_available() else "cpu"))
    except Exception as e:
        kind = "a program of torch.export" if exported else "TorchScript"
        raise InputError(f"{path} cannot be loaded as {kind}: {e}") from e


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state dict into a model, strictly; a checkpoint may hold it under 'state_dict' or 'model'.

    Nothing in the file is executed. Raises InputError where the file or its keys do not fit.
    """
    state = _read_state(path)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as e:  # tensors of other shapes; PyTorch names them
        raise InputError(f"the weights in {path} do not fit the model: {e}") from e
    if problems := _named("missing", missing) + _named("unexpected", unexpected):
        raise InputError(f"the weights in {path} do not fit the model: {'; '.join(problems)}")


def _read_state(path: Path) -> Mapping[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        reason = "it is no file of weights only" if "weights_only" in str(e) else str(e)
        raise InputError(f"the weights in {path} cannot be read: {reason}") from e
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} holds no state dict, a mapping from names to tensors")
    return state


def _named(kind: str, names: Sequence[str]) -> list[str]:
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return [f"{len(names)} keys are {kind} ({shown})"] if names else []
