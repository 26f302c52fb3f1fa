"""Norms that move their running statistics: a graph gives the new ones and changes none that it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.capture import Captured
from ampopt.ir.graph import aten, calls
from ampopt.ir.lanes import FP32
from ampopt.ir.model_copy import private_copy
from ampopt.ir.operator_list import why_not_call
from ampopt.measure.verify import Verifier
from tests.helpers import BF16, Model
from tests.support.norms import training
from tests.support.planted import captured_of

IMAGES, ROWS, SERIES, VOLUMES = (2, 3, 6, 5), (4, 3), (4, 3, 7), (2, 3, 4, 3, 5)


def drawn(shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(*shape, generator=generator) * (1 + n) + n).to(dtype) for n in range(count)]


def near(a: Tensor, b: Tensor, limit: float) -> bool:
    return a.dtype is b.dtype and bool((a - b).double().norm() <= limit * b.double().norm())


def check(model: nn.Module, shape: tuple[int, ...], limit: float = 1e-6) -> Captured:
    """Eight calls of the graph are the model's, results and states, and it writes to none of its inputs."""
    dtype = next((weight.dtype for weight in model.parameters()), torch.float32)
    inputs = drawn(shape, 8, dtype)
    _, captured = captured_of(model, inputs[0])
    state, twin = list(captured.initial_state), private_copy(model)
    with torch.no_grad():
        for x in inputs:
            before = [tensor.clone() for tensor in (x, *state)]
            result, *new = captured.program.run(x, *state)
            assert all(map(torch.equal, before, (x, *state)))
            state = new
            assert near(result, twin(x), limit)
            assert captured.lifted is not None
            for mine, theirs in zip(state, captured.lifted.read(twin), strict=True):
                assert near(mine, theirs, limit)
    assert not any(map(why_not_call, calls(captured.program.graph)))
    return captured


@pytest.mark.parametrize("momentum", [0.1, 0.75, 1.0, None])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, ROWS),
        (nn.BatchNorm1d, SERIES),
        (nn.BatchNorm2d, IMAGES),
        (nn.BatchNorm3d, VOLUMES),
        (nn.SyncBatchNorm, IMAGES),
    ],
)
def test_a_batch_norm_in_training_keeps_its_statistics(
    kind: type[nn.Module], shape: tuple[int, ...], momentum: float | None
) -> None:
    captured = check(training(kind, 3, momentum=momentum), shape)
    assert captured.state == ("running_mean", "running_var", "num_batches_tracked")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.InstanceNorm1d, SERIES),
        (nn.InstanceNorm2d, IMAGES),
        (nn.InstanceNorm2d, IMAGES[1:]),
        (nn.InstanceNorm3d, VOLUMES),
    ],
)
def test_an_instance_norm_in_training_keeps_its_statistics(
    kind: type[nn.Module], shape: tuple[int, ...], affine: bool
) -> None:
    captured = check(training(kind, 3, track_running_stats=True, affine=affine), shape)
    assert captured.state == ("running_mean", "running_var")


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float16, 4e-3)])
def test_statistics_have_the_precision_of_the_model(
    dtype: torch.dtype, limit: float, momentum: float | None
) -> None:
    check(training(nn.BatchNorm2d, 3, momentum=momentum).to(dtype), IMAGES, limit)


def _by_hand(m: Any, x: Tensor) -> Tensor:
    return F.relu(F.batch_norm(m.conv(x), m.mean, m.var, training=True, momentum=0.3))


def _images_by_hand(m: Any, x: Tensor) -> Tensor:
    return F.instance_norm(m.conv(x), m.mean, m.var, use_input_stats=True)


def _twice(m: Any, x: Tensor) -> Tensor:
    y = F.batch_norm(m.conv(x), m.mean, m.var, training=True)
    z = F.batch_norm(y, m.mean, m.var)
    return y.add(z).add(F.batch_norm(z * 2, m.mean, m.var, training=True))


def _read_afterwards(m: Any, x: Tensor) -> Tensor:
    y = F.batch_norm(m.conv(x), m.mean, m.var, training=True)
    return y.add(m.mean.sum() * m.var.view(3, 1, 1))


def _rows_of_one_buffer(m: Any, x: Tensor) -> Tensor:
    y = F.batch_norm(m.conv(x), m.both[0], m.both[1], training=True)
    return y.add(m.both.sum())


def _rows_of_one_buffer_by_images(m: Any, x: Tensor) -> Tensor:
    y = F.instance_norm(m.conv(x), m.both[0], m.both[1], use_input_stats=True)
    return y.add(m.both.sum())


def _then_written_in_place(m: Any, x: Tensor) -> Tensor:
    y = F.batch_norm(m.conv(x), m.mean, m.var, training=True)
    y[:, 0] += 1
    m.mean.mul_(0.5)
    return y


def _of_what_is_written_afterwards(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.conv(x)
    z = F.batch_norm(y, m.mean, m.var, training=True)
    y[:, 0] += 1
    return y + z


def _without_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.batch_norm(m.conv(x), m.mean, m.var, training=True)


def _natively(m: Any, x: Tensor) -> Tensor:
    y, _, _ = torch.native_batch_norm(m.conv(x), None, None, m.mean, m.var, True, 0.1, 1e-5)
    return y


def _natively_then_in_place(m: Any, x: Tensor) -> Tensor:
    y, _, _ = torch.native_batch_norm(m.conv(x), None, None, m.mean, m.var, True, 0.1, 1e-5)
    y[:, 0] += 1
    return y


def _through_views(m: Any, x: Tensor) -> Tensor:
    seen = m.mean.view(3, 1)
    y = F.batch_norm(m.conv(x), seen.view(3), m.var, training=True)
    return y.add(seen.sum())


def _natively_with_what_gradients_need(m: Any, x: Tensor) -> Tensor:
    operator = torch.ops.aten._native_batch_norm_legit.default
    y, mean, inverse = operator(m.conv(x), None, None, m.mean, m.var, True, 0.1, 1e-5)
    result: Tensor = y + mean.sum() + inverse.sum()
    return result


def _functionally(m: Any, x: Tensor) -> Tensor:
    operator = torch.ops.aten._native_batch_norm_legit_functional.default
    y, _, _, mean, var = operator(m.conv(x), None, None, m.mean, m.var, True, 0.1, 1e-5)
    m.mean, m.var = mean, var
    result: Tensor = y
    return result


def keeping(function: Any) -> nn.Module:
    torch.manual_seed(0)
    one, two = torch.zeros(3), torch.ones(3)
    both = torch.stack([one, two])
    return Model(function, conv=nn.Conv2d(3, 3, 3), mean=one, var=two, both=both).eval()


@pytest.mark.parametrize(
    "function",
    [
        *(_by_hand, _images_by_hand, _twice, _read_afterwards, _rows_of_one_buffer),
        *(_rows_of_one_buffer_by_images, _then_written_in_place, _of_what_is_written_afterwards),
        *(_without_autocast, _natively, _natively_then_in_place, _through_views),
        *(_natively_with_what_gradients_need, _functionally),
    ],
)
def test_statistics_that_the_models_code_gives_are_kept(function: Any) -> None:
    captured = check(keeping(function), IMAGES)
    assert set(captured.state) <= {"mean", "var", "both"}
    assert captured.state


def test_a_norm_that_is_called_several_times_moves_its_statistics_as_often() -> None:
    def repeated(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = m.norm(m.conv(x)).relu_()
        return x

    torch.manual_seed(0)
    model = Model(repeated, conv=nn.Conv2d(3, 3, 3, padding=1), norm=training(nn.BatchNorm2d, 3)).eval()
    check(model, IMAGES)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.batch_norm(m.conv(x), m.mean, m.var, training=True, momentum=0.0),
        lambda m, x: F.batch_norm(m.conv(x), torch.zeros(3), torch.ones(3), training=True),
        lambda m, x: F.batch_norm(m.conv(x), m.mean, m.var),
    ],
)
def test_a_norm_that_moves_nothing_for_the_next_call_has_no_state(function: Any) -> None:
    model, (x, y) = keeping(function), drawn(IMAGES, 2)
    _, captured = captured_of(model, x)
    assert captured.state == ()
    assert [node.target for node in calls(captured.program.graph, [aten.var.correction])] == []
    with torch.no_grad():
        assert near(captured.program.run(y)[0], model(y), 1e-6)


def test_a_frozen_norm_beside_one_in_training_stays() -> None:
    torch.manual_seed(0)
    frozen = nn.BatchNorm2d(3, momentum=0.5)
    frozen.running_mean.fill_(0.25)  # type: ignore[union-attr]
    model = nn.Sequential(frozen, nn.Conv2d(3, 3, 3), training(nn.BatchNorm2d, 3)).eval()
    captured = check(model, IMAGES)
    assert captured.state == ("2.running_mean", "2.running_var", "2.num_batches_tracked")
    trains = [node.args[5] for node in calls(captured.program.graph, [aten.batch_norm.default])]
    assert trains == [False, True]


def test_a_norm_whose_only_result_is_read_is_one_that_passes_know() -> None:
    for function in (_natively, _then_written_in_place, _functionally):
        _, captured = captured_of(keeping(function), drawn(IMAGES, 1)[0])
        targets = [str(node.target) for node in calls(captured.program.graph)]
        assert targets.count("aten.batch_norm.default") == 1
        assert not [target for target in targets if "native" in target]


def test_the_input_is_no_place_for_statistics() -> None:
    model = Model(lambda m, x, mean: F.batch_norm(x, mean, torch.ones(3), training=True)).eval()
    with pytest.raises(CaptureError, match="the model changes its input"):
        captured_of(model, drawn(IMAGES, 1)[0], torch.zeros(3))


def _by_an_operator_for_several_processes(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.conv(x)
    torch.batch_norm_update_stats(y, m.mean, m.var, 0.1)
    return y


def _by_an_operator_that_chooses_a_library(m: Any, x: Tensor) -> Tensor:
    found: Tensor = torch._batch_norm_impl_index(
        m.conv(x), None, None, m.mean, m.var, True, 0.1, 1e-5, False
    )[0]
    return found


@pytest.mark.parametrize(
    "function", [_by_an_operator_for_several_processes, _by_an_operator_that_chooses_a_library]
)
def test_other_operators_that_move_statistics_are_named(function: Any) -> None:
    with pytest.raises(CaptureError, match=r"changes running statistics by an operator .*batch_norm_\w+ \("):
        captured_of(keeping(function), drawn(IMAGES, 1)[0])


@torch.library.custom_op("ampopt_tests::normalized", mutates_args=())
def _normalized(x: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
    return (x - running_mean[:, None, None]) * (running_var[:, None, None] + 1e-5).rsqrt()


@_normalized.register_fake
def _(x: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_of_a_users_that_only_reads_statistics_is_no_obstacle() -> None:
    model, x = keeping(lambda m, x: _normalized(m.conv(x), m.mean, m.var)), drawn(IMAGES, 1)[0]
    assert near(captured_of(model, x)[1].program.run(x)[0], model(x), 1e-6)


def test_one_tensor_as_mean_and_variance_is_refused_as_it_moves_twice() -> None:
    def function(m: Any, x: Tensor) -> Any:
        both = m.var + 1
        return F.batch_norm(m.conv(x), both, both, training=True), both

    with pytest.raises(CaptureError, match="changes running statistics by an operator"):
        captured_of(keeping(function), drawn(IMAGES, 1)[0])


@pytest.mark.parametrize("lane", [FP32, BF16])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_each_lane_is_verified_with_its_states(lane: Any, momentum: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), training(nn.BatchNorm2d, 4, momentum=momentum)).eval()
    original, captured = captured_of(model, drawn(IMAGES, 1)[0])
    check = Verifier(original, captured).check(lane.start(captured.program).run, lane, everywhere=True)
    assert check.passed, check
