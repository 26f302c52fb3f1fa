"""Fixtures that take the clock out of the tests of the engine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

import ampopt
from ampopt.measure import headline, rounds, sampling
from ampopt.measure.sampling import Gain, Measurement, Sampler
from ampopt.search import last_comparison, search_plan, trial_timer
from tests.support.planted import KEEP, keep_the_patched, module_of
from tests.support.small_net import PASSES, image, net

TIMED = (trial_timer, search_plan, last_comparison, headline, rounds)


def _few_rounds(samplers: Mapping[str, Sampler], **_: object) -> dict[str, Measurement]:
    return sampling.interleave(samplers, seconds=0.0, least=3)


def _few(patch: pytest.MonkeyPatch) -> None:
    """Let three samples be enough; no lane is left behind on so few."""
    for module in TIMED:
        patch.setattr(module, "interleave", _few_rounds)
    patch.setattr(rounds, "MOST", 3)
    for limit in ("BEHIND", "FAR_BEHIND", "TOO_FAR_AHEAD"):
        patch.setattr(search_plan, limit, math.inf)


def _undecided(patch: pytest.MonkeyPatch) -> None:
    """Let no lane be faster than another, and no result slower than the original."""
    for name in ("optimizer", "last_comparison"):
        patch.setattr(f"ampopt.search.{name}.gain", lambda before, after: Gain(1.0, 1.0, 1.0))


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples are enough where a test makes up what the clock says."""
    _few(monkeypatch)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples are enough where a test does not care which passes are kept, or which lane answers."""
    _few(monkeypatch)
    _undecided(monkeypatch)


@contextlib.contextmanager
def _all_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        _few(patch)
        _undecided(patch)
        patch.setattr("ampopt.search.trial_timer.gain", lambda before, after: KEEP)
        yield


@pytest.fixture(scope="session")
def all_kept() -> contextlib.AbstractContextManager[None]:
    """Within this context every pass that is right is kept, as if it were faster; it may be entered again."""
    return _AllKept()


@pytest.fixture
def through_dynamo(all_kept: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Every right pass is kept, and every result found faster; Dynamo forgets what it has captured."""
    torch._dynamo.reset()
    with all_kept, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        keep_the_patched(patch)
        yield
    torch._dynamo.reset()


class _AllKept(contextlib.AbstractContextManager[None]):
    def __enter__(self) -> None:
        self._scope = _all_kept()
        self._scope.__enter__()

    def __exit__(self, *details: object) -> None:
        self._scope.__exit__(None, None, None)


@pytest.fixture
def model() -> nn.Module:
    """A small network on a GPU; files with other models have their own."""
    return net()


@pytest.fixture
def fast(model: nn.Module) -> ampopt.OptimizedModule:
    """The network in a captured graph."""
    return module_of(model, image(), passes=PASSES)
