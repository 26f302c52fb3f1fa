"""Models whose results are no numbers: diagnosed as that, and not by tables without rows."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import ampopt
from ampopt.diagnosis.findings import no_numbers
from tests.helpers import Model
from tests.support.cases import case_of

X = torch.randn(1, 3, 8, 8)


def spoilt(value: float, *, everywhere: bool = True) -> nn.Module:
    """A convolution after a ReLU, with such a number as its weights, or as one of its biases."""
    conv = nn.Conv2d(3, 4, 3)
    weights = dict(conv.named_parameters())
    with torch.no_grad():
        (weights["weight"] if everywhere else weights["bias"][:1]).fill_(value)
    return nn.Sequential(nn.ReLU(), conv).eval()


def test_results_of_nan_alone_are_a_fault_with_the_first_operator_and_the_weights() -> None:
    (found,) = no_numbers.find(case_of(spoilt(math.nan), X))
    assert found.is_fault
    assert found.says == (
        "the results have no number, NaN in every place: conv2d is the first operator that gives NaN; NaN in "
        "the weights: 1.weight"
    )
    assert found.places == ("1",)


def test_infinite_results_are_told_as_such() -> None:
    (found,) = no_numbers.find(case_of(Model(lambda m, x: x.relu().add(1) / 0), X))
    assert "no number, infinite in every place: div is the first operator that gives infinite" in found.says


def test_where_some_results_are_nan_it_is_a_note() -> None:
    case = case_of(spoilt(math.nan, everywhere=False), X)
    assert not list(no_numbers.find(case))
    assert case.notes == ["36 of 144 numbers of the results are NaN"]


@pytest.mark.parametrize(
    "model",
    [
        nn.ReLU(),
        Model(lambda m, x: (x, torch.full((3, 3), -math.inf).triu(1))),
        Model(lambda m, x: x > 0),
        Model(lambda m, x: x[:0]),
    ],
)
def test_masks_and_results_without_fractions_or_elements_are_no_faults(model: nn.Module) -> None:
    case = case_of(model.eval(), X)
    assert not list(no_numbers.find(case))
    assert not case.notes


def test_without_a_graph_the_results_are_told_alone() -> None:
    case = dataclasses.replace(case_of(spoilt(math.nan), X), program=None)
    (found,) = no_numbers.find(case)
    assert found.says == "the results have no number, NaN in every place; NaN in the weights: 1.weight"


@pytest.mark.slow
def test_a_diagnosis_has_no_table_without_rows() -> None:
    found = ampopt.diagnose(spoilt(math.nan), X, budget_s=60, progress=False)
    assert found.findings[0].name == "no-numbers"
    assert "the results have no number" in found.verdict
    assert found.accuracy["fp32"] == ()
    assert "errors against float64, fp32" not in str(found)
    assert "no errors by layer in the fp32 lane: no operator rounds a number there" in found.notes
