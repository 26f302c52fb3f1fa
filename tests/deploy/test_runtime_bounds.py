"""OptimizedModule: how many programs it makes and keeps, and what was prepared stays."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.kinds_of_calls import MOST_REFUSED
from ampopt.errors import InputError
from tests.helpers import with_statistics
from tests.support.planted import module_of, optimize


def net() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))


def image(height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(seed))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What ampopt has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "ampopt"]


@pytest.fixture
def model() -> nn.Module:
    return net()


def close(actual: Any, expected: Any) -> bool:
    return bool(torch.allclose(actual, expected, atol=1e-5, rtol=1e-4)) and actual.shape == expected.shape


def test_memory_for_other_strides_is_bounded(model: nn.Module) -> None:
    fast = module_of(model, image(), max_shapes=2)
    for extra in range(100):
        fast(torch.zeros(1, 3, 8, 8 + extra)[..., :8])
    assert len(fast._calls.answers) <= 16, "a video of ever other crops fills the memory with keys"


def test_the_least_recently_used_program_goes_first(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    fast = module_of(model, image(), max_shapes=2)
    fast(image(9))
    fast(image())  # so the one for 9 is the oldest
    fast(image(10))
    assert len(fast._calls.answers) == 2
    caplog.clear()
    fast(image())
    fast(image(10))
    assert not said(caplog)
    assert close(fast(image(9)), model(image(9)))
    assert len(said(caplog)) == 1
    assert len(fast._calls.answers) == 2


def test_after_max_captures_the_original_answers_and_the_log_says_why(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    fast = module_of(model, image(), max_captures=2)
    for height in (9, 10, 11, 11):
        assert close(fast(image(height)), model(image(height)))
    last = [text for text in said(caplog) if "the original model answers" in text]
    assert len(last) == 1
    assert "float32[1, 3, 11, 8] on cpu" in last[0]
    assert "2 later ones at most" in last[0]
    assert not fast(image(11)).requires_grad


def test_answers_of_the_original_do_not_push_programs_out(model: nn.Module) -> None:
    fast = module_of(model, image(), max_captures=0, max_shapes=2)
    for height in (9, 10, 11, 12):
        fast(image(height))
    served = fast._calls.answers
    assert any(one.layout is not None for one in served), "the only program is gone, for good"


def test_prepared_calls_are_not_captured_later(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    fast = module_of(model, image(), max_captures=0)
    before = torch.get_rng_state()
    fast.prepare((1, 3, 9, 9), image(10), (image(11),))
    assert torch.equal(before, torch.get_rng_state()), "it draws from the user's generator"
    for x in (image(9, 9), image(10), image(11)):
        assert close(fast(x), model(x))
    assert not said(caplog)


def test_all_that_was_prepared_stays(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    fast = module_of(model, image(), max_shapes=2)
    fast.prepare(*[(1, 3, height, 8) for height in range(9, 14)])
    for height in range(8, 14):
        fast(image(height))
    assert not said(caplog), "a program was captured in the middle of the work"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_the_example_and_what_was_prepared_stay_whatever_else_comes(
    model: nn.Module, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    """They were pushed out by sizes that came once, and then the original answered them, or nobody."""
    fast = module_of(model, image(), max_shapes=most, max_captures=8)
    fast(image(9))
    fast.prepare((1, 3, 9, 8), (1, 3, 10, 8))
    for height in range(11, 26):
        for extra in (0, 1, 2):
            fast(torch.zeros(1, 3, height, 8 + extra)[..., :8])
    assert fast._calls.programs <= 4
    assert len(fast._calls.answers) <= 4 * 4
    caplog.clear()
    fast.strict = True
    for height in (8, 9, 10):
        assert close(fast(image(height)), model(image(height)))
    assert not said(caplog)


def test_what_cannot_be_prepared_is_refused(model: nn.Module) -> None:
    fast = module_of(model, image())
    with pytest.raises(InputError, match="prepare takes shapes, tensors or tuples"):
        fast.prepare([1, 3, 8, 8])
    with pytest.raises(InputError, match=r"\(-1, 3, 8, 8\) is no shape: sizes are 0 or more"):
        fast.prepare((-1, 3, 8, 8))
    with pytest.raises(InputError, match="float64"):
        fast.prepare(image().double())


@pytest.mark.parametrize("serve_original", [False, True])
def test_a_call_on_which_the_model_fails_cannot_be_prepared_whoever_answers(
    model: nn.Module, serve_original: bool
) -> None:
    fast = module_of(model, image(), serve_original=serve_original)
    before = torch.get_rng_state()
    with pytest.raises(InputError, match=r"^the model fails on the call to prepare: .*to have 3 channels"):
        fast.prepare((1, 4, 8, 8))
    fast.prepare(image(9))
    assert torch.equal(before, torch.get_rng_state())


class Counted(nn.Module):
    """It has no state that a model has: its calls are counted outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        CALLS()
        result: Tensor = self.conv(x) * scale
        return result


CALLS = Mock()  # a list that grows would be a state of the model


def test_sizes_that_the_original_answers_all_the_time_cost_one_call_each_and_are_not_kept() -> None:
    model = Counted().eval()
    fast: Any = optimize(model, torch.randn(1, 3, 8, 8), precision="fp32", budget_s=3)
    fast._new.max_captures = 1
    for size in (9, 10):  # the last capture, and the first that the original answers
        fast(torch.randn(1, 3, size, size))
    kept = len(fast._maker._kinds._known)
    for size in range(11, 40):
        x = torch.randn(1, 3, size, size)
        CALLS.reset_mock()
        assert torch.equal(fast(x), model(x))
        assert CALLS.call_count == 2  # one of them is the test's
    assert len(fast._maker._kinds._known) == kept
    for number in range(40):
        fast(torch.randn(1, 3, 8, 8), float(number))
    assert len(fast._maker._kinds._known) <= kept + MOST_REFUSED
