"""CUDA graphs at work: right for every stride, stream and thread, outputs owned by whom they should be."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.engines.cuda_graphs import CapturedGraph
from ampopt.engines.graph_capture import ReplayedProgram, capture_calls
from ampopt.errors import PassError
from ampopt.ir.lanes import FP32
from ampopt.measure.entry import Verdict
from ampopt.passes import CudaGraph
from tests.helpers import FP16, Model, eager_of, largest_error, reference_of
from tests.support import snapshot
from tests.support.planted import captured_of, module_of, optimize
from tests.support.small_net import PASSES, close, expected, image, net

pytestmark = pytest.mark.gpu


def test_a_replay_equals_eager_on_fresh_inputs_of_any_strides(
    model: nn.Module, fast: ampopt.OptimizedModule
) -> None:
    assert fast.program.cuda_graph
    for seed in range(10):
        x = image(seed=seed)
        wanted = expected(model, x)
        for laid in (
            x,
            x.to(memory_format=torch.channels_last),
            x.transpose(2, 3).contiguous().transpose(2, 3),
            torch.cat([x, x], 3)[..., :32],
            x.clone().requires_grad_(),
        ):
            found = fast(laid)
            assert close(found.detach(), wanted)
            assert found.is_contiguous()
            assert found.requires_grad is laid.requires_grad


def test_a_second_call_does_not_change_the_result_of_the_first(fast: ampopt.OptimizedModule) -> None:
    first = fast(image(seed=1))
    kept = first.clone()
    second = fast(image(seed=2))
    assert torch.equal(first, kept)
    assert first.data_ptr() != second.data_ptr()
    first.zero_()
    assert torch.equal(fast(image(seed=1)), kept)


def test_a_result_belongs_to_the_mode_of_its_own_call(fast: ampopt.OptimizedModule) -> None:
    for inference in (True, False, False, True):
        with torch.inference_mode(inference):
            assert fast(image()).is_inference() == inference


def test_a_thread_that_never_used_the_device_can_call(model: nn.Module, fast: ampopt.OptimizedModule) -> None:
    x = image(seed=9)
    wanted = expected(model, x)
    fast(x)
    torch.cuda.synchronize()
    found = ThreadPoolExecutor(1).submit(lambda: [fast(x) for _ in range(3)]).result()
    torch.cuda.synchronize()
    assert all(close(y, wanted) for y in found)


def test_a_result_outlives_the_module_that_made_it(model: nn.Module) -> None:
    fast = module_of(model, image(), passes=PASSES)
    found, wanted = fast(image(seed=1)), expected(model, image(seed=1))
    del fast
    torch.cuda.empty_cache()
    _ = [torch.randn_like(found) for _ in range(64)]
    assert close(found, wanted)


def test_calls_in_flight_keep_their_own_inputs_and_outputs(
    model: nn.Module, fast: ampopt.OptimizedModule
) -> None:
    inputs = [image(seed=seed) for seed in range(20)]
    wanted = [expected(model, x) for x in inputs]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # all launches are queued before the first one runs
    found = [fast(x) for x in inputs]
    torch.cuda.synchronize()
    assert len({y.data_ptr() for y in found}) == len(found)
    assert all(close(a, b) for a, b in zip(found, wanted, strict=True))


def test_static_outputs_are_overwritten_by_the_next_call_as_documented(model: nn.Module) -> None:
    fast = module_of(model, image(), passes=PASSES, outputs="static")
    first = fast(image(seed=1))
    assert close(first, expected(model, image(seed=1)))
    second = fast(image(seed=2))
    assert first.data_ptr() == second.data_ptr()
    assert close(first, expected(model, image(seed=2)))


def test_the_input_is_left_alone(fast: ampopt.OptimizedModule) -> None:
    x = image()
    fast(x).zero_()
    torch.cuda.synchronize()
    assert torch.equal(x, image())


def test_outputs_that_are_inputs_or_weights_belong_to_the_caller() -> None:
    model = Model(lambda m, x: (m.conv(x), x, m.conv.weight), conv=nn.Conv2d(3, 4, 1)).cuda()
    fast, x = module_of(model, image(), passes=(CudaGraph(),)), image()
    kept = [t.clone() for t in fast(x)]
    for tensor in fast(x):
        tensor.zero_()
    assert torch.equal(x, image())
    assert all(torch.equal(a, b) for a, b in zip(fast(x), kept, strict=True))


def test_calls_from_two_streams_do_not_mix(model: nn.Module, fast: ampopt.OptimizedModule) -> None:
    inputs = [image(seed=seed) for seed in range(40)]
    wanted = [expected(model, x) for x in inputs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(2)], list[Tensor]()
    for x, stream in zip(inputs, itertools.cycle(streams)):
        with torch.cuda.stream(stream):
            found.append(fast(x))
    torch.cuda.synchronize()
    assert all(close(a, b) for a, b in zip(found, wanted, strict=True))


def test_work_queued_on_the_callers_stream_comes_first(
    model: nn.Module, fast: ampopt.OptimizedModule
) -> None:
    stream, wanted = torch.cuda.Stream(), expected(model, image(seed=5) * 2)
    x = image(seed=5)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = fast(x * 2)
        doubled = found * 2
    torch.cuda.synchronize()
    assert close(found, wanted)
    assert close(doubled, 2 * wanted)


@pytest.mark.parametrize("own_stream", [False, True])
def test_threads_with_mixed_shapes_get_what_one_gets(model: nn.Module, own_stream: bool) -> None:
    fast = module_of(model, image(), passes=PASSES, max_shapes=3, max_captures=50)
    calls = [image(32 + 4 * (seed % 4), 32, seed) for seed in range(120)]
    wanted = [expected(model, x) for x in calls]
    torch.cuda.synchronize()

    def call(x: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
            found: Tensor = fast(x)
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, calls))
    assert all(close(a, b) for a, b in zip(found, wanted, strict=True))


def test_graphs_are_bounded_and_their_memory_comes_back(model: nn.Module) -> None:
    fast = module_of(model, image(), passes=PASSES, max_shapes=2, max_captures=100)
    sizes = [64 + 8 * (number % 6) for number in range(30)]
    reserved = []
    for number, size in enumerate(sizes):
        assert close(fast(image(size, seed=number)), expected(model, image(size, seed=number)))
        reserved.append(torch.cuda.memory_reserved())
    assert len(fast._calls.answers) == 2
    assert reserved[-1] <= 1.5 * max(reserved[:12])


def test_prepared_shapes_are_not_captured_later(
    model: nn.Module, fast: ampopt.OptimizedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast.prepare((1, 3, 40, 40), image(48))
    monkeypatch.setattr(
        "ampopt.engines.graph_capture.capture_calls", lambda *args: pytest.fail("captured in the work")
    )
    for x in (image(40, 40), image(48)):
        assert close(fast(x), expected(model, x))


def test_a_deep_copy_has_its_own_buffers(model: nn.Module, fast: ampopt.OptimizedModule) -> None:
    twin = copy.deepcopy(fast)
    streams, found = [torch.cuda.Stream() for _ in range(2)], list[Tensor]()
    torch.cuda.synchronize()
    for stream, module, seed in zip(streams, (fast, twin), (1, 2), strict=True):
        with torch.cuda.stream(stream):
            found.append(module(image(seed=seed)))
    torch.cuda.synchronize()
    assert all(close(y, expected(model, image(seed=seed))) for seed, y in zip((1, 2), found, strict=True))


def test_inputs_on_another_device_are_refused(fast: ampopt.OptimizedModule) -> None:
    with pytest.raises(ampopt.InputError, match=r"on cpu; this program was made for float32 on cuda"):
        fast(image().cpu())


def test_a_failed_capture_leaves_the_process_usable() -> None:
    model = Model(lambda m, x: m.conv(x) * x.sum().item(), conv=nn.Conv2d(3, 4, 1)).cuda()
    program = captured_of(model, image())[1].program.replace(cuda_graph=True)
    for make in (CapturedGraph, ReplayedProgram):
        with pytest.raises(PassError, match="the CUDA graph could not be captured"):
            make(program)
        torch.cuda.synchronize()
        assert not torch.cuda.is_current_stream_capturing()
        torch.randn(3, device="cuda")  # PyTorch takes a failed capture for one that goes on
    good = net()
    assert close(module_of(good, image(), passes=PASSES)(image(seed=3)), expected(good, image(seed=3)))
    torch.randn(3, device="cuda")  # the generator is not registered with a dead graph


def test_a_failed_capture_leaves_the_stream_and_the_random_numbers() -> None:
    stream, x = torch.cuda.current_stream(), torch.randn(100, device="cuda")
    state = torch.cuda.get_rng_state()
    with pytest.raises(PassError, match="the CUDA graph could not be captured"):
        capture_calls(lambda: (x[x > 0],))
    assert torch.cuda.current_stream() == stream
    drawn = torch.randn(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(3, device="cuda"), drawn)


def test_a_model_of_several_inputs_is_optimized() -> None:
    torch.manual_seed(0)
    model = Model(lambda m, x, y: m.linear(x).relu() * y, linear=nn.Linear(64, 64)).cuda().eval()
    examples = torch.randn(8, 64, device="cuda"), torch.randn(8, 64, device="cuda")
    fast = optimize(model, examples, budget_s=15.0, precision="fp32")
    for _ in range(3):
        x, y = (torch.randn(8, 64, device="cuda") for _ in range(2))
        assert close(fast(x, y), eager_of(model, [x, y], FP32)[0])


def test_a_model_that_cannot_be_captured_is_optimized_without_a_graph() -> None:
    model = Model(lambda m, x: m.conv(x) * x.sum().item(), conv=nn.Conv2d(3, 4, 1)).cuda()
    fast = optimize(model, image(), budget_s=20.0, precision="fp32")
    rows = [e for e in fast.report.entries if e.name == "cuda-graph"]
    assert all(row.verdict in (Verdict.FAILED, Verdict.DECLINED) for row in rows)
    assert close(fast(image(seed=3)), expected(model, image(seed=3)))


@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_both_lanes_of_a_network_are_verified(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # on a busy GPU the original may answer
    model = net()
    fast = optimize(model, image(), budget_s=20.0, precision=precision)
    lane = FP32 if precision == "fp32" else FP16
    for x in (image(seed=7), image(40, 24, seed=8)):
        reference = reference_of(model, [x])
        own = largest_error(eager_of(model, [x], lane), reference)
        assert largest_error([fast(x)], reference) <= max(4 * own, 1e-5 if lane is FP32 else 2e-3)
    assert not any(entry.verdict is Verdict.FAILED for entry in fast.report.entries), fast.report


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
def test_optimizing_leaves_flags_generators_and_the_model_alone(search: bool, tf32: bool) -> None:
    backends: Any = torch.backends
    model = net()
    old = backends.cudnn.benchmark, backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    try:
        backends.cudnn.benchmark = search
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = tf32
        before = (
            snapshot.of_torch(),
            torch.cuda.get_rng_state().numpy().tobytes(),
            torch.cuda.current_stream(),
        )
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fast = optimize(model, image(), budget_s=15.0, tolerance=1e-2)
        fast(image(40))
        fast.prepare((1, 3, 24, 24))
        assert snapshot.differences(before[0], snapshot.of_torch()) == []
        assert before[1] == torch.cuda.get_rng_state().numpy().tobytes()
        assert before[2] == torch.cuda.current_stream()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    finally:
        backends.cudnn.benchmark, backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = old


@pytest.mark.timing
def test_the_overhead_of_a_call_is_measured(
    fast: ampopt.OptimizedModule, record_property: Callable[[str, object], None]
) -> None:
    x, replay = image(), fast._calls.answers[0].run
    calls: dict[str, Callable[[], object]] = {"module": lambda: fast(x), "program": lambda: replay(x)}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2000):
            call()
        torch.cuda.synchronize()
        record_property(f"{name}_us", 1e6 * (time.perf_counter() - start) / 2000)
