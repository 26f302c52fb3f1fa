"""Models that select at a place which a number of a tensor is, and some for which that is not all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

T = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
X = torch.randn(8, generator=torch.Generator().manual_seed(1))
PLACES = [*range(-14, 15), -(2**31), 2**31 - 1, 2**31, 2**62, -(2**62), 2**63 - 1, 2 - 2**63, -(2**63)]

SELECTING: dict[str, Callable[..., Any]] = {}
OTHERS: dict[str, Callable[..., Any]] = {}


class Selecting(nn.Module):
    """Calls a function with a tensor, a place, and what may be written there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, t: Tensor, k: Tensor, x: Tensor) -> Any:
        written = t * 1
        result = self.function(written, k, x)
        return written if result is None else result


def number_of(k: Tensor) -> Any:
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
    return t[:, k].clone(), torch.select(t, -1, number_of(k))


@_selecting
def an_element(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[k, k - 1] * x


@_selecting
def of_a_view(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t.T[1:, k].exp(), x[number_of(k.reshape(1, 1))]


@_selecting
def going_around(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[k % 4] + x, t[(number_of(k) + 1) % 3], t[(3 * number_of(k) - 5) % 6], t[(7 - number_of(k)) % 4]


@_selecting
def computed(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    return t[-number] + x, t[number + 1], t[2 - number], t[number // 3], t[(number // 2 + number % 3) % 5]


@_selecting
def limited(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    return t[torch.sym_min(torch.sym_max(number, 0), 5)], t[torch.sym_max(number, number % 2) - 1] + x


@_selecting
def checked(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    torch._check(number >= 0)
    torch._check(number < 6)
    return t[number] + x, t[number - 1]


@_selecting
def a_slice(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    torch._check(number >= 0)
    torch._check(number <= 3)
    return t[number : number + 3] + x, t.narrow(0, number, 3)


@_selecting
def a_slice_of_columns(t: Tensor, k: Tensor, x: Tensor) -> Any:
    first = number_of(k) % 6
    return t[:, first : first + 3].clone(), t.narrow(1, first, 2), t.narrow(-1, first, 1)


@_selecting
def a_slice_from_the_end(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t.narrow(0, number_of(k) % 4 - 6, 2) + x


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
    t[number_of(k) % 6] = x
    t[(number_of(k) + 1) % 6] += t[(number_of(k) - 1) % 6]


@_selecting
def written_and_put_back(t: Tensor, k: Tensor, x: Tensor) -> None:
    behind = number_of(k) + 3
    t[0] = x
    t[k] = x
    t[behind] = t[behind]


@_selecting
def written_as_halves(t: Tensor, k: Tensor, x: Tensor) -> None:
    t[k % 4] = x.half()


@_selecting
def a_slice_that_is_written(t: Tensor, k: Tensor, x: Tensor) -> None:
    first = number_of(k) % 4
    t[first : first + 3] = x + t[first + 1]
    t[:, first : first + 1] *= 2


@_other
def a_size(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    return t[number] + x, x.new_zeros(number)


@_other
def of_what_a_mask_selects(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[t[:, 0] > 9].select(1, number_of(k)).sum() + x, t.nonzero()[:, k - 2].sum()


@_other
def for_its_shape(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    torch._check(number >= 0)
    torch._check(number < 6)
    return torch.zeros_like(t[number]) + x, x.expand_as(t[number])


@_other
def a_stricter_check(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    torch._check(number < 5)
    return t[number] + x


@_other
def a_check_that_refuses_what_there_is(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    torch._check(number <= 6)
    return t[number - 7] + x


@_other
def a_write_that_nothing_reads(t: Tensor, k: Tensor, x: Tensor) -> Any:
    t[k] = x
    return x + 1


@_other
def a_read_that_nothing_reads(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    torch._check(number >= -6)
    torch._check(number < 6)
    return (x + 1, t[number] * 2)[0]


@_other
def a_check_of_some_that_count_from_the_end(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
    torch._check(number >= -3)
    return t[number] + x


@_other
def a_slice_that_varies(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[k : k + 3] + x


@_other
def a_slice_from_below_zero(t: Tensor, k: Tensor, x: Tensor) -> Any:
    first = number_of(k) % 4 - 6
    return t[first : first + 2] + x


@_other
def what_may_go_around(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[2 * number_of(k)] + x


@_other
def of_bits(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[number_of(k) & 3] + x


@_other
def by_what_is_below_zero(t: Tensor, k: Tensor, x: Tensor) -> Any:
    return t[number_of(k) % -4] + x


@_other
def a_number_too(t: Tensor, k: Tensor, x: Tensor) -> Any:
    number = number_of(k)
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


def place(number: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(number, dtype=dtype)


def answer(function: Callable[..., Any], *given: Tensor) -> list[Tensor] | None:
    """The results of a call in a list; None where it raises an error."""
    try:
        result = function(*given)
    except (IndexError, RuntimeError, ValueError):  # what PyTorch raises for a place too large for int64
        return None
    return [result] if isinstance(result, Tensor) else list(result)
