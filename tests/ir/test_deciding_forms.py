"""Quotients rounded down, remainders and places of maxima in ONNX Runtime are eager's, at every jump."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampopt.engines.onnx_program import for_onnx_runtime, place_of_input, plain_model
from ampopt.ir.deciding_forms import FORMS
from ampopt.ir.graph import aten, calls
from ampopt.ir.stable_forms import with_stable_forms
from ampopt.ort.session import OnnxRunner, SessionOptions
from tests.helpers import Model, program_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

Function = Callable[[Tensor, Tensor], Tensor]

DIVISIONS: dict[str, Function] = {
    "a cell of a grid": lambda a, b: a // 0.1,
    "a place in a cell": lambda a, b: a % 0.1,
    "a place in a negative cell": lambda a, b: a % -0.25,
    "a quotient rounded down": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "a quotient by a number": lambda a, b: aten.div.Scalar_mode(a, -0.1, rounding_mode="floor"),
    "a remainder": lambda a, b: a % b,
    "a remainder of a number": lambda a, b: 1.0 % b,
    "a remainder of a negative number": lambda a, b: -7 % b,
    "a number rounded down": lambda a, b: 7.0 // b,
    "an integer by integers": lambda a, b: -7 // ((b > 0).long() * 5 - 2),
    "a remainder of an integer": lambda a, b: -7 % ((b > 0).long() * 5 - 2),
    "integers by a number": lambda a, b: (100 * b.nan_to_num(0, 9, -9)).int() // 0.1,
}
PLACES: dict[str, Function] = {
    "largest": lambda a, b: a.argmax(1),
    "smallest": lambda a, b: a.argmin(0, keepdim=True),
    "largest of all": lambda a, b: a.argmax(),
    "beside the largest": lambda a, b: a.max(1)[1],
    "beside the smallest": lambda a, b: a.min(1, keepdim=True).indices,
}
SPOILT = torch.tensor([math.nan, math.inf, -math.inf])
EXAMPLE = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))


def runner_of(function: Function) -> Callable[..., Tensor]:
    """The function in ONNX Runtime, exported with random numbers."""
    examples = EXAMPLE, EXAMPLE.flip(0).contiguous()
    program = program_of(Model(lambda m, a, b: function(a, b)), *examples)
    runner = OnnxRunner(for_onnx_runtime(plain_model(program.graph, examples)), SessionOptions())
    read = [place_of_input(info.name) for info in runner.inputs]

    def run(*tensors: Tensor) -> Tensor:
        (array,) = runner(*[tensors[place].numpy() for place in read])
        return torch.from_numpy(array)

    return run


@pytest.fixture(scope="module")
def grid() -> tuple[Tensor, Tensor]:
    """Multiples of what is divided by, and numbers that are large, or none, by each other."""
    numbers = torch.cat([torch.arange(-8, 9) * 0.1, torch.tensor([0.5, 3e9, -3e9]), SPOILT])
    pairs = torch.cartesian_prod(numbers, numbers)[: 20 * 16]
    return pairs[:, 0].reshape(20, 16).contiguous(), pairs[:, 1].reshape(20, 16).contiguous()


@pytest.mark.parametrize("name", DIVISIONS)
def test_quotients_and_remainders_are_eagers_where_they_jump(name: str, grid: tuple[Tensor, Tensor]) -> None:
    function, run = DIVISIONS[name], runner_of(DIVISIONS[name])
    for a, b in (grid, grid[::-1], (EXAMPLE, EXAMPLE.flip(0).contiguous())):
        torch.testing.assert_close(run(a, b), function(a, b), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", PLACES)
def test_a_place_is_that_of_the_first_nan_or_of_the_first_largest(name: str) -> None:
    function, run = PLACES[name], runner_of(PLACES[name])
    generator = torch.Generator().manual_seed(1)
    for share in (0.0, 0.05, 0.5, 1.0):
        x = torch.randint(-2, 3, EXAMPLE.shape, generator=generator).float()
        spoilt = SPOILT[torch.randint(3, x.shape, generator=generator)]
        x = torch.where(torch.rand(x.shape, generator=generator) < share, spoilt, x)
        assert torch.equal(run(x, x), function(x, x))


def test_every_form_is_used_by_one_of_these() -> None:
    used = set[object]()
    for function in (DIVISIONS | PLACES).values():
        program = program_of(Model(lambda m, a, b, f=function: f(a, b)), EXAMPLE, EXAMPLE + 0)
        used |= {node.target for node in calls(program.graph, FORMS)}
    assert used == FORMS.keys()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.long() // 3,
        lambda x: x.long() % 3,
        lambda x: x.long().argmax(1),
        lambda x: torch.div(x, 3.0, rounding_mode="trunc"),
        lambda x: x // 0.0,
        lambda x: x.max(1)[0],
    ],
)
def test_others_are_left_alone(function: Callable[[Tensor], Tensor]) -> None:
    graph = program_of(Model(lambda m, x: function(x)), EXAMPLE).graph
    assert any(calls(graph, FORMS))
    assert with_stable_forms(graph, (EXAMPLE,)).code == graph.code
