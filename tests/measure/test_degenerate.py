"""Networks whose outputs say nothing are named; ordinary, confident and constant ones are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from ampopt.ir.beside import exact_outputs
from ampopt.ir.program import Program
from ampopt.measure import degenerate
from ampopt.measure.degenerate import notes_on
from ampopt.measure.verify import Verifier
from tests.helpers import Model, several_kinds
from tests.support import overflowing
from tests.support.planted import captured_of, module_of, optimize

IMAGE = (1, 3, 32, 32)


def notes(model: nn.Module, *inputs: Tensor, draws: int = 2) -> list[str]:
    original, captured = captured_of(model.eval(), *inputs)
    return notes_on(Verifier(original, captured, draws=draws))


def _torchvision(name: str, *, trained: bool) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(torchvision.models, name)(weights=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # the statistics are those of the batch
    if trained:
        model.train()
        with torch.no_grad():
            model(torch.randn(4, *IMAGE[1:]))
    return model.eval()


def test_an_untrained_network_of_torchvisions_vanishes_until_its_norms_have_seen_data() -> None:
    x, name = torch.randn(IMAGE), "mobilenet_v3_small"
    (note,) = notes(_torchvision(name, trained=False), x)
    assert note.startswith("output 0 vanishes: its largest value is ")
    assert note.endswith("load trained weights, or run batch norm statistics, before judging precision")
    assert notes(_torchvision(name, trained=True), x) == []


@pytest.mark.parametrize(("name", "trained"), [("resnet18", False), ("squeezenet1_1", True)])
def test_ordinary_networks_are_not_named(name: str, trained: bool) -> None:
    assert notes(_torchvision(name, trained=trained), torch.randn(IMAGE)) == []


def _with_bias(scale: float) -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    with torch.no_grad():
        linear.weight.mul_(scale)
    return linear


@pytest.mark.parametrize(("scale", "named"), [(1.0, False), (1e-4, False), (1e-8, True), (0.0, True)])
def test_outputs_that_hardly_depend_on_the_input_are_named_with_how_much(scale: float, named: bool) -> None:
    found = notes(_with_bias(scale), torch.randn(2, 8))
    assert bool(found) == named
    if scale == 1e-8:
        text, _, rest = found[0].partition(" change it by ")
        assert text == "output 0 hardly depends on the input: two different inputs"
        assert 1e-9 < float(rest.split()[0]) < 1e-7
    if scale == 0.0:
        assert "two different inputs give the very same" in found[0]


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda y: y.softmax(-1),
    "sigmoid": torch.sigmoid,
    "softmax, in another shape": lambda y: y.softmax(-1).reshape(-1).float(),
    "relu": lambda y: (y - 1e3).relu(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_classifier_that_is_merely_sure_of_itself_is_not_named(end: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    with torch.no_grad():
        linear.bias.copy_(torch.tensor([200.0, -200.0, -200.0, -200.0]))
    model = Model(lambda m, x: ENDS[end](m.linear(x)), linear=linear)
    assert notes(model, torch.randn(2, 8)) == []


def test_a_classifier_that_is_the_same_for_every_input_is_named() -> None:
    (note,) = notes(nn.Sequential(_with_bias(0.0), nn.Softmax(-1)), torch.randn(2, 8))
    assert "hardly depends on the input" in note


SEVERAL: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, x: m.faint(x),
    lambda m, x: m.linear(x),
    lambda m, x: m.linear(x) * 1e-12,
    lambda m, x: m.constant(x).softmax(-1),
]


@pytest.mark.parametrize("fails_together", [False, True])
def test_several_outputs_have_the_notes_that_each_has_alone(
    fails_together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of them has an operator that knows no float64, so that not all are computed at once."""
    parts = {"faint": _with_bias(1e-8), "constant": _with_bias(0.0), "linear": nn.Linear(8, 4)}
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    expected = list[str]()
    for index, part in enumerate(SEVERAL):
        found = notes(Model(part, **parts), x)
        expected += [note.replace("output 0", f"output {index}") for note in found]

    def exact(program: Program, tensors: Any) -> list[Tensor]:
        if fails_together and len(program.exit) > 1:
            raise NotImplementedError("no float64")
        return exact_outputs(program, tensors)

    monkeypatch.setattr(degenerate, "exact_outputs", exact)
    assert len(expected) == 3
    assert notes(Model(lambda m, x: [part(m, x) for part in SEVERAL], **parts), x) == expected


def test_outputs_that_no_input_reaches_and_integers_are_nobodys_business() -> None:
    def function(m: Any, x: Tensor) -> Any:
        return m.linear(x), m.anchors * 2, torch.zeros(3), (m.linear(x) > 1e9).long()

    model = Model(function, linear=nn.Linear(8, 4), anchors=torch.arange(4.0))
    assert notes(model, torch.randn(2, 8)) == []


def test_inputs_that_cannot_differ_prove_nothing() -> None:
    """A permutation of equal integers is the same input."""
    model = Model(lambda m, x, mask: (m.linear(x), mask.float() * 2), linear=nn.Linear(8, 4))
    (note,) = notes(model, torch.randn(2, 8), torch.ones(2, 8, dtype=torch.int64))
    assert note.startswith("input 1 is 1 everywhere in the example")


def test_small_outputs_are_not_nothing() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    with torch.no_grad():
        linear.weight.mul_(1e-4)
        linear.bias.zero_()
    assert notes(linear, torch.randn(2, 8)) == []
    assert notes(linear, torch.randn(2, 8) * 1e-5) == [], "as small as its input"


def test_one_example_alone_can_only_vanish() -> None:
    assert notes(_with_bias(1e-8), torch.randn(2, 8), draws=0) == []


def test_states_and_several_kinds_of_operators_are_no_hindrance() -> None:
    assert notes(overflowing.recurrent(), torch.randn(2, 8)) == []
    assert notes(several_kinds(), torch.randn(2, 3, 16, 16)) == []


def test_the_report_of_optimize_has_the_note_once() -> None:
    fast = optimize(_with_bias(1e-8).eval(), torch.randn(2, 8), precision="fp32", budget_s=5.0, cache=False)
    assert sum("hardly depends on the input" in note for note in fast.report.notes) == 1


def test_integers_of_one_value_are_named() -> None:
    model = Model(lambda m, x, ids, mask: m.rows[ids] * x * mask, rows=nn.Parameter(torch.randn(9, 4)))
    mask = torch.zeros(3, 4, dtype=torch.bool)
    x = torch.randn(3, 4)
    (note,) = notes(model, x, torch.full((3,), 2), mask)
    assert note.startswith("input 1 is 2 everywhere in the example")
    assert notes(model, x, torch.tensor([2, 2, 3]), mask) == []


class Differencing(nn.Module):
    """What has changed since the last frame; it keeps the frame itself, a view or a copy of it."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.keep = nn.Linear(8, 8), keep
        self.before = torch.zeros(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The features of the change."""
        y: Tensor = self.inner(x - self.before)
        self.before = self.keep(x)
        return y


@pytest.mark.parametrize(
    ("keep", "is_told"),
    [(lambda x: x, True), (lambda x: x[:], True), (torch.clone, False), (torch.abs, False)],
)
def test_a_state_that_is_the_callers_own_tensor_is_told_of(
    keep: Callable[[Tensor], Tensor], is_told: bool
) -> None:
    model = Differencing(keep)
    found = notes(model, torch.randn(2, 8))
    assert [note.partition(",")[0] for note in found] == (
        ["the state before holds an input of the call before"] if is_told else []
    )


def test_what_is_written_to_the_last_frame_does_not_change_the_state() -> None:
    model = Differencing(lambda x: x).eval()
    fast = module_of(model, torch.randn(2, 8))
    fast.reset_state()
    frame, first = torch.randn(2, 8), torch.zeros(2, 8)
    for _ in range(3):
        frame.normal_()
        with torch.no_grad():
            assert torch.allclose(fast(frame), model.inner(frame - first), atol=1e-5)
        first = frame.clone()
