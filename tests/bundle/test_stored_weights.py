"""Weights go to a table and contiguous tensors, and come back in the same order in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt.bundle.stored_weights import StoredWeight, read_weights, write_weights
from ampopt.errors import BundleError, ExportError

CPU = torch.device("cpu")
IMAGE = torch.randn(4, 3, 3, 2, generator=torch.Generator().manual_seed(0))


def read(table: Any, tensors: dict[str, Tensor]) -> dict[str, StoredWeight]:
    return read_weights(table, tensors, CPU, "file")


def there_and_back(**weights: Tensor) -> dict[str, Tensor]:
    """The weights after a way through the bytes of both files."""
    table, tensors = write_weights(weights, CPU, "file")
    loaded = safetensors.torch.load(safetensors.torch.save(tensors))
    return {name: weight.load() for name, weight in read(json.loads(json.dumps(table)), loaded).items()}


def bits(tensor: Tensor) -> bytes:
    """The elements in their logical order."""
    return bytes(tensor.reshape(-1).contiguous().view(torch.uint8).tolist())


@pytest.mark.parametrize(
    "weight",
    [
        IMAGE,
        IMAGE.contiguous(memory_format=torch.channels_last),
        IMAGE.permute(3, 0, 2, 1),
        torch.randn(5, 3).t(),
        torch.tensor(0.5),
        torch.empty(0, 3),
        torch.empty(3, 0).t(),
        torch.randn(1, 4, 1, 1).contiguous(memory_format=torch.channels_last),
        IMAGE.half(),
        IMAGE.bfloat16(),
        IMAGE.double(),
        torch.arange(7),
        torch.tensor([True, False]),
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ],
    ids=lambda w: f"{str(w.dtype).removeprefix('torch.')}{list(w.shape)}{list(w.stride())}",
)
def test_a_weight_comes_back_with_its_bits_and_its_order_in_memory(weight: Tensor) -> None:
    found = there_and_back(w=weight)["w"]
    assert (found.dtype, found.shape, found.stride()) == (weight.dtype, weight.shape, weight.stride())
    assert bits(found) == bits(weight)


def test_what_is_stored_owns_contiguous_memory_of_its_own_size() -> None:
    whole = torch.arange(300.0).view(3, 100)
    table, tensors = write_weights({"w": whole[:, 0]}, CPU, "file")
    assert tensors["w"].untyped_storage().nbytes() == 12
    assert tensors["w"].data_ptr() != whole.data_ptr()
    assert table == {"w": {"tensor": "w", "strides": [1], "device": {"device": "own"}}}


def test_gaps_and_repetitions_are_not_kept() -> None:
    found = there_and_back(gap=torch.randn(4, 6)[:, ::2], repeated=torch.randn(3, 1).expand(3, 4))
    assert (found["gap"].stride(), found["repeated"].stride()) == ((3, 1), (4, 1))


def test_one_tensor_under_two_names_is_stored_once_and_another_view_of_it_apart() -> None:
    weight = torch.randn(3, 3)
    table, tensors = write_weights({"a": weight, "b": weight.view(3, 3), "c": weight.t()}, CPU, "file")
    assert tensors.keys() == {"a", "c"}
    assert [table[name]["tensor"] for name in "abc"] == ["a", "a", "c"]
    found = {name: each.load() for name, each in read(table, tensors).items()}
    assert found["a"] is found["b"]
    assert torch.equal(found["c"], weight.t())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        lambda t: t.to(torch.complex64),
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "complex", "quantized"],
)
def test_what_a_file_cannot_hold_is_refused_by_name(make: Callable[[Tensor], Tensor]) -> None:
    message = r"^file, weight 'w': a file cannot hold a torch\..* tensor of torch\."
    with pytest.raises(ExportError, match=message):
        write_weights({"w": make(torch.eye(3))}, CPU, "file")


@pytest.mark.gpu
def test_on_a_gpu_a_weight_on_another_device_is_refused() -> None:
    weight = torch.ones(2, device="cuda")
    with pytest.raises(ExportError, match=r"^file, weight 'w': a program on cpu that also uses cuda:0"):
        write_weights({"w": weight}, CPU, "file")
    table, _ = write_weights({"w": weight, "host": torch.ones(2)}, weight.device, "file")
    assert [table[name]["device"]["device"] for name in ("w", "host")] == ["own", "cpu"]


def test_weights_are_read_for_the_device_of_the_reader() -> None:
    table, tensors = write_weights({"w": IMAGE}, CPU, "file")
    elsewhere = read_weights(table, tensors, torch.device("meta"), "file")["w"]
    assert elsewhere.load().device.type == "meta"


def test_a_weight_without_memory_is_of_its_kind() -> None:
    weight = StoredWeight(IMAGE, (18, 1, 6, 3), CPU)
    with FakeTensorMode():
        fake = weight.without_memory()
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
        IMAGE.shape,
        (18, 1, 6, 3),
        IMAGE.dtype,
        CPU,
    )


def test_what_lies_as_it_should_is_not_copied() -> None:
    assert StoredWeight(IMAGE, IMAGE.stride(), CPU).load() is IMAGE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strides": [3, 3]}, r"strides \[3, 3\] do not fit shape \[2, 3\]"),
        ({"strides": [1]}, r"strides \[1\] do not fit shape \[2, 3\]"),
        ({"strides": [-3, 1]}, "do not fit"),
        ({"strides": [4, 1]}, "do not fit"),
        ({"strides": [0, 1]}, "do not fit"),
        ({"strides": [True, 1]}, "expected an integer of 64 bits"),
        ({"strides": 3}, "expected an array"),
        ({"tensor": "x"}, "its tensor 'x' is missing from the weights' file"),
        ({"tensor": 3}, "expected a string"),
        ({"device": {"device": "cuda:7"}}, "unknown value"),
        ({"device": 3}, "a tensor of torch.float32 on 3 cannot be a weight"),
        ({"more": 1}, "expected an object of tensor, strides, device"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_the_weights_name(
    change: dict[str, Any], message: str
) -> None:
    table, tensors = write_weights({"w": torch.randn(2, 3)}, CPU, "file")
    table["w"] |= change
    with pytest.raises(BundleError, match=rf"^file, weight 'w': .*{message}"):
        read(table, tensors)


def test_tensors_and_weights_have_to_be_each_others() -> None:
    table, tensors = write_weights({"w": torch.randn(2, 3)}, CPU, "file")
    with pytest.raises(BundleError, match="file, weights: the weights' file holds 'more', which no weight"):
        read(table, {**tensors, "more": torch.ones(1)})
    others: list[Any] = [[], None, "w"]
    for wrong in others:
        with pytest.raises(BundleError, match=r"^file, weights: expected an object"):
            read(wrong, tensors)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_that_no_weight_has_is_refused(dtype: torch.dtype) -> None:
    table, tensors = write_weights({"w": torch.randn(2, 3)}, CPU, "file")
    with pytest.raises(BundleError, match=f"weight 'w': a tensor of {dtype} on cpu cannot be a weight"):
        read(table, {"w": tensors["w"].to(dtype)})
