"""Which backend served a bundle best when it was first loaded on this machine: it is measured once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ampopt.system import cached_facts
from ampopt.system.cache_folder import cache_folder
from ampopt.system.environment import machine_facts


@dataclasses.dataclass(frozen=True)
class KnownBackend:
    """The backend, and what was measured of each, by name."""

    backend: str
    measured: dict[str, str]


class BackendCache:
    """The choice for one bundle among `backends` on a device; without a cache folder nothing is known."""

    def __init__(
        self,
        manifest: Mapping[str, Any],
        device: torch.device,
        backends: Sequence[str],
        budget_s: float | None,
    ) -> None:
        """`manifest` has the hashes of the bundle's files.

        `budget_s` is the time in which ampopt's own program is searched on another machine than the bundle's.
        """
        self.backends, self._folder = backends, cache_folder()
        facts = ["the backend of a bundle", manifest, list(backends), budget_s, *machine_facts(device)]
        self._key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def find(self) -> KnownBackend | None:
        """What an earlier load has chosen; None where that is not known."""
        found = None if self._folder is None else cached_facts.find(self._folder, self._key)
        if not isinstance(found, dict) or found.get("backend") not in self.backends:
            return None
        measured = found.get("measured")
        if not isinstance(measured, dict):
            return None
        return KnownBackend(found["backend"], {str(name): str(text) for name, text in measured.items()})

    def store(self, chosen: KnownBackend) -> None:
        """Keep a choice for the next load."""
        if self._folder is not None:
            cached_facts.store(self._folder, self._key, dataclasses.asdict(chosen))

    def forget(self) -> None:
        """Forget the choice: that backend does not serve the bundle any more."""
        if self._folder is not None:
            cached_facts.forget(self._folder, self._key)
