"""What code can tell of a call besides its tensors' values: order, identity, and kinds of arguments."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import InputError, StrictError
from ampopt.ir.lane_io import LaneIO
from ampopt.ir.lanes import FP32
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger
from tests.helpers import Model
from tests.support.planted import captured_of, module_of


def image(seed: int = 0) -> Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


X, Y = image(), image(1)


class Conv(nn.Module):
    """A convolution for whatever a model does with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.eval()


class Sensors(Conv):
    """Sees the order of its keyword arguments."""

    def forward(self, **sensors: Tensor) -> Tensor:
        images = [self.conv(sensor) * (i + 1) for i, sensor in enumerate(sensors.values())]
        return torch.cat(images, 1)


class Stereo(Conv):
    """Takes two images by name, and does not care whether they are one."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.conv(left) - 2 * self.conv(right)
        return out


class Asks(Conv):
    """Asks whether its two images are one."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.conv(a) * (2 if a is b else 3) + b.mean()
        return out


class Masked(Conv):
    """Takes a mask or does without, whatever the mask is."""

    def forward(self, a: Tensor, mask: Any, b: Tensor) -> Tensor:
        out: Tensor = self.conv(a) + self.conv(b)
        return out if mask is None else out * mask


def called(model: nn.Module, **kwargs: Any) -> OptimizedModule:
    """The module for a call with keyword arguments, made without timing anything."""
    original, captured = captured_of(model, **kwargs)
    return OptimizedModule(original, captured, captured.program, Recipe(FP32, ()), Ledger("m", {}, ()))


def check(fast: OptimizedModule, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The call is answered as the model answers it."""
    with torch.no_grad():
        expected = model(*args, **kwargs)
    torch.testing.assert_close(fast(*args, **kwargs), expected, atol=1e-5, rtol=1e-4)


def test_keyword_arguments_keep_their_order() -> None:
    model = Sensors()
    fast = called(model, rgb=X, depth=Y)
    for _ in range(2):
        check(fast, model, rgb=X, depth=Y)
        check(fast, model, depth=Y, rgb=X)
    assert fast.health.late_captures == 1


def test_the_order_of_arguments_with_names_makes_no_program() -> None:
    model = Stereo()
    fast = called(model, right=X, left=Y)
    check(fast, model, right=X, left=Y)
    check(fast, model, left=Y, right=X)
    assert fast.health.late_captures == 0


def test_prepared_keyword_arguments_are_found_in_any_order() -> None:
    model = Stereo()
    fast = module_of(model, X, Y)
    fast.prepare_call((), {"right": X, "left": Y})
    fast.strict = True
    check(fast, model, left=Y, right=X)
    assert fast.health.late_captures == 0


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda d: collections.defaultdict(list, d)])
def test_dicts_keep_their_order(kind: Any) -> None:
    model = Model(lambda m, d: torch.cat([m.conv(v) * (i + 1) for i, v in enumerate(d.values())], 1))
    model.conv = nn.Conv2d(3, 4, 1)
    model.eval()
    fast = module_of(model, kind({"rgb": X, "depth": Y}))
    check(fast, model, kind({"rgb": X, "depth": Y}))
    check(fast, model, kind({"depth": Y, "rgb": X}))


def test_a_lane_io_finds_the_dtypes_of_arguments_with_names_in_any_order() -> None:
    class Takes(nn.Module):
        def forward(self, z: Tensor, a: Tensor) -> Tensor:
            assert (z.dtype, a.dtype) == (torch.float64, torch.float32)
            return z + a

    model = Takes().eval()
    around = LaneIO.of_call(model, (), {"z": X.double(), "a": Y}, torch.float16)
    low = {"a": Y.half(), "z": X.half()}
    assert torch.equal(around(**low), around(**dict(reversed(low.items()))))


def test_a_lane_io_keeps_a_tensor_that_is_given_twice() -> None:
    around = LaneIO.of_call(Model(lambda m, a, b: a * (2 if a is b else 3)), (X, X), {}, torch.float16)
    low = X.half()
    assert torch.equal(around(low, low), (X.half().float() * 2).half())


@pytest.mark.parametrize("example", [(X, X), (X, Y)], ids=["once", "twice"])
def test_a_program_in_a_lanes_dtype_answers_both_however_they_are_given(
    example: tuple[Tensor, Tensor],
) -> None:
    model = Stereo()
    args, _ = (around := LaneIO.of_call(model, example, {}, torch.bfloat16)).outside(example, {})
    fast, low = module_of(around, *args), (X.bfloat16(), Y.bfloat16())
    for a, b in ((low[0], low[1]), (low[0], low[0])):
        assert torch.allclose(fast(a, b).float(), model(a.float(), b.float()), atol=0.05)
    health = fast.health
    assert (health.late_captures, health.served_by_original) == (0, 0)


@pytest.mark.parametrize("example", [(X, X), (X, Y)], ids=["once", "twice"])
def test_a_model_that_uses_both_is_answered_by_one_program_however_they_are_given(
    example: tuple[Tensor, Tensor],
) -> None:
    model = Stereo()
    fast = module_of(model, *example)
    for _ in range(2):
        check(fast, model, X, Y)
        check(fast, model, X, X)
        check(fast, model, Y, Y)
    health = fast.health
    assert (health.late_captures, health.served_by_original) == (0, 0)


def test_a_model_that_asks_whether_both_are_one_answers_that_itself() -> None:
    model = Asks()
    fast = module_of(model, X, Y)
    for _ in range(2):
        check(fast, model, X, X)
        check(fast, model, X, Y)
        check(fast, model, X, X.clone())
    assert fast.health.served_by_original == 2
    needs_gradients = X.clone().requires_grad_()
    check(fast, model, needs_gradients.detach(), needs_gradients.detach())
    assert torch.equal(fast(needs_gradients, needs_gradients), model(needs_gradients, needs_gradients))


class AsksForLists(Conv):
    """Asks whether two of its lists, or what they hold, are one."""

    def forward(self, x: Tensor, a: list[Any], b: list[Any]) -> Tensor:
        out: Tensor = self.conv(x) * (2 if a is b else 3)
        return out if a[0] is b[0] else -out


@pytest.mark.parametrize("first_is_twice", [False, True])
def test_a_model_that_asks_whether_lists_are_one_answers_that_itself(first_is_twice: bool) -> None:
    model, one, other = AsksForLists(), [[1]], [[1]]
    fast = module_of(model, X, one, other)
    calls = [(one, other), (one, one), (one, [one[0]]), (other, other), (other, [[1]])]
    for a, b in reversed(calls) if first_is_twice else calls:
        torch.testing.assert_close(fast(Y, a, b), model(Y, a, b))
    assert fast.health.served_by_original == 3
    assert fast.health.late_captures == 0


def test_a_model_that_only_reads_its_lists_is_answered_by_one_program() -> None:
    model, sizes = Model(lambda m, x, a, b: x * a[0] + b["size"][0]), [3]
    fast = module_of(model, X, [3], {"size": [3]})
    for a, b in (([3], [3]), (sizes, sizes), (sizes, [3])):
        torch.testing.assert_close(fast(Y, a, {"size": b}), model(Y, a, {"size": b}))
    assert fast.health.served_by_original == fast.health.late_captures == 0


def test_a_strict_module_refuses_what_only_the_original_can_tell() -> None:
    fast = module_of(Asks(), X, Y, strict=True)
    fast(X, Y)
    with pytest.raises(StrictError, match="which of its arguments are the same tensor"):
        fast(X, X)


def test_a_new_shape_given_twice_makes_one_program_for_all_its_calls() -> None:
    model = Stereo()
    fast, wide = module_of(model, X, Y), torch.cat([X, Y], 3)
    check(fast, model, wide, wide)
    check(fast, model, wide, wide.clone())
    assert fast.health.late_captures == 1


def test_prepare_takes_a_tensor_that_is_given_twice() -> None:
    model = Stereo()
    fast, wide = module_of(model, X, Y), torch.cat([X, Y], 3)
    fast.prepare((wide, wide))
    fast.strict = True
    check(fast, model, wide, wide)
    check(fast, model, wide, wide + 1)
    assert fast.health.late_captures == 0
    with pytest.raises(InputError, match=r"only the original can answer .*the same tensor"):
        module_of(Asks(), X, Y).prepare((X, X))


def test_the_original_still_raises_its_own_error() -> None:
    def function(m: Any, a: Tensor, b: Tensor) -> Tensor:
        if a is b:
            raise ValueError("two images, please")
        return a + b

    fast = module_of(Model(function), X, Y)
    for _ in range(2):
        with pytest.raises(ValueError, match="two images, please"):
            fast(X, X)
    assert torch.equal(fast(X, Y), X + Y)


def test_what_only_some_calls_write_is_written_once() -> None:
    def function(m: Any, a: Tensor, b: Tensor) -> Tensor:
        return a.mul_(2) + b if a is b or a.shape[-1] > 8 else a + b

    fast, same, wide = module_of(Model(function), X, Y), X.clone(), torch.cat([X, Y], 3)
    assert torch.equal(fast(same, same), 4 * X)
    assert torch.equal(same, 2 * X)
    assert torch.equal(fast(wide, torch.zeros_like(wide)), 2 * torch.cat([X, Y], 3))
    assert torch.equal(wide, 2 * torch.cat([X, Y], 3))


MASK = torch.ones(1, 1, 8, 8, dtype=torch.bool)


@pytest.mark.parametrize(
    ("example", "other"),
    [
        (None, MASK),
        (MASK, None),
        (None, torch.full((), 2.0, dtype=torch.float64)),
        (2, torch.tensor(3)),
        (2, 3.0),
        (2, True),
        (2.0, np.float64(3.0)),
        (2.0, np.float32(3.0)),
        (torch.tensor(2.0), 3.0),
        (None, nn.Parameter(torch.ones(1))),
    ],
    ids=[
        *("a mask", "no mask", "a tensor", "a tensor for an int", "a float for an int", "a bool for an int"),
        *("NumPy's double", "NumPy's single", "a number for a tensor", "a parameter"),
    ],
)
def test_an_argument_of_another_kind_makes_another_call(example: Any, other: Any) -> None:
    model = Masked()
    fast = module_of(model, X, example, Y)
    for _ in range(2):
        check(fast, model, X, other, Y)
        check(fast, model, X, example, Y)


def test_another_dtype_at_the_same_place_is_refused_by_the_tensors_number() -> None:
    fast = module_of(Masked(), X, None, Y)
    with pytest.raises(InputError, match=r"tensor 1 of the call is float64.*dtype=torch.float32"):
        fast(X, None, Y.double())


class Pair(NamedTuple):
    """Two images."""

    a: Tensor
    b: Tensor


@dataclasses.dataclass
class Frames:
    """A class that pytree does not look into."""

    a: Tensor
    b: Tensor

    def __iter__(self) -> Any:
        return iter((self.a, self.b))


@pytest.mark.parametrize(
    "other",
    [(X, Y), [X, Y, X + 1], [X], Pair(X, Y), Frames(X, Y), [X, [Y]], [X, 2.0], [X, None]],
    ids=["tuple", "longer", "shorter", "named tuple", "dataclass", "deeper", "number", "none"],
)
def test_another_container_makes_another_call(other: Any) -> None:
    def function(m: Any, images: Any) -> Tensor:
        total = torch.zeros_like(X)
        for place, each in enumerate(images):
            inner = each[0] if isinstance(each, list) else each
            total = total + place * (0.5 if inner is None else inner) + isinstance(images, tuple)
        return total

    model = Model(function).eval()
    fast = module_of(model, [X, Y])
    for _ in range(2):
        check(fast, model, other)
        check(fast, model, [X, Y])
    if isinstance(other, Frames):
        other.a = other.a + 1
        check(fast, model, other)
