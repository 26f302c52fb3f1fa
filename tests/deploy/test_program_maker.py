"""Programs for further calls: made by the recipe, verified, and held for other strides and autocasts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.optimized import Optimized
from ampopt.deploy.program_maker import MOST_COMPARED, ProgramMaker
from ampopt.deploy.served_state import State
from ampopt.errors import VerificationError
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.signature import flatten_call
from ampopt.ir.transform import Pass, Recipe
from ampopt.measure.ledger import Ledger
from tests.helpers import BF16, Model
from tests.support.planted import Planted, captured_of


def rows(count: int = 2) -> Tensor:
    return torch.linspace(-1, 1, count * 8).reshape(count, 8)


def maker_of(model: nn.Module, *passes: Pass, lane: Lane = FP32, x: Tensor | None = None) -> ProgramMaker:
    original, captured = captured_of(model.eval(), rows() if x is None else x)
    recipe = Recipe(lane, passes)
    optimized = Optimized(original, captured, lane.start(captured.program), recipe, Ledger("m", {}, ()))
    return ProgramMaker(optimized, State(original, one_at_a_time=captured.lifted is not None), "copy")


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def test_a_program_is_made_for_other_sizes_with_the_passes_given() -> None:
    model, step = linear(), Planted("harmless")
    served = maker_of(model).make((rows(5),), {}, (step,))
    assert served.program is not None
    assert served.program.recipe == (step,)
    assert served.layout is not None
    with torch.no_grad():
        assert torch.allclose(served.layout.restore(served.run(rows(5))), model(rows(5)), atol=1e-6)


def test_a_pass_that_is_wrong_there_is_refused() -> None:
    with pytest.raises(VerificationError, match="the optimized program is wrong for this call: output 0"):
        maker_of(linear()).make((rows(5),), {}, (Planted("off", factor=1.5),))


def test_it_computes_in_the_recipes_lane() -> None:
    served = maker_of(linear(), lane=BF16).make((rows(3),), {}, ())
    assert served.program is not None
    assert (served.program.lane, served.program.under_autocast) == (BF16, True)


def test_the_first_one_takes_what_is_ready() -> None:
    calls: list[int] = []

    def ready(*tensors: Tensor) -> tuple[Tensor, ...]:
        calls.append(len(tensors))
        return tensors

    served = maker_of(linear()).first(ready)
    served.run(rows())
    assert calls == [1]


def test_the_originals_own_error_is_raised_and_its_copy_is_not_the_original() -> None:
    maker = maker_of(linear())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        maker.try_original((torch.ones(2, 9),), {})
    assert maker.original() is not maker.original()


def test_other_strides_are_compared_a_few_times_and_then_taken_for_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker, compared = maker_of(linear()), list[int]()
    served = maker.first(None)
    whole = maker.why_wrong

    def counted(*args: Any, **options: Any) -> str | None:
        compared.append(1)
        return whole(*args, **options)

    monkeypatch.setattr(maker, "why_wrong", counted)
    leaves = flatten_call((rows(8).T[:2].contiguous().T.T,), {})[0]
    assert all(maker.holds(served, leaves) for _ in range(MOST_COMPARED + 2))
    assert len(compared) == MOST_COMPARED


def test_a_program_does_not_hold_where_the_original_answers_otherwise() -> None:
    def writes_into_a_view(m: Any, x: Tensor) -> Tensor:
        flat = x.clone(memory_format=torch.preserve_format)
        flat.reshape(-1)[0] = 7.0  # into it, or into a copy
        return flat

    maker = maker_of(Model(writes_into_a_view), x=rows(8))
    served = maker.first(None)
    assert maker.holds(served, flatten_call((rows(8),), {})[0])
    assert not maker.holds(served, flatten_call((rows(8).T,), {})[0])


@pytest.mark.parametrize(
    ("function", "dtypes"),
    [
        (lambda m, x: m.layer(x), (torch.bfloat16,)),
        (lambda m, x: m.layer(x).float(), (torch.float32,)),
        (lambda m, x: m.layer(x) * (2 if torch.is_autocast_enabled("cpu") else 1), None),
    ],
    ids=["lowered", "its own cast", "it asks"],
)
def test_under_an_autocast_results_have_the_originals_dtypes_or_it_answers(
    function: Any, dtypes: tuple[torch.dtype, ...] | None
) -> None:
    maker = maker_of(Model(function, layer=nn.Linear(8, 8)))
    served = maker.first(None)
    outputs = served.run(rows())
    with torch.autocast("cpu", torch.bfloat16):
        assert maker.casts(served, torch.bfloat16, outputs, (rows(),), {}) == dtypes
    assert served.casts == {torch.bfloat16: dtypes}
