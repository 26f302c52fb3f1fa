"""`io="lane"`: a module takes and gives its lane's dtype, whoever answers, and so do all of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt import robot
from ampopt.deploy.onnx_dynamic import capture_dynamic
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import InputError, StrictError
from ampopt.ir.capture import capture
from ampopt.ir.graph import calls
from ampopt.ir.lane_io import LaneIO
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.model_copy import device_of, private_copy
from ampopt.ir.numerics import relative_error
from ampopt.ir.transform import Recipe, replay
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.ledger import Ledger
from ampopt.passes import BakeAutocast
from ampopt.search.options import Options
from ampopt.search.partly_optimized import PartlyOptimizedModule
from tests.helpers import BF16, FP16, Model
from tests.support.planted import keep_the_original, optimize

pytestmark = pytest.mark.usefixtures("quick")

LOW = torch.bfloat16
"""The dtype of a CPU's "amp"."""

LARGEST = 2.0**-6
"""The largest relative error in it of the small models of these tests."""


def lane_module(model: nn.Module, *args: Any, lane: Lane = BF16, **options: Any) -> OptimizedModule:
    """A module in its lane's dtype, made without timing anything."""
    device = device_of(model, args)
    original = LaneIO.of_call(private_copy(model), args, {}, lane.dtype)
    captured = capture(original, *original.outside(args, {}), device)
    recipe = Recipe(lane, (BakeAutocast(),) if lane.is_mixed else ())
    program = replay(recipe.passes, lane.start(captured.program))
    return OptimizedModule(original, captured, program, recipe, Ledger("model", {}, ()), **options)


def rows(count: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def right(found: Tensor, expected: Tensor, dtype: torch.dtype = LOW) -> bool:
    return found.dtype is dtype and relative_error(found, expected) <= LARGEST


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("lane", "dtype"), [(BF16, LOW), (FP16, torch.float16), (FP32, torch.float32)])
def test_nothing_is_converted_at_the_border_of_a_lane(lane: Lane, dtype: torch.dtype) -> None:
    model = mlp()
    fast = lane_module(model, rows(), lane=lane)
    assert {border.dtype for border in (*fast.program.entry, *fast.program.exit)} == {dtype}
    assert "_to_copy" not in fast.program.graph.code
    x = rows(seed=1).to(dtype)
    assert right(fast(x), model(x.float()), dtype)


def test_an_input_with_readers_in_both_precisions_is_cast_once() -> None:
    model = Model(lambda m, x: m.layer(x).sum() + x.exp(), layer=nn.Linear(16, 16)).eval()
    fast = lane_module(model, rows())
    assert [border.dtype for border in fast.program.entry] == [LOW]
    assert [str(node.target) for node in calls(fast.program.graph)].count("aten._to_copy.default") == 1
    assert right(fast(rows().to(LOW)), model(rows().to(LOW).float()))


def test_an_unseen_shape_is_served_in_the_lanes_dtype_by_its_own_program() -> None:
    model = mlp()
    fast = lane_module(model, rows())
    assert right(fast(rows(5).to(LOW)), model(rows(5)))
    assert fast.health.late_captures == 1


def test_the_original_answers_in_the_lanes_dtype_where_no_program_may_be_made() -> None:
    model = mlp()
    fast = lane_module(model, rows(), max_captures=0)
    assert right(fast(rows(5).to(LOW)), model(rows(5)))
    assert fast.health.served_by_original == 1
    fast.strict = True
    with pytest.raises(StrictError, match="only the original model could answer"):
        fast(rows(6).to(LOW))
    assert right(lane_module(model, rows(), serve_original=True)(rows().to(LOW)), model(rows()))


def test_a_call_in_the_originals_dtype_is_refused_with_the_advice() -> None:
    fast = lane_module(mlp(), rows())
    with pytest.raises(InputError, match=r"made for bfloat16 on cpu: convert it with \.to\("):
        fast(rows())
    with pytest.raises(InputError, match=r"made for bfloat16 on cpu"):
        fast.prepare(rows(3))


def test_a_shape_is_prepared_in_the_lanes_dtype() -> None:
    fast = lane_module(mlp(), rows())
    fast.prepare((3, 16))
    assert right(fast(rows(3).to(LOW)), mlp()(rows(3)))
    assert fast.health.late_captures == 0


def test_an_input_in_channels_last_is_known_after_prepare_and_has_its_own_program() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    x = torch.rand(1, 3, 8, 8)
    fast = lane_module(model, x)
    moved = x.to(LOW).to(memory_format=torch.channels_last)
    fast.prepare(moved)
    served = fast._calls.find([moved], fast._optimized.captured.spec)
    assert served is not None
    assert served.program is not None
    assert served.program.examples[0].stride() == moved.stride()
    assert right(fast(moved), model(x))
    assert (fast.health.late_captures, fast._calls.programs) == (0, 2)


class Answer(NamedTuple):
    scores: Tensor
    places: Tensor


def test_integers_and_the_structure_of_a_result_stay_as_they_are() -> None:
    model = Model(
        lambda m, x, i: {"a": Answer(m.layer(x)[i], i), "mask": x > 0}, layer=nn.Linear(16, 4)
    ).eval()
    index = torch.tensor([3, 1])
    found = lane_module(model, rows(), index)(rows().to(LOW), index)
    assert type(found["a"]) is Answer
    assert right(found["a"].scores, model(rows(), index)["a"].scores)
    assert torch.equal(found["a"].places, index)
    assert found["mask"].dtype is torch.bool


def test_outputs_of_integers_alone_are_in_the_lanes_dtype() -> None:
    model = nn.Embedding(10, 4).eval()
    index = torch.tensor([3, 1])
    assert right(lane_module(model, index)(index), model(index))


@pytest.mark.parametrize("lane", [FP32, BF16])
def test_a_model_stored_in_bfloat16_takes_and_gives_the_lanes_dtype(lane: Lane) -> None:
    model = mlp().bfloat16()
    found = lane_module(model, rows().to(LOW), lane=lane)(rows().to(LOW).to(lane.dtype))
    assert right(found, model(rows().to(LOW)), lane.dtype)


class Counting(nn.Module):
    """Adds a third more at every call."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1 / 3
        return self.layer(x) + self.seen  # type: ignore[no-any-return]


@pytest.mark.parametrize("serve_original", [False, True])
def test_a_state_is_kept_in_its_own_dtype(serve_original: bool) -> None:
    fast, model = lane_module(Counting().eval(), rows(), serve_original=serve_original), Counting().eval()
    model.load_state_dict(fast._optimized.original.model.state_dict())  # type: ignore[union-attr]
    for count in (8, 8, 5):  # the last by a program of its own
        assert right(fast(rows(count).to(LOW)), model(rows(count)))
    lifted = fast._optimized.captured.lifted
    assert lifted is not None
    (seen,) = lifted.read(fast._state._serving) if serve_original else fast._state._forms[0].tensors
    assert seen.dtype is torch.float32
    assert torch.allclose(seen, torch.tensor([1.0]))


@pytest.mark.parametrize("backend", ["ampopt", "onnxruntime", "original"])
@pytest.mark.parametrize("lane", [FP16, BF16], ids=["fp16", "bf16"])
def test_a_bundle_takes_and_gives_the_lanes_dtype(
    backend: str, lane: Lane, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundle = tmp_path_factory.getbasetemp() / f"io-{lane.dtype}.ampopt"
    model = mlp()
    if not bundle.exists():
        lane_module(model, rows(), lane=lane).save(bundle, cpp=lane is BF16, tune_s=0.1)
    loaded = ampopt.load(bundle, backend=backend, device="cpu", budget_s=5)
    assert right(loaded(rows().to(lane.dtype)), model(rows()), lane.dtype)
    with pytest.raises(InputError, match=r"it takes b?float16"):
        loaded(rows())
    runner = robot.load(bundle)
    dtype = np.float16 if lane is FP16 else np.float32  # NumPy has no bfloat16
    found = runner(rows().numpy().astype(dtype))
    assert isinstance(found, np.ndarray)
    assert found.dtype == dtype
    assert relative_error(torch.from_numpy(found), model(rows())) <= LARGEST


@pytest.mark.parametrize(
    ("lane", "options", "dtype"),
    [
        (FP16, {}, "float16"),
        (FP16, {"io": "fp32"}, "float"),
        (BF16, {"dynamic": "batch"}, "float"),
    ],
)
def test_an_onnx_file_takes_and_gives_the_lanes_dtype_or_the_one_asked_for(
    lane: Lane, options: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    report = lane_module(mlp(), rows(), lane=lane).export_onnx(tmp_path / "model.onnx", **options)
    assert report.verified
    assert report.io == ("fp16" if dtype == "float16" else "fp32")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    found = {value.type for value in (*session.get_inputs(), *session.get_outputs())}
    assert found == {f"tensor({dtype})"}


def test_a_dynamic_capture_leaves_the_conversions_at_the_border() -> None:
    own = lane_module(mlp(), rows())._optimized
    traced = capture_dynamic(own.original, own.captured, ({0: "batch"},)).program
    assert [str(node.target) for node in calls(traced.graph)].count("aten.linear.default") == 2
    assert not [node for node in calls(traced.graph) if "to" in str(node.target)]
    assert (traced.entry, traced.exit) == (own.captured.program.entry, own.captured.program.exit)
    assert right(traced.run(rows(5).to(LOW))[0], mlp()(rows(5)))


def test_optimize_takes_examples_in_the_lanes_dtype_too_and_says_what_the_result_takes() -> None:
    model = mlp()
    options: dict[str, Any] = {"passes": "bake-autocast", "budget_s": 5.0, "cache": False}
    fast = optimize(model, rows().to(LOW), precision="amp", io="lane", **options)
    assert right(fast(rows().to(LOW)), model(rows()))
    assert any("io='lane': it takes and gives bfloat16" in note for note in fast.report.notes)
    assert fast.report.model == "Sequential"
    assert fast.report.inputs == ("bfloat16[8, 16] on cpu",)


class Overflows(nn.Sequential):
    """Leaves the range of float16 on the way."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x * 1e6)  # type: ignore[no-untyped-call]
        return result * 1e-6


def test_the_lanes_dtype_stays_where_a_program_in_fp32_answers() -> None:
    model, half = Overflows(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.float16
    x = torch.rand(1, 3, 8, 8)
    options: dict[str, Any] = {"amp_dtype": half, "passes": "channels-last", "budget_s": 5.0}
    fast = optimize(model, x, precision="amp", io="lane", cache=False, **options)
    assert list(fast.report.lanes) == ["fp32"]
    assert right(fast(x.half()), model(x), half)


def test_the_lanes_dtype_stays_where_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_original(monkeypatch)
    fast = optimize(mlp(), rows(), precision="amp", io="lane", budget_s=1e-6)
    assert fast.report.chosen == ORIGINAL
    assert right(fast(rows().to(LOW)), mlp()(rows()))


def test_a_model_of_several_graphs_takes_and_gives_the_lanes_dtype() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> list[Tensor]:
            y = self.body(x)
            return [y + 1, y] if float(y.sum()) > 0 else [y - 1, y]

    model = Deciding().eval()
    options: dict[str, Any] = {"passes": "bake-autocast", "budget_s": 3.0, "cache": False}
    fast = optimize(model, rows(), precision="amp", io="lane", **options)
    assert isinstance(fast, PartlyOptimizedModule)
    assert list(fast.report.regions) == ["body"]
    fast.report.chosen = ORIGINAL  # whichever answers
    for optimized in ({}, {"body": lane_module(model.body, rows(), lane=FP32)}):
        served = PartlyOptimizedModule(fast._original[0], optimized, None, fast.report, torch.device("cpu"))
        for found, expected in zip(served(rows().to(LOW)), model(rows().to(LOW).float()), strict=True):
            assert right(found, expected)


@pytest.mark.parametrize("precision", ["auto", "fp32,amp"])
def test_the_lane_has_to_be_named(precision: str) -> None:
    with pytest.raises(InputError, match=r"io='lane' with precision=.*: name one lane, such as"):
        ampopt.optimize(mlp(), rows(), io="lane", precision=precision)
    with pytest.raises(InputError, match="io='half': choose from original, lane"):
        Options(io="half")


def test_what_was_tuned_for_one_io_is_not_taken_for_the_other() -> None:
    assert Options("amp", io="lane").cache_facts() != Options("amp").cache_facts()
    assert Options("amp").io_dtype(torch.device("cpu")) is None
    assert Options("amp", io="lane").io_dtype(torch.device("cuda")) is torch.float16
    assert Options("fp32", io="lane").io_dtype(torch.device("cuda")) is torch.float32


def _kernels(fast: Any, x: Tensor) -> list[str]:
    """The names of the kernels and copies of a call on the GPU."""
    for _ in range(3):
        fast(x)
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        fast(x)
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if str(event.device_type) == "DeviceType.CUDA"]


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", ["copy", "static"])
def test_on_a_gpu_no_kernel_of_a_call_casts(outputs: Any) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
    model, x = nn.Sequential(*layers).cuda().eval(), torch.randn(512, 4096, device="cuda")
    options: dict[str, Any] = {"precision": "amp", "outputs": outputs, "budget_s": 20, "cache": False}
    for io, given, casts in (("lane", x.half(), False), ("original", x, True)):
        fast = optimize(model, x, io=io, **options)
        assert fast.report.chosen == "amp"
        assert right(fast(given), model(x), given.dtype)
        found = _kernels(fast, given)
        assert found
        assert any("copy" in name for name in found) is casts, (
            found
        )  # so are PyTorch's kernels of casts called


@pytest.mark.gpu
def test_on_a_gpu_an_input_in_channels_last_is_read_where_it_is() -> None:
    from ampopt.passes import ChannelsLast, CudaGraph

    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()).cuda().eval()
    x = torch.rand(4, 16, 32, 32, device="cuda")
    original = LaneIO.of_call(private_copy(model), (x,), {}, torch.float16)
    moved = x.to(memory_format=torch.channels_last)
    captured = capture(original, *original.outside((moved,), {}), x.device)
    recipe = Recipe(FP16, (BakeAutocast(), ChannelsLast(), CudaGraph()))
    program = replay(recipe.passes, FP16.start(captured.program))
    assert program.entry[0].convert(program.examples[0]) is program.examples[0]
    fast = OptimizedModule(original, captured, program, recipe, Ledger("model", {}, ()))
    y = moved.half()
    assert right(fast(y), model(x), torch.float16)
    assert (y.data_ptr(),) in fast._calls.answers[0].bare._forms  # type: ignore[union-attr]


class Optional(nn.Module):
    """It takes a second tensor, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        result: Tensor = self.a(x)
        return result if y is None else result + self.b(y)


def test_a_tensor_where_the_example_had_none_is_converted_too() -> None:
    model, x = Optional().eval(), torch.randn(2, 8)
    fast: Any = optimize(model, (x, None), precision="amp", io="lane", budget_s=3)
    found = fast(x.to(LOW), x.to(LOW))
    assert found.dtype is LOW
    with torch.no_grad():
        assert torch.allclose(found.float(), model(x, x), atol=0.1)
