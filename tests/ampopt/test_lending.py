"""Which outputs of a captured graph may be lent, and how it shows that the caller has let go of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampopt.cuda_graphs import _can_be_lent, _LentGraph


def lent(*outputs: Tensor) -> _LentGraph:
    return _LentGraph(torch.cuda.CUDAGraph.__new__(torch.cuda.CUDAGraph), outputs)


@pytest.mark.parametrize(
    "hold",
    [
        lambda y: y,
        lambda y: y[1:],
        lambda y: y.numpy(),
        lambda y: y.untyped_storage(),
        lambda y: y.view(2, 2).T,
    ],
)
def test_whatever_shares_the_memory_holds_it(hold: Callable[[Tensor], object]) -> None:
    graph = lent(torch.zeros(4), torch.zeros(3))
    assert graph.is_free()
    held = hold(graph._aliases[0]())
    assert not graph.is_free()
    del held
    assert graph.is_free()


def test_the_last_of_several_outputs_holds_as_well() -> None:
    graph = lent(torch.zeros(4), torch.zeros(3))
    held = graph._aliases[1]()
    assert not graph.is_free()
    del held
    assert graph.is_free()


def test_what_was_sent_to_another_process_is_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, other = lent(torch.zeros(4)), lent(torch.zeros(4))
    sent = {b"handle": StorageWeakRef(graph._aliases[0]().untyped_storage())}
    monkeypatch.setattr("ampopt.cuda_graphs.shared_cache", sent)
    assert not graph.is_free()
    assert other.is_free()


def test_outputs_with_memory_of_their_own_can_be_lent() -> None:
    assert _can_be_lent([torch.zeros(4), torch.zeros(2, 3)], [torch.zeros(4), torch.zeros(2, 3)])


def test_outputs_that_share_memory_are_not_lent() -> None:
    whole = torch.zeros(4)
    assert not _can_be_lent([whole, whole], [])
    assert not _can_be_lent([whole, whole.view(2, 2)], [])
    assert not _can_be_lent([whole[1:]], [])


def test_what_was_there_before_the_captures_is_not_lent() -> None:
    weight = torch.zeros(4)
    assert not _can_be_lent([weight.detach()], [weight.detach()])
