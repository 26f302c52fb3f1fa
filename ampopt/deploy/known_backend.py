"""Which backend serves a bundle best on a machine: it is measured once.

That is where the bundle is saved, or at its first load on a machine that differs from that one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampopt.bundle.files import BundleFiles
from ampopt.deploy.onnx_verify import to_numpy
from ampopt.engines.executable import executable
from ampopt.ir.program import Program
from ampopt.measure.clocks import REST_S, engine_latency
from ampopt.measure.sampling import interleave
from ampopt.ort.backend_choice import Timed, best
from ampopt.ort.session import Array
from ampopt.system import cached_facts
from ampopt.system.cache_folder import cache_folder
from ampopt.system.environment import machine_facts

CHOOSING_S = 2.0
"""Time in seconds for which the backends of a bundle are measured."""

BACKEND = "backend.json"
"""The file of a bundle that tells which backend was best where it was saved."""

MOST_BYTES = 4096
"""Largest size of that file."""

SAME = 1.03
"""Costs within this factor are the same; of such backends one that is a file in the bundle loads sooner."""

OWN = "ampopt"
"""The backend whose program a load makes of the bundle's recipe."""


@dataclasses.dataclass(frozen=True)
class KnownBackend:
    """The backend, and what was measured of each, by name."""

    backend: str
    measured: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Runner:
    """What takes and gives a model's arrays, and how many threads of the processor it takes."""

    run: Callable[..., Sequence[Array]]
    threads: int


def fastest(calls: Mapping[str, tuple[Callable[[], object], int]], device: torch.device) -> KnownBackend:
    """The backend that serves best, of calls without arguments and the threads that each takes, by name.

    They take turns for `CHOOSING_S`; see `ampopt.ort.backend_choice`, and `SAME`.
    """
    rest_s = REST_S if device.type == "cpu" else 0.0
    samplers = {name: engine_latency(call, device, rest_s=rest_s) for name, (call, _) in calls.items()}
    with torch.no_grad():
        latencies = interleave(samplers, seconds=CHOOSING_S)
    timed = {name: Timed(latencies[name], threads) for name, (_, threads) in calls.items()}
    chosen, told = best(timed), {name: str(way) for name, way in timed.items()}
    if chosen == OWN:
        own = timed.pop(OWN)
        same = {
            name: way
            for name, way in timed.items()
            if way.cost <= SAME * own.cost and way.threads <= own.threads
        }
        chosen = best(same) if same else OWN
    return KnownBackend(chosen, told)


def backend_file(
    program: Program, inputs: Sequence[Tensor], runners: Mapping[str, Runner]
) -> dict[str, bytes]:
    """The file of a bundle that tells which backend serves it best on this machine.

    `program` is ampopt's own, which a load makes anew of the recipe; `inputs` are those of all, on its
    device, in the order of the call.
    """
    device = program.device

    def framed(runner: Runner) -> None:
        outputs = runner.run(*(to_numpy(tensor) for tensor in inputs))
        for array, border in zip(outputs, program.exit, strict=True):
            torch.from_numpy(array).to(device, border.dtype)

    threads = torch.get_num_threads() if device.type == "cpu" else 1
    calls: dict[str, tuple[Callable[[], object], int]] = {
        OWN: (functools.partial(executable(program), *inputs), threads),
        **{name: (functools.partial(framed, each), each.threads) for name, each in runners.items()},
    }
    found = fastest(calls, device)
    facts = {"machine": _machine(device, list(calls)), **dataclasses.asdict(found)}
    return {BACKEND: json.dumps(facts, indent=1).encode()}


def known_from(files: BundleFiles, device: torch.device, backends: Sequence[str]) -> KnownBackend | None:
    """What was best where a bundle was saved, if that machine and its libraries are like these."""
    if BACKEND not in files.names or len(data := files.read(BACKEND)) > MOST_BYTES:
        return None
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.get("machine") != _machine(device, backends):
        return None
    return _known(facts, backends)


def _machine(device: torch.device, backends: Sequence[str]) -> str:
    return _hash([list(backends), *machine_facts(device)])


def _hash(facts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _known(facts: Any, backends: Sequence[str]) -> KnownBackend | None:
    """A choice as `KnownBackend` has it, from JSON; None where that holds none of these backends."""
    if not isinstance(facts, dict) or facts.get("backend") not in backends:
        return None
    measured = facts.get("measured")
    if not isinstance(measured, dict) or not measured.keys() <= set(backends):
        return None
    if not all(isinstance(text, str) and text.isprintable() for text in measured.values()):
        return None
    return KnownBackend(facts["backend"], dict(measured))


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
        self._key = _hash(facts)

    def find(self) -> KnownBackend | None:
        """What an earlier load has chosen; None where that is not known."""
        found = None if self._folder is None else cached_facts.find(self._folder, self._key)
        return _known(found, self.backends)

    def store(self, chosen: KnownBackend) -> None:
        """Keep a choice for the next load."""
        if self._folder is not None and self.find() != chosen:
            cached_facts.store(self._folder, self._key, dataclasses.asdict(chosen))

    def forget(self) -> None:
        """Forget the choice: that backend does not serve the bundle any more."""
        if self._folder is not None:
            cached_facts.forget(self._folder, self._key)
