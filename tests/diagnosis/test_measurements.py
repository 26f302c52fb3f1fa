"""What a diagnosis measures: operators, layers, errors, host reads and batches."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.diagnosis import examine
from ampopt.diagnosis.accuracy import layer_errors
from ampopt.diagnosis.examine import measure
from ampopt.diagnosis.findings import host_reads
from ampopt.diagnosis.host_reads import waits_to_write
from ampopt.diagnosis.layers import layers_of, without_tensor_cores
from ampopt.diagnosis.operators import Kernel, Spent, least_disturbed, profiled
from ampopt.diagnosis.sweep import BatchRow, of_batch, pays_from, sweep
from ampopt.diagnosis.trace import write_trace
from ampopt.diagnosis.watch import watch
from ampopt.diagnosis.work import works
from ampopt.ir.beside import accumulated, observe
from ampopt.ir.graph import calls
from ampopt.ir.lanes import FP32
from tests.helpers import BF16, FP16, Model, program_of, several_kinds
from tests.support.cases import CEILINGS, CPU, case_of, taking

X = torch.randn(2, 3, 12, 12)


def test_every_operator_is_timed_and_autocasts_casts_are_its() -> None:
    program = program_of(several_kinds(), X)
    names = {node.name for node in program.graph.graph.nodes if node.op == "call_function"}
    fp32 = profiled(program, runs=3)
    assert fp32.keys() == names
    assert all(spent.seconds > 0 for spent in fp32.values())
    assert sum(spent.casts for spent in fp32.values()) == 0
    amp = profiled(BF16.start(program), runs=1)
    assert amp["conv2d"].casts == 3  # its input, its weight and its bias
    assert 0 < amp["conv2d"].casts_s < amp["conv2d"].seconds


def test_the_work_of_a_layer() -> None:
    found = works(program_of(several_kinds(), X))
    conv = found["conv2d"]
    assert (conv.operator, conv.module, conv.shape) == ("conv2d", "0", (2, 8, 10, 10))
    assert conv.parameters == 3 * 8 * 9 + 8
    assert conv.madds == 2 * 8 * 100 * 27
    assert conv.moved == 4 * (X.numel() + conv.parameters + 2 * 8 * 100)
    assert next(work for work in found.values() if work.operator in ("flatten", "reshape")).moved == 0


def test_sparse_tensors_are_not_counted() -> None:
    found = works(program_of(Model(lambda m, x: x.to_sparse().to_dense()).eval(), X))
    moved = {work.operator: work.moved for work in found.values()}
    assert moved["to_sparse"] == 0
    assert max(moved.values()) == 4 * 2 * X.numel()  # the copy that the caller owns


def test_what_bounds_a_layer() -> None:
    found = works(program_of(nn.Conv2d(3, 8, 3).eval(), X))
    (name,) = found
    kernels = (Kernel("gemm", 1e-3), Kernel("permute", 1e-3))
    slow = layers_of(
        {"fp32": found}, {"fp32": {name: Spent(2e-3, kernels)}}, {"fp32": torch.float32}, CEILINGS
    )[0]
    assert slow.bounds == {"fp32": "launch"}  # 2 µs; 0.9 µs of arithmetic; 1 µs of bytes
    assert slow.reached["fp32"] == pytest.approx(1e-3)
    told = slow.to_dict()["lanes"]["fp32"]
    assert told["tflop_s"] == pytest.approx(found[name].flops / 2e-3 / 1e12, abs=1e-5)
    assert [kernel["name"] for kernel in told["kernels"]] == ["gemm", "permute"]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        (
            "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x32_tensor16x8x16",
            True,
        ),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_64x64_64x6_tn_align8>", True),
        ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_tn", True),
        ("volta_h884gemm_64x64_ldg8_nn", True),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", True),
        (
            "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_hgmma",
            True,
        ),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nchw_tilesize128x128x8_ffma", False),
        ("ampere_sgemm_128x64_nn", False),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>", False),
        ("void cudnn::winograd_nonfused::winogradForwardOutput4x4", False),
        ("void implicit_convolve_sgemm<__half, __half, 128, 5, 5, 3, 3, 3, 1, true, false, true>", False),
        ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, c10::Half, int>", False),
        ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>", False),
    ],
)
def test_kernels_of_tensor_cores_are_known_by_their_names(name: str, is_one: bool) -> None:
    assert Kernel(name, 1.0).on_tensor_cores is is_one


def test_layers_without_tensor_cores_are_told() -> None:
    found = works(program_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval(), X))
    convs = [name for name, work in found.items() if work.flops]
    kernels = dict(zip(convs, ("implicit_convolve_sgemm", "s16816gemm"), strict=True))
    spent = {name: Spent(1e-3, (Kernel(kernels[name], 1e-3),) if name in kernels else ()) for name in found}
    layers = layers_of({"amp": found}, {"amp": spent}, {"amp": torch.float16}, CEILINGS)
    assert [layer.tensor_cores("amp") for layer in layers] == [False, None, True]
    note = without_tensor_cores(layers, "amp")
    assert note is not None
    assert note.startswith(
        "1 of 2 convolutions and products in amp, 33% of the operators' time, run no kernel"
    )
    assert note.endswith(f"{convs[0]} to [2, 8, 10, 10], 0: implicit_convolve_sgemm")
    assert without_tensor_cores(layers[1:], "amp") is None


def test_errors_by_layer_add_up_and_the_worst_comes_first() -> None:
    program = program_of(several_kinds(), X)
    errors = layer_errors(program, BF16, left_s=60.0)
    by_name = {each.name: each for each in errors}
    assert 1e-4 < by_name["conv2d"].alone < 2e-2
    assert by_name["linear"].accumulated > by_name["conv2d"].accumulated / 10
    shares = [each.at_outputs for each in errors]
    assert None not in shares
    assert shares == sorted(shares, key=lambda share: -(share or 0.0))
    assert all(each.at_outputs is None for each in layer_errors(program, BF16, left_s=0.0))


def test_errors_of_the_first_operator_are_its_own() -> None:
    program = program_of(nn.Conv2d(3, 8, 3).eval(), X)
    (alone,) = observe(program, [program.examples]).values()
    (together,) = accumulated(program, program.examples).values()
    assert together == pytest.approx(alone.error, rel=1e-6)


def test_an_overflow_is_accumulated_to_infinity() -> None:
    model = Model(lambda m, x: m.second(m.first(x) * 1e5), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    errors = layer_errors(program_of(model.eval(), torch.ones(2, 4)), FP16, left_s=0.0)
    assert errors[0].overflows
    assert max(each.accumulated for each in errors) == math.inf


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        kept = y[y > 0]
        for _ in range(3):
            y = y + kept.sum().item()
        return y  # type: ignore[no-any-return]


def test_host_reads_are_counted_by_line() -> None:
    seen = watch(Reading(), (torch.randn(2, 4),), {}, CPU)
    assert seen.error is None
    found = {read.what: read for read in seen.reads}
    assert found[".item()"].count == 3
    assert 'y = y + kept.sum().item()"' in found[".item()"].place
    assert "kept = y[y > 0]" in next(read.place for what, read in found.items() if what != ".item()")
    assert 'self.inner(x)"' in seen.place("inner")


MASK, NUMBER = torch.ones(3, dtype=torch.bool, device="meta"), torch.tensor(0.5)


@pytest.mark.parametrize(
    ("indices", "values", "more", "waits"),
    [
        ([MASK], torch.ones(3, device="meta"), (), True),
        ([MASK], torch.ones((), device="meta"), (), True),
        ([None, MASK.to(torch.uint8)], torch.ones(2, 3, device="meta"), (), True),
        ([MASK, torch.zeros(1, dtype=torch.int64)], NUMBER, (), True),
        ([MASK], NUMBER, (True,), True),
        ([MASK], NUMBER, (), False),
        ([None, MASK], NUMBER, (), False),
        ([torch.zeros(2, dtype=torch.int64, device="meta")], torch.ones(2, device="meta"), (), False),
        ([torch.ones(3, dtype=torch.bool)], torch.ones(3), (), False),
    ],
)
def test_to_write_by_a_mask_waits_unless_one_number_fills_it(
    indices: list[Tensor | None], values: Tensor, more: tuple[bool, ...], waits: bool
) -> None:
    assert waits_to_write(indices, values, *more) is waits


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[x > 0] = 0.5
        y[x > 1] = x[0, 0]
        y[y < 0] = torch.ones_like(y[0])[: int(torch.ones(()).numpy())]
        return y


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)])
def test_what_writes_by_a_mask_is_told_of_a_gpu_and_reads_of_the_hosts_arrays_are_not(
    device: torch.device,
) -> None:
    seen = watch(Writing(), (torch.randn(2, 4, device=device),), {}, device)
    lines = [read.place.partition(", ")[2] for read in seen.reads]
    written = ['"y[x > 1] = x[0, 0]"', '"y[y < 0] = torch.ones_like(y[0])[: int(torch.ones(()).numpy())]"']
    assert lines == (written if device.type == "cuda" else [])
    assert {read.what for read in seen.reads} <= {"x[mask] = y"}


class Lazy(nn.Module):
    """Reads a number in its first call, another in those after it, and one in each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.abs().max().item()
        else:
            x = x + x.min().item()
        x.add_(1.0)
        return x / self.scale / x.sum().item()


def test_what_only_the_first_call_reads_is_told_from_what_every_call_does() -> None:
    x = torch.ones(2, 4)
    seen = watch(Lazy(), (x,), {}, CPU)
    assert [read.place.partition(", ")[2] for read in seen.at_first] == [
        '"self.scale = x.abs().max().item()"'
    ]
    later = [read.place.partition(", ")[2] for read in seen.reads]
    assert later == ['"x = x + x.min().item()"', '"return x / self.scale / x.sum().item()"']
    assert all(read.count == 1 for read in (*seen.at_first, *seen.reads))
    assert x.eq(2).all()  # the second call has inputs of its own


def test_where_only_a_second_call_fails_the_first_ones_reads_are_told() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = 1

        def forward(self, x: Tensor) -> Tensor:
            self.left -= 1
            return x * x.sum().item() * 2 ** (0 // (self.left + 1))  # type: ignore[no-any-return]

    seen = watch(Once(), (torch.ones(2, 4),), {}, CPU)
    assert (seen.error, seen.at_first) == (None, ())
    assert [read.what for read in seen.reads] == [".item()"]


def test_reads_of_the_first_call_are_a_note_and_no_finding() -> None:
    case = case_of(nn.ReLU(), X)
    case.watched = watch(Lazy(), (torch.ones(2, 4),), {}, CPU)
    found = list(host_reads.find(case))
    assert len(found) == 2
    assert not any("self.scale =" in finding.says for finding in found)
    (note,) = case.notes
    assert note.startswith("in the first call and not in the second, test_measurements.py:")
    assert note.endswith("waits for a value on the host (.item(), once)")


def test_a_call_that_fails_is_named_with_its_line() -> None:
    seen = watch(Reading(), (torch.randn(2, 5),), {}, CPU)
    assert seen.error is not None
    assert seen.failed_at is not None
    assert "self.inner(x)" in seen.failed_at


def test_a_batch_repeats_examples_in_turn() -> None:
    x, other = torch.arange(2.0).reshape(2, 1), torch.zeros(7)
    (bigger, same), named = of_batch((x, other), {"scale": 3}, 5)
    assert bigger.flatten().tolist() == [0, 1, 0, 1, 0]
    assert same is other
    assert named == {"scale": 3}


def test_the_sweep_ends_where_a_batch_fails() -> None:
    def refusing(model: Model, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise ValueError("too many")
        return x * 2

    rows, ended = sweep(Model(refusing), (torch.ones(1, 3),), {}, CPU, [FP32], [4, 1, 2], 1.0, 0.0)
    assert [row.batch for row in rows] == [1, 2]
    assert ended == "the batch sweep ended before 4: ValueError: too many"
    assert rows[1].throughput("fp32") == pytest.approx(2 / rows[1].latency["fp32"].median)


def test_the_sweep_has_the_optimized_program_after_it_has_taken_in_a_shape() -> None:
    batches: list[int] = []

    def optimized(x: Tensor) -> Tensor:
        batches.append(len(x))
        return x

    model = Model(lambda m, x: x * 2)
    rows, ended = sweep(model, (torch.ones(1, 3),), {}, CPU, [FP32], [1, 2], 2.0, 0.0, optimized)
    assert ended is None
    assert [list(row.latency) for row in rows] == [["fp32", "optimized"]] * 2
    assert batches.count(2) > len(rows[1].latency["optimized"].samples)


def test_a_batch_that_would_take_too_long_is_not_made() -> None:
    model = Model(lambda m, x: pytest.fail("it was called"))
    rows, ended = sweep(model, (torch.ones(2, 3),), {}, CPU, [FP32], [10**12], 1.0, 1e-6)
    assert (rows, ended) == ([], "the batch sweep ended before 1000000000000: its time was over")


def test_amp_pays_from_a_batch_on() -> None:
    times = {1: (1, 2), 2: (2, 1.5), 4: (4, 5), 8: (8, 5), 16: (16, 9)}
    rows = [BatchRow(n, {"fp32": taking(a), "amp": taking(b)}) for n, (a, b) in times.items()]
    assert pays_from(rows, "amp") == 8
    assert pays_from(rows[:3], "amp") is None


def test_a_trace_has_modules_and_lanes(tmp_path: Path) -> None:
    model = several_kinds()
    write_trace(tmp_path / "t.json", model, (X,), {}, CPU, {"fp32": FP32, "amp": BF16})
    names = {event.get("name") for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert {"call in fp32", "call in amp", "Sequential", "0", "aten::conv2d"} <= names


def test_eager_runs_as_its_user_runs_it_and_autocast_keeps_the_weights_that_it_has_cast() -> None:
    seen: list[tuple[bool, bool, bool]] = []

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.linear.weight
            seen[:] = [(torch.is_autocast_cache_enabled(), weight.requires_grad, torch.is_grad_enabled())]
            return self.linear(self.linear(x))  # type: ignore[no-any-return]

    model = Twice().eval()
    frozen = nn.Sequential(model, nn.Linear(4, 4))
    frozen[1].weight.requires_grad_(False)
    case = case_of(frozen, torch.randn(2, 4))
    measure(case, tuple(case.lanes.values()), lambda *_: None)
    seen.clear()
    case.eager(case.lanes["amp"])()
    assert seen == [(True, True, False)]
    assert not case.original[1].weight.requires_grad  # type: ignore[index]


def test_disturbed_runs_of_operators_do_not_count() -> None:
    assert least_disturbed([1.0]) == [0]
    assert least_disturbed([40.0, 1.0, 2.0, 41.0, 3.0]) == [1, 2, 4]


@pytest.mark.parametrize(("operator_s", "is_noted"), [(0.006, False), (0.011, True)])
def test_operators_that_take_longer_together_than_the_call_are_noted(
    operator_s: float, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "interleave", lambda samplers, **_: dict.fromkeys(samplers, taking(16)))
    monkeypatch.setattr(
        examine,
        "profiled",
        lambda program, runs, trained: {node.name: Spent(operator_s) for node in calls(program.graph)},
    )
    case = case_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), X)
    measure(case, tuple(case.lanes.values()), lambda *_: None)
    noted = [note for note in case.notes if "under the profiler" in note]
    assert len(noted) == 2 * is_noted
    if is_noted:
        assert noted[0].startswith(
            "the operators in the fp32 lane took 22 ms together under the profiler, and"
        )
        assert "a call 16: " in noted[0]


def test_operators_that_take_far_longer_than_the_call_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = functools.partial(Spent, 0.5)
    monkeypatch.setattr(
        examine,
        "profiled",
        lambda program, runs, trained: {node.name: disturbed() for node in calls(program.graph)},
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    found = ampopt.diagnose(model, torch.randn(1, 3, 16, 16), precision="fp32", budget_s=10)
    assert any("other work on this machine disturbed them" in note for note in found.notes)
    assert not any(layer.spent for layer in found.layers)
