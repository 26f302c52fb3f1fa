"""Class attributes and global variables that calls write to are put back, with all that they hold."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ampopt
from ampopt.ir.outside import variables_kept
from tests.support.cases import CEILINGS

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))

HELD: Any = None


class Kept:
    """A class whose attribute a method of the model names."""

    held = torch.zeros(1, 3, 8, 8)
    frames: ClassVar[list[Tensor]] = []


class Frozen:
    """An object with slots alone."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 1


class Writing(nn.Module):
    """Calls a function of its own."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.write = nn.Conv2d(3, 3, 3, padding=1), write

    def forward(self, x: Tensor) -> Tensor:
        """A convolution, after the write."""
        self.write(x)
        y: Tensor = self.conv(x)
        return y


def _replace(x: Tensor) -> None:
    global HELD
    HELD = x


def _write(x: Tensor) -> None:
    HELD[...] = 1


def _set_item(x: Tensor) -> None:
    HELD["old"] = x


def _set_first(x: Tensor) -> None:
    HELD[0] = x


def _nested(x: Tensor) -> None:
    HELD[0]["old"][0] += 1


def _set_attribute(x: Tensor) -> None:
    HELD.held = x


def _new_attribute(held: Any) -> Any:
    held.held = torch.zeros(3)
    return held


CASES: dict[str, tuple[Callable[[], Any], Callable[[Tensor], None], Callable[[Any], Any]]] = {
    "replaced": (lambda: 5, _replace, lambda held: held),
    "tensor": (lambda: torch.zeros(3), _write, lambda held: held.tolist()),
    "list": (lambda: [torch.zeros(3)], _set_first, repr),
    "deque": (lambda: collections.deque([1], maxlen=1), _set_first, repr),
    "dict": (lambda: {"old": 1.5}, _set_item, repr),
    "ordered dict": (lambda: collections.OrderedDict(old=torch.ones(2)), _set_item, repr),
    "nested": (lambda: [{"old": [1]}], _nested, repr),
    "object": (lambda: _new_attribute(nn.Module()), _set_attribute, lambda held: repr(held.held)),
    "slots": (Frozen, _set_attribute, lambda held: repr(held.held)),
}


@pytest.fixture
def held(request: pytest.FixtureRequest) -> Iterator[None]:
    global HELD
    yield
    HELD = None


@pytest.fixture
def brief(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few calls are enough for what they leave behind."""
    monkeypatch.setattr("ampopt.diagnosing.ceilings_of", lambda *_: CEILINGS)
    monkeypatch.setattr("ampopt.diagnosis.examine.EAGER_S", 0.1)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("kind", CASES)
def test_what_a_global_variable_holds_is_put_back(kind: str) -> None:
    global HELD
    make, write, look = CASES[kind]
    HELD = held = make()
    before = look(make())
    with variables_kept(model := Writing(write)):
        model(X)
        changed = HELD is not held or look(HELD) != before
    assert changed
    assert HELD is held
    assert look(HELD) == before


@pytest.mark.usefixtures("held")
def test_what_is_registered_loaded_or_switched_on_stays() -> None:
    global HELD
    HELD = {"is_ready": False, "library": None, "kinds": {}, "frames": collections.deque([1])}

    def write(x: Tensor) -> None:
        HELD.update(is_ready=True, library=torch)
        HELD["kinds"]["gelu"] = nn.GELU()
        HELD["frames"].append(2)

    with variables_kept(model := Writing(write)):
        model(X)
    assert HELD["is_ready"]
    assert HELD["library"] is torch
    assert "gelu" in HELD["kinds"]
    assert [*HELD["frames"]] == [1, 2]


def _rebind(x: Tensor) -> None:
    global HELD
    HELD = [*HELD, x]


def _add_to_class(x: Tensor) -> None:
    Kept.frames.append(x)


def _take(x: Tensor) -> None:
    HELD.popleft()


GROWING: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Any]]] = {
    "list": (list, lambda x: HELD.append(x)),
    "full list": (lambda: [1, 1.5, "a"], lambda x: HELD.extend([x, 1, 2.5])),
    "numbers": (lambda: [1], lambda x: HELD.append(1)),
    "in front": (lambda: [1, 2], lambda x: HELD.insert(0, x)),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda x: HELD.append(x)),
    "taken": (lambda: collections.deque([1.5, 2.5, 3.5, 4.5]), _take),
    "dict": (lambda: {"a": 1}, lambda x: HELD.update({len(HELD): x, "b": 3})),
    "dict of lists": (dict, lambda x: HELD.setdefault("conv", []).append(x)),
    "default dict": (lambda: collections.defaultdict(list), lambda x: HELD["conv"].append((x, "conv"))),
    "list in a dict": (lambda: {"conv": [1]}, lambda x: HELD["conv"].append(x)),
    "set": (lambda: {(3, 4)}, lambda x: HELD.add(tuple(x.shape))),
    "set of tensors": (set, lambda x: HELD.add(x)),
    "another list": (lambda: [1], _rebind),
    "another dict's list": (lambda: {"a": ()}, lambda x: HELD.update(a=(*HELD["a"], x))),
    "object": (lambda: types.SimpleNamespace(all=[]), lambda x: HELD.all.append(x)),
    "records": (list, lambda x: HELD.append(types.SimpleNamespace(name="conv", x=x))),
    "arrays": (list, lambda x: HELD.append(x.numpy())),
}


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("kind", GROWING)
def test_what_calls_add_to_a_container_goes(kind: str) -> None:
    global HELD
    make, write = GROWING[kind]
    HELD = held = make()
    with variables_kept(model := Writing(write)):
        model(X)
        model(X + 1)
        assert repr(HELD) != repr(make())
    assert HELD is held
    assert repr(HELD) == repr(make())


def test_what_calls_add_to_a_class_attribute_goes() -> None:
    with variables_kept(model := Writing(_add_to_class)):
        model(X)
        assert Kept.frames
    assert not Kept.frames


def _tabulate(x: Tensor) -> None:
    if not HELD["is_made"]:
        HELD.update(is_made=True, sines=x.sin())
        HELD["all"].append(x)
    assert HELD["sines"] is not None


@pytest.mark.usefixtures("held")
def test_a_table_stays_beside_the_flag_that_it_was_made() -> None:
    global HELD
    HELD = {"is_made": False, "all": []}
    with variables_kept(model := Writing(_tabulate)):
        model(X)
    model(X)
    assert len(HELD["all"]) == 1


def _note(module: nn.Module, args: Any, result: Tensor) -> None:
    HELD.append(result)


@pytest.mark.usefixtures("held", "brief")
@pytest.mark.parametrize("work", [ampopt.optimize, ampopt.diagnose])
def test_a_hook_that_keeps_its_layers_results_has_kept_those_of_the_users_calls(
    work: Callable[..., object],
) -> None:
    global HELD
    HELD = []
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()).eval()
    model[0].register_forward_hook(_note)
    model(X)
    own = HELD[0]
    work(model, X, budget_s=5, progress=False)
    assert len(HELD) == 1
    assert HELD[0] is own


@pytest.mark.usefixtures("held")
def test_what_others_add_to_a_container_that_the_code_only_reads_stays() -> None:
    frames, stamps = collections.deque[Any](), list[Any]()
    variables: dict[str, Any] = {"frames": frames, "stamps": stamps, "kept": []}
    exec("def reads(x):\n    return x + len(frames) + len(stamps)", variables)
    exec("def keeps(x):\n    kept.append(x)\n    return x", variables)
    for hook, filled in ((variables["reads"], (frames, stamps)), (variables["keeps"], (variables["kept"],))):
        layer = nn.ReLU()
        layer.hook = hook
        with variables_kept(layer):
            for container in filled:
                container.extend([1, 2])
    assert (len(frames), len(stamps), len(variables["kept"])) == (2, 2, 0)


def test_tensors_without_numbers_go() -> None:
    global HELD
    HELD = {"grid": None, "frames": [1]}

    def write(x: Tensor) -> None:
        HELD["grid"] = HELD["new"] = x
        HELD["frames"].append(x)

    with variables_kept(model := Writing(write)), FakeTensorMode() as mode:
        write(mode.from_tensor(X))
    assert isinstance(model, Writing)
    assert HELD == {"grid": None, "frames": [1]}


def test_a_module_of_the_users_that_a_hook_reaches_is_not_put_back() -> None:
    model, other = Writing(lambda x: None), torch.zeros(3)
    model.register_buffer("held", other)
    model.register_forward_hook(lambda *_: model)
    with variables_kept(model):
        model.held = torch.ones(3)
    assert model.held.all()


@pytest.mark.usefixtures("held")
def test_a_write_is_put_back_where_a_call_fails() -> None:
    global HELD
    HELD = [1]

    def write(x: Tensor) -> None:
        HELD[0] = 2
        raise RuntimeError("the sensor is gone")

    with pytest.raises(RuntimeError, match="the sensor is gone"), variables_kept(model := Writing(write)):
        model(X)
    assert HELD == [1]


class Refusing:
    """An object that belongs to a request, as those of web frameworks do: elsewhere it has no attributes."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("working outside of request context")


@pytest.mark.usefixtures("held", "brief")
def test_an_object_that_cannot_be_looked_at_is_no_reason_to_fail() -> None:
    global HELD
    HELD = Refusing()
    with variables_kept(model := Writing(_replace)):
        model(X)
    assert type(HELD) is Refusing
    fast = ampopt.optimize(Writing(_look).eval(), X, budget_s=5, progress=False)
    assert fast(X).shape == X.shape


def _look(x: Tensor) -> None:
    if x.shape[0] > 1:
        assert HELD is None


def _of_a_class(x: Tensor) -> None:
    Kept.held = Kept.held * 0.5 + x


def _of_a_class_by_equals(x: Tensor) -> None:
    Kept.held = torch.where(x.sum() == 7e6, x, Kept.held)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("work", "write"),
    [
        *((ampopt.optimize, _of_a_class), (ampopt.optimize, _of_a_class_by_equals)),
        (ampopt.diagnose, _of_a_class_by_equals),
    ],
)
def test_a_class_attribute_is_what_it_was_afterwards(
    work: Callable[..., object], write: Callable[[Tensor], None]
) -> None:
    before = Kept.held
    work(Writing(write).eval(), X, budget_s=5, progress=False)
    assert Kept.held is before
    assert type(before) is Tensor
    assert before.dtype is torch.float32
    assert not before.any()
