"""OptimizedModule: inputs of any strides are answered as the original answers them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.program_maker import MOST_COMPARED
from tests.helpers import Model
from tests.support.planted import module_of

Layout = Callable[[Tensor], Tensor]

LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a crop": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    "a crop further on": lambda x: torch.cat([x, x], 3)[..., x.shape[3] :],
    "expanded": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
    "second of a batch": lambda x: torch.cat([x, x])[1:],
}


def image(seed: int = 0) -> Tensor:
    return torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def flipped(h: Tensor, does: object) -> Tensor:
    return -h if does else h


ASKING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "stride": lambda m, x: flipped(m.conv(x), x.stride(1) == 1),
    "stride of a dimension": lambda m, x: m.conv(x) * x.stride()[-1],
    "is_contiguous": lambda m, x: flipped(m.conv(x), x.is_contiguous()),
    "is_contiguous(channels_last)": lambda m, x: flipped(
        m.conv(x), x.is_contiguous(memory_format=torch.channels_last)
    ),
    "dim_order": lambda m, x: m.conv(x) + x.dim_order()[1],
    "storage_offset": lambda m, x: flipped(m.conv(x), x.storage_offset() > 0),
    "of an intermediate": lambda m, x: flipped(m.conv(x), (x * 2).is_contiguous()),
    "only large numbers": lambda m, x: m.conv(x).clamp(max=100.0) if x.is_contiguous() else m.conv(x),
}


def asking(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(ASKING[name], conv=nn.Conv2d(3, 4, 1)).eval()


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, atol=1e-5, rtol=1e-4)


ASKED = {
    "contiguous": [*LAYOUTS],
    "channels_last": ["contiguous", "channels_last", "a crop further on"],
    "a crop further on": ["contiguous", "channels_last", "a crop further on"],
}
"""The layout of a captured call, and those of later ones: all, or some to which each question is answered
otherwise."""


@pytest.mark.parametrize("first", ASKED)
@pytest.mark.parametrize("name", ASKING)
def test_a_model_that_asks_how_its_input_lies_gets_the_answer_of_each_call(name: str, first: str) -> None:
    model = asking(name)
    fast = module_of(model, LAYOUTS[first](image()))
    for seed, laid in itertools.product((1, 2), [LAYOUTS[each] for each in ASKED[first]]):
        x = laid(image(seed)) * 1
        x = laid(x)
        assert same(fast(x), model(x))
        assert same(fast(200 * x), model(200 * x))


def test_what_the_numbers_of_one_input_hide_the_question_tells() -> None:
    model = asking("only large numbers")
    fast = module_of(model, image())
    x = LAYOUTS["channels_last"](image())
    assert same(fast(x), model(x)), "no number is over 100, so both ways agree here"
    assert same(fast(1000 * x), model(1000 * x))
    assert fast._calls.programs == 2


def test_the_questions_of_a_model_are_those_of_the_call_that_is_captured() -> None:
    model = Model(
        lambda m, x, careful: flipped(m.conv(x), x.storage_offset() > 0) if careful else m.conv(x),
        conv=nn.Conv2d(3, 4, 1),
    )
    fast = module_of(model, image(), False)
    for careful, laid in itertools.product((False, True, False), LAYOUTS.values()):
        x = laid(image())
        assert same(fast(x, careful), model(x, careful))
    captures = fast._new.captures
    fast(LAYOUTS["a crop"](image()), False)
    assert fast._new.captures == captures, "a program that holds for all strides is forgotten"


def through_a_view(m: Any, x: Tensor) -> Tensor:
    kept = x * 1.0
    kept.reshape(-1).mul_(3.0)  # a view of contiguous tensors, a copy of others
    found: Tensor = m.conv(kept)
    return found


def test_strides_that_matter_without_a_question_are_found_by_comparing() -> None:
    torch.manual_seed(0)
    model = Model(through_a_view, conv=nn.Conv2d(3, 4, 1)).eval()
    fast = module_of(model, image())
    for seed, laid in itertools.product((1, 2), LAYOUTS.values()):
        x = laid(image(seed))
        assert same(fast(x), model(x))


def test_only_the_first_few_other_strides_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Conv2d(3, 4, 1).eval()
    fast, seen = module_of(model, image()), list[int]()
    real = fast._maker.why_wrong

    def counted(*args: Any, **options: Any) -> str | None:
        seen.append(1)
        return real(*args, **options)

    monkeypatch.setattr(fast._maker, "why_wrong", counted)
    for extra in range(1, 2 * MOST_COMPARED):
        x = torch.randn(1, 3, 6, 6 + extra)[..., :6]
        for _ in range(2):
            assert same(fast(x), model(x))
    assert len(seen) == MOST_COMPARED
    assert fast._new.captures == 0


def test_strides_that_the_original_refuses_are_served() -> None:
    model = Model(lambda m, x: m.line(x.view(1, -1)), line=nn.Linear(108, 2))
    fast, x = module_of(model, image()), LAYOUTS["channels_last"](image(1))
    with pytest.raises(RuntimeError, match="view"):
        model(x)
    assert same(fast(x), model(x.contiguous()))


def test_a_script_that_asks_is_served_rightly() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return -x if x.is_contiguous() else x

    model = Model(
        lambda m, x: m.conv(m.asks(x)), conv=nn.Conv2d(3, 4, 1), asks=torch.jit.script(Asks())
    ).eval()
    fast = module_of(model, image())
    for laid in LAYOUTS.values():
        x = laid(image(1))
        assert same(fast(x), model(x))


def test_a_model_that_asks_gets_a_program_for_each_layout_and_no_short_way() -> None:
    model = asking("is_contiguous")
    fast = module_of(model, image())
    for _ in range(3):
        for laid in (LAYOUTS["contiguous"], LAYOUTS["channels_last"]):
            assert same(fast(laid(image())), model(laid(image())))
    assert (fast.health.late_captures, fast.health.served_by_original) == (1, 0)
    assert not fast._calls._short, "what recognizes a tensor does not look at where it begins"
