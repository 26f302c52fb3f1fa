"""A part of a model answers for its submodule only while the model leaves that as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import InputError, StrictError
from ampopt.search.partly_optimized import patched
from ampopt.search.served_part import ServedPart
from tests.support.planted import module_of


class Head(nn.Module):
    """Scales by a buffer, and more at night."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("scale", torch.ones(4))
        self.night = False

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        y: Tensor = self.inner(x) * self.scale
        return y * 3 if self.night else y


class Around(nn.Module):
    """Writes to its head where the image is bright."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.head, self.write = Head(), write

    def forward(self, x: Tensor) -> Tensor:
        """The head's features."""
        if x.mean().item() > 3:
            self.write(self.head)
        return self.head(x)  # type: ignore[no-any-return]


def _replace(head: Any) -> None:
    head.inner[0].weight = nn.Parameter(head.inner[0].weight * 2)


WRITES: dict[str, Callable[[Any], object]] = {
    "in a buffer": lambda head: head.scale.fill_(4.0),
    "another weight": _replace,
    "another buffer": lambda head: setattr(head, "scale", head.scale * 5),
    "a flag": lambda head: setattr(head, "night", True),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_the_model_writes_to_a_part_is_seen(what: str) -> None:
    torch.manual_seed(0)
    model, x = Around(WRITES[what]).eval(), torch.randn(2, 4)
    own = patched(model, {})
    program = module_of(model.head, x)
    served: Any = patched(model, {"head": program})
    with torch.no_grad():
        for image in (x, x + 10, x, x + 10):
            torch.testing.assert_close(served(image), own(image))
    assert isinstance(served.head.forward.__self__, ServedPart)
    assert not served.head.forward.__self__._is_as_it_was()


def test_a_part_that_is_left_alone_is_answered_for() -> None:
    head, x = Head().eval(), torch.randn(2, 4)
    part = ServedPart(head, module_of(head, x))
    part._own = lambda *_: pytest.fail("its own code ran")
    with torch.no_grad():
        torch.testing.assert_close(part(x), head(x))
        torch.testing.assert_close(part(x + 1), head(x + 1))


def test_a_call_of_another_dtype_runs_the_part_s_own_code() -> None:
    model = nn.Sequential(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))).eval()
    x = torch.arange(6)
    program = module_of(model[0], x)
    with pytest.raises(InputError, match="int32"):
        program(x.int())
    refused, served = program.health.refusals, patched(model, {"0": program})
    with torch.no_grad():
        torch.testing.assert_close(served(x.int()), model(x))
        assert (program.health.served_by_original, program.health.refusals) == (1, refused)
        program.strict = True
        with pytest.raises(StrictError, match="int32"):
            served(x.int() + 0 * x.int()[:1])


def test_what_a_part_s_own_code_answers_is_counted_and_refused_where_that_is_asked_for() -> None:
    torch.manual_seed(0)
    model, x = Around(WRITES["a flag"]).eval(), torch.randn(2, 4)
    program = module_of(model.head, x)
    served = patched(model, {"head": program})
    with torch.no_grad():
        served(x)
        assert program.health.served_by_original == 0
        served(x + 10)
        served(x)
        assert program.health.served_by_original == 2
        program.strict = True
        with pytest.raises(StrictError, match="the model has written to this part of it"):
            served(x)


def test_a_model_in_parts_has_no_ranges_of_sizes() -> None:
    class Deciding(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2 if x.sum().item() > 0 else x

    fast = ampopt.optimize(
        Deciding().eval(),
        torch.ones(2, 3),
        dynamic={"batch": (1, 4)},
        budget_s=5,
        progress=False,
        cache=False,
    )
    assert fast.sizes == {}
