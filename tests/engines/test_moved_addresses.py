"""Captured graphs read and write where a call's tensors lie; where they cannot, they copy, and are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.engines.cuda_graphs import FORMS, CapturedGraph
from ampopt.passes import CudaGraph
from ampopt.system.cuda_driver import check
from tests.helpers import Model
from tests.support.planted import module_of
from tests.support.small_net import PASSES, close, expected, image

pytestmark = pytest.mark.gpu


def test_a_call_copies_nothing_and_allocates_only_its_result(fast: ampopt.OptimizedModule) -> None:
    run = fast._calls.answers[0].run
    assert isinstance(run, CapturedGraph)
    x = image(seed=1)
    fast(x)
    form = next(iter(run._forms.values()))
    assert [len(use.nodes) for use in form.ready._uses] == [1, 1]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fast(x)
        torch.empty(1)  # on the host, to see that the profile sees something
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    operators = {event.name for event in profile.events()} - {"INVALID"}  # the profiler's own, now and then
    assert operators == {"aten::empty"}


def test_a_result_in_memory_that_other_tensors_had_before_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CapturedGraph, "_capture_into_buffers", lambda graph: pytest.fail("copied"))
    torch.manual_seed(0)
    linear = [nn.Linear(64, 64) for _ in range(3)]
    model = nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2]).cuda().eval()
    fast = module_of(model, torch.randn(8, 64, device="cuda"), passes=(CudaGraph(),))
    for _ in range(3):
        x = torch.randn(8, 64, device="cuda")
        assert close(fast(x), expected(model, x))


def test_results_that_are_read_again_inside_the_graph_are_right() -> None:
    torch.manual_seed(0)
    model = Model(lambda m, x: (y := m.linear(x), y.relu(), y.sum()), linear=nn.Linear(64, 64)).cuda()
    fast = module_of(model, torch.randn(8, 64, device="cuda"), passes=(CudaGraph(),))
    for _ in range(3):
        x = torch.randn(8, 64, device="cuda")
        for found, wanted in zip(fast(x), model(x), strict=True):
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_loop_uses_few_forms_of_its_graph_and_any_loop_is_right(
    model: nn.Module, fast: ampopt.OptimizedModule
) -> None:
    run = fast._calls.answers[0].run
    assert isinstance(run, CapturedGraph)
    result = None
    for seed in range(20):  # the input and the result of the call before are alive
        x = image(seed=seed)
        result = fast(x)
        assert close(result, expected(model, x))
    x, seen = image(), []
    for _ in range(20):
        fast(x)
        seen.append(set(run._forms))
    assert seen[0] == seen[-1]
    kept = []
    for seed in range(30):
        kept.append((image(seed=seed), fast(image(seed=seed))))
        del kept[seed % 3 : seed % 5]
        assert all(close(y, expected(model, x)) for x, y in kept)
    assert len(run._forms) == FORMS


def test_inputs_at_odd_addresses_and_parameters_are_copied(
    model: nn.Module, fast: ampopt.OptimizedModule
) -> None:
    room, x = torch.empty(3 * 32 * 32 + 1, device="cuda"), image(seed=4)
    shifted = room[1:].view_as(x).copy_(x)
    negative = torch._neg_view(-x)
    for laid in (shifted, negative, nn.Parameter(x)):
        assert close(fast(laid), expected(model, x))


def test_where_results_have_the_class_of_the_input_the_original_answers(
    model: nn.Module, fast: ampopt.OptimizedModule
) -> None:
    named = image(seed=4).as_subclass(_Named)
    found = fast(named)
    assert type(found) is _Named
    with torch.no_grad():
        assert close(found, model(named))  # as eager, with TF32 where that is on


class _Named(Tensor):
    """Some library's own kind of tensor."""


def test_a_driver_that_refuses_costs_copies_and_nothing_else(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ampopt")
    monkeypatch.setattr("ampopt.engines.graph_pointers.nodes_of", lambda graph: check((801,)))
    for outputs in ("copy", "static"):
        fast = module_of(model, image(), passes=PASSES, outputs=outputs)
        run = fast._calls.answers[0].run
        assert isinstance(run, CapturedGraph)
        assert not run._moves
        assert "copied in every call: RuntimeError: CUDA's driver refuses, with status 801" in caplog.text
        for seed in range(3):
            assert close(fast(image(seed=seed)), expected(model, image(seed=seed)))


@pytest.mark.parametrize("outputs", ["copy", "static"])
def test_operands_of_every_kind_are_found(outputs: str) -> None:
    """cuBLAS packs its parameters, concatenation has addresses in a table, views begin in the middle."""
    torch.manual_seed(0)
    cases: tuple[tuple[Callable[[Any, Tensor], Any], Tensor], ...] = (
        (lambda m, x: m.linear(x), torch.randn(8, 64)),
        (lambda m, x: m.linear(x.half().float()), torch.randn(8, 64)),
        (lambda m, x: torch.cat([x[2:], x[:3], x * 2]), torch.randn(5, 64)),
        (lambda m, x: (x, x[1:], x.relu(), x.sum(0)), torch.randn(5, 64)),
        (lambda m, x: (x[:, 32:].contiguous(), m.linear.weight, torch.zeros_like(x)), torch.randn(5, 64)),
        (
            lambda m, x: torch.zeros_like(m.linear.weight).index_add(0, x, m.linear.weight[:5]),
            torch.arange(5),
        ),
        (lambda m, x: x.argmax(1), torch.randn(5, 64)),
    )
    for function, example in cases:
        model = Model(function, linear=nn.Linear(64, 64)).cuda()
        x = example.cuda()
        fast = module_of(model, x, passes=(CudaGraph(),), outputs=outputs)
        for other in (x.clone(), x.flip(0).contiguous(), x.clone()):
            found, wanted = fast(other), model(other)
            pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)
