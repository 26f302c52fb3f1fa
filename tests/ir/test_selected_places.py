"""What a tensor's value selects, the tensor selects: the same places, and an error where there is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt.ir.device_asserts import asserts_raised
from ampopt.ir.graph import aten, calls
from ampopt.ir.lowering import lower
from ampopt.ir.program import Program
from ampopt.passes import CudaGraph
from tests.support.later_pytorch import needs_places_of_values
from tests.support.planted import captured_of

pytestmark = needs_places_of_values

T = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(8, generator=torch.Generator().manual_seed(1))
PLACES = [*range(-14, 15), -(2**31), 2**31 - 1, 2**31, 2**62, -(2**62), 2**63 - 1, 2 - 2**63, -(2**63)]

SELECTING: dict[str, Callable[..., Any]] = {}
OTHERS: dict[str, Callable[..., Any]] = {}


class _Selecting(nn.Module):
    """Calls a function with a tensor, a place, and what may be written there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, t: Tensor, k: Tensor, x: Tensor) -> Any:
        written = t * 1
        result = self.function(written, k, x)
        return written if result is None else result


def _number(k: Tensor) -> Any:
    return k.item()


def _selecting(function: Callable[..., Any]) -> Callable[..., Any]:
    SELECTING[function.__name__] = function
    return function


def _other(function: Callable[..., Any]) -> Callable[..., Any]:
    OTHERS[function.__name__] = function
    return function


@_selecting
def a_row(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[k] + x


@_selecting
def a_column(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[:, k].clone(), torch.select(t, -1, _number(k))


@_selecting
def an_element(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[k, k - 1] * x


@_selecting
def of_a_view(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t.T[1:, k].exp(), x[_number(k.reshape(1, 1))]


@_selecting
def going_around(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[k % 4] + x, t[(_number(k) + 1) % 3], t[(3 * _number(k) - 5) % 6], t[(7 - _number(k)) % 4]


@_selecting
def computed(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    return t[-number] + x, t[number + 1], t[2 - number], t[number // 3], t[(number // 2 + number % 3) % 5]


@_selecting
def limited(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    return t[torch.sym_min(torch.sym_max(number, 0), 5)], t[torch.sym_max(number, number % 2) - 1] + x


@_selecting
def checked(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    torch._check(number >= 0)
    torch._check(number < 6)
    return t[number] + x, t[number - 1]


@_selecting
def a_slice(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    torch._check(number >= 0)
    torch._check(number <= 3)
    return t[number : number + 3] + x, t.narrow(0, number, 3)


@_selecting
def a_slice_of_columns(t: Tensor, k: Tensor, x: Tensor) -> Any:
    first = _number(k) % 6
    return t[:, first : first + 3].clone(), t.narrow(1, first, 2), t.narrow(-1, first, 1)


@_selecting
def a_slice_from_the_end(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t.narrow(0, _number(k) % 4 - 6, 2) + x


@_selecting
def written(t: Tensor, k: Tensor, x: Tensor) -> None:
    t[k] = x


@_selecting
def written_and_read(t: Tensor, k: Tensor, x: Tensor) -> Any:
    t[k] = x
    t[k] += 1
    t[:, k % 4].mul_(2)
    t[k, 2:5] = x[:3]
    t[1, k] = 3.0
    return t[k // 2] - t


@_selecting
def written_around(t: Tensor, k: Tensor, x: Tensor) -> None:
    t[_number(k) % 6] = x
    t[(_number(k) + 1) % 6] += t[(_number(k) - 1) % 6]


@_selecting
def written_and_put_back(t: Tensor, k: Tensor, x: Tensor) -> None:
    behind = _number(k) + 3
    t[0] = x
    t[k] = x
    t[behind] = t[behind]


@_selecting
def written_as_halves(t: Tensor, k: Tensor, x: Tensor) -> None:
    t[k % 4] = x.half()


@_selecting
def a_slice_that_is_written(t: Tensor, k: Tensor, x: Tensor) -> None:
    first = _number(k) % 4
    t[first : first + 3] = x + t[first + 1]
    t[:, first : first + 1] *= 2


@_other
def a_size(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    return t[number] + x, x.new_zeros(number)


@_other
def a_stricter_check(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    torch._check(number < 5)
    return t[number] + x


@_other
def a_check_that_refuses_what_there_is(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    torch._check(number <= 6)
    return t[number - 7] + x


@_other
def a_write_that_nothing_reads(t: Tensor, k: Tensor, x: Tensor) -> Any:
    t[k] = x
    return x + 1


@_other
def a_read_that_nothing_reads(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    torch._check(number >= -6)
    torch._check(number < 6)
    return (x + 1, t[number] * 2)[0]


@_other
def a_check_of_some_that_count_from_the_end(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    torch._check(number >= -3)
    return t[number] + x


@_other
def a_slice_that_varies(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[k : k + 3] + x


@_other
def a_slice_from_below_zero(t: Tensor, k: Tensor, x: Tensor) -> Any:
    first = _number(k) % 4 - 6
    return t[first : first + 2] + x


@_other
def what_may_go_around(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[2 * _number(k)] + x


@_other
def of_bits(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[_number(k) & 3] + x


@_other
def by_what_is_below_zero(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[_number(k) % -4] + x


@_other
def a_number_too(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = _number(k)
    return t[number] * number + x


@_other
def of_nothing(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[:, :0][k], x + 1


@_other
def of_a_dtype_that_few_operators_take(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t.to(torch.float8_e4m3fn)[k].float() + x


@_other
def at_what_lies_elsewhere_in_memory(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return torch.view_as_real(torch.view_as_complex(t.reshape(6, 4, 2))[k]).flatten() + x


def _place(number: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(number, dtype=dtype)


def _program(function: Callable[..., Any], dtype: torch.dtype = torch.int64) -> Program:
    return captured_of(_Selecting(function), T, _place(2, dtype), X)[1].program


def _reads_numbers(program: Program) -> bool:
    return any(calls(program.graph, [aten.item.default, aten._local_scalar_dense.default]))


def _answer(function: Callable[..., Any], *given: Tensor) -> list[Tensor] | None:
    """The results of a call in a list; None where it raises an error."""
    try:
        result = function(*given)
    except (IndexError, RuntimeError, ValueError):  # what PyTorch raises for a place too large for int64
        return None
    return [result] if isinstance(result, Tensor) else list(result)


def _check(function: Callable[..., Any], program: Program, places: list[int], dtype: torch.dtype) -> None:
    """Assert that a program gives what the model does at each place, and raises where that does."""
    answered = set()
    for number in places:
        if not torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max:
            continue
        given = T, _place(number, dtype), X
        expected, got = _answer(_Selecting(function), *given), _answer(program.run, *given)
        answered.add(expected is not None)
        assert (got is None) == (expected is None), number
        for mine, its in zip(got or [], expected or [], strict=True):
            assert torch.equal(mine, its), number
            assert mine.dtype is its.dtype
    assert True in answered


DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
BYTES = (
    "computed",
    "limited",
    "checked",
    "a_slice",
    "a_slice_of_columns",
    "a_slice_from_the_end",
    "written_around",
)
"""Those of numbers alone: PyTorch reads bytes in brackets as a mask."""


@pytest.mark.parametrize(
    ("name", "dtype"), [*itertools.product(SELECTING, DTYPES), *((name, torch.uint8) for name in BYTES)]
)
def test_a_place_is_the_same_as_a_tensor(name: str, dtype: torch.dtype) -> None:
    program = _program(SELECTING[name], dtype)
    assert not _reads_numbers(program)
    _check(SELECTING[name], program, PLACES, dtype)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_more_than_a_place_stays_a_number(name: str) -> None:
    program = _program(OTHERS[name])
    assert _reads_numbers(program)
    _check(OTHERS[name], program, PLACES[:29], torch.int64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("written", [aten.index_put.default]),
        ("added", [aten.index.Tensor, aten.add.Tensor, aten.index_put.default]),
        (
            "around",
            [aten.remainder.Scalar, aten.reshape.default, aten.unsqueeze.default, aten.index_copy.default],
        ),
    ],
)
def test_a_write_costs_one_write_and_the_reads_of_the_model(name: str, expected: list[object]) -> None:
    def added(t: Tensor, k: Tensor, x: Tensor) -> None:
        t[k] += x

    def around(t: Tensor, k: Tensor, x: Tensor) -> None:
        t[_number(k) % 6] = x

    functions = {"written": SELECTING["written"], "added": added, "around": around}
    program = _program(functions[name])
    found = [node.target for node in calls(program.graph) if node.target is not aten.mul.Tensor]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    _check(functions[name], program, PLACES, torch.int64)


def test_much_that_is_computed_of_one_number_is_written_too() -> None:
    def function(t: Tensor, k: Tensor, x: Tensor) -> None:
        number = _number(k)
        for count in range(12):
            number = (number * 3 + count) % 7
            t[number % 6] += x
            t[(k + count) % 6, count % 8] = count

    program = _program(function)
    assert not _reads_numbers(program)
    _check(function, program, PLACES, torch.int64)


def test_a_place_in_a_tensor_whose_size_varies_is_a_tensor() -> None:
    function, given = SELECTING["of_a_view"], (T, _place(2), X)
    columns = torch.export.Dim("columns", min=3)
    sizes = {"t": {0: torch.export.Dim("rows", min=3), 1: columns}, "k": None, "x": {0: columns}}
    with torch.no_grad():
        graph = lower(torch.export.export(_Selecting(function), given, dynamic_shapes=sizes, strict=False))
    assert not any(calls(graph, [aten.item.default]))
    for rows, width, number in ((4, 5, 3), (4, 5, -4), (9, 6, 5), (9, 6, 6), (3, 4, 2), (3, 4, 3)):
        other = torch.randn(rows, width), _place(number), torch.randn(width)
        expected, got = _answer(_Selecting(function), *other), _answer(graph, *other)
        assert (got is None) == (expected is None) == (number >= min(rows, width))
        assert all(map(torch.equal, got or [], expected or []))


@pytest.mark.parametrize(
    ("of_tensor", "of_place", "is_written"),
    [("cuda", "cuda", True), ("cuda", "cpu", False), ("cpu", "cuda", False), ("cpu", "cpu", True)],
)
def test_a_place_on_another_device_stays_a_number(of_tensor: str, of_place: str, is_written: bool) -> None:
    with FakeTensorMode(), torch.no_grad():
        t, x = torch.empty(6, 8, device=of_tensor), torch.empty(8, device=of_tensor)
        k = torch.zeros((), dtype=torch.int64, device=of_place)
    graph = lower(torch.export.export(_Selecting(SELECTING["a_row"]), (t, k, x), strict=False))
    assert any(calls(graph, [aten.item.default])) is not is_written


@pytest.mark.gpu
@pytest.mark.parametrize("name", SELECTING)
def test_on_a_gpu_a_place_waits_for_no_host(name: str) -> None:
    given = T.cuda(), _place(2).cuda(), X.cuda()
    program = captured_of(_Selecting(SELECTING[name]).cuda(), *given)[1].program
    assert CudaGraph().why_not(program) is None
    for number in range(4):
        given = T.cuda(), _place(number).cuda(), X.cuda()
        expected = _answer(_Selecting(SELECTING[name]), *given)
        with asserts_raised(given[0].device):
            got = _answer(program.run, *given)
        assert (got is None) == (expected is None)
        for mine, its in zip(got or [], expected or [], strict=True):
            assert torch.equal(mine, its)
