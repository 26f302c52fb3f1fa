"""Tuning results on disk: the passes that won for a model, found again by a hash of all that decides it.

What is found again is replayed and verified like anything else, so that a file can cost time, never a right
answer. Files are small, written in one step, and carry a checksum; one that is damaged is removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from ampopt.cache_folder import cache_folder
from ampopt.environment import environment
from ampopt.errors import BundleError
from ampopt.program import Program
from ampopt.recipe_file import read_recipe, write_recipe
from ampopt.transform import Pass

SCHEMA, MOST_FILES, MOST_BYTES = 1, 256, 1 << 20

KINDS = (".json", ".so", ".tmp")
"""Files in the cache's folder: recipes, our compiled libraries, and what killed processes left behind."""

LIBRARIES = ("triton", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")
"""Beside torch and its CUDA libraries, which the environment names."""

Recipes = Mapping[str, tuple[Pass, ...]]
"""For each lane the recipe of its best program."""


@dataclasses.dataclass(frozen=True)
class TuningCache:
    """The files of one folder, `<key>.json` each. Nothing here raises: a cache that fails is an empty one."""

    folder: Path

    def find(self, key: str) -> Recipes | None:
        """What was stored under a key; None where nothing was, or nothing that is sound."""
        file = self._file(key)
        try:
            if file.stat().st_size > MOST_BYTES:
                raise ValueError("too large")
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA or data["sha256"] != _checksum(key, data["lanes"]):
                raise ValueError("damaged")
            found = {str(lane): read_recipe(recipe) for lane, recipe in data["lanes"].items()}
            os.utime(file)  # the oldest go first
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, BundleError):
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        return found

    def store(self, key: str, recipes: Recipes) -> None:
        """Keep recipes under a key, in place of what is there; the longest unused files make room."""
        lanes = {lane: write_recipe(recipe) for lane, recipe in recipes.items()}
        if any(len(lanes[lane]) < len(recipe) for lane, recipe in recipes.items()):
            return  # a pass of the user's own, which no file can name
        data = {"schema": SCHEMA, "lanes": lanes, "sha256": _checksum(key, lanes)}
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.folder, suffix=".tmp", encoding="utf-8", delete=False
            ) as file:
                json.dump(data, file)
            os.replace(file.name, self._file(key))
            for old in self.files()[:-MOST_FILES]:
                old.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """All files, the longest unused first."""
        with contextlib.suppress(OSError):
            found = [file for kind in KINDS for file in self.folder.glob(f"*{kind}")]
            times = {file: file.stat().st_mtime for file in found if file.is_file()}
            return sorted(times, key=times.__getitem__)
        return []

    def clear(self) -> int:
        """Remove every file; returns how many there were."""
        files = self.files()
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
        return len(files)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def default_cache() -> TuningCache | None:
    """The user's cache, in `cache_folder`; None where there is none."""
    folder = cache_folder()
    return TuningCache(folder) if folder is not None else None


def key_of(program: Program, wishes: Mapping[str, object]) -> str:
    """The hash of everything that decides which passes win for a captured program.

    That is its graph and the shapes of its weights (not their values, on which verification depends and
    speed does not), its inputs, what the user wishes, the device, the libraries and ampopt's own code.
    """
    digest = hashlib.sha256()

    def add(*facts: object) -> None:
        digest.update((json.dumps([str(fact) for fact in facts]) + "\n").encode())

    add(SCHEMA, _own_code(), *_versions(), *sorted(environment(program.device).items()), program.device.index)
    add(*sorted((name, repr(wish)) for name, wish in wishes.items()))
    for node in program.graph.graph.nodes:
        add(node.op, node.name, node.target, node.args, node.kwargs)
    for name, weight in sorted(program.graph.named_buffers()):
        add(name, weight.dtype, list(weight.shape))
    for example in program.examples:
        add(example.dtype, list(example.shape), example.stride())
    add(os.cpu_count(), torch.get_num_threads(), torch.get_num_interop_threads())
    return digest.hexdigest()


def _checksum(key: str, lanes: object) -> str:
    return hashlib.sha256((key + json.dumps(lanes, sort_keys=True)).encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """A hash of ampopt's modules: another version of a pass may decide otherwise."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for file in sorted([*root.glob("*.py"), *root.glob("passes/*.py"), *root.glob("cpp/*")]):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _versions() -> list[str]:
    found = []
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return found
