"""Random networks drawn by hypothesis, which shrinks those that fail: through the passes, and served."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampopt.errors import AmpoptError
from ampopt.ir.model_copy import private_copy
from fuzz import calls
from fuzz.judge import Judge
from fuzz.network import KINDS, Layer, Spec, build, make_call
from fuzz.outcome import Outcome
from fuzz.pick import Pick
from fuzz.shrink import describe
from fuzz.through_optimize import judge_served
from fuzz.through_passes import check
from tests.support.planted import optimize

ASKED = os.environ.get("FUZZ_EXAMPLES")
"""How many networks `make fuzz` asks for, other ones each time; the tests take the same few every time."""

SHAPES = [(2, 4, 6, 5), (1, 3, 9, 9), (2, 6), (2, 4, 7), (1, 2, 3, 4, 3), (0, 4, 5, 5)]

specs = st.builds(
    Spec,
    seed=st.integers(0, 2**16),
    shape=st.sampled_from(SHAPES),
    layers=st.lists(st.builds(Layer, st.sampled_from(sorted(KINDS)), st.integers(0, 2**16)), max_size=10).map(
        tuple
    ),
    values=st.sampled_from(list(calls.VALUES)),
    memory=st.sampled_from(list(calls.MEMORIES)),
    call=st.sampled_from(list(calls.CALLS)),
    ending=st.sampled_from(list(calls.ENDINGS)),
)

often = settings(
    max_examples=int(ASKED or 12),
    deadline=None,
    derandomize=ASKED is None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def shown(spec: Spec, outcome: Outcome) -> str:
    """What to read where a network fails."""
    return f"{outcome.kind} in {outcome.stage}: {outcome.reason}\n{describe(spec)}\n{spec}\n{outcome.details}"


@pytest.mark.slow
@often
@given(specs)
def test_no_pass_makes_a_random_network_wrong(spec: Spec) -> None:
    outcome = check(spec)
    assert not outcome.is_fault, shown(spec, outcome)


@pytest.mark.slow
@often
@given(specs, st.sampled_from(["fp32", "amp"]))
def test_a_random_network_with_every_pass_kept_is_right_on_other_calls(
    all_kept: contextlib.AbstractContextManager[None], spec: Spec, precision: str
) -> None:
    model, example = build(spec), make_call(spec)
    others = [make_call(spec, 1), make_call(spec, 2, shape=(spec.shape[0] + 1, *spec.shape[1:]))]
    try:
        judge = Judge(private_copy(model), [example, *others, example])
    except Exception:  # the model does not take these shapes
        return
    if not judge.repeats() or not judge.knows(torch.float32 if precision == "fp32" else torch.bfloat16):
        return
    with all_kept:
        try:
            served = optimize(
                model, example.args, example_kwargs=example.kwargs, precision=precision, cache=False
            )
        except AmpoptError:
            return
    outcome = judge_served(served, judge, Pick(spec.seed), precision)
    assert not outcome.is_fault, shown(spec, outcome)
