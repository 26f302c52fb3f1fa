"""inductor_code: what was compiled in one process is loaded in another, with its weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config, cpu_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass

from ampopt.engines.inductor_code import InductorCode, LoadedCode, is_whole
from ampopt.ir.graph import aten
from ampopt.ir.lanes import FP32, Lane
from ampopt.ir.program import Program
from ampopt.passes import BakeAutocast, ChannelsLast, Compile, CudaGraph, FoldConvBn
from ampopt.search.rehearsal import Sandbox
from tests.helpers import FP16, Model, check_outputs, program_of, with_statistics
from tests.support.compiler import look_at_processor, needs_compiler


@pytest.fixture
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    look_at_processor()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def weighted(scale: float) -> tuple[nn.Module, Tensor]:
    """A network whose weights oneDNN does not take, and that are too long to be written into the code."""
    torch.manual_seed(0)
    model = Model(lambda m, x: ((x * m.w).relu(), x + m.w), w=nn.Parameter(scale * torch.randn(3000)))
    return model, torch.randn(4, 3000)


def sent_by(program: Program) -> tuple[Program, dict[str, Any] | None]:
    made = Compile().apply(program).program
    return made, Compile().send(made)


@needs_compiler
@pytest.mark.usefixtures("_own_cache")
def test_code_for_one_instruction_set_is_not_found_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may be on a disk of several machines; code for shorter vectors writes beyond its buffers."""
    model, x = Model(lambda m, x: x * 2), torch.randn(144)
    keys = list[str]()
    for isa in (cpu_vec_isa.pick_vec_isa(), cpu_vec_isa.InvalidVecISA(), cpu_vec_isa.pick_vec_isa()):
        with monkeypatch.context() as patch:
            patch.setattr(cpu_vec_isa, "pick_vec_isa", lambda isa=isa: isa)
            _, sent = sent_by(program_of(model, x))
        assert sent is not None
        keys.append(sent["key"])
    assert keys[0] == keys[2] != keys[1]


@needs_compiler
@pytest.mark.usefixtures("_own_cache")
def test_what_is_sent_is_loaded_with_the_weights_that_were_sent_and_nothing_is_traced() -> None:
    found = []
    for scale in (1.0, 2.0):  # equal graphs: the second is the first one's code
        model, x = weighted(scale)
        made, sent = sent_by(program_of(model, x))
        assert sent is not None
        counters.clear()
        loaded = InductorCode(**sent).load()
        assert counters["inductor"]["fxgraph_cache_miss"] == counters["aot_autograd"]["total"] == 0
        for one, two in zip(loaded(x), made.run(x), strict=True):
            assert torch.equal(one, two)
        found.append(sent["key"])
    assert found[0] == found[1]


class Pads(CustomGraphPass):
    """Pads each batched product, as inductor's first passes do on a GPU where they find that faster."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
            value = node.meta["val"]
            with graph.inserting_after(node):
                padded = graph.call_function(aten.constant_pad_nd.default, (node, [0, 4]))
            with graph.inserting_after(padded):
                same = graph.call_function(aten.slice.Tensor, (padded, 2, 0, value.shape[-1]))
            padded.meta["val"] = aten.constant_pad_nd.default(value, [0, 4])
            same.meta["val"] = padded.meta["val"][..., : value.shape[-1]]
            node.replace_all_uses_with(same)
            padded.args = (node, [0, 4])

    def uuid(self) -> str:
        return "pads"


@needs_compiler
@pytest.mark.parametrize("with_reshapes", [True, False])
def test_a_view_of_what_inductor_has_padded_is_a_copy(
    monkeypatch: pytest.MonkeyPatch, with_reshapes: bool
) -> None:
    """Inductor alone fails there, where it looks for a layout of its own."""
    torch.manual_seed(0)

    def tokens(m: Any, x: Tensor) -> Tensor:
        return torch.matmul(m.conv(x).flatten(2).transpose(1, 2), m.w).reshape(1, -1)

    model = Model(tokens, conv=nn.Conv2d(3, 8, 3), w=nn.Parameter(torch.randn(1, 8, 12)))
    x = torch.randn(1, 3, 10, 10)
    program = program_of(model, x)
    if not with_reshapes:
        monkeypatch.setattr("ampopt.passes.compile.options", lambda _: {"freezing": True})
    patches = {
        "joint_custom_pre_pass": Pads(),
        "force_layout_optimization": True,
        "force_disable_caches": True,
    }
    with config.patch(patches):
        if with_reshapes:
            after = Compile().apply(program).program
            check_outputs(Compile.numerics, program, after, model, [x], FP32)
        else:
            with pytest.raises(ValueError, match="Cannot view"):
                Compile().apply(program)


IN_A_NEW_PROCESS = """
import sys, torch
from ampopt.passes import Compile
from tests.engines.test_inductor_code import pooled
from tests.helpers import program_of

model, x = pooled()
sent, expected = torch.load(sys.argv[1])
hints = []
engine = Compile()._load(program_of(model, x), sent, hints)
assert not hints, hints
assert all(map(torch.equal, engine(x), expected))
"""


def pooled() -> tuple[nn.Module, Tensor]:
    """A network whose compiled code calls an operator of ours."""
    torch.manual_seed(0)
    return Model(lambda _, x: F.max_pool2d(x, 2, return_indices=True)), torch.randn(1, 2, 4, 4)


@needs_compiler
@pytest.mark.usefixtures("_own_cache")
def test_code_that_calls_an_operator_of_ours_is_loaded_in_a_process_that_has_traced_nothing(
    tmp_path: Path,
) -> None:
    model, x = pooled()
    made, sent = sent_by(program_of(model, x))
    assert sent is not None
    torch.save((sent, made.run(x)), tmp_path / "sent.pt")
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, str(tmp_path / "sent.pt")]
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parents[2])


@needs_compiler
@pytest.mark.usefixtures("_own_cache")
def test_code_for_aligned_inputs_is_right_for_others() -> None:
    model, x = weighted(1.0)
    made, sent = sent_by(program_of(model, x))
    assert sent is not None
    moved = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    for one, two in zip(InductorCode(**sent).load()(moved), made.run(x), strict=True):
        assert torch.equal(one, two)


@needs_compiler
@pytest.mark.usefixtures("_own_cache")
def test_weights_in_onednns_layout_are_not_sent() -> None:
    made, sent = sent_by(program_of(nn.Linear(3000, 3000), torch.randn(4, 3000)))
    assert made.engine is not None
    assert sent is None


def test_code_is_whole_where_it_answers_with_the_same_tensors_or_equal_ones() -> None:
    x = torch.randn(2, 3)
    assert is_whole(lambda x: (x + 1,), lambda xs: [xs[0] + 1], [x])
    assert not is_whole(lambda x: (x + 1, x), lambda xs: [xs[0] + 1], [x])
    assert not is_whole(lambda x: (x + 1,), lambda xs: [(xs[0] + 1).T], [x])
    assert not is_whole(lambda x: (x.view(3, 2),), lambda xs: [xs[0].view(3, 2)], [x])
    assert not is_whole(lambda x: (x + 1,), lambda xs: [xs[0] + xs[1]], [x])


@pytest.mark.usefixtures("_own_cache")
def test_what_the_cache_has_lost_is_said_and_compiled_again() -> None:
    lost = InductorCode("fnosuchkey", {})
    with pytest.raises(LookupError, match="fnosuchkey"):
        lost.load()
    program = program_of(*weighted(1.0))
    hints: list[str] = []
    assert Compile()._load(program, None, hints) is None
    assert hints == []
    assert Compile()._load(program, {"key": lost.key, "constants": {}}, hints) is None
    assert ["fnosuchkey" in hint and "could not be loaded" in hint for hint in hints] == [True]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("lane", "before"),
    [
        pytest.param(FP32, [FoldConvBn()], id="fp32"),
        pytest.param(FP16, [BakeAutocast(), FoldConvBn(), ChannelsLast()], id="baked channels_last"),
    ],
)
def test_on_a_gpu_the_rehearsals_code_is_loaded_and_right(lane: Lane, before: list[Any]) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()]
    model, x = with_statistics(nn.Sequential(*layers)).cuda(), torch.randn(2, 3, 10, 10, device="cuda")
    program = program_of(model, x, lane=lane, on_top_of=before)
    with Sandbox(program.device) as box, box.rehearsing(Compile(), program, seconds=120) as rehearsed:
        counters.clear()
        made = Compile().apply_beside(program, rehearsed).program
        assert rehearsed().sent[0] is not None
    assert isinstance(made.engine, LoadedCode)
    assert not counters["aot_autograd"]
    check_outputs(Compile.numerics, program, made, model, [x], lane)
    captured = CudaGraph().apply(made).program
    check_outputs(Compile.numerics, program, captured, model, [x], lane)
