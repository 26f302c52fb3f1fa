"""Arrays and tensors with memory in common have it in a copy of the model, too."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.model_copy import exact_copy, working_copy
from ampopt.ir.shared_memory import memory_of_arrays
from ampopt.ir.watch import Watch
from tests.helpers import Model
from tests.support.planted import optimize

X = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def holding(**attributes: Any) -> Any:
    return Model(lambda m, x: x, **attributes)


def filled(tensor: Tensor, number: float) -> list[Any]:
    with torch.no_grad():
        tensor.fill_(number)
    return tensor.tolist()


def test_an_array_of_a_tensors_memory_is_that_of_the_copied_tensor() -> None:
    gain = torch.arange(4.0)
    copied: Any = exact_copy(holding(gain=gain, view=gain.numpy(), tail=gain.numpy()[2:]))
    assert copied.view.tolist() == [0, 1, 2, 3]
    assert filled(copied.gain, 7) == copied.view.tolist()
    assert copied.tail.tolist() == [7, 7]
    assert gain.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.bool_, np.complex64])
def test_a_tensor_of_an_arrays_memory_is_that_of_the_copied_array(dtype: Any) -> None:
    drawn = np.ones((3, 4), dtype)
    mask, row = torch.from_numpy(drawn[1:]), torch.from_numpy(drawn)[2, 1:3]
    copied: Any = exact_copy(holding(drawn=drawn, mask=mask, row=row))
    copied.drawn[:] = 0
    assert not copied.mask.any()
    assert not copied.row.any()
    assert (copied.mask.shape, copied.mask.stride()) == (mask.shape, mask.stride())
    assert mask.all()
    copied.row.fill_(1)
    assert copied.drawn.sum() == 2


@pytest.mark.parametrize(
    "part", [lambda a: a[1], lambda a: a[::-1], lambda a: a.T[1:, ::2], lambda a: a.reshape(-1)[3:5]]
)
def test_an_array_that_is_a_part_of_another_one_stays_it(part: Any) -> None:
    table = np.arange(12.0).reshape(3, 4)
    table.flags.writeable = False
    copied: Any = exact_copy(holding(table=table, part=part(table), twice=[table, {"again": table}]))
    assert not copied.table.flags.writeable
    assert copied.twice[0] is copied.twice[1]["again"] is copied.table
    assert np.array_equal(copied.part, part(copied.table))
    assert np.shares_memory(copied.part, copied.table)
    assert not np.shares_memory(copied.part, table)


def test_arrays_without_memory_in_common_are_copied_each_for_itself() -> None:
    table = np.arange(6.0)
    parts = np.empty(2, object)
    parts[:] = [[1], table]
    copied: Any = exact_copy(holding(low=table[:3], high=table[3:], parts=parts, empty=table[:0]))
    assert copied.low.tolist() == [0, 1, 2]
    assert not np.shares_memory(copied.high, table)
    copied.parts[0].append(2)
    assert parts[0] == [1]
    assert not np.shares_memory(copied.parts[1], table)


def test_a_working_copy_has_the_arrays_of_the_parameters_that_it_shares() -> None:
    model = holding(conv=nn.Conv2d(1, 1, 1))
    weight = model.conv.weight
    model.view = weight.detach().numpy()
    working: Any = working_copy(model)
    assert working.view is model.view
    copied: Any = exact_copy(model)
    assert isinstance(copied.conv.weight, nn.Parameter)
    assert copied.conv.weight.requires_grad
    assert np.shares_memory(copied.view, copied.conv.weight.detach().numpy())
    assert not np.shares_memory(copied.view, model.view)


def test_arrays_of_other_classes_and_of_objects_are_copied_each_for_itself(tmp_path: Path) -> None:
    record, masked = np.zeros(3).view(np.recarray), np.ma.masked_array([1.0, 2.0], [True, False])
    names = np.array(["a", "b"], object)
    attributes = {"record": record, "plain": np.asarray(record)[1:], "names": names, "some": names[:1]}
    copied: Any = exact_copy(holding(masked=masked, data=masked.data, **attributes))
    assert type(copied.record) is np.recarray
    assert copied.plain.tolist() == [0, 0]
    assert copied.some.tolist() == ["a"]
    assert copied.masked.mask.tolist() == [True, False]
    assert not np.shares_memory(copied.data, masked.data)


def test_a_file_in_memory_and_its_tensor_have_the_copys_memory(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "table", np.float32, "w+", shape=4)
    copied: Any = exact_copy(holding(mapped=mapped, table=torch.from_numpy(mapped)))
    assert filled(copied.table, 3) == copied.mapped.tolist()
    assert mapped.tolist() == [0, 0, 0, 0]


def test_weights_are_copied_once_where_a_model_has_arrays() -> None:
    copies = list[int]()

    class Counted(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
            copies.append(sum(isinstance(each, Counted) for each in gc.get_objects()))
            return Counted(2, 2)

    model = nn.Sequential(Counted(2, 2), holding(kept=np.ones(2)))
    exact_copy(model)
    assert copies == [copies[0]] * len(copies)  # nothing of a first try is left at the second


class Exposed(nn.Module):
    """Keeps its gain in a buffer, and reads it by an array of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("gain", torch.ones(4))
        self.view = self.get_buffer("gain").numpy()

    def forward(self, x: Tensor) -> Tensor:
        """Brighter by each call."""
        self.get_buffer("gain").add_(1)
        result: Tensor = self.conv(x) * float(self.view[0])
        return result


class Drawn(Exposed):
    """Draws into an array, and reads it as a tensor, on bright frames alone."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = np.ones(4, np.float32)
        self.mask = torch.from_numpy(self.drawn)

    def forward(self, x: Tensor) -> Tensor:
        """The masked features."""
        self.drawn[1] = 9 if x.mean().item() > 5 else 1
        result: Tensor = self.conv(x) * self.mask.view(1, 4, 1, 1)
        return result


@pytest.mark.parametrize("kind", [Exposed, Drawn])
def test_what_is_written_to_the_one_is_read_from_the_other(kind: type[nn.Module]) -> None:
    model = kind().eval()
    twin = kind().eval()
    twin.load_state_dict(model.state_dict())
    fast = optimize(model, X, precision="fp32", budget_s=5.0)
    with torch.no_grad():
        for factor in (1, 20, 1):
            torch.testing.assert_close(fast(factor * X), twin(factor * X))


class Masked(nn.Module):
    """A layer, and a mask that it reads as a tensor."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """The masked input."""
        return x * self.get_buffer("mask")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_sees_what_others_write_to_an_array_of_its_tensors_memory(dtype: torch.dtype) -> None:
    drawn = np.ones(4, np.float32)
    copied: Any = exact_copy(holding(drawn=drawn, part=Masked(torch.from_numpy(drawn).view(dtype))))
    watch = Watch(copied.part, lambda value: False)
    assert watch.is_unchanged()
    copied.drawn[1] = 9
    assert not watch.is_unchanged()
    copied.drawn[1] = 1
    assert watch.is_unchanged()


def test_a_tensor_without_arrays_is_watched_by_its_version_alone() -> None:
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, device="meta"), torch.ones(0)):
        copied: Any = exact_copy(holding(kept=tensor))
        assert memory_of_arrays(copied.kept) is None
