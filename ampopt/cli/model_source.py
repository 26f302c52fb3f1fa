"""Loads the command line's MODEL: from a model zoo, a factory in Python code, or a saved model file."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ampopt.bundle.file_kinds import EXPORTED, SAFETENSORS, STATE, TORCHSCRIPT, Kind, kind_of_file
from ampopt.cli.weights import check_weights, load_weights
from ampopt.errors import InputError, near, need, require
from ampopt.system.plain_files import open_named

if TYPE_CHECKING:
    from torch import nn

MODEL_FILES = (".pt2", ".pt", ".ts")
ZOOS = {"torchvision": "vision", "timm": "timm"}
"""Model zoos, and the extras that install them."""

MOST_CODE_BYTES = 1 << 24
FORMS = "torchvision:NAME, timm:NAME, package.module:factory, file.py:factory, FILE.pt2, FILE.pt or FILE.ts"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model, and the example call stored in its file, if there is one."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def is_model_file(source: str) -> bool:
    """Whether a MODEL names a saved model file, which may contain code; else a factory or a zoo entry."""
    return Path(source).suffix in MODEL_FILES


def check_model(source: str, *, trust_file: bool = False, weights: Path | None = None) -> None:
    """Raise the errors of `load_model` that can be detected before PyTorch is imported."""
    if is_model_file(source):
        _check_file(Path(source), trust_file)
    else:
        _check_code(source)
    if weights is not None:
        check_weights(weights)


def load_model(
    source: str, *, trust_file: bool = False, weights: Path | None = None, train: bool = False
) -> Loaded:
    """The model that a MODEL argument names.

    A newly built model has random weights from a fixed seed, unless `weights` are loaded. It is in evaluation
    mode; with `train` in training mode, and what its factory has frozen in a model in that mode stays so.
    Raises InputError if it cannot be built or loaded, MissingExtraError if the zoo is not installed.
    """
    check_model(source, trust_file=trust_file, weights=weights)
    import torch

    weights = weights and weights.absolute()  # the model's code may change the current folder
    if is_model_file(source):
        loaded = _load_file(Path(source), trust_file)
    else:
        # Not `torch.manual_seed`, which would seed every accelerator, too.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            loaded = Loaded(_build(source))
        if not (train and loaded.model.training):
            loaded.model.train(train)
    if weights is not None:
        load_weights(loaded.model, weights)
    return loaded


def anchored(source: str) -> str:
    """The same function of a file or a module, whatever becomes of the current folder."""
    where, _, name = source.rpartition(":")
    if Path(where).suffix == ".py":
        return f"{Path(where).absolute()}:{name}"
    _can_import_from(Path.cwd())
    return source


def check_function(source: str, option: str) -> None:
    """Raise the errors of `load_function` that can be detected before its code is run."""
    where, _, name = source.rpartition(":")
    if not where or not name or where in ZOOS:
        raise InputError(f"{option} {source}: name a file and a function in it, as in train.py:my_step")
    _check_code(source, option)


def load_function(source: str, option: str) -> Callable[..., Any]:
    """The function that an option names, as `train.py:my_step`. Raises InputError if there is none.

    A module is found in the folder in which `anchored` was called.
    """
    where, _, name = source.rpartition(":")
    found = getattr(_import(where), name, None)
    if not callable(found):
        raise InputError(f"{option} {source}: {where} has no function {name!r}")
    function: Callable[..., Any] = found
    return function


def _check_code(source: str, option: str = "MODEL") -> None:
    """That an option names a zoo that is installed, a file that can be parsed, or a package that is there."""
    where, _, name = source.rpartition(":")
    if not where or not name:
        path = Path(source)
        if path.suffix == ".py":
            raise InputError(f"MODEL {source!r}: add what makes the model, as in {source}:make_net")
        if not os.path.exists(path):
            raise InputError(f"MODEL {source!r} is none of: {FORMS}")
        raise _no_model(path, kind_of_file(path, "MODEL"))
    if where in ZOOS:
        require(where, ZOOS[where])
    elif Path(where).suffix == ".py":
        with open_named(Path(where), option, MOST_CODE_BYTES) as file:
            code = file.read()
        try:
            ast.parse(code, where)
        except (SyntaxError, ValueError) as e:
            raise InputError(f"{where} cannot be imported: {type(e).__name__}: {e}") from e
    else:
        root = where.partition(".")[0]
        beside = os.path.isdir(root) or os.path.isfile(f"{root}.py")
        if not root or not (beside or root in sys.modules or importlib.util.find_spec(root)):
            raise InputError(f"{where} cannot be imported: No module named {root!r}")


def _no_model(path: Path, kind: Kind) -> InputError:
    """Why a file is no MODEL, and what to do with it."""
    if kind in (STATE, SAFETENSORS):
        what = f"name the model's code and add its weights: file.py:make_net --weights {path}"
    elif kind.name == "pickled":
        what = (
            "only its own code can read it, and reading it executes what is in it. With that code: "
            "torch.save(model.state_dict(), 'weights.pt'), then file.py:make_net --weights weights.pt"
        )
    elif kind in (EXPORTED, TORCHSCRIPT):
        what = f"rename it, so that it ends in {'.pt2' if kind is EXPORTED else '.ts'}"
    else:
        what = f"MODEL is one of {FORMS}"
    return InputError(f"{path} is {kind.words}: {what}")


def _build(source: str) -> nn.Module:
    where, _, name = source.rpartition(":")
    if where == "torchvision":
        return _torchvision(name)
    if where == "timm":
        return _timm(name)
    if Path(where).suffix != ".py":
        _can_import_from(Path.cwd())
    return _call_factory(_import(where, anew=True), name, source)


def _unknown(zoo: str, name: str, names: Sequence[str]) -> InputError:
    lists = {"torchvision": "torchvision.models", "timm": "timm"}[zoo]
    more = near([name], names) or f": {lists}.list_models() gives the names of all"
    return InputError(f"{zoo} has no model {name!r}{more}")


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


def _can_import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import(where: str, *, anew: bool = False) -> ModuleType:
    """A module by its name or its file; like `python`, a file can import what lies beside it, also later on.

    A file that was imported is not run again, for its classes would be others; `anew`: it is.
    """
    is_file, place = Path(where).suffix == ".py", Path(where).resolve()
    try:
        if not is_file:
            return importlib.import_module(where)
        _can_import_from(place.parent)
        return (None if anew else _known(place)) or _run_file(place)
    except SystemExit as e:
        raise InputError(
            f"{where} ends Python when it is imported (exit status {e.code}), as a script does that reads "
            'its arguments: put that under  if __name__ == "__main__":'
        ) from e
    except Exception as e:
        raise InputError(f"{where} cannot be imported: {type(e).__name__}: {e}") from e


def _known(place: Path) -> ModuleType | None:
    """The module that a file has made, by whatever name it was imported."""
    return next((module for module in [*sys.modules.values()] if _file_of(module) == str(place)), None)


def _file_of(module: ModuleType) -> str | None:
    name, file = getattr(module, "__name__", "__main__"), getattr(module, "__file__", None)
    return os.path.realpath(file) if isinstance(file, str) and name != "__main__" else None


def _run_file(place: Path) -> ModuleType:
    """The module of a file, which other files of the user's can import, by its own name, while it runs.

    Where that ends in a circle of imports, they run it anew by this name, and the module is theirs.
    """
    own = place.stem if _would_import(place.stem, place) else None
    try:
        return _run_as(own, place)
    except (ImportError, AttributeError):
        if own is None:
            raise
    module = _run_as(None, place)
    return sys.modules.get(own, module)


def _run_as(own: str | None, place: Path) -> ModuleType:
    # A name of its own, so that model files called torch.py or test.py hide nothing.
    name = f"ampopt_model_{place.stem}"
    while name in sys.modules and _file_of(sys.modules[name]) != str(place):
        name += "_"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    names = [name, *([own] if own is not None else [])]
    sys.modules.update(dict.fromkeys(names, module))  # copying, pickling, scripting look its classes up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for each in names:
            sys.modules.pop(each, None)
        raise
    return module


def _would_import(name: str, place: Path) -> bool:
    """Whether other files of the user's get this file by its name."""
    if name in sys.modules:
        return _file_of(sys.modules[name]) == str(place)
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    return found is not None and found.origin is not None and Path(found.origin).resolve() == place


def _call_factory(module: ModuleType, name: str, source: str) -> nn.Module:
    """The module that a factory returns; a class is called likewise, a ready module is taken as it is."""
    from torch import nn

    if not hasattr(module, name):
        raise InputError(f"{source.rpartition(':')[0]} has no {name!r}")
    factory = getattr(module, name)
    if isinstance(factory, nn.Module):
        return factory
    try:
        model = factory()
    except (Exception, SystemExit) as e:
        raise InputError(f"{source} fails when called without arguments: {type(e).__name__}: {e}") from e
    if not isinstance(model, nn.Module):
        raise InputError(f"{source} returns {type(model).__name__}, not a torch.nn.Module")
    return model


def _check_file(path: Path, trusted: bool) -> Kind:
    kind = kind_of_file(path, "MODEL")
    if kind not in (EXPORTED, TORCHSCRIPT):
        raise _no_model(path, kind)
    if not trusted:
        why = "torch.export.load unpickles it" if kind is EXPORTED else "TorchScript is a program"
        raise InputError(
            f"loading {path} can execute code that is in it ({why}): if you trust its origin, add "
            "--trust-model-file"
        )
    return kind


def _load_file(path: Path, trusted: bool) -> Loaded:
    import torch

    kind = _check_file(path, trusted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.jit.load calls itself deprecated
            if kind is EXPORTED:
                program = torch.export.load(path)
                args, kwargs = program.example_inputs or ((), {})
                return Loaded(program.module(), tuple(args), kwargs)
            return Loaded(torch.jit.load(path, map_location=None if torch.cuda.is_available() else "cpu"))
    except Exception as e:
        raise InputError(f"{path} is {kind.words} and cannot be loaded: {e}") from e
