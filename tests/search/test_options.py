"""What the user asks for is checked before any work, and decides the passes and the cache's key."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from ampopt.errors import InputError
from ampopt.ir.pipeline import Pipeline
from ampopt.ir.program import Program
from ampopt.ir.transform import Family, Numerics, Pass, Result
from ampopt.passes import PIPELINE, AllowTf32, BakeAutocast, Degroup, FoldConvBn, FuseConvAct
from ampopt.search.options import Options


def names(options: Options) -> list[str]:
    return [step.name for step in options.pipeline()]


def the(kind: type[Pass], options: Options) -> Any:
    """The one pass of a kind."""
    (step,) = [step for step in options.pipeline() if isinstance(step, kind)]
    return step


def test_by_default_every_pass_is_tried_but_tf32_which_rounds() -> None:
    assert names(Options()) == [step.name for step in PIPELINE if not isinstance(step, AllowTf32)]
    assert names(Options(tolerance=0.0)) == [step.name for step in PIPELINE]


def test_what_is_excluded_is_left_out_and_the_order_stays() -> None:
    kept = names(Options(exclude=("degroup", "compile")))
    assert kept == [name for name in names(Options()) if name not in ("degroup", "compile")]


def test_a_list_of_passes_is_exactly_those_in_the_order_given() -> None:
    options = Options(passes=(Degroup(least_gain=1.5), "fold-conv-bn"))
    assert tuple(options.pipeline()) == (Degroup(least_gain=1.5), FoldConvBn())
    assert names(Options(passes="fold-conv-bn,degroup", exclude=["degroup"])) == ["fold-conv-bn"]
    assert isinstance(options.passes, Pipeline)  # read once, not anew for every lane


def test_the_policy_is_baked_unless_the_passes_say_their_own() -> None:
    assert the(BakeAutocast, Options(policy="O1")) == BakeAutocast("O1")
    assert the(BakeAutocast, Options(passes=(BakeAutocast("half"),))) == BakeAutocast("half")


@pytest.mark.parametrize(("nan", "keeps"), [("keep", True), ("exact", True), ("ignore", False)])
def test_nan_may_be_lost_only_where_the_user_says_so(nan: Any, keeps: bool) -> None:
    assert the(FuseConvAct, Options(nan=nan)).keeps_nan is keeps


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget_s": 0}, "budget_s=0: give a positive, finite number of seconds"),
        ({"budget_s": math.inf}, "budget_s=inf: give a positive, finite number of seconds"),
        ({"tolerance": -1e-9}, "tolerance=-1e-09: give a relative error, 0 or more"),
        ({"metric": "iou"}, "metric='iou': give a function, metric(outputs, original_outputs) -> float"),
        ({"outputs": "mine"}, "outputs='mine': choose 'copy' or 'static'"),
        ({"policy": "O3"}, "policy='O3': choose from amp, O1, O2, half"),
        ({"nan": "maybe"}, "nan='maybe': choose from"),
        ({"cache": 1}, "cache=1: give True or False"),
        ({"precision": "fp8"}, "precision='fp8': choose from auto, fp32"),
        ({"amp_dtype": torch.float64}, "amp_dtype=torch.float64: choose torch.float16 or torch.bfloat16"),
        ({"exclude": "compile"}, "exclude='compile': give a list of names"),
        ({"exclude": ["no-such"]}, "there is no pass no-such: choose from"),
        ({"exclude": ["fold-conv-nb"]}, "; near it are fold-conv-bn, fold-constants"),
        ({"passes": "fold-conv-nb"}, "; near it are fold-conv-bn, fold-constants"),
        ({"passes": "no-such"}, "there is no pass no-such: choose from"),
        ({"passes": 5}, "passes=5: give a list of passes, their text, or a Pipeline"),
        ({"passes": "degroup{least-gain"}, "degroup{least-gain"),
        ({"passes": "allow-tf32"}, "tolerance"),
    ],
)
def test_a_value_that_does_not_serve_is_refused_with_what_would(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Options(**wrong)
    assert message in str(caught.value)


def test_numbers_become_pythons_own_and_names_a_tuple() -> None:
    options = Options(budget_s=np.float32(2), tolerance=np.float64(0.5), exclude={"compile"})  # type: ignore[arg-type]
    assert (type(options.budget_s), type(options.tolerance)) == (float, float)
    assert (options.budget_s, options.tolerance, options.exclude) == (2.0, 0.5, ("compile",))


@dataclasses.dataclass(frozen=True)
class Mine(Pass):
    """A user's own pass."""

    numerics, family, portable = Numerics.BITWISE, Family.REWRITE, True

    @property
    def name(self) -> str:
        """Its name."""
        return "mine"

    def apply(self, program: Program) -> Result:
        """Do nothing."""
        return Result(program, 0)


def test_a_users_own_pass_may_be_excluded_by_its_name() -> None:
    options = Options(passes=(Mine(), FoldConvBn()), exclude=["mine"])
    assert names(options) == ["fold-conv-bn"]
    with pytest.raises(InputError, match="there is no pass mine"):
        Options(exclude=["mine"])


def test_what_is_found_is_kept_where_the_code_of_every_pass_has_a_hash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Options().is_cacheable
    assert not Options(cache=False).is_cacheable
    assert Options(passes=(Mine(),)).is_cacheable  # its code is in this file
    monkeypatch.setattr(Mine, "__module__", "typed_at_a_prompt")
    assert not Options(passes=(Mine(),)).is_cacheable


BASE = Options()


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "fp32"},
        {"tolerance": 0.5},
        {"budget_s": 1.0},
        {"amp_dtype": torch.bfloat16},
        {"nan": "exact"},
        {"metric": max},
        {"policy": "O2"},
        {"exclude": ("degroup",)},
        {"passes": (FoldConvBn(),)},
    ],
)
def test_what_decides_the_winners_is_in_the_key(change: dict[str, Any]) -> None:
    assert Options(**change).cache_facts() != BASE.cache_facts()
    assert Options(**change).cache_facts() == Options(**change).cache_facts()


@pytest.mark.parametrize("change", [{"outputs": "static"}, {"cache": False}])
def test_what_does_not_decide_them_is_not_in_the_key(change: dict[str, Any]) -> None:
    assert Options(**change).cache_facts() == BASE.cache_facts()
