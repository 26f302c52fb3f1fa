"""What a kernel on a GPU would assert is raised before it runs, as on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampopt.ir.device_asserts import AssertsRaised, may_assert
from tests.support.planted import captured_of

OUT = [0, 3, 9]
"""Places, of which the last is out of range."""

Call = Callable[[str], object]


def _places(device: str, *shape: int) -> Tensor:
    return torch.tensor(OUT, device=device).reshape(shape or (3,))


def _ones(device: str, *shape: int) -> Tensor:
    return torch.ones(shape, device=device)


CALLS: dict[str, Call] = {
    "gather": lambda d: _ones(d, 4).gather(0, _places(d)),
    "index": lambda d: _ones(d, 2, 4)[:, _places(d)],
    "index beside a mask": lambda d: _ones(d, 2, 4)[torch.tensor([True, False], device=d), _places(d)],
    "negative index": lambda d: _ones(d, 4)[-_places(d)],
    "index_put": lambda d: _ones(d, 4).index_put((_places(d),), _ones(d, 3)),
    "setitem": lambda d: _ones(d, 4).half().__setitem__(_places(d), 2.0),
    "index_select": lambda d: _ones(d, 4).index_select(0, _places(d)),
    "index_add": lambda d: _ones(d, 4).index_add_(0, _places(d), _ones(d, 3)),
    "index_copy": lambda d: _ones(d, 4).index_copy(0, _places(d), _ones(d, 3)),
    "index_fill": lambda d: _ones(d, 4).index_fill(0, _places(d), 2.0),
    "take": lambda d: _ones(d, 4).take(_places(d)),
    "put": lambda d: _ones(d, 4).put(_places(d), _ones(d, 3)),
    "scatter": lambda d: _ones(d, 4).bfloat16().scatter(0, _places(d), 2.0),
    "scatter_add": lambda d: _ones(d, 4).scatter_add_(0, _places(d), _ones(d, 3)),
    "scatter_reduce": lambda d: _ones(d, 4).scatter_reduce(0, _places(d), _ones(d, 3), "amax"),
    "embedding": lambda d: F.embedding(_places(d), _ones(d, 4, 2)),
    "embedding_bag": lambda d: F.embedding_bag(_places(d, 1, 3), _ones(d, 4, 2)),
    "max_unpool2d": lambda d: F.max_unpool2d(_ones(d, 1, 1, 1, 3), _places(d, 1, 1, 1, 3), (1, 2)),
    "nll_loss": lambda d: F.nll_loss(_ones(d, 3, 4), _places(d)),
    "cross_entropy": lambda d: F.cross_entropy(_ones(d, 3, 4).half(), _places(d)),
    "binary_cross_entropy": lambda d: F.binary_cross_entropy(_ones(d, 4) * 2, _ones(d, 4)),
    "masked_scatter": lambda d: _ones(d, 4).masked_scatter(_ones(d, 4) > 0, _ones(d, 2)),
    "assert": lambda d: torch._assert_async(_ones(d) > 1),
}


@pytest.mark.parametrize("is_inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", CALLS)
def test_the_mode_knows_each_operator_by_the_kernels_that_it_calls(name: str, is_inference: bool) -> None:
    """On a CPU nothing can be seen of it but that PyTorch's kernel ran once more before it raised."""
    ran = list[str]()

    class Seen(AssertsRaised):
        def first(self, func: object, args: object, kwargs: object) -> None:
            ran.append(str(func))
            super().first(func, args, kwargs)

    scope = torch.inference_mode if is_inference else torch.no_grad
    with scope(), Seen("cpu"), pytest.raises((IndexError, RuntimeError)):
        CALLS[name]("cpu")
    assert ran


def test_results_and_what_is_written_are_as_without_it() -> None:
    def work() -> list[Tensor]:
        torch.manual_seed(0)
        table, places = torch.randn(4, 3).half(), torch.tensor([1, 1, 3])
        total = torch.zeros(4, 3).half().index_add_(0, places, table[places])
        image, where = F.max_pool2d(torch.randn(1, 1, 4, 4), 2, return_indices=True)
        return [total, F.max_unpool2d(image, where, (2, 2)), F.one_hot(places, 4), F.embedding(places, table)]

    plain = work()
    with AssertsRaised("cpu"):
        checked = work()
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(plain, checked, strict=True))


def test_operators_that_run_functions_and_compiled_code_run_in_it() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
    x = torch.randn(4)
    with torch.no_grad(), AssertsRaised("cpu"):
        chosen = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        assert torch.equal(compiled(x), x.sin() + 1)
    assert torch.equal(chosen, x.sin() if x.sum() > 0 else x.cos())


def test_what_is_elsewhere_or_lies_in_another_layout_is_not_looked_at() -> None:
    places = torch.tensor([0, 1])
    with torch.no_grad(), AssertsRaised("cpu"):
        assert torch.empty(3, device="meta").index_select(0, places.to("meta")).shape == (2,)
        assert torch.eye(3).to_sparse().index_select(0, places).to_dense().sum() == 2
        huge = torch.zeros(1).expand(2**40)  # of which no copy has room
        assert huge.gather(0, places).shape == (2,)


class Voxels(nn.Module):
    """Counts points in cells, whose numbers it computes: NaN is the smallest integer."""

    def __init__(self, *, within: bool = False) -> None:
        super().__init__()
        self.mix, self.within = nn.Linear(3, 8), within

    def forward(self, points: Tensor) -> Tensor:
        cells = (points.clamp(-3.9, 3.9) + 4).long()
        if self.within:
            cells = cells.clamp(0, 7)
        place = (cells[..., 0] * 8 + cells[..., 1])[..., None].expand(-1, -1, 8)
        made = self.mix(points)
        grid = torch.zeros(points.shape[0], 64, 8, dtype=made.dtype, device=points.device)
        return grid.scatter_add(1, place, made)


class Table(nn.Module):
    """Reads a table at numbers that only inputs of the examples' range have."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.table = nn.Linear(3, 8), nn.Parameter(torch.randn(64, 8))

    def forward(self, points: Tensor) -> Tensor:
        made: Tensor = self.mix(points) * self.table[(points[..., 0] * 8 + 32).long()]
        return made


class Labels(nn.Module):
    """The loss of classes that it is told."""

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels)


def test_only_programs_that_may_be_given_such_places_are_checked() -> None:
    points = torch.rand(1, 20, 3) * 6 - 3
    assert may_assert(captured_of(Voxels(), points)[1].program)
    assert not may_assert(captured_of(Voxels(within=True), points)[1].program)
    assert not may_assert(captured_of(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))[1].program)
    assert may_assert(captured_of(Labels(), torch.randn(2, 4), torch.tensor([1, 3]))[1].program)


def _on_a_gpu() -> None:
    """In a process of its own, which a kernel that asserts would leave without a GPU."""
    from ampopt import optimize

    def fails(call: Call) -> None:
        with AssertsRaised(), pytest.raises((IndexError, RuntimeError), match=r"^(?!CUDA)"):
            call("cuda")

    on_gpu = {**CALLS, "one_hot": lambda d: F.one_hot(_places(d), 4)}  # on a CPU it looks itself
    for call in on_gpu.values():
        with torch.no_grad():
            fails(call)
        with torch.inference_mode():
            fails(call)
    torch.cuda.synchronize()
    points = torch.rand(2, 500, 3, device="cuda") * 6 - 3
    for model in (Voxels().eval().cuda(), Table().eval().cuda()):
        fast = optimize(model, points, budget_s=15)
        assert fast.report.chosen != "original", fast.report
        for seen in (points, points.flip(0).clone()):  # the second lies elsewhere in memory
            with torch.no_grad():
                torch.testing.assert_close(fast(seen), model(seen), rtol=2e-2, atol=2e-2)
    print("all right")


@pytest.mark.gpu
def test_nothing_on_a_gpu_ends_its_context() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.ir.test_device_asserts"]
    root, environment = Path(__file__).parents[2], {**os.environ, "PYTHONPATH": "."}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["all right"], done.stdout + done.stderr


if __name__ == "__main__":
    _on_a_gpu()
