"""CUDA's float16 autocast is followed without a GPU: what it computes in float32 gets a cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampopt.errors import ExportError
from ampopt.ir import cuda_autocast
from ampopt.ir.cuda_autocast import on_cuda, with_widening_casts
from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32
from ampopt.ir.program import Program
from tests.helpers import Model, check_graph, program_of, targets_of

ROWS = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))


def program_after_linear(function: Callable[[Tensor], Any]) -> Program:
    """A linear layer, whose result is float16 under autocast, and what reads it."""
    model = Model(lambda m, x: function(m.linear(x)), linear=nn.Linear(6, 6))
    return program_of(model, ROWS)


def widened(program: Program) -> list[str]:
    """The operators with an input that was cast for them."""
    return [
        str(user.target).split(".")[1]
        for node in calls(with_widening_casts(program).graph, [aten._to_copy.default])
        for user in node.users
    ]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y: torch.softmax(y, -1), ["softmax"]),
        (lambda y: F.layer_norm(y, (6,)), ["layer_norm"]),
        (lambda y: y.sum(1), ["sum"]),
        (lambda y: y.exp(), ["exp"]),
        (lambda y: y.relu(), []),
        (lambda y: y @ y.mT, []),
        (lambda y: F.gelu(y), []),
    ],
    ids=["softmax", "layer norm", "sum", "exp", "relu", "product", "gelu"],
)
def test_what_cuda_computes_in_float32_gets_a_cast(
    function: Callable[[Tensor], Any], expected: list[str]
) -> None:
    assert widened(program_after_linear(function)) == expected


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_computed_in_float16_without_a_gpu_too(
    layer: Callable[[int, int], nn.Module],
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), layer(8, 6))
    program = program_of(model.eval(), torch.randn(5, 1, 8))
    assert targets_of(with_widening_casts(program)) == targets_of(program)


def test_so_is_a_cell_of_an_rnn() -> None:
    program = program_of(nn.Sequential(nn.Linear(8, 8), nn.RNNCell(8, 6)).eval(), torch.randn(2, 8))
    assert targets_of(with_widening_casts(program)) == targets_of(program)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_cells_that_a_cpus_autocast_leaves_out_are_refused_by_name(
    cell: Callable[[int, int], nn.Module],
) -> None:
    program = program_of(nn.Sequential(nn.Linear(8, 8), cell(8, 6)).eval(), torch.randn(2, 8))
    with pytest.raises(ExportError, match=r"_cell .*leaves it in float32: use a layer with one step"):
        with_widening_casts(program)


def test_a_recurrent_layer_taken_out_of_autocast_is_fed_float32() -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(8, 8), nn.GRU(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            with torch.autocast(x.device.type, enabled=False):
                result: Tensor = self.layer(y.float())[0]
            return result

    assert widened(program_of(Guarded().eval(), torch.randn(5, 1, 8))) == ["to"]


def test_what_is_float32_already_is_not_cast() -> None:
    program = program_of(Model(lambda m, x: torch.softmax(x, -1)), ROWS)
    assert targets_of(with_widening_casts(program)) == targets_of(program)


def test_every_reader_gets_a_cast_of_its_own_and_the_others_none() -> None:
    program = program_after_linear(lambda y: (y.exp(), torch.softmax(y, -1), y.relu()))
    assert sorted(widened(program)) == ["exp", "softmax"]


def test_a_result_that_is_asked_for_in_float32_counts() -> None:
    assert widened(program_after_linear(lambda y: torch.cumsum(y.relu(), 1, dtype=torch.float32))) == [
        "cumsum"
    ]


def test_what_the_model_takes_out_of_autocast_is_fed_float32() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.outer(x)
        with torch.autocast("cpu", enabled=False):
            return m.inner(y.float().relu())  # type: ignore[no-any-return]

    program = program_of(Model(forward, outer=nn.Linear(6, 6), inner=nn.Linear(6, 3)), ROWS)
    changed = with_widening_casts(program)
    (relu,) = calls(changed.graph, [aten.relu.default])
    assert relu.all_input_nodes[0].target in (aten._to_copy.default, aten.to.dtype)


def test_in_float32_the_casts_change_nothing_and_the_given_program_stays() -> None:
    program = program_after_linear(lambda y: torch.softmax(y, -1))
    code = program.graph.code
    changed = with_widening_casts(program)
    assert program.graph.code == code
    check_graph(changed)
    assert (changed.lane, changed.under_autocast) == (FP32, False)
    assert torch.equal(changed.run(ROWS)[0], program.run(ROWS)[0])


def test_an_operator_that_cannot_be_run_without_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_after_linear(lambda y: y.relu())

    def fail(*_: object) -> object:
        raise RuntimeError("no kernel for that " + "x " * 300)

    monkeypatch.setattr(cuda_autocast._CudaRun, "call_function", fail)
    with pytest.raises(
        ExportError, match=r"^float16 autocast cannot be followed through .*linear.*: no kernel"
    ) as e:
        with_widening_casts(program)
    assert len(str(e.value)) < 400


@pytest.mark.parametrize("failing", [False, True])
def test_autocast_is_as_it_was_afterwards(failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> tuple[object, ...]:
        kinds = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
        return (*kinds, torch.is_autocast_cache_enabled(), torch.is_grad_enabled())

    program, before = program_after_linear(lambda y: y.exp()), state()
    if failing:
        monkeypatch.setattr(cuda_autocast._CudaRun, "call_function", lambda *_: 1 / 0)
        with pytest.raises(ExportError):
            with_widening_casts(program)
    else:
        with_widening_casts(program)
    assert state() == before


def test_a_fake_tensor_of_cuda_has_everything_but_numbers() -> None:
    real = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).half()
    fake = on_cuda(real, FakeTensorMode())
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.device == torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [lambda y: torch.softmax(y, -1), lambda y: y.relu(), lambda y: y.sum(1)])
def test_on_a_gpu_autocast_gives_the_dtype_that_was_foretold(function: Callable[[Tensor], Tensor]) -> None:
    model = Model(lambda m, x: function(m.linear(x)), linear=nn.Linear(6, 6)).cuda()
    with torch.no_grad(), torch.autocast("cuda"):
        found = model(ROWS.cuda()).dtype
    foretold = torch.float32 if widened(program_after_linear(function)) else torch.float16
    assert found is foretold
