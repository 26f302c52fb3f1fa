"""Memory that a call takes from the system anew: counted, kept for a while, and told where that helps."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from torch import nn

from ampopt.diagnosis import heap
from ampopt.diagnosis.finding import Counterfactual
from ampopt.diagnosis.findings import page_faults
from ampopt.diagnosis.heap import Refilled, examine_heap
from ampopt.measure.sampling import gain
from tests.support.cases import CPU, case_of, taking

MEGABYTES = 4
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its page faults are Linux's")


def taking_pages() -> None:
    """Takes memory that the system clears, whatever the heap keeps."""
    with mmap.mmap(-1, MEGABYTES << 20) as taken:
        for place in range(0, MEGABYTES << 20, mmap.PAGESIZE):
            taken[place] = 1


@on_linux
def test_what_calls_take_from_the_system_is_counted_and_sampled_in_both_ways() -> None:
    found = examine_heap(taking_pages, CPU, 1e-3)
    assert found is not None
    assert MEGABYTES << 20 <= found.taken < 1.5 * (MEGABYTES << 20)
    assert found.faults * mmap.PAGESIZE == pytest.approx(found.taken)
    assert len(found.kept.before.samples) == len(found.kept.after.samples) == heap.ROUNDS


@on_linux
@pytest.mark.parametrize(
    ("device", "call_s"), [(torch.device("meta"), 1e-3), (CPU, 0.5)], ids=["no CPU", "too long"]
)
def test_what_cannot_be_examined_is_not_called(device: torch.device, call_s: float) -> None:
    def fail() -> None:
        raise AssertionError("called")

    assert examine_heap(fail, device, call_s) is None


@on_linux
def test_little_memory_is_not_worth_a_look() -> None:
    kept = torch.zeros(8)
    assert examine_heap(lambda: kept.add_(1), CPU, 1e-6) is None


@on_linux
def test_longer_calls_have_fewer_samples() -> None:
    found = examine_heap(taking_pages, CPU, 0.3)
    assert found is not None
    assert len(found.kept.after.samples) == 9


def refilled(before_ms: float, after_ms: float) -> Refilled:
    before, after = taking(before_ms), taking(after_ms)
    return Refilled(
        6 << 20, 1536.0, Counterfactual("with this memory kept", before, after, gain(before, after))
    )


def test_it_is_told_with_what_keeping_the_memory_brought() -> None:
    case = case_of(nn.Linear(3, 3), torch.ones(2, 3))
    assert [*page_faults.find(case)] == []
    case.refilled = refilled(4.0, 2.0)
    (found,) = page_faults.find(case)
    assert (found.name, found.lane) == ("page-faults", "fp32")
    assert found.share == pytest.approx(0.5)
    assert "took 6.0 MiB anew from the system (1536 page faults)" in found.says
    assert "MALLOC_TRIM_THRESHOLD_" in found.advice
    assert "a process that keeps its memory" in case.notes.pop()
    case.refilled = refilled(2.0, 2.0)
    assert [*page_faults.find(case)] == []
    assert "not certainly faster: with this memory kept" in case.notes.pop()


@on_linux
def test_a_call_takes_nothing_anew_where_memory_is_kept() -> None:
    def call() -> None:
        for size in (1 << 20, 3 << 20, 40 << 10):
            torch.ones(size, dtype=torch.uint8)

    with heap.kept(CPU):
        assert examine_heap(call, CPU, 1e-3) is None
