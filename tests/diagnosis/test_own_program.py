"""The kernels of an optimized program: each belongs to nodes and lines, whatever runs the program."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

import ampopt
from ampopt.diagnosis.layers import OPTIMIZED
from ampopt.diagnosis.operators import LABEL
from ampopt.diagnosis.optimized_column import with_column
from ampopt.diagnosis.own_onnx import computed_values
from ampopt.diagnosis.own_program import OwnKernel, kernels_in, matched, own_kernels, resolved
from ampopt.engines.apart import Apart
from ampopt.engines.divided import Chain, divided
from ampopt.errors import InputError
from ampopt.ir.graph import calls
from ampopt.ir.lanes import FP32
from ampopt.ir.origin import Origin
from ampopt.ir.program import Program
from ampopt.ir.transform import Pass, Recipe
from ampopt.measure.ledger import Ledger
from ampopt.passes import ChannelsLast, Compile, FoldConvBn, OnnxRuntime
from benchmarks.models import WORKLOADS
from tests.helpers import Model, program_of
from tests.support.cases import CEILINGS, case_of
from tests.support.planted import captured_of


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.deep, self.last = nn.Conv2d(16, 16, 3, groups=16), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        x = torch.sigmoid(self.deep(x)) * 2
        return self.last(x.mean((2, 3))).softmax(1)  # type: ignore[no-any-return]


def small() -> Program:
    torch.default_generator.manual_seed(0)
    return FoldConvBn().apply(program_of(Small().eval(), torch.randn(1, 3, 32, 32))).program


def with_engine(engine: Pass, program: Program) -> Program:
    result = engine.apply(program)
    return result.program.replace(recipe=(result.replay or engine,))


def check_attributed(kernels: tuple[OwnKernel, ...]) -> None:
    """That each kernel has nodes and a place, and that its time is one."""
    assert kernels
    assert not [kernel for kernel in kernels if not kernel.nodes or not kernel.place]
    assert sum(kernel.seconds for kernel in kernels) > 0


def check_complete(kernels: tuple[OwnKernel, ...], program: Program) -> None:
    """That each call of the graph is in a kernel."""
    computed = {name for kernel in kernels for name in kernel.nodes}
    assert not {node.name for node in calls(program.graph)} - computed


def test_the_nodes_of_a_graph_are_their_own_operators() -> None:
    program = small()
    kernels = own_kernels(program)
    check_attributed(kernels)
    check_complete(kernels, program)
    assert [kernel.nodes for kernel in kernels] == [(node.name,) for node in calls(program.graph)]
    assert kernels[0].name == "conv2d"
    assert {origin.module for origin in kernels[0].origins} == {"conv", "norm"}  # folded


def test_conversions_at_the_border_have_names_of_their_own() -> None:
    program = ChannelsLast().apply(small()).program
    kernels = own_kernels(program)
    check_attributed(kernels)
    assert (kernels[0].nodes, kernels[0].place) == (("(inputs)",), "(inputs)")


@pytest.mark.slow
@pytest.mark.usefixtures("exports_kept")
@pytest.mark.parametrize("session", [(), None])
def test_onnx_runtimes_nodes_compute_values_of_the_graph(session: Any) -> None:
    pytest.importorskip("onnxruntime")
    program = with_engine(OnnxRuntime(session=session), small())
    kernels = own_kernels(program)
    check_attributed(kernels)
    modules = {origin.module for kernel in kernels for origin in kernel.origins}
    assert modules >= {"conv", "norm", "deep", "last"}
    conv = next(kernel for kernel in kernels if "conv2d" in kernel.nodes)
    assert "deep" not in {origin.module for origin in conv.origins}


@pytest.mark.slow
def test_inductors_statements_compute_nodes_of_the_graph() -> None:
    program = with_engine(Compile(), small())
    x = program.examples[0]
    before = program.run(x)[0]
    kernels = own_kernels(program)
    check_attributed(kernels)
    check_complete(kernels, program)
    assert any(kernel.by == "node" for kernel in kernels)
    assert any("convolution" in kernel.name for kernel in kernels)
    assert torch.equal(program.run(x)[0], before)  # the labels are gone, the code is as it was


@pytest.mark.slow
def test_code_behind_which_results_are_copied_is_looked_into() -> None:
    model = Model(lambda m, x: ((y := x.relu() + 1), y * 1))
    program = with_engine(Compile(), program_of(model, torch.randn(3, 5)))
    assert isinstance(program.engine, Apart)
    kernels = own_kernels(program)
    check_attributed(kernels)
    alone = own_kernels(program.replace(engine=program.engine.engine))
    assert [kernel.nodes for kernel in kernels] == [kernel.nodes for kernel in alone]


@pytest.mark.slow
def test_code_of_a_graph_that_was_sent_names_the_nodes_of_the_one_that_is_here() -> None:
    program = small()
    sent = program.replace(graph=pickle.loads(pickle.dumps(program.graph)))
    assert {node.name for node in calls(sent.graph)} != {node.name for node in calls(program.graph)}
    there = own_kernels(with_engine(Compile(), sent))
    here = own_kernels(with_engine(Compile(), program).replace(engine=Compile().apply(sent).program.engine))
    assert [kernel.by for kernel in here] == [kernel.by for kernel in there]
    for mine, its in zip(here, there, strict=True):
        places = ([node.name for node in calls(graph)] for graph in (program.graph, sent.graph))
        known = dict(zip(*places, strict=True))
        assert [known[name] for name in mine.nodes] == list(its.nodes)
    assert any(kernel.by == "node" for kernel in here)


@pytest.mark.slow
def test_code_that_equal_pieces_share_names_the_nodes_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.engines.divided.LEAST_CALLS", 2)
    convs = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))).eval()
    program = program_of(convs, torch.randn(1, 16, 8, 8))
    division = divided(program, 2)
    assert division is not None
    engines: list[Any] = [Compile().apply(piece).program.engine for piece in division.programs]
    chain = program.replace(engine=Chain(division, engines), recipe=(Compile(),))
    kernels = own_kernels(chain)
    check_attributed(kernels)
    own = [kernel for kernel in kernels if kernel.by == "node"]
    assert [kernel.origins[0].module for kernel in own] == ["0", "1", "2", "3"]


def test_what_nothing_can_look_into_is_said() -> None:
    program = small()
    opaque = program.replace(engine=lambda *tensors: tensors, recipe=(FoldConvBn(),))
    with pytest.raises(LookupError, match="nothing can look into what fold-conv-bn runs"):
        own_kernels(opaque)


def test_a_replays_kernels_are_matched_by_name_in_order() -> None:
    alone = [("gemm", 1.0, "a"), ("relu", 1.0, "b"), ("gemm", 1.0, "c")]
    replayed = [("gemm", 0.1, ""), ("memset", 0.2, ""), ("gemm", 0.3, ""), ("relu", 0.4, "")]
    found = matched([(name, seconds) for name, seconds, _ in replayed], alone)
    assert found == [("gemm", 0.1, "a"), ("memset", 0.2, ""), ("gemm", 0.3, "c"), ("relu", 0.4, "b")]


def event(name: str, start: float, end: float, kind: DeviceType = DeviceType.CUDA) -> Any:
    time_range = SimpleNamespace(start=start, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, time_range=time_range, device_type=kind)


def test_a_kernel_belongs_to_the_range_that_began_before_it() -> None:
    ranges = [
        event(f"{LABEL}{name}", start, start + 5, DeviceType.CPU) for name, start in (("a", 0), ("b", 10))
    ]
    work = [event("relu", 12, 13), event("gemm", 3, 9), event("memset", 1, 2), event(f"{LABEL}a", 1, 9)]
    found = kernels_in(ranges, [*ranges, *work])
    assert [[name for name, _ in kernels] for kernels in found] == [["memset", "gemm"], ["relu"]]
    assert found[0][1][1] == pytest.approx(6e-6)


def test_a_kernel_without_a_name_has_the_nodes_that_no_other_has_at_its_place() -> None:
    kernels = [
        *(("copy", 1.0, ""), ("conv", 1.0, "a"), ("triton", 1.0, ""), ("gemm", 1.0, "d,e")),
        *(("memset", 1.0, ""), ("other", 1.0, "unknown")),
    ]
    found = resolved(kernels, ["(inputs)", "a", "b", "c", "d", "e", "(outputs)"])
    assert [kernel.nodes for kernel in found] == [
        ("a",),
        ("a",),
        ("b", "c"),
        ("d", "e"),
        ("d", "e"),
        ("d", "e"),
    ]
    assert [kernel.by for kernel in found] == ["order", "node", "order", "node", "order", "order"]


def node(kind: str, inputs: str, outputs: str, name: str = "") -> Any:
    onnx = pytest.importorskip("onnx")
    return onnx.helper.make_node(kind, inputs.split(), outputs.split(), name)


def test_what_onnx_runtime_fuses_and_renames_computes_the_same_values() -> None:
    before = [
        *(node("Conv", "x w", "conv"), node("HardSwish", "conv", "swish"), node("Conv", "swish v", "conv_1")),
        *(node("Relu", "conv_1", "relu"), node("ReduceMean", "relu", "mean"), node("Gemm", "mean g", "out")),
    ]
    after = [
        *(node("ReorderInput", "x", "t0", "ReorderInput"), node("Conv", "t0 w", "t1", "conv_nchwc")),
        *(node("Conv", "t1 v", "t2", "relu_nchwc"), node("ReorderOutput", "t2", "relu", "ReorderOutput")),
        *(node("ReduceMean", "relu", "mean", "node_mean"), node("Gemm", "mean g", "out", "node_linear")),
    ]
    assert computed_values(before, after) == {
        "t0": ("conv", "swish"),
        "t1": ("conv", "swish"),
        "t2": ("conv_1", "relu"),
        "relu": ("relu",),
        "mean": ("mean",),
        "out": ("out",),
    }


def test_a_layers_column_has_the_kernels_that_compute_it() -> None:
    case = case_of(Small().eval(), torch.randn(1, 3, 32, 32))
    by_name = {layer.name: layer for layer in case.layers}
    at = {layer.work.module: Origin(layer.work.module, layer.work.source) for layer in case.layers}
    kernels = (
        OwnKernel("fused", 3e-6, ("conv2d",), (at["conv"], at["norm"])),
        OwnKernel("permute", 1e-6, ("conv2d",), (at["conv"],)),
        OwnKernel("cast", 1e-6, ("(inputs)",), (Origin("", ""),)),
    )
    layers = with_column(case.layers, kernels, CEILINGS, torch.float32)
    found = {layer.name: layer for layer in layers if OPTIMIZED in layer.spent}
    assert list(found) == ["conv2d"]  # the batch norm takes no longer than it, and comes after it
    assert found["conv2d"].seconds(OPTIMIZED) == pytest.approx(4e-6)
    assert [kernel.name for kernel in found["conv2d"].spent[OPTIMIZED].kernels] == ["fused", "permute"]
    assert found["conv2d"].seconds("fp32") == by_name["conv2d"].seconds("fp32")


@pytest.mark.slow
@pytest.mark.usefixtures("exports_kept")
def test_a_diagnosis_with_the_optimized_module(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    torch.default_generator.manual_seed(0)
    model, x = Small().eval(), torch.randn(1, 3, 32, 32)
    original, captured = captured_of(model, x)
    program = with_engine(OnnxRuntime(session=()), FoldConvBn().apply(captured.program).program)
    recipe = Recipe(FP32, (FoldConvBn(), OnnxRuntime(session=())))
    fast = ampopt.OptimizedModule(original, captured, program, recipe, Ledger("model", {}, ()))
    monkeypatch.setattr("ampopt.diagnosing.ceilings_of", lambda *_: CEILINGS)
    monkeypatch.setattr("ampopt.diagnosis.examine.EAGER_S", 0.3)
    monkeypatch.setattr("ampopt.diagnosis.findings.cold_calls.IDLE_S", 0.01)
    found = ampopt.diagnose(model, x, optimized=fast, budget_s=60, progress=False)
    assert OPTIMIZED in found.latency
    check_attributed(found.own)
    assert any(OPTIMIZED in layer.spent for layer in found.layers)
    assert "kernels of the optimized program" in str(found)
    assert max(map(len, str(found).splitlines())) <= 80
    assert found.to_dict()["own_kernels"][0]["nodes"]
    with pytest.raises(InputError, match=r"optimized= is a program for float32\[1, 3, 32, 32\] on cpu"):
        ampopt.diagnose(model, torch.randn(2, 3, 32, 32), optimized=fast, progress=False)
    with pytest.raises(InputError, match=r"optimized= takes what ampopt\.optimize returns"):
        ampopt.diagnose(model, x, optimized=model, progress=False)


@pytest.mark.slow
@pytest.mark.usefixtures("exports_kept")
@pytest.mark.parametrize("name", ["encdecmil18", "mobilenet-v3-small"])
def test_every_operator_of_an_optimized_network_is_attributed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.passes.onnx_runtime.TUNING_S", 0.3)
    monkeypatch.setattr("ampopt.passes.onnx_runtime.COMPARING_S", 0.1)
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model = WORKLOADS[name].model()
    program = FoldConvBn().apply(program_of(model, x)).program
    engines = (None, OnnxRuntime(session=()), OnnxRuntime())
    for made in (program if engine is None else with_engine(engine, program) for engine in engines):
        kernels = own_kernels(made)
        check_attributed(kernels)
        modules = {name for name, each in model.named_modules() if isinstance(each, nn.Conv2d)}
        assert not modules - {origin.module for kernel in kernels for origin in kernel.origins}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("name", ["encdecmil18", "mobilenet-v3-small"])
def test_every_kernel_of_an_optimized_network_is_attributed(name: str, precision: str) -> None:
    workload, device = WORKLOADS[name], torch.device("cuda", 0)
    model, inputs = workload.model().to(device), workload.inputs(device=device)
    fast = ampopt.optimize(model, inputs, precision=precision, budget_s=60, progress=False)
    assert isinstance(fast, ampopt.OptimizedModule)
    assert not fast.health.chose_original
    kernels = own_kernels(fast.program)
    check_attributed(kernels)
    check_complete(kernels, fast.program)
    total = sum(kernel.seconds for kernel in kernels)
    by_name = sum(kernel.seconds for kernel in kernels if kernel.by == "node")
    assert by_name > 0.9 * total, [kernel for kernel in kernels if kernel.by == "order"]
    assert len({kernel.nodes for kernel in kernels}) > len(kernels) / 4
