"""Copies of a model share what they may, own what they change, and leave the model and its world alone."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import InputError
from ampopt.ir.model_copy import (
    device_of,
    exact_copy,
    note_writes,
    private_copy,
    same_tensor,
    untouched_rng,
    working_copy,
)
from tests.helpers import Model

CPU = torch.device("cpu")


def model_with_buffer() -> nn.Module:
    return Model(lambda m, x: m.linear(x), linear=nn.Linear(2, 2), state=torch.zeros(2))


def test_a_private_copy_evaluates_without_gradients_and_shares_nothing() -> None:
    model = model_with_buffer().train()
    duplicate = private_copy(model)
    assert not any(module.training for module in duplicate.modules())
    assert not any(parameter.requires_grad for parameter in duplicate.parameters())
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    for (name, mine), (other, theirs) in zip(
        model.state_dict().items(), duplicate.state_dict().items(), strict=True
    ):
        assert (name, mine.shape) == (other, theirs.shape)
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()


def test_a_private_copy_is_moved_and_the_model_is_not() -> None:
    model = model_with_buffer()
    duplicate = private_copy(model, torch.device("meta"))
    assert {t.device.type for t in duplicate.state_dict().values()} == {"meta"}
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}


def test_an_exact_copy_keeps_mode_frozen_parameters_and_ties() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).train()
    first, second = model
    second.weight = first.weight
    first.bias.requires_grad_(False)
    second.eval()
    duplicate = exact_copy(model)
    weight = duplicate.get_parameter("0.weight")
    assert duplicate.get_submodule("1").weight is weight
    assert weight is not first.weight
    assert [p.requires_grad for p in duplicate.parameters()] == [True, False, True]
    assert [module.training for module in duplicate.modules()] == [True, True, False]


def test_an_exact_copy_uses_what_its_memo_gives() -> None:
    model = model_with_buffer()
    shared = {id(parameter): parameter for parameter in model.parameters()}
    duplicate = exact_copy(model, shared)
    for mine, theirs in zip(model.parameters(), duplicate.parameters(), strict=True):
        assert mine is theirs
    assert duplicate.state is not model.state


def test_tensors_that_are_results_of_others_are_cloned_and_lose_their_history() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.utils.weight_norm(nn.Linear(2, 2))
    assert not model.weight.is_leaf
    duplicate = exact_copy(model)
    assert isinstance(duplicate.weight, Tensor)
    assert duplicate.weight.is_leaf
    assert torch.equal(duplicate.weight, model.weight)
    assert duplicate.weight.data_ptr() != model.weight.data_ptr()
    assert torch.equal(private_copy(model)(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_a_copy_made_in_inference_mode_may_be_written_to() -> None:
    model = model_with_buffer()
    with torch.inference_mode():
        duplicate = exact_copy(model)
    assert not any(t.is_inference() for t in (*duplicate.parameters(), *duplicate.buffers()))


def test_what_cannot_be_copied_is_said_and_the_cause_is_kept() -> None:
    model = nn.Linear(2, 2)
    model.__dict__["lock"] = threading.Lock()
    for copies in (private_copy, exact_copy, working_copy):
        with pytest.raises(InputError, match=r"cannot be copied \(cannot pickle") as caught:
            copies(model)
        assert isinstance(caught.value.__cause__, TypeError)


def test_a_working_copy_shares_parameters_and_owns_buffers_and_attributes() -> None:
    model = model_with_buffer()
    model.__dict__["seen"] = []
    duplicate = working_copy(model)
    for mine, theirs in zip(model.parameters(), duplicate.parameters(), strict=True):
        assert mine is theirs
    duplicate.get_buffer("state").add_(1)
    duplicate.__dict__["seen"].append(1)
    assert model.get_buffer("state").tolist() == [0, 0]
    assert model.__dict__["seen"] == []


def test_working_copies_of_a_model_that_writes_to_its_parameters_own_them_and_so_do_their_copies() -> None:
    model = nn.Linear(2, 2)
    called = exact_copy(model)
    bias = called.get_parameter("bias")
    note_writes(model, called)
    assert working_copy(model).weight is model.weight
    with torch.no_grad():
        bias[1] += 1
    note_writes(model, called)
    duplicate = working_copy(model)
    again = working_copy(duplicate)
    assert len({copied.get_parameter("weight") for copied in (model, duplicate, again)}) == 3
    assert torch.equal(duplicate.get_parameter("bias"), model.bias)
    assert working_copy(called).weight is called.weight


NAN = float("nan")


def _with_five(tensor: Tensor) -> Tensor:
    tensor.view(-1)[1000] = 5
    return tensor


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True),
        (torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN]), False),
        (torch.tensor([complex(NAN, 1)]), torch.tensor([complex(NAN, 1)]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.ones(2), torch.ones(1), False),
        (torch.ones(2), torch.ones(2, device="meta"), False),
        (torch.ones(0), torch.ones(0), True),
        (torch.ones(2, 2), torch.ones(2, 2).t(), True),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), True),
        (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse(), False),
        (torch.ones(2000).to_sparse(), _with_five(torch.ones(2000)).to_sparse(), False),
        (torch.eye(60).to_sparse_csr(), _with_five(torch.eye(60)).to_sparse_csr(), False),
        (torch.eye(60).to_sparse_csr(), torch.eye(60).to_sparse_csr(), True),
        (torch.eye(60).to_sparse_csr(), torch.eye(60).to_sparse(), False),
    ],
)
def test_tensors_are_the_same_by_kind_and_by_number_and_nan_is_nan(a: Tensor, b: Tensor, same: bool) -> None:
    assert same_tensor(a, b) is same
    assert same_tensor(b, a) is same


def test_a_model_computes_where_its_weights_are_else_its_inputs_else_on_the_cpu() -> None:
    meta = torch.device("meta")
    weights, on_meta = nn.Linear(2, 2, device=meta), torch.ones(2, device=meta)
    assert device_of(weights, [torch.ones(2)]) == meta
    assert device_of(Model(lambda m, x: x, state=on_meta), [torch.ones(2)]) == meta
    assert device_of(nn.ReLU(), [3, on_meta]) == meta
    assert device_of(nn.ReLU(), [3, "x"]) == CPU
    with pytest.raises(InputError, match=r"several devices \(cpu, meta\)"):
        device_of(Model(lambda m, x: x, linear=weights, state=torch.ones(1)), [])


def test_random_numbers_go_on_after_a_block_as_if_it_had_not_been() -> None:
    before = torch.get_rng_state()
    with untouched_rng(CPU):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.rand(3), first)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="negative dimension"), untouched_rng(CPU):
        torch.rand(int(torch.randint(-3, -1, ())))
    assert torch.equal(torch.get_rng_state(), before)


def test_pythons_and_numpys_numbers_go_on_after_a_block_too() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), float(np.random.rand())
    random.seed(3)
    np.random.seed(3)
    with untouched_rng(CPU):
        assert (random.random(), float(np.random.rand())) == expected
    assert (random.random(), float(np.random.rand())) == expected


def test_the_last_of_overlapping_blocks_puts_back_what_was_there_before_the_first() -> None:
    before = torch.get_rng_state()
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(untouched_rng(CPU))
    torch.rand(3)
    second.enter_context(untouched_rng(CPU))
    torch.rand(3)
    first.close()
    torch.rand(3)
    second.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_nested_block_puts_back_what_was_there_before_it_and_the_next_starts_anew() -> None:
    with untouched_rng(CPU):
        torch.rand(3)
        before = torch.get_rng_state()
        with untouched_rng(CPU):
            torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    later = torch.get_rng_state()
    with untouched_rng(CPU):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), later)
