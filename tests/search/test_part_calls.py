"""A submodule is a part only if its calls change nothing, and depend on nothing that changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests.search.test_part_calls as this
from ampopt.ir.model_copy import private_copy
from ampopt.search.part_calls import calls_of_parts
from tests.support.norms import training
from tests.support.planted import keep_the_patched, optimize

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SEEN: list[Tensor] = []


class Body(nn.Module):
    """A submodule that would be a graph, if it did nothing else than it returns."""

    latest: Any = None

    def __init__(self, leave: Callable[[Any, Tensor], object] | None = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.feat: Any = None
        self.feats: dict[str, Tensor] = {}
        self.held: list[Any] = []
        self.scale: Any = 1.0
        self.cache: dict[int, Tensor] = {}
        self.register_buffer("last", torch.zeros(1, 4, 4, 4))
        self.leave = [leave]

    def forward(self, x: Tensor) -> Tensor:
        """The features, which it may also leave somewhere."""
        y = self.stem(x)
        if self.leave[0] is not None:
            self.leave[0](self, y)
        out: Tensor = y * self.scale
        return out


class Net(nn.Module):
    """A model that is no single graph; `read` is what it takes from its body besides the result."""

    def __init__(
        self,
        read: Callable[[Any, Tensor], Any] = lambda body, y: y,
        leave: Callable[[Any, Tensor], object] | None = None,
        before: Callable[[Any, Tensor], object] = lambda body, x: None,
    ) -> None:
        super().__init__()
        self.bb = Body(leave)
        self.head = nn.Conv2d(4, 4, 1)
        self.how = [read, before]

    def forward(self, x: Tensor) -> Any:
        """The head's result, and the mean of what was read."""
        self.how[1](self.bb, x)
        y = self.head(self.bb(x))
        if y.sum().item() > 1e9:
            y = y * 2
        return y, self.how[0](self.bb, y).mean((2, 3))


def _hook_inside(net: Net) -> None:
    bb = net.bb
    bb.stem[0].register_forward_hook(lambda module, args, output: bb.feats.__setitem__("f", output))


class _Keeper:
    def __init__(self, feats: dict[str, Tensor]) -> None:
        self.feats = feats

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.feats["f"] = output


def _hook_of_an_object(net: Net) -> None:
    net.bb.stem[0].register_forward_hook(_Keeper(net.bb.feats).keep)


def _hook_that_names_a_global(net: Net) -> None:
    net.bb.stem[0].register_forward_hook(this._global_hook)


def _global_hook(module: nn.Module, args: Any, output: Tensor) -> None:
    SEEN[:] = [output]


def _closure(body: Any, y: Tensor) -> Tensor:
    out: Tensor = body.held[1]()
    return out


def _with_closure(net: Net) -> None:
    kept: Any = None

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal kept
        kept = output

    net.bb.held = [keep, lambda: kept]
    net.bb.stem[0].register_forward_hook(keep)


def _as_it_is(net: Net) -> None:
    net.eval()


LEFT: dict[str, tuple[Net, Callable[[Net], None]]] = {
    "attribute": (Net(lambda b, y: b.feat, lambda b, y: setattr(b, "feat", y)), _as_it_is),
    "dict": (Net(lambda b, y: b.feats["f"], lambda b, y: b.feats.update(f=y)), _as_it_is),
    "list": (Net(lambda b, y: b.held[-1], lambda b, y: b.held.append(y)), _as_it_is),
    "class attribute": (Net(lambda b, y: Body.latest, lambda b, y: setattr(Body, "latest", y)), _as_it_is),
    "global list": (Net(lambda b, y: SEEN[0], lambda b, y: SEEN.__setitem__(slice(None), [y])), _as_it_is),
    "buffer": (Net(lambda b, y: b.last, lambda b, y: b.last.copy_(y)), _as_it_is),
    "cache by id": (
        Net(lambda b, y: next(iter(b.cache.values())), lambda b, y: b.cache.setdefault(id(y), y)),
        _as_it_is,
    ),
    "hook inside": (Net(lambda b, y: b.feats["f"]), _hook_inside),
    "hook of an object": (Net(lambda b, y: b.feats["f"]), _hook_of_an_object),
    "global hook": (
        Net(lambda b, y: SEEN[0]),
        _hook_that_names_a_global,
    ),
    "closure": (Net(_closure), _with_closure),
    "set by the parent": (
        Net(before=lambda b, x: setattr(b, "scale", x.mean().item())),
        _as_it_is,
    ),
    "tensor set by the parent": (
        Net(before=lambda b, x: setattr(b, "scale", x.mean() * torch.ones(1))),
        _as_it_is,
    ),
    "buffer set by the parent": (
        Net(lambda b, y: y, lambda b, y: y.add_(b.last), before=lambda b, x: b.last.fill_(x.mean().item())),
        _as_it_is,
    ),
    "parent reads after it set it back": (
        Net(
            lambda b, y: vars(b).pop("feat"),
            lambda b, y: setattr(b, "feat", y),
        ),
        _as_it_is,
    ),
}


@pytest.mark.parametrize("how", LEFT)
def test_what_is_left_anywhere_or_comes_from_anywhere_makes_it_no_part(how: str) -> None:
    net, prepare = LEFT[how]
    prepare(net.eval())
    with torch.no_grad():
        net(X)  # the usual warm-up
    seen = calls_of_parts(private_copy(net), ["bb", "head"], (X,), {})
    assert seen["bb"].why_not is not None
    assert seen["head"].why_not is None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["attribute", "hook inside", "set by the parent", "global list", "closure"])
def test_the_model_is_right_for_other_inputs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_patched(monkeypatch)
    net, prepare = LEFT[how]
    prepare(net.eval())
    with torch.no_grad():
        net(X)
        fast = optimize(net, X, precision="fp32", cache=False)
        assert "bb" not in fast.report.regions
        assert fast.report.chosen == "fp32", fast.report.notes
        assert any(note.startswith("submodule bb is not one graph: ") for note in fast.report.notes)
        for x in (X + 1, X * 2):
            for found, expected in zip(fast(x), net(x), strict=True):
                assert torch.allclose(found, expected, atol=1e-5)


def test_hooks_of_the_submodule_itself_are_left_and_others_that_leave_nothing() -> None:
    net = Net().eval()
    kept: list[Tensor] = []
    net.bb.register_forward_hook(lambda module, args, output: kept.append(output))
    net.bb.stem[0].register_forward_hook(lambda module, args, output: output * 2)
    seen = calls_of_parts(private_copy(net), ["bb"], (X,), {})
    assert seen["bb"].why_not is None
    assert len(seen["bb"].calls) == 1


def test_a_weight_that_every_call_computes_anew_is_no_change() -> None:
    net = Net().eval()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(net.bb.stem[0])
    assert calls_of_parts(private_copy(net), ["bb"], (X,), {})["bb"].why_not is None


def test_without_other_inputs_whatever_is_computed_anew_is_a_change() -> None:
    class Picky(Net):
        def forward(self, x: Tensor) -> Any:
            if not torch.equal(x, X):
                raise ValueError("another image")
            return super().forward(x)

    net = Picky(lambda b, y: b.feat, lambda b, y: setattr(b, "feat", y)).eval()
    with torch.no_grad():
        net(X)
    seen = calls_of_parts(private_copy(net), ["bb", "head"], (X,), {})
    assert seen["bb"].why_not == "feat changes when it is called"
    assert seen["head"].why_not is None


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    yield


class Decorated(Body):
    """A submodule with methods that a context manager's function decorates, the forward among them."""

    @_guarded()
    def initialize(self) -> None:
        """What no call runs."""

    @_guarded()
    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        return super().forward(x)


def test_a_context_manager_as_a_decorator_is_no_change() -> None:
    net = Net().eval()
    net.bb = Decorated().eval()
    assert calls_of_parts(private_copy(net), ["bb"], (X,), {})["bb"].why_not is None


def test_a_container_that_it_is_called_with_and_changes() -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
            kept["f"] = self.conv(x)
            return kept["f"] * 2

    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bb = Filling()

        def forward(self, x: Tensor) -> Any:
            kept: dict[str, Tensor] = {}
            y = self.bb(x, kept)
            return y, kept["f"]

    seen = calls_of_parts(Giving().eval(), ["bb"], (X,), {})
    assert seen["bb"].why_not == "it changes a container that it is called with"


class Returning(nn.Module):
    """Returns a table that it holds, and its input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.table = torch.ones(3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The features, the table, the input."""
        return self.conv(x), self.table, x


class Around(nn.Module):
    """A model that is no single graph around a submodule, with what `use` makes of that."""

    def __init__(self, body: nn.Module, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.bb, self.use = body, [use]

    def forward(self, x: Tensor) -> Any:
        """What `use` makes of it."""
        y = self.use[0](self.bb, x * 1)
        return y * 2 if y.sum().item() > 1e9 else y


def _called_twice(body: Any, x: Tensor) -> Tensor:
    out: Tensor = body(body(x) * 2) + body(x[..., :6]).mean()
    return out


def _writes_to_its_table(body: Any, x: Tensor) -> Tensor:
    y, table, _ = body(x)
    table.add_(x.mean().item())
    out: Tensor = y * body.table
    return out


def _writes_to_its_input(body: Any, x: Tensor) -> Tensor:
    y, _, same = body(x)
    same.mul_(2)
    out: Tensor = x + y
    return out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("body", "use", "parts"),
    [
        (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()), _called_twice, ["bb"]),
        (Returning(), _writes_to_its_table, ["bb.conv"]),
        (Returning(), _writes_to_its_input, ["bb"]),
    ],
    ids=["called twice", "its table is written to", "its input is written to"],
)
def test_results_that_are_used_in_other_ways(
    body: nn.Module, use: Any, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_the_patched(monkeypatch)
    model = Around(body, use).eval()
    twin = private_copy(model)
    with torch.no_grad():
        fast = optimize(model, X, precision="fp32", cache=False)
        assert list(fast.report.regions) == parts
        for x in (X + 1, X * 2, X):
            assert torch.allclose(fast(x), twin(x), atol=1e-5)


class Transformed(nn.Module):
    """Layers of which one is called in `vmap` only, one outside of it only, and one in both."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside, self.both = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def along(row: Tensor) -> Tensor:
            return self.inside(self.both(row))  # type: ignore[no-any-return]

        rows: Tensor = torch.vmap(along)(x)
        return self.both(rows) + self.outside(x)  # type: ignore[no-any-return]


def test_calls_within_a_transform_are_no_calls_of_a_part() -> None:
    model, x = Transformed().eval(), torch.randn(3, 4)
    calls = calls_of_parts(model, ["inside", "outside", "both"], (x,), {})
    assert sorted(calls) == ["both", "outside"]
    assert all(part.why_not is None and len(part.calls) == 1 for part in calls.values())
    assert all(args[0].shape == (3, 4) for part in calls.values() for args, _ in part.calls)


@pytest.mark.parametrize(("path", "named"), [("0.0", "it"), ("0", "0 (AdaptingBatchNorm2d)")])
def test_a_norm_that_moves_its_statistics_is_named_with_what_to_do(path: str, named: str) -> None:
    model = nn.Sequential(nn.Sequential(training(nn.BatchNorm2d, 3), nn.ReLU())).eval()
    why_not = calls_of_parts(private_copy(model), [path], (X,), {})[path].why_not
    assert why_not is not None
    changed, does = why_not.split(": ")
    assert changed.removeprefix("0.") == "num_batches_tracked changes when it is called"
    assert does == f"{named} normalizes by its input, as in training, and does not in evaluation mode"
