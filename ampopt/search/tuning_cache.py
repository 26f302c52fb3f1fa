"""Disk cache of tuning results: the recipes that won for a model, by a hash of everything they depend on.

Cached recipes are replayed and verified like any others, so that a bad file can only cost time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ampopt.deploy.recipe_file import read_recipe, write_recipe
from ampopt.errors import BundleError
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass
from ampopt.passes import PIPELINE
from ampopt.system import cached_facts
from ampopt.system.cache_folder import cache_folder
from ampopt.system.environment import machine_facts

Recipes = Mapping[str, tuple[Pass, ...]]
"""The recipe of the best program of each lane."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What an earlier search found; if it had no time for everything, it is not `complete`."""

    recipes: Recipes
    complete: bool


@dataclasses.dataclass(frozen=True)
class TuningCache:
    """The files of one folder, `<key>.json` each.

    No method raises: a cache that fails acts as an empty one.
    """

    folder: Path

    def find(self, key: str, passes: Iterable[Pass] = PIPELINE) -> Known | None:
        """The recipes stored under a key, made of these passes; None if there are none or the file is bad."""
        if (found := cached_facts.find(self.folder, key)) is None:
            return None
        try:
            known = {step.name: step for step in passes}
            recipes = {str(lane): read_recipe(recipe, known) for lane, recipe in found["lanes"].items()}
            return Known(recipes, bool(found["complete"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BundleError):
            cached_facts.forget(self.folder, key)
            return None

    def store(
        self, key: str, recipes: Recipes, passes: Iterable[Pass] = PIPELINE, *, complete: bool = True
    ) -> None:
        """Store recipes of these passes under a key, replacing existing ones; remove the oldest files."""
        known = {step.name: step for step in passes}
        try:
            lanes = {lane: write_recipe(recipe, known) for lane, recipe in recipes.items()}
            if any(read_recipe(lanes[lane], known) != recipe for lane, recipe in recipes.items()):
                return  # a pass that is none of them, which no file can name
        except (TypeError, ValueError, BundleError):
            return  # a user's pass with an option that a file cannot hold
        cached_facts.store(self.folder, key, {"lanes": lanes, "complete": complete})


def default_cache() -> TuningCache | None:
    """The user's cache, in `cache_folder`; None if there is none."""
    folder = cache_folder()
    return TuningCache(folder) if folder is not None else None


def key_of(program: Program, facts: Mapping[str, object]) -> str:
    """The hash of everything that decides which passes win for a captured program.

    These are its graph and the shapes of its weights (not their values, which affect verification but not
    speed), its inputs, the user's options, the device, the libraries and ampopt's own code.
    """
    digest = hashlib.sha256()

    def add(*facts: object) -> None:
        digest.update((json.dumps([str(fact) for fact in facts]) + "\n").encode())

    add(cached_facts.SCHEMA, *machine_facts(program.device))
    add(*sorted((name, repr(fact)) for name, fact in facts.items()))
    for node in program.graph.graph.nodes:
        add(node.op, node.name, node.target, node.args, node.kwargs)
    for name, weight in sorted(program.graph.named_buffers()):
        add(name, weight.dtype, list(weight.shape))
    for example in program.examples:
        add(example.dtype, list(example.shape), example.stride())
    return digest.hexdigest()
