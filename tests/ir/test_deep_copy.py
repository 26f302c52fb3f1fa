"""What is bound to a model is bound to its copy: hooks, closures, methods, references."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from typing import Any
from weakref import proxy, ref

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

import tests.ir.test_deep_copy as this
from ampopt.errors import InputError
from ampopt.ir.deep_copy import deep_copy, shared_with
from ampopt.ir.model_copy import exact_copy, private_copy
from tests.support.planted import optimize

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Seeing(nn.Module):
    """Returns the mean of a feature that something bound to it has put into `feats`."""

    def __init__(self, bind: Callable[[Any], None]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.feats: dict[str, Tensor] = {}
        self.outputs: list[Tensor] = []
        self.seen: Any = None
        bind(self)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what was seen, for each channel."""
        self.outputs.clear()
        y = self.body(x)
        found = self.outputs[0] if self.outputs else self.feats.get("f", y)
        out: Tensor = found.mean((2, 3)) + (self.seen(x) if self.seen is not None else 0)
        return out

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """A hook."""
        self.feats["f"] = output

    def twice(self, x: Tensor) -> Any:
        """Twice the mean of the first weight's bias, and of the input."""
        return self.get_parameter("body.0.bias").mean() * 2 + x.mean()


def _keep(model: Any, module: nn.Module, args: Any, output: Tensor, name: str = "f") -> None:
    model.feats[name] = output


class _Keeper:
    def __init__(self, model: Any) -> None:
        self.model = model

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.model.feats["f"] = output


def _hooked(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    def bind(model: Any) -> None:
        model.body[0].register_forward_hook(hook(model))

    return bind


def _by_default(model: Any) -> Any:
    return lambda module, args, output, feats=model.feats: feats.__setitem__("f", output)


def _by_keyword(model: Any) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor, *, feats: dict[str, Tensor] = model.feats) -> None:
        feats["f"] = output

    return hook


def _wrapping(model: Any) -> None:
    inside = model.body.forward

    def forward(x: Tensor) -> Tensor:
        out: Tensor = inside(x) * (1 + model.body[0].bias.mean())
        return out

    model.body.forward = forward


def _by_attribute(model: Any) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        own.feats["f"] = output

    own: Any = hook
    own.feats = model.feats
    return hook


BOUND: dict[str, Callable[[Any], None]] = {
    "closure": _hooked(lambda model: lambda module, args, output: model.feats.__setitem__("f", output)),
    "default": _hooked(_by_default),
    "keyword default": _hooked(_by_keyword),
    "function attribute": _hooked(_by_attribute),
    "partial": _hooked(lambda model: functools.partial(_keep, model)),
    "partial of a closure": _hooked(lambda model: functools.partial(lambda *a: _keep(model, *a))),
    "method of the model": _hooked(lambda model: model.keep),
    "method of another object": _hooked(lambda model: _Keeper(model).keep),
    "method of a list": lambda model: model.__dict__.__setitem__(
        "sink", model.body[0].register_forward_hook(lambda m, a, o, put=model.outputs.append: put(o))
    ),
    "weak reference": _hooked(lambda model: functools.partial(lambda r, *a: _keep(r(), *a), ref(model))),
    "weak proxy": _hooked(lambda model: functools.partial(_keep, proxy(model))),
    "wrapped forward": _wrapping,
    "function in a list": lambda model: setattr(model, "seen", [lambda x: model.twice(x)][0]),
    "cached": lambda model: setattr(model, "seen", functools.lru_cache(model.twice)),
    "method": lambda model: setattr(model, "seen", model.twice),
}


@pytest.mark.parametrize("how", BOUND)
def test_what_is_bound_to_the_model_is_bound_to_the_copy(how: str) -> None:
    model = Seeing(BOUND[how]).eval()
    with torch.no_grad():
        model(X)  # the usual warm-up
        kept, outputs = dict(model.feats), list(model.outputs)
        duplicate: Any = exact_copy(model)
        assert shared_with(model, duplicate) is None
        expected = model(X + 1)
        model.feats.clear()
        model.feats.update(kept)
        model.outputs[:] = outputs
        assert torch.equal(duplicate(X + 1), expected)
        assert model.feats.keys() == kept.keys()
        assert all(model.feats[name] is kept[name] for name in kept)
        assert len(model.outputs) == len(outputs)
        for weight in duplicate.parameters():
            weight.mul_(2.0)
        assert not torch.equal(duplicate(X + 1), expected)
        twin = Seeing(BOUND[how]).eval()
        twin.load_state_dict(duplicate.state_dict())
        assert torch.equal(duplicate(X + 1), twin(X + 1))


@pytest.mark.parametrize("how", ["closure", "default", "method of a list", "wrapped forward"])
def test_a_model_with_bound_functions_is_right_for_other_inputs_and_stays_as_it_is(how: str) -> None:
    model = Seeing(BOUND[how]).eval()
    with torch.no_grad():
        model(X)
        kept, outputs = dict(model.feats), list(model.outputs)
        fast = optimize(model, X, precision="fp32", cache=False, budget_s=5.0)
        assert all(model.feats[name] is kept[name] for name in kept)
        assert all(one is other for one, other in zip(model.outputs, outputs, strict=True))
        for x in (X + 1, X * 2):
            assert torch.allclose(fast(x), model(x), atol=1e-5)


def test_a_variable_of_several_functions_is_one_variable_of_their_copies() -> None:
    def counter() -> list[Callable[[], int]]:
        count = 0

        def advance() -> int:
            nonlocal count
            count += 1
            return count

        return [advance, lambda: count]

    model: Any = nn.Module()
    model.pair = counter()
    model.pair[0]()
    duplicate: Any = exact_copy(model)
    assert duplicate.pair[0]() == 2
    assert (duplicate.pair[1](), model.pair[1]()) == (2, 1)


def test_a_function_that_calls_itself_and_an_unset_variable() -> None:
    def make() -> Callable[[int], int]:
        def factorial(n: int) -> int:
            return 1 if n == 0 else n * factorial(n - 1)

        if X is None:
            later: int = 1
        held: Any = factorial
        held.unset = lambda: later
        return factorial

    made = make()
    copied = deep_copy(made, {})
    assert copied is not made
    assert copied(4) == 24
    assert copied.__closure__[0].cell_contents is copied


def test_functions_of_modules_and_what_cannot_be_copied_are_shared() -> None:
    import math

    lock = threading.Lock()
    model: Any = nn.Module()
    model.held = [nn.functional.max_pool2d, torch.relu, math, lambda: lock, _keep]
    duplicate: Any = exact_copy(model)
    held = duplicate.held
    assert held[:3] == model.held[:3]
    assert held[3]() is lock
    assert held[4] is _keep


def test_what_cannot_be_copied_and_leads_to_the_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    steps = (module for module in [model])
    held = [threading.Lock(), model, steps]
    model.register_forward_hook(lambda *_: held and None)
    with pytest.raises(InputError, match="cannot be copied"):
        private_copy(model)


MODEL: nn.Module | None = None


def _global_hook(module: nn.Module, args: Any, output: Tensor) -> None:
    assert MODEL is not None
    MODEL.seen = output


def test_a_hook_that_names_the_model_as_a_global_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    monkeypatch.setattr(this, "MODEL", model)
    model[0].register_forward_hook(this._global_hook)
    with pytest.raises(InputError, match=r"<global MODEL> is the original's Sequential"):
        private_copy(model)


def test_an_attribute_with_the_name_of_a_global_variable_is_not_that_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.MODEL = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return self.MODEL(x)

    model = Wrapping()
    monkeypatch.setattr(this, "MODEL", model)
    assert shared_with(model, private_copy(model)) is None


def test_a_model_that_a_method_of_a_class_reaches_by_its_closure_answers_itself() -> None:
    model = Seeing(lambda model: None).eval()

    class Keeper:
        def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
            model.feats["f"] = output

    model.body[0].register_forward_hook(Keeper().keep)
    with torch.no_grad():
        model(X)
        kept = dict(model.feats)
        fast = optimize(model, X, cache=False, budget_s=2.0)
        assert all(model.feats[name] is kept[name] for name in kept)
        assert "is the original's Seeing" in fast.report.notes[0]
        assert torch.equal(fast(X + 1), model(X + 1))


def test_a_graph_module_keeps_its_hooks_and_those_inside() -> None:
    def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * scale["by"]

    scale = {"by": 2.0}
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model.register_forward_hook(doubled)
    model.get_submodule("0").register_forward_hook(lambda module, args, output: output + scale["by"])
    duplicate: Any = exact_copy(model)
    x = torch.ones(1, 2)
    expected = model(x)
    scale["by"] = 5.0
    assert torch.equal(duplicate(x), expected)


def test_a_feature_extractor_stays_in_its_mode() -> None:
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    model = extraction.create_feature_extractor(body, return_nodes={"2": "out"}).eval()
    model.get_submodule("2").train()
    duplicate = exact_copy(model)
    assert [each.training for each in duplicate.modules()] == [each.training for each in model.modules()]
    model.eval()
    assert torch.equal(private_copy(model)(X)["out"], model(X)["out"])
    assert torch.equal(exact_copy(private_copy(model))(X)["out"], model(X)["out"])


def test_results_that_autograd_has_left_in_a_container_are_copied() -> None:
    model = Seeing(BOUND["closure"])
    model(X)  # not under no_grad
    assert not model.feats["f"].is_leaf
    duplicate: Any = exact_copy(model)
    assert torch.equal(duplicate.feats["f"], model.feats["f"])
    assert duplicate.feats["f"] is not model.feats["f"]


def test_an_exported_module_keeps_what_its_check_of_inputs_reads() -> None:
    x = torch.ones(1, 4)
    exported = torch.export.export(nn.Linear(4, 2), (x,)).module()
    duplicate = exact_copy(exported)
    assert torch.equal(duplicate(x), exported(x))
    with pytest.raises(AssertionError, match="Guard failed"):
        exported(torch.ones(2, 4))
    with pytest.raises(AssertionError, match="Guard failed"):
        duplicate(torch.ones(2, 4))


def test_an_ordered_dict_is_copied_with_its_order_its_attributes_and_what_leads_back_to_it() -> None:
    model: Any = nn.Linear(2, 2)
    model.table = collections.OrderedDict({"z": [1], model.weight: model, "a": None})
    model.table["self"], model.table.kept = model.table, model.table["z"]
    model.again = model.table
    model.table.move_to_end("z")
    made: Any = exact_copy(model)
    assert type(made.table) is collections.OrderedDict
    assert list(made.table) == [made.weight, "a", "self", "z"]
    assert made.table[made.weight] is made
    assert made.again is made.table is made.table["self"] is not model.table
    assert vars(made.table).keys() == {"kept"}
    assert made.table.kept is made.table["z"] is not model.table["z"]
    assert not hasattr(exact_copy(nn.Linear(2, 2))._forward_hooks, "__orig_class__")


@pytest.mark.filterwarnings("error")
def test_the_structure_of_a_call_is_copied_without_a_warning() -> None:
    held = tree_flatten((X, [X]))[1]
    assert deep_copy({"held": held}, {}) == {"held": held}


def test_a_gradient_that_a_tensor_has_left_is_copied() -> None:
    tensor = torch.ones(2, requires_grad=True)
    tensor.sum().backward()
    tensor.requires_grad_(False)
    copied = deep_copy([tensor], {})[0]
    assert copied.grad.tolist() == [1.0, 1.0]
    assert copied.grad is not tensor.grad


class _Clearing:
    """Replaces an empty dict of its owner's while it is copied, and is a list of new ones."""

    def __init__(self, owner: dict[str, Any]) -> None:
        self.owner = owner

    def __reduce_ex__(self, _: Any) -> Any:
        self.owner["cache"] = None
        return list, ([{"k": number} for number in range(50)],)


def test_an_empty_dict_that_is_replaced_during_the_copy_is_taken_for_no_other() -> None:
    owner: dict[str, Any] = {"cache": {}}
    owner["child"] = _Clearing(owner)
    assert deep_copy(owner, {})["child"] == [{"k": number} for number in range(50)]
