"""What is computed as in training, in either mode: told with its module and line, and only where it is so."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt.diagnosis.findings import training_mode
from ampopt.diagnosis.watch import watch
from ampopt.ir.model_copy import private_copy
from tests.helpers import Model
from tests.support.cases import CPU, case_of, every_remedy_helps
from tests.support.norms import training

X, STEPS = torch.randn(2, 3, 8, 8), torch.randn(5, 2, 16)
DRAWN = itertools.count()


def found_in(model: nn.Module, *inputs: Tensor) -> dict[str, Any]:
    """The findings about a model in its own mode, by name."""
    case = dataclasses.replace(
        case_of(nn.ReLU(), X),
        model=model,
        original=private_copy(model),
        args=inputs,
        watched=watch(private_copy(model), inputs, {}, CPU),
    )
    found = list(training_mode.find(case))
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


class Unreached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.auxiliary, self.drop, self.conv = nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)  # type: ignore[no-any-return]


class Doubling(nn.Module):
    """Own code that looks at the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class Skipping(nn.Module):
    """Own code that draws random numbers in training, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1, 1, 1).bernoulli_(0.5) * 2 if self.training else x


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Dropout(0.0), (X,)),
        (Unreached(), (X,)),
        (nn.InstanceNorm2d(3), (X,)),
        (nn.LSTM(16, 4, 1), (STEPS,)),
        (nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), (STEPS,)),
        (Model(lambda m, x: (name for name in "ab")), (X,)),
    ],
)
def test_a_mode_that_changes_nothing_is_no_fault(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert not found_in(model.train(), *inputs)


@pytest.mark.parametrize(
    ("model", "inputs", "names"),
    [
        (nn.RReLU(), (X,), {"rrelu-in-training-mode"}),
        (nn.LSTM(16, 4, 2, dropout=0.5), (STEPS,), {"dropout-in-training-mode"}),
        (nn.GRU(16, 4, 2, dropout=0.5), (STEPS,), {"dropout-in-training-mode"}),
        (nn.MultiheadAttention(16, 4, dropout=0.5), (STEPS,) * 3, {"dropout-in-training-mode"}),
        (nn.Dropout2d(0.5), (X,), {"dropout-in-training-mode"}),
        (nn.FeatureAlphaDropout(0.5), (X,), {"dropout-in-training-mode"}),
        (nn.InstanceNorm2d(3, track_running_stats=True), (X,), {"training-mode"}),
        (Skipping(), (X,), {"training-mode"}),
        (
            nn.Sequential(nn.BatchNorm2d(3), Skipping()),
            (X,),
            {"batch-norm-in-training-mode", "training-mode"},
        ),
    ],
)
def test_whatever_a_mode_changes_is_a_fault(
    model: nn.Module, inputs: tuple[Tensor, ...], names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every_remedy_helps(monkeypatch)
    found = found_in(model.train(), *inputs)
    assert found.keys() == names
    assert all(each.is_fault and each.counterfactual is not None for each in found.values())
    assert not found_in(model.eval(), *inputs)


def test_modules_whose_own_code_looks_at_the_mode_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Doubling(), nn.Identity(), Doubling()).train()
    found = found_in(model, X)["training-mode"]
    assert found.says == (
        "in training mode each of 2 modules, 1 (Doubling) first, gives other results than in evaluation "
        "mode: results depend on it"
    )
    assert found.places == ("1", "3")
    model[1].eval()
    assert "in training mode 3 (Doubling) gives other results" in found_in(model, X)["training-mode"].says


def test_modules_of_torchscript_are_named_by_their_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5))).train()
    says = found_in(model, X)["training-mode"].says
    assert says.startswith("in training mode 1 (Dropout) gives other results than in evaluation mode")


class Forgetting(nn.Module):
    """Behaves as in training whatever its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        return F.rrelu(F.dropout(x, 0.5), training=True)


@pytest.mark.parametrize("training", [False, True])
def test_what_is_done_in_both_modes_is_told_with_its_line(training: bool) -> None:
    case = case_of(nn.ReLU(), X)
    case.model = Forgetting().train(training)
    found = list(training_mode.find(case))
    assert [each.name for each in found] == [
        *("batch-norm-in-evaluation-mode", "dropout-in-evaluation-mode"),
        *("dropout-in-evaluation-mode", "rrelu-in-evaluation-mode"),
    ]
    assert all(each.is_fault and "in evaluation mode, too" in each.says for each in found)
    assert found[0].says.startswith("test_training_mode.py:")
    for each, line in zip(found, ("F.batch_norm(", "dropout_p=0.1", "F.dropout(", "F.rrelu("), strict=True):
        assert line in each.says
    assert "changes the running ones" in found[0].says


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_without_running_statistics_is_told_and_no_fault(training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)).train(training)
    (found,) = found_in(model, X).values()
    assert (found.name, found.is_fault) == ("batch-norm-in-evaluation-mode", False)
    assert found.says.startswith("1 normalizes with this batch's statistics in evaluation mode, too")


def test_a_call_that_fails_in_training_mode_is_told() -> None:
    (found,) = found_in(nn.BatchNorm1d(3).train(), torch.randn(1, 3)).values()
    assert found.is_fault
    assert found.says.startswith(
        "the model is in training mode, in which its call fails: ValueError: Expected"
    )


def test_without_time_the_flags_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Dropout(0.0), nn.Conv2d(3, 3, 1)).train()
    case = case_of(nn.ReLU(), X)
    case.model, case.budget = model, dataclasses.replace(case.budget, seconds=-9.0)
    found = list(training_mode.find(case))
    assert [each.name for each in found] == ["batch-norm-in-training-mode", "dropout-in-training-mode"]
    assert ["1 (Dropout)" in each.says for each in found] == [False, True]


def test_a_note_says_that_a_diagnosis_has_optimized_nothing() -> None:
    found = ampopt.diagnose(
        nn.Sequential(nn.ReLU()).train(), X, precision="fp32", budget_s=0.01, progress=False
    )
    assert "the model is in training mode: what was measured is evaluation mode" in found.notes


class Both(nn.Module):
    """Has two other results than in evaluation mode together, and the one of neither part alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm2d(3), nn.ReLU(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(self.norm(x)))
        return x * 2 if self.a.training or self.b.training else x


def test_a_remedy_whose_modules_are_not_known_is_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    found = found_in(Both().train(), X)
    assert found.keys() == {"batch-norm-in-training-mode", "training-mode"}
    assert found["training-mode"].says.startswith("in training mode the model gives other results")
    assert found["training-mode"].counterfactual is None
    assert found["batch-norm-in-training-mode"].counterfactual is not None


@pytest.mark.parametrize("parts", [(), (nn.Dropout(0.5),)])
def test_a_model_that_draws_its_own_random_numbers_is_not_told_by_its_mode(
    parts: tuple[nn.Module, ...],
) -> None:
    def drawing(m: nn.Module, x: Tensor) -> Tensor:
        return m.net(x) + next(DRAWN)  # type: ignore[no-any-return, operator]

    case = case_of(nn.ReLU(), X)
    case.model = Model(drawing, net=nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), *parts)).train()
    found = [each.name for each in training_mode.find(case)]
    assert found == (["dropout-in-training-mode"] if parts else [])
    assert any("inputs and random numbers have different results" in note for note in case.notes)


def test_a_model_that_draws_its_own_random_numbers_in_training_is_told_as_a_whole() -> None:
    def drawing(m: nn.Module, x: Tensor) -> Tensor:
        return m.conv(x) + (next(DRAWN) if m.training else 0)  # type: ignore[no-any-return, operator]

    (found,) = found_in(Model(drawing, conv=nn.Conv2d(3, 3, 1)).train(), X).values()
    assert found.says.startswith("in training mode the model gives other results than in evaluation mode")


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_norm_that_eval_leaves_in_training_is_a_fault(momentum: float | None) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), training(nn.BatchNorm2d, 4, momentum=momentum)).eval()
    found = found_in(model, X)
    assert set(found) == {"batch-norm-in-evaluation-mode"}
    own = found["batch-norm-in-evaluation-mode"]
    assert own.is_fault
    assert own.places == ("1",)
    assert "changes the running ones in evaluation mode, too" in own.says
