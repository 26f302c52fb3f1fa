"""The contestants of the race: each computes what the model does; ampopt is called as users call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.ort.options import SessionError
from ampopt.system.flags import cuda_math
from benchmarks import by_compile, by_onnx
from benchmarks.by_hand import as_float, as_half_channels_last, cuda_graph
from benchmarks.contestants import border_of, contestants, ios_of, ours
from benchmarks.ways import Border, make_all

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_every_device_has_both_lanes_with_the_original_and_ampopt(device: torch.device) -> None:
    found = contestants(device)
    assert len({contestant.name for contestant in found}) == len(found)
    for lane in ("fp32", "amp"):
        assert any(c.lane == lane and c.name.startswith("eager") for c in found)
        assert any(c.lane == lane and c.name == f"ampopt {lane}" for c in found)
    assert all("max-autotune" in c.name or c.name.endswith("copied") for c in found if c.thorough)
    assert all((c.make is None) == (c.engine is not None) for c in found)


def test_ampopt_races_with_the_default_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("ampopt.optimize", lambda *_, **options: given.append(options))
    ours(nn.Linear(2, 2), (torch.randn(1, 2),), border_of("fp32", "fp32", CPU), lane="fp32")[""]()
    assert [set(options) & {"budget_s", "passes", "exclude"} for options in given] == [set()]


def test_the_fp32_lane_has_one_border_and_amp_two() -> None:
    assert ios_of("fp32") == ("fp32",)
    assert ios_of("amp") == ("fp32", "lane")
    assert border_of("amp", "lane", CUDA) == Border("lane", torch.float16)
    assert border_of("amp", "lane", CPU).dtype is torch.bfloat16
    assert border_of("fp32", "fp32", CUDA).dtype is torch.float32


def conv_net() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    return model, (torch.randn(1, 3, 8, 8),)


@pytest.mark.parametrize("io", ["fp32", "lane"])
@pytest.mark.parametrize(
    "name",
    [
        *("channels_last", "channels_last fold", "TorchScript"),
        *("eager bf16 autocast", "bf16 autocast channels_last", "bf16 channels_last"),
    ],
)
def test_peers_compute_what_the_model_does(name: str, io: str) -> None:
    model, inputs = conv_net()
    (peer,) = (each for each in contestants(CPU) if each.name == name)
    if io not in ios_of(peer.lane):
        return
    border = border_of(peer.lane, io, CPU)
    assert peer.make is not None
    with torch.no_grad():
        expected = model(*inputs)
        made = make_all(peer.make(model, inputs, border)).made
        assert made
        for each in made.values():
            found = each.call(*each.inputs)
            assert isinstance(found, Tensor)
            assert found.dtype is each.inputs[0].dtype is (border.dtype if io == "lane" else torch.float32)
            tolerance = 1e-5 if peer.lane == "fp32" else 3e-2
            assert torch.allclose(found.float(), expected, atol=tolerance)


ON_GPU = [
    (kind, lane, io)
    for kind in ("graph by hand", "TorchScript", "compile reduce-overhead")
    for lane, io in (("fp32", "fp32"), ("amp", "fp32"), ("amp", "lane"))
] + [("eager fp16", "amp", "fp32"), ("eager fp16", "amp", "lane")]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "lane", "io"), ON_GPU)
def test_every_way_of_a_peer_computes_what_the_model_does_on_a_gpu(kind: str, lane: str, io: str) -> None:
    (peer,) = (c for c in contestants(CUDA) if c.name in (kind, f"{kind} {lane}"))
    model, inputs = conv_net()
    model, inputs = model.to(CUDA), tuple(tensor.to(CUDA) for tensor in inputs)
    assert peer.make is not None
    with torch.no_grad(), cuda_math(tf32=False, search=True):
        expected = model(*inputs)
        candidates = make_all(peer.make(model, inputs, border_of(lane, io, CUDA)))
        assert candidates.failed == {}
        for each in candidates.made.values():
            each.call(*each.inputs)
            found = each.call(*each.inputs)
            assert isinstance(found, Tensor)
            assert found.dtype is each.inputs[0].dtype is (torch.float16 if io == "lane" else torch.float32)
            assert torch.allclose(found.float(), expected, atol=1e-5 if lane == "fp32" else 1e-2)
        name, _, tried = candidates.fastest(torch.cuda.synchronize)
        assert set(tried) == set(candidates.made)
        assert name in tried


@pytest.mark.gpu
@pytest.mark.parametrize("copied", [False, True])
def test_a_plain_graphs_results_are_overwritten_or_copied(copied: bool) -> None:
    model, x = nn.Conv2d(3, 8, 3).to(CUDA, torch.float16), torch.randn(1, 3, 8, 8, device=CUDA)
    with torch.no_grad():
        call = cuda_graph(model, (x.half(),), copied=copied)
        first = call(x)
        assert isinstance(first, Tensor)
        kept = first.clone()
        second = call(x + 1)
        torch.cuda.synchronize()
    assert torch.equal(first, kept) == copied
    assert (second is first) != copied
    assert first.dtype is (torch.float32 if copied else torch.float16)


def test_ampopt_has_the_lanes_border_where_that_is_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def optimize(model: object, inputs: object, *, io: str = "original", **options: Any) -> object:
        seen.update(options, io=io, dtype=inputs[0].dtype)  # type: ignore[index]
        return lambda x: x

    monkeypatch.setattr(ampopt, "optimize", optimize)
    model, inputs = conv_net()
    made = make_all(ours(model, inputs, Border("lane", torch.float16), lane="amp"))
    assert made.made[""].way == "outputs=static"
    assert (seen["io"], seen["precision"], seen["outputs"]) == ("lane", "amp", "static")
    assert seen["dtype"] is torch.float16
    make_all(ours(model, inputs, Border("fp32", torch.float16), lane="amp"))
    assert (seen["io"], seen["dtype"]) == ("original", torch.float32)


def test_inductor_prints_no_tables() -> None:
    import torch._inductor.config as inductor
    from torch._inductor import select_algorithm

    by_compile.be_silent()
    assert inductor.autotune_num_choices_displayed == 0
    assert select_algorithm.PRINT_AUTOTUNE is False


def test_inductor_has_its_own_graphs_or_a_plain_one_and_tunes_by_descent() -> None:
    found = by_compile.on_cuda(Border("fp32", torch.float16), {"": {}, "freezing": by_compile.FREEZING})
    assert list(found) == [
        *("its own graphs", "a plain graph"),
        *("freezing, its own graphs", "freezing, a plain graph"),
    ]
    assert by_compile.AUTOTUNE == {"max_autotune": True, "coordinate_descent_tuning": True}
    torch.compile(
        nn.ReLU(), options={**by_compile.FREEZING, **by_compile.AUTOTUNE, "triton.cudagraphs": True}
    )


def test_what_enters_half_is_half_and_integers_stay() -> None:
    image = as_half_channels_last(torch.randn(1, 3, 4, 4))
    assert image.dtype is torch.float16
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert as_half_channels_last(torch.arange(3)).dtype is torch.int64


def test_outputs_become_float32_and_others_stay() -> None:
    mask, low = torch.tensor([True]), torch.ones(2, dtype=torch.bfloat16)
    found = as_float({"mask": mask, "low": low})
    assert isinstance(found, dict)
    assert found["mask"] is mask
    assert found["low"].dtype is torch.float32


def test_a_provider_that_does_not_load_is_found_out_before_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def exported(model: nn.Module, inputs: tuple[Tensor, ...]) -> bytes:
        raise AssertionError("it exports")

    monkeypatch.setattr(by_onnx, "exported", exported)
    with pytest.raises(SessionError, match="NoExecutionProvider"):
        by_onnx._fastest(nn.ReLU(), (torch.ones(1),), "NoExecutionProvider", [{}])
    with pytest.raises(AssertionError, match="it exports"):
        by_onnx._fastest(nn.ReLU(), (torch.ones(1),), "CPUExecutionProvider", [{}])
