"""A place on a GPU becomes a tensor where it is in range: else the host has to raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt.ir.graph import aten, calls
from ampopt.ir.lowering import lower
from ampopt.passes import CudaGraph
from tests.support.later_pytorch import needs_places_of_values
from tests.support.planted import captured_of
from tests.support.selecting import PLACES, SELECTING, Selecting, T, X, answer, place

pytestmark = needs_places_of_values


@pytest.mark.parametrize(
    ("of_tensor", "of_place", "is_written"),
    [("cuda", "cuda", True), ("cuda", "cpu", False), ("cpu", "cuda", False), ("cpu", "cpu", True)],
)
def test_a_place_on_another_device_stays_a_number(of_tensor: str, of_place: str, is_written: bool) -> None:
    graph = _lowered_on(of_tensor, of_place, SELECTING["written_around"])
    assert any(calls(graph, [aten.item.default])) is not is_written


def _lowered_on(of_tensor: str, of_place: str, function: Callable[..., Any]) -> fx.GraphModule:
    with FakeTensorMode(), torch.no_grad():
        t, x = torch.empty(6, 8, device=of_tensor), torch.empty(8, device=of_tensor)
        k = torch.zeros((), dtype=torch.int64, device=of_place)
    return lower(torch.export.export(Selecting(function), (t, k, x), strict=False))


def _largest(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[t[:, 0].argmax()], t[:, x.max(0)[1]] + x[:6]


WITH_SLICES = {"a_slice_of_columns", "a_slice_that_is_written"}
"""They have a constant of places, which takes a GPU."""

IN_RANGE = {"going_around", "written_around", "written_as_halves", *WITH_SLICES}
"""What selects at places that are in range whatever the number is."""


@pytest.mark.parametrize("name", sorted({*SELECTING, "the largest"} - WITH_SLICES))
def test_on_a_gpu_a_place_that_may_be_none_is_read_by_the_host_which_raises(name: str) -> None:
    """There an assertion would end the CUDA context, where PyTorch raises an error."""
    graph = _lowered_on("cuda", "cuda", {**SELECTING, "the largest": _largest}[name])
    assert any(calls(graph, [aten.item.default])) is (name not in {*IN_RANGE, "the largest"})


@pytest.mark.gpu
@pytest.mark.parametrize("name", SELECTING)
def test_on_a_gpu_a_place_in_range_waits_for_no_host_and_others_raise(name: str) -> None:
    given = T.cuda(), place(2).cuda(), X.cuda()
    program = captured_of(Selecting(SELECTING[name]).cuda(), *given)[1].program
    assert (CudaGraph().why_not(program) is None) is (name in IN_RANGE)
    for number in PLACES:
        given = T.cuda(), place(number).cuda(), X.cuda()
        expected = answer(Selecting(SELECTING[name]), *given)
        got = answer(program.run, *given)
        assert (got is None) == (expected is None)
        for mine, its in zip(got or [], expected or [], strict=True):
            assert torch.equal(mine, its)
