"""Models of which a copy would not be the model are not optimized, and those that can be copied are."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import UncopyableError
from ampopt.ir.copyable import check_copyable
from ampopt.ir.model_copy import exact_copy
from tests.support.planted import optimize

X = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SCALES: dict[Any, float] = {}
WEAK: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
MADE: list[Any] = []
MARK = object()


class Mode:
    """A way to work, told by identity."""

    def __init__(self, name: str) -> None:
        self.name = name


FAST = Mode("fast")
MODES, TABLE = [FAST], {FAST: 3.0}
DRAWS, LOG = random.Random(0), Mode("")


class Scaled(nn.Module):
    """A convolution, times what a method finds for it."""

    of_class: ClassVar[dict[Any, float]] = {}

    def __init__(self, keep: Callable[[Any], object], find: Callable[[Any], float]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.find = find
        self.kept: Any = None
        keep(self)
        MADE.append(self)

    def scale(self) -> float:
        """What was found, 1 where nothing was."""
        return self.find(self)

    def forward(self, x: Tensor) -> Tensor:
        """The scaled features."""
        result: Tensor = self.conv(x) * self.scale()
        return result


class Forgetting:
    """Copies of it begin anew."""

    def __init__(self) -> None:
        self.measured, self.calls = 1.0, 0

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.measured, self.calls = 1.0, 0


class Listed(list[int]):
    """Copies of it lose an attribute."""

    def __init__(self, measured: float | None = None) -> None:
        super().__init__()
        if measured is not None:
            self.measured = measured

    def __reduce__(self) -> Any:
        return Listed, ()


class Renewed:
    """Copies itself as another one."""

    def __init__(self, measured: float) -> None:
        self.measured = measured

    def __deepcopy__(self, memo: dict[int, Any]) -> Renewed:
        return Renewed(1.0)


class InMethod(Scaled):
    """A registry that only a method names."""

    def scale(self) -> float:
        """By the layer."""
        return SCALES.get(self.conv, 1.0)


class ByClass(Scaled):
    """A registry in the class."""

    def scale(self) -> float:
        """By the layer's identity."""
        return self.of_class.get(id(self.conv), 1.0)


class ByMode(Scaled):
    """Its class has the modes."""

    dark, bright = Mode("dark"), Mode("bright")

    def scale(self) -> float:
        """By the mode."""
        return 3.0 if self.kept == self.bright else 1.0


class ByWeak(Scaled):
    """A registry that keeps nothing alive."""

    def scale(self) -> float:
        """By the layer."""
        return WEAK.get(self.conv, 1.0)


class ByWeight(Scaled):
    """A registry of tensors."""

    def scale(self) -> float:
        """By the weight."""
        return SCALES.get(self.conv.weight, 1.0)


def _keep(model: Any, kept: Any) -> None:
    model.kept = kept


def _forgetting(model: Any, kind: Callable[[], Any] = Forgetting) -> None:
    model.kept = kind()
    model.kept.measured = 3.0


def _called(model: Any) -> None:
    model.kept = Forgetting()
    model.kept.calls = 7


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "by layer": (
        lambda: InMethod(lambda m: SCALES.update({m.conv: 3.0}), lambda m: 1.0),
        r"the global variable SCALES.* the original's conv",
    ),
    "by weight": (
        lambda: ByWeight(lambda m: SCALES.update({m.conv.weight: 3.0}), lambda m: 1.0),
        "the global variable SCALES knows the original's conv.weight by its identity",
    ),
    "in a class": (
        lambda: ByClass(lambda m: m.of_class.update({id(m.conv): 3.0}), lambda m: 1.0),
        "the class attribute Scaled.of_class knows the original's conv by its identity",
    ),
    "weakly": (
        lambda: ByWeak(lambda m: WEAK.update({m.conv: 3.0}), lambda m: 1.0),
        r"the global variable WEAK.* is the original's conv",
    ),
    "by address": (
        lambda: Scaled(
            lambda m: _keep(m, m.conv.weight.data_ptr()),
            lambda m: 3.0 if m.kept == m.conv.weight.data_ptr() else 1.0,
        ),
        "kept knows the original's conv.weight by its identity or address",
    ),
    "in words": (
        lambda: Scaled(
            lambda m: _keep(m, {f"conv{id(m.conv)}": 3.0}),
            lambda m: float(m.kept.get(f"conv{id(m.conv)}", 1.0)),
        ),
        "kept knows the original's conv by its identity",
    ),
    "by hash": (
        lambda: Scaled(lambda m: _keep(m, [hash(m.conv)]), lambda m: 3.0 if hash(m.conv) in m.kept else 1.0),
        r"kept\[0\] knows the original's conv by its identity",
    ),
    "of a list": (
        lambda: Scaled(lambda m: _keep(m, Listed(3.0)), lambda m: float(getattr(m.kept, "measured", 1.0))),
        "kept.measured is another",
    ),
    "left out": (
        lambda: Scaled(_forgetting, lambda m: float(m.kept.measured)),
        "kept.measured is another: its class copies it otherwise",
    ),
    "in a list": (
        lambda: Scaled(lambda m: _keep(m, [{"a": Renewed(3.0)}]), lambda m: float(m.kept[0]["a"].measured)),
        r"kept\[0\]\['a'\]\.measured is another",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_copy_that_would_not_be_the_model_is_refused_and_the_original_answers(case: str) -> None:
    make, why = REFUSED[case]
    model = make().eval()
    try:
        with pytest.raises(UncopyableError, match=f"the model cannot be copied: in its copy {why}"):
            check_copyable(model)
        fast = optimize(model, X, budget_s=5.0)
        assert torch.equal(fast(X), model(X))
    finally:
        SCALES.clear()
        ByClass.of_class.clear()


COPIED: dict[str, Callable[[], nn.Module]] = {
    "by identity": lambda: Scaled(
        lambda m: _keep(m, {id(m.conv): 3.0, id(m): 2.0}),
        lambda m: float(m.kept.get(id(m.conv), 1.0) * m.kept.get(id(m), 1.0)),
    ),
    "by the weight's identity": lambda: Scaled(
        lambda m: _keep(m, [id(m.conv.weight)]), lambda m: 3.0 if id(m.conv.weight) in m.kept else 1.0
    ),
    "by layer": lambda: Scaled(lambda m: _keep(m, {m.conv: 3.0}), lambda m: float(m.kept.get(m.conv, 1.0))),
    "a mark": lambda: Scaled(lambda m: _keep(m, MARK), lambda m: 3.0 if m.kept is MARK else 1.0),
    "an object of the file": lambda: Scaled(
        lambda m: _keep(m, {"mode": FAST}), lambda m: 3.0 if m.kept["mode"] is FAST else 1.0
    ),
    "compared from the left": lambda: Scaled(
        lambda m: _keep(m, FAST), lambda m: 3.0 if m.kept and FAST is m.kept else 1.0
    ),
    "among some": lambda: Scaled(lambda m: _keep(m, FAST), lambda m: 3.0 if m.kept in (MARK, FAST) else 1.0),
    "among those of a list": lambda: Scaled(lambda m: _keep(m, FAST), lambda m: 1.0 + 2 * (m.kept in MODES)),
    "in a table": lambda: Scaled(lambda m: _keep(m, FAST), lambda m: TABLE[m.kept]),
    "an object of a class": lambda: ByMode(lambda m: _keep(m, m.bright), lambda m: 1.0),
    "an attribute of a weight": lambda: Scaled(
        lambda m: setattr(m.conv.weight, "scale", 3.0), lambda m: float(getattr(m.conv.weight, "scale", 1.0))
    ),
    "by reference": lambda: Scaled(
        lambda m: _keep(m, weakref.ref(m.conv)), lambda m: 3.0 if m.kept() is m.conv else 1.0
    ),
    "what nothing reads is left out": lambda: Scaled(_called, lambda m: float(m.kept.measured)),
}


@pytest.mark.parametrize("case", COPIED)
def test_a_copy_that_is_the_model_is_made(case: str) -> None:
    model = COPIED[case]().eval()
    check_copyable(model)
    assert torch.equal(exact_copy(model)(X), model(X))
    fast = optimize(model, X, precision="fp32", budget_s=5.0)
    torch.testing.assert_close(fast(X), model(X))
    assert not any("copied" in note for note in fast.report.notes)


def test_objects_that_are_not_compared_stay_the_users() -> None:
    def log(model: Any) -> float:
        LOG.name += "."
        return DRAWS.random() and 1.0

    model = Scaled(lambda m: _keep(m, [DRAWS, LOG]), lambda m: 1.0)
    check_copyable(Scaled(lambda m: _keep(m, [DRAWS, LOG]), log))
    copied: Any = exact_copy(model)
    assert copied.kept[0] is not DRAWS
    assert copied.kept[1] is not LOG


class Caching:
    """Copies of it fill their cache anew."""

    def __init__(self) -> None:
        self.cache: dict[str, float] = {"a": 3.0}
        self.mean: Tensor | None = torch.ones(2)
        self.lazily: dict[str, float] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.cache, self.mean, self.lazily = {}, None, {}


def test_a_cache_that_a_copy_fills_anew_is_no_obstacle() -> None:
    model = Scaled(
        lambda m: _keep(m, Caching()),
        lambda m: float(m.kept.cache.setdefault("a", 3.0) + len(m.kept.lazily or ()) + (m.kept.mean is None)),
    )
    check_copyable(model)


def test_an_array_that_a_copy_lays_out_otherwise_is_the_same() -> None:
    anchors = np.arange(24.0).reshape(4, 6).T[::2]
    model = Scaled(lambda m: _keep(m, anchors), lambda m: float(m.kept[1, 1]))
    check_copyable(model)
    copied: Any = exact_copy(model)
    assert np.array_equal(copied.kept, anchors)


def test_an_attribute_named_as_a_modules_variable_is_no_obstacle() -> None:
    perception: Any = ModuleType("perception")
    perception.conv = nn.Conv2d(3, 4, 3)
    exec("def scale(y):\n    return 3.0", vars(perception))
    variables = {"perception": perception}
    exec(
        "def reads(m):\n    return perception.scale(m.conv)\n"
        "def reaches(m):\n    return perception.conv.bias.sum().item()",
        variables,
    )

    def own(model: Any) -> None:
        model.conv = perception.conv

    check_copyable(Scaled(own, variables["reads"]))
    with pytest.raises(UncopyableError, match=r"the global variable perception\.conv is the original's conv"):
        check_copyable(Scaled(own, variables["reaches"]))


def test_what_only_the_constructor_names_is_no_obstacle() -> None:
    model = Scaled(lambda m: None, lambda m: 1.0)
    assert model in MADE
    check_copyable(model)


def test_a_part_that_copies_lose_or_change_is_told() -> None:
    class Dropping(nn.Sequential):
        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Sequential:
            return nn.Sequential(self[0])

    class Anew(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Anew:
            return Anew(self.in_features, self.out_features)

    with pytest.raises(UncopyableError, match=r"in its copy 0\.1(\.bias)? is missing, or new"):
        check_copyable(nn.Sequential(Dropping(nn.ReLU(), nn.Linear(2, 2))))
    with pytest.raises(UncopyableError, match=r"in its copy 0\.bias is another"):
        check_copyable(nn.Sequential(Anew(2, 2)))


def test_a_model_whose_weights_are_to_come_says_so_itself() -> None:
    check_copyable(nn.Sequential(nn.LazyLinear(2)))
