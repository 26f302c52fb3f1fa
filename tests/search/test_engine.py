"""An engine of the user's own, registered in one line: tried, timed, cached, declined without its package."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.ir.program import Program
from ampopt.ir.transform import Result
from ampopt.measure.entry import Verdict
from ampopt.search.options import Options
from ampopt.search.tuning_cache import key_of
from ampopt.system import environment
from tests.support.planted import captured_of

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass(frozen=True)
class Toy(ampopt.Engine):
    """Run the graph as it is, under another name."""

    packages = ("json",)

    def apply(self, program: Program) -> Result:
        """Let the graph run itself."""
        return Result(program.replace(engine=program.graph), 0 if program.engine else 1)


class Shortcut:
    """Runs a graph, and counts the calls that take its shorter way."""

    def __init__(self, program: Program) -> None:
        self._program, self.dtypes, self.short_calls = program, (torch.float32,), 0

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = self._program.graph(*tensors)
        return outputs

    def quick(self, example: Tensor, otherwise: Callable[..., Any]) -> Callable[[Tensor], tuple[Tensor, ...]]:
        def call(tensor: Tensor) -> tuple[Tensor, ...]:
            self.short_calls += 1
            return tuple(self(tensor))

        return call


@dataclasses.dataclass(frozen=True)
class Quick(ampopt.Engine):
    """Run the graph with a shorter way for one tensor."""

    def apply(self, program: Program) -> Result:
        """Let the graph run itself."""
        return Result(program.replace(engine=Shortcut(program)), 1)


class Homeless(Toy):
    """Needs a package that is not there."""

    packages = ("not_on_this_machine",)


class Extra(Homeless):
    """The same, and ampopt has an extra for it."""

    extra = "toys"


def tuned(*passes: ampopt.Pass, **options: Any) -> ampopt.OptimizedModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fast = ampopt.optimize(model, X, passes=passes, precision="fp32", budget_s=20, progress=False, **options)
    assert isinstance(fast, ampopt.OptimizedModule)
    assert torch.allclose(fast(X), model(X), atol=1e-6)
    return fast


def test_it_is_tried_verified_timed_and_served(all_kept: Any) -> None:
    with all_kept:
        fast = tuned(Toy(), cache=False)
    (entry,) = fast.report.entries
    assert (entry.name, entry.verdict) == ("toy", Verdict.KEPT)
    assert entry.before is not None
    assert entry.error is not None
    assert fast.program.engine is not None
    assert [step.name for step in fast.program.recipe] == ["toy"]


def test_its_quick_call_answers_tensors_that_need_no_conversion(all_kept: Any) -> None:
    with all_kept:
        fast = tuned(Quick(), cache=False)
    engine = fast.program.engine
    assert isinstance(engine, Shortcut)
    before = engine.short_calls
    fast(X)
    assert engine.short_calls == before + 1
    fast(X.T.contiguous().T)  # other strides: the border brings them into order
    assert engine.short_calls == before + 1


def test_it_is_found_in_the_cache_and_anew_with_another_version_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_kept: Any
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    with all_kept:
        tuned(Toy())
        (file,) = tmp_path.glob("*.json")
        assert [step["pass"] for step in json.loads(file.read_text())["facts"]["lanes"]["fp32"]] == ["toy"]
        again = tuned(Toy())
    assert any("tuned by an earlier call" in note for note in again.report.notes)
    program, options = captured_of(nn.ReLU(), X)[1].program, Options(passes=[Toy()])
    own = key_of(program, options.cache_facts())
    assert key_of(program, options.cache_facts()) == own
    monkeypatch.setattr(environment, "_version", lambda name: "9.9")
    assert key_of(program, options.cache_facts()) != own


@pytest.mark.parametrize(
    ("engine", "advice"), [(Homeless(), "not_on_this_machine"), (Extra(), "'ampopt[toys]'")]
)
def test_without_its_package_it_is_declined_and_says_what_to_install(engine: Toy, advice: str) -> None:
    (entry,) = tuned(engine, cache=False).report.entries
    assert entry.verdict is Verdict.DECLINED
    assert entry.reason == f"not_on_this_machine is not installed: run  pip install {advice}"


def test_no_engine_is_given_what_still_runs_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.search.search_plan.BEHIND", math.inf)  # the lane is searched, however slow
    monkeypatch.setattr("ampopt.search.search_plan.FAR_BEHIND", math.inf)
    fast = ampopt.optimize(nn.Linear(8, 8), X, passes=[Toy()], precision="amp", cache=False, progress=False)
    (entry,) = (entry for entry in fast.report.entries if (entry.lane, entry.name) == ("amp", "toy"))
    assert (entry.verdict, entry.reason) == (Verdict.DECLINED, "it still runs under autocast")


def test_the_versions_of_packages_are_those_of_what_brings_them() -> None:
    found = environment.package_versions(["torch", "google", "not_on_this_machine"])
    assert found["torch"].startswith("torch 2.")
    assert found["not_on_this_machine"] == "absent"
    assert environment.package_versions(["typing_extensions"])["typing_extensions"] != "absent"
