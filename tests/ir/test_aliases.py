"""Results of graphs lie as they did: their own memory, or views of inputs and of other results."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from ampopt.errors import CaptureError
from ampopt.ir.aliases import Layout, Own, joined, layout_of

Tensors = Sequence[Tensor]
Function = Callable[[Tensor], Tensors]

FUNCTIONS: dict[str, Function] = {
    "own": lambda x: [x + 1, (x * 2).T],
    "the input": lambda x: [x + 1, x],
    "a part of the input": lambda x: [x[1:, ::2], x + 1],
    "a view of a result": lambda x: [y := x + 1, y.view(-1), y.T, y[1]],
    "a view of a transposed result": lambda x: [y := (x + 1).T, y[:, 1], y.diagonal()],
    "parts of what is no result": lambda x: list((x + 1).unbind(-1)),
    "the same twice": lambda x: [y := x + 1, y],
    "nothing": lambda x: [x[:0], x + 1],
    "spread out": lambda x: [(x + 1).unsqueeze(0).expand(2, -1, -1), x[:1].expand(3, -1)],
}


def replayed(layout: Layout, computed: Tensors, inputs: Tensors) -> tuple[Tensor, ...]:
    """The results as an optimized graph gives them: contiguous and new."""
    return layout.laid_out([computed[place].contiguous().clone() for place in layout.own], inputs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_later_code_writes_is_seen_where_it_was(name: str) -> None:
    function = FUNCTIONS[name]
    example = torch.arange(12.0).view(3, 4)
    layout = layout_of([example], function(example))
    for shift in range(2):  # an input that begins elsewhere in its memory
        numbers = torch.arange(20.0, 40.0)
        own, other = (numbers.clone()[shift : shift + 12].view(3, 4) for _ in range(2))
        expected, found = function(own), replayed(layout, function(other.clone()), [other])
        assert [each.stride() for each in found] == [each.stride() for each in expected]
        for place in range(len(expected)):
            if expected[place].numel() and not _overlaps(expected[place]):
                expected[place].mul_(3.0)
                found[place].mul_(3.0)
            assert all(map(torch.equal, found, expected))
            assert torch.equal(own, other)


def _overlaps(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [(y := x + 1)[:2], y[1:]],
        lambda x: [x.view(torch.int32)],
        lambda x: [(x + 1).view(-1).unfold(0, 4, 2)],
        lambda x: [(y := x + 1), y.view(torch.int32)],
    ],
)
def test_memory_that_is_shared_in_part_or_read_as_another_dtype_is_refused(function: Function) -> None:
    x = torch.arange(12.0).view(3, 4)
    with pytest.raises(CaptureError, match="a result of it"):
        layout_of([x], function(x))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_any_slice_of_an_input_is_its_view_and_any_sum_is_not(sizes: list[int], data: st.DataObject) -> None:
    x = torch.randn(sizes).permute(*data.draw(st.permutations(range(len(sizes)))))
    index = tuple(slice(data.draw(st.integers(0, n - 1)), n, data.draw(st.integers(1, 3))) for n in x.shape)
    layout = layout_of([x], [x[index], x + 1])
    assert layout.own == (1,)
    other = torch.empty_strided(x.shape, x.stride()).copy_(torch.randn(x.shape))
    view, _ = layout.laid_out([other + 1], [other])
    assert torch.equal(view, other[index])
    assert view.data_ptr() == other[index].data_ptr()


def test_contiguous_results_are_given_as_they_are() -> None:
    x = torch.randn(3)
    layout, y = layout_of([x], [x + 1]), torch.randn(3)
    assert layout.own == (0,)
    assert layout.laid_out([y], [x])[0] is y
    assert Own(None).laid_out(y) is y


@st.composite
def parts(draw: st.DrawFn) -> list[Tensor]:
    """Parts of two memories, also such as lie in turn, repeat elements, or have none."""
    memories, found = (torch.zeros(40), torch.zeros(40)), list[Tensor]()
    for _ in range(draw(st.integers(0, 6))):
        sizes = draw(st.lists(st.integers(0, 3), max_size=3))
        strides = [draw(st.integers(0, 5)) for _ in sizes]
        offset = draw(st.integers(0, 9))
        found.append(draw(st.sampled_from(memories)).as_strided(sizes, strides, offset))
    return found


def _addresses(tensor: Tensor) -> set[int]:
    elements = torch.arange(40).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return {tensor.untyped_storage().data_ptr() + 4 * place for place in elements.flatten().tolist()}


@given(parts(), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_results_are_joined_that_have_an_element_in_common(
    results: list[Tensor], but: set[tuple[int, int]]
) -> None:
    pairs = itertools.combinations(range(len(results)), 2)
    found = {(i, j) for i, j in pairs if _addresses(results[i]) & _addresses(results[j])}
    assert joined(results, but=but) == found - but


def test_numbers_that_are_read_as_others_are_joined() -> None:
    z = torch.zeros(4, dtype=torch.complex64)
    assert joined([z.real, z.conj(), z.imag, torch.zeros(4).to_sparse()]) == {(0, 1), (1, 2)}


def test_many_parts_that_lie_in_turn_are_told_apart_soon() -> None:
    """Pair by pair, a step of a recurrent network after the other, took seconds in each call."""
    whole = torch.zeros(64, 256, 128)
    began = time.process_time()
    assert joined([whole, *whole.unbind(1)]) == {(0, place) for place in range(1, 257)}
    assert time.process_time() - began < 5.0
