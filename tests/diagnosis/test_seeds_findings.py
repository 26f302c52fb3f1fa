"""The five questions that ampopt comes from: on a GPU, the first finding is what an expert said then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ampopt
from ampopt.diagnosing import Diagnosis
from ampopt.diagnosis.findings.memory_layout import is_permute
from ampopt.diagnosis.sweep import pays_from
from benchmarks.seeds_workloads import SEEDS

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timing]


def diagnosed(name: str, *, train: bool = False, **options: Any) -> Diagnosis:
    device, workload = torch.device("cuda", 0), SEEDS[name].workload
    model, inputs = workload.model().to(device), workload.inputs(device=device)
    if train:
        loss = SEEDS[name].loss(model, inputs)
        return ampopt.diagnose(model.train(), inputs, train=True, loss=loss, budget_s=60, progress=False)
    return ampopt.diagnose(model.eval(), inputs, budget_s=60, progress=False, **options)


def seconds(found: Diagnosis, lane: str) -> float:
    return sum(layer.seconds(lane) for layer in found.layers)


def kernels(found: Diagnosis, lane: str = "fp32") -> int:
    return sum(len(layer.spent[lane].kernels) for layer in found.layers)


def test_s1_a_single_convolution_is_slower_by_what_the_profile_shows_largest() -> None:
    found = diagnosed("conv3x64-b64")
    names = {(each.name, each.lane): each for each in found.findings}
    assert ("amp-pays", "fp32") not in names
    amp = [layer.spent["amp"] for layer in found.layers]
    permutes = sum(k.seconds for spent in amp for k in spent.kernels if is_permute(k.name))
    casts = sum(spent.casts_s for spent in amp)
    slower = seconds(found, "amp") - casts - permutes - seconds(found, "fp32")
    first = next(each for each in found.findings if each.lane == "amp")
    if max(permutes, casts, slower) == permutes:
        assert first.name == "memory-layout"
        assert "only permute between NCHW and NHWC" in first.says
    elif max(permutes, casts, slower) == casts:
        assert first.name == "autocast-casts" or "casts take" in first.says
    else:  # cuDNN's kernel is slower itself: for three channels, and more so in this layout
        told = next(each for each in found.findings if each.name in ("amp-harmful", "amp-useless"))
        assert first.name == "memory-layout" or first is told
        assert "without casts its operators take" in told.says


def test_s1_the_linear_layers_are_bound_by_compute_and_amp_pays() -> None:
    found = diagnosed("mlp3x4096-b512")
    named = {each.name: each for each in found.findings}
    assert found.findings[0].name in ("amp-pays", "allow-tf32")  # both are faster products
    assert "bound by compute" in named["amp-pays"].says
    assert found.latency["amp"].median < found.latency["fp32"].median


def test_s2_a_step_of_many_small_layers_waits_for_launches() -> None:
    found = diagnosed("linear50x512-b1024", train=True)
    assert found.findings[0].name == "launch-bound"
    assert "gaps between launches" in found.findings[0].says
    assert found.latency["amp"].median > found.latency["fp32"].median
    as_graph = found.latency["amp + CUDA graph"].median
    assert as_graph < 0.5 * found.latency["fp32"].median


def test_s2_amp_pays_from_a_batch_on() -> None:
    batches = (64, 1024, 4096, 10240, 40960)
    found = diagnosed("linear50x512-b1024", batches=batches)
    crosses = pays_from(found.sweep, "amp")
    assert crosses is not None
    assert batches[0] < crosses <= batches[-1]
    assert f"amp is faster than FP32 from batch {crosses} on" in str(found)


def test_s4_small_kernels_and_casts_and_from_which_batch_on_amp_pays() -> None:
    found = diagnosed("mnist-b512", batches=(64, 512, 4096, 16384))
    named = {(each.name, each.lane): each for each in found.findings}
    pays = found.latency["amp"].median < found.latency["fp32"].median  # by the host, more than by the GPU
    by_the_gpu = ("amp-pays", "allow-tf32") if pays else ("amp-harmful",)  # on a fast host
    assert found.findings[0].name in ("launch-bound", *by_the_gpu)
    first = next(each for each in found.findings if each.lane == "amp")
    assert first.name in ("launch-bound", "autocast-casts", "amp-harmful")
    assert ("launch-bound", "amp") in named
    assert ("autocast-casts", "amp") in named
    crosses = pays_from(found.sweep, "amp")
    text = "is not faster than FP32 in the end" if crosses is None else f"from batch {crosses} on"
    assert text in str(found)


def test_s4_amp_takes_less_memory() -> None:
    found = diagnosed("mnist-b512", train=True)
    peaks = {way: times.peak or 0 for way, times in found.training.items()}
    assert 0 < peaks["amp"] < 0.75 * peaks["fp32"]


def test_s5_the_small_network_is_slow_by_its_kernels_not_its_flops() -> None:
    small, large = diagnosed("encdecmil18"), diagnosed("cropunet")
    assert small.findings[0].name == "launch-bound"
    assert any(each.name == "launch-bound" for each in large.findings)
    flops = [sum(layer.work.flops for layer in found.layers) for found in (small, large)]
    assert flops[0] < flops[1]
    assert kernels(small) > kernels(large)
    assert small.latency["fp32"].median > large.latency["fp32"].median


def test_s5_the_parts_of_a_step_are_slower_too() -> None:
    small, large = (
        diagnosed(name, train=True).training["fp32"].parts for name in ("encdecmil18", "cropunet")
    )
    assert small["forward"] > large["forward"]
    assert small["backward"] > large["backward"]
