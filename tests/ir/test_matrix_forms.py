"""Inverses, solutions and determinants of small matrices in ONNX Runtime are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.engines.executable import executable
from ampopt.ir.graph import calls
from ampopt.ir.matrix_forms import FORMS, LARGEST
from ampopt.ir.numerics import relative_error
from ampopt.ir.stable_forms import with_stable_forms
from ampopt.passes import OnnxRuntime, Openvino
from tests.helpers import Model, program_of
from tests.support.planted import module_of
from tests.support.side_by_side import results_by_name, side_by_side

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def cameras(count: int) -> Tensor:
    """Intrinsics of pinhole cameras, in pixels."""
    one = torch.tensor([[500.0, 0.5, 320.0], [0.0, 505.0, 240.0], [0.0, 0.0, 1.0]])
    return one + torch.arange(count).view(-1, 1, 1) * torch.diag(torch.tensor([3.0, 2.0, 0.0]))


MATRICES = {
    **{f"{size} rows": random(4, size, size) for size in (1, 2, 4, LARGEST)},
    "one matrix": random(3, 3),
    "of many": random(2, 1, 5, 2, 2),
    "of cameras": cameras(6),
    "with exchanged rows": torch.eye(4).roll(1, 0).expand(2, 4, 4).contiguous(),
    "of poses": torch.cat([torch.linalg.qr(random(3, 4, 4))[0][:, :3], torch.eye(4)[3:].expand(3, 1, 4)], 1),
    "of large numbers": random(3, 3, 3) * 1e10,
    "of tiny numbers": random(3, 3, 3) * 1e-10,
    "almost singular": torch.ones(2, 3, 3) + 1e-3 * random(2, 3, 3),
    "in float64": random(2, 3, 3).double(),
}


def _identity(m: Tensor) -> Tensor:
    return torch.eye(m.shape[-1], dtype=m.dtype)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "inv": torch.linalg.inv,
    "inverse": torch.inverse,
    "det": lambda m: torch.linalg.det(m) + m.det(),
    "solve": lambda m: torch.linalg.solve(m, m.flip(-1)[..., :1] * 2),
    "factor": lambda m: torch.linalg.cholesky(m @ m.mT + m.square().amax() * _identity(m)),
    "sign": lambda m: torch.linalg.slogdet(m)[0],
    "logarithm of tiny ones": lambda m: torch.linalg.slogdet(m * 2.0**-90)[1],
    "upper factor": lambda m: torch.linalg.cholesky(m @ m.mT + m.square().amax() * _identity(m), upper=True),
    "logarithms": lambda m: torch.linalg.slogdet(m)[1] + torch.logdet(m.abs().clamp(min=0.125).tril()),
    "solve below": lambda m: torch.linalg.solve_triangular(m + _identity(m), m.flip(-1), upper=False),
    "solve above": lambda m: torch.linalg.solve_triangular(m, m.mT, upper=True, unitriangular=True),
    "solve for many": lambda m: torch.linalg.solve(m, torch.cat([m.flip(-2), m], -1)),
}


ONE_WAY = ("1 rows", "4 rows", "of many", "of poses", "in float64")
"""Matrices for what is eliminated as for `inv` and `det`, or in one way for all."""

ELIMINATED = ("inv", "det", "solve")


@pytest.mark.parametrize("name", MATRICES)
def test_a_form_is_at_least_as_near_float64_as_eager(name: str) -> None:
    """Or within rounding of it; each matrix has one graph of all its functions."""
    x, names = MATRICES[name], FUNCTIONS if name in ONE_WAY else ELIMINATED
    model = Model(lambda _, m: tuple(FUNCTIONS[function](m) for function in names))
    graph = with_stable_forms(program_of(model, x).graph, (x,))
    assert not any(calls(graph, FORMS))
    for function, mine in zip(names, graph(x), strict=True):
        eager, exact = FUNCTIONS[function](x), FUNCTIONS[function](x.double())
        assert mine.dtype == eager.dtype, function
        assert relative_error(mine, exact) <= max(relative_error(eager, exact), 1e-6), function


def test_a_file_computes_what_eager_does(tmp_path: Path) -> None:
    table = {
        "inv": (FUNCTIONS["inv"], MATRICES["with exchanged rows"]),
        "inverse": (FUNCTIONS["inverse"], MATRICES["of cameras"]),
        "det": (FUNCTIONS["det"], MATRICES["2 rows"]),
        "solve": (FUNCTIONS["solve"], MATRICES["of many"]),
        "float64": (FUNCTIONS["solve for many"], random(3, 2, 2).double()),
    }
    functions, given = {name: f for name, (f, _) in table.items()}, [x for _, x in table.values()]
    report = module_of(side_by_side(functions), *given).export_onnx(tmp_path / "matrices.onnx")
    assert report.reason is None
    session = onnxruntime.InferenceSession(tmp_path / "matrices.onnx")
    names = [info.name for info in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})
    for name, mine, wanted in results_by_name(functions, given, [*map(torch.from_numpy, found)]):
        assert mine.dtype == wanted.dtype, name
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-6), name


def test_nan_anywhere_makes_all_numbers_of_a_file_nan(tmp_path: Path) -> None:
    """ONNX's maximum ignores it, and would take another pivot."""
    sizes = {"inv": 3, "det": 4, "solve": 3}
    table = {name: FUNCTIONS[name] for name in sizes}
    given = [random(size, size) for size in sizes.values()]
    module_of(side_by_side(table), *given).export_onnx(tmp_path / "matrices.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "matrices.onnx")
    names = [info.name for info in session.get_inputs()]
    for place in range(16):
        for x in given:
            x.copy_(random(*x.shape)).view(-1)[place % x.numel()] = torch.nan
        found = session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})
        for name, output in zip(table, found, strict=True):
            assert torch.from_numpy(output).isnan().all(), (name, place)


@pytest.mark.parametrize("target", ["openvino", "tensorrt"])
def test_a_file_for_a_runtime_without_float64_tells_of_it(target: str, tmp_path: Path) -> None:
    x = random(2, 3, 3)
    module = module_of(Model(lambda _, m: torch.linalg.inv(m)).eval(), x)
    report = module.export_onnx(tmp_path / "inverse.onnx", target=target)
    assert any("linalg_inv" in note and "is computed in float64" in note for note in report.notes)
    wide = random(2, LARGEST + 1, LARGEST + 1)  # whose determinant is ONNX's own, not OpenVINO's
    for function, given in ((torch.sin, x), (torch.linalg.det, wide)):
        other = module_of(Model(lambda _, m, f=function: f(m)).eval(), given)
        notes = other.export_onnx(tmp_path / "other.onnx", target=target, force=True).notes
        assert not any("float64" in note for note in notes)


def test_a_singular_matrix_gives_nan_and_a_determinant_of_zero() -> None:
    def function(m: Tensor) -> Any:
        return torch.linalg.inv(m), torch.linalg.solve(m, m[..., :1]), torch.linalg.det(m)

    x = random(2, 3, 3)
    graph = with_stable_forms(program_of(Model(lambda _, m: function(m)), x).graph, (x,))
    singular = x.clone()
    singular[0, 2] = singular[0, 1] * 2
    singular[0, :, 0] = 0.0
    inverse, solution, determinant = graph(singular)
    assert inverse[0].isnan().all()
    assert solution[0].isnan().all()
    assert determinant[0] == 0.0
    torch.testing.assert_close(inverse[1], torch.linalg.inv(x[1]))


@pytest.mark.parametrize(
    "function",
    [
        lambda m: torch.linalg.solve(m, m[..., 0]),
        lambda m: torch.linalg.solve(m, m[0]),
        lambda m: torch.linalg.solve(m, m, left=False),
        lambda m: torch.linalg.inv(m.to(torch.complex64)).real,
        lambda m: torch.linalg.inv(torch.nn.functional.pad(m, (0, 6, 0, 6)) + torch.eye(9)),
    ],
)
def test_others_are_left_alone(function: Callable[[Tensor], Tensor]) -> None:
    graph = program_of(Model(lambda _, m: function(m)), random(2, 3, 3)).graph
    assert any(calls(with_stable_forms(graph, (random(2, 3, 3),)), FORMS))


@pytest.mark.parametrize("engine", [OnnxRuntime(session=()), Openvino(options=())])
def test_an_engine_runs_what_raises_no_error_in_eager(engine: Any) -> None:
    """The original raises an error for a singular matrix: an answer in its place would be another one."""
    pytest.importorskip("openvino")
    x = random(2, 3, 3)
    for function in (torch.linalg.inv, torch.inverse, lambda m: torch.linalg.solve(m, m)):
        reason = engine.why_not(program_of(Model(lambda _, m, f=function: f(m)), x))
        assert "raises an error for some matrices" in (reason or "")
    program = program_of(Model(lambda _, m: torch.linalg.det(m)), x)
    assert engine.why_not(program) is None
    torch.testing.assert_close(executable(engine.apply(program).program)(x)[0], torch.linalg.det(x))
