"""The workloads are the networks that the questions describe, seeded, and alive enough to compare outputs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import CPU_WORKLOADS, WORKLOADS, Workload

NAMES = [
    "encdecmil18",
    "cropunet",
    "resnet18",
    "resnet18-b64",
    "deeplabv3plus-r101",
    "deeplabv3plus-r101-b4",
    "mobilenet-v3-small",
    "resnext50",
    "regnet-y-400mf",
    "shufflenet-v2",
    "linear5x128",
    "linear50x512",
    "mlp3x4096",
    "conv3x64",
    "mnist-b512",
]
TORCHVISION = ["resnet18", "mobilenet-v3-small", "resnext50", "regnet-y-400mf", "shufflenet-v2"]
# The larger batches run the same networks.
DISTINCT = [name for name in NAMES if name not in ("resnet18-b64", "deeplabv3plus-r101-b4")]


def small(name: str) -> Workload:
    """The workload with two samples, images of 64x64 where it does not need its own size."""
    workload = WORKLOADS[name]
    if name in TORCHVISION:
        pytest.importorskip("torchvision")
    (shape,) = workload.input_shapes
    fixed = len(shape) != 4 or name == "mnist-b512"
    return replace(workload, input_shapes=((2, *shape[1:]) if fixed else (2, shape[1], 64, 64),))


@cache
def small_model(name: str) -> nn.Module:
    return small(name).model()


@torch.no_grad()
def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = model(*inputs)
    return out if isinstance(out, tuple) else (out,)


@cache
def answer(name: str, seed: int) -> tuple[Tensor, ...]:
    """What the small workload's model gives for its inputs."""
    return outputs(small_model(name), small(name).inputs(seed))


def number_of_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def number_of(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def batch_norms(model: nn.Module) -> Iterator[nn.BatchNorm2d]:
    return (module for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def test_list_is_in_the_order_of_the_tables() -> None:
    assert list(WORKLOADS) == NAMES
    assert [workload.name for workload in WORKLOADS.values()] == NAMES
    assert set(CPU_WORKLOADS) < set(NAMES)


@pytest.mark.parametrize(
    ("name", "parameters", "convs"),
    [
        ("encdecmil18", 19_681, 74),
        ("cropunet", 1_897_585, 15),
        ("resnet18", 11_689_512, 20),
        ("deeplabv3plus-r101", 59_343_795, 114),
        ("mobilenet-v3-small", 2_542_856, 52),
        ("resnext50", 25_028_904, 53),
        ("regnet-y-400mf", 4_344_144, 85),
        ("shufflenet-v2", 2_278_604, 56),
        ("linear5x128", 5 * (128 + 1) * 128, 0),
        ("linear50x512", 50 * (512 + 1) * 512, 0),
        ("mlp3x4096", 3 * (4096 + 1) * 4096, 0),
        ("conv3x64", 3 * 3 * 3 * 64, 1),
        ("mnist-b512", 1_199_882, 2),
    ],
)
def test_network_has_the_stated_parameters_and_convs(name: str, parameters: int, convs: int) -> None:
    model = small_model(name)
    assert number_of_parameters(model) == parameters
    assert number_of(model, nn.Conv2d) == convs


def test_cropunet_has_two_transposed_convs_beside_its_convs() -> None:
    assert number_of(small_model("cropunet"), nn.ConvTranspose2d) == 2


def test_deeplab_backbone_is_resnet101_without_its_classifier_at_stride_16() -> None:
    backbone = small_model("deeplabv3plus-r101").get_submodule("backbone")
    assert number_of_parameters(backbone) == 44_549_160 - (2048 + 1) * 1000
    layer4 = backbone.get_submodule("layer4")
    dilations = [m.dilation for m in layer4.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert dilations == [(2, 2), (4, 4), (8, 8)]
    low, deep = outputs(backbone, small("deeplabv3plus-r101").inputs())
    assert low.shape == (2, 256, 16, 16)
    assert deep.shape == (2, 2048, 4, 4)


@pytest.mark.parametrize("name", ["encdecmil18", "cropunet"])
def test_robot_network_returns_a_quarter_size_map(name: str) -> None:
    workload = WORKLOADS[name]
    (out,) = outputs(small_model(name), workload.inputs())
    assert out.shape == (1, 1, 120, 160)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("deeplabv3plus-r101", [(2, 256, 16, 16), (2, 19, 16, 16)]),
        *((name, [(2, 1000)]) for name in TORCHVISION),
        ("linear5x128", [(2, 128)]),
        ("linear50x512", [(2, 512)]),
        ("mlp3x4096", [(2, 4096)]),
        ("conv3x64", [(2, 64, 32, 32)]),
        ("mnist-b512", [(2, 10)]),
    ],
)
def test_output_shapes(name: str, shapes: list[tuple[int, ...]]) -> None:
    assert [tuple(out.shape) for out in answer(name, 0)] == shapes


@pytest.mark.parametrize("name", DISTINCT)
def test_outputs_are_finite_scaled_and_depend_on_the_input(name: str) -> None:
    for out, other in zip(answer(name, 0), answer(name, 1), strict=True):
        assert out.isfinite().all()
        assert 1e-3 < out.std() < 1e3
        assert (out - other).norm() > 1e-2 * out.norm()


@pytest.mark.parametrize("name", ["deeplabv3plus-r101", "resnext50", "regnet-y-400mf"])
def test_deep_networks_do_not_amplify_noise(name: str) -> None:
    workload, model = small(name), small_model(name)
    (image,) = workload.inputs(0)
    (noise,) = workload.inputs(1)
    logits = answer(name, 0)[-1]
    noisy = outputs(model, (image + 1e-3 * noise,))[-1]
    assert (noisy - logits).norm() < 1e-2 * logits.norm()


@pytest.mark.parametrize("name", ["encdecmil18", "cropunet", "deeplabv3plus-r101", *TORCHVISION])
def test_batch_norm_statistics_and_affine_are_not_trivial(name: str) -> None:
    model = small_model(name)
    assert not model.training
    for norm in batch_norms(model):
        assert (norm.get_buffer("running_var") > 0).all()
        for values in (
            norm.get_buffer("running_mean"),
            norm.get_buffer("running_var"),
            norm.weight,
            norm.bias,
        ):
            assert values.isfinite().all()
            assert values.std() > 0
        assert norm.weight.requires_grad
        assert not norm._forward_pre_hooks


@pytest.mark.parametrize("name", ["encdecmil18", "mobilenet-v3-small", "linear5x128", "mnist-b512"])
def test_model_is_determined_by_its_seed(name: str) -> None:
    workload = small(name)
    first, again, other = (workload.model(seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    floats = [key for key in first if first[key].is_floating_point()]
    assert any(not torch.equal(first[key], other[key]) for key in floats)


@pytest.mark.parametrize("name", ["encdecmil18", "mnist-b512"])
def test_inputs_are_determined_by_their_seed(name: str) -> None:
    workload = WORKLOADS[name]
    (first,), (again,), (other,) = (workload.inputs(seed) for seed in (3, 3, 4))
    assert tuple(first.shape) == workload.input_shapes[0]
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_inputs_go_to_the_device_asked_for() -> None:
    (image,) = WORKLOADS["conv3x64"].inputs(device="meta")
    assert image.device.type == "meta"


@pytest.mark.parametrize("name", ["encdecmil18", "mnist-b512"])
def test_global_random_state_is_untouched(name: str) -> None:
    before = torch.random.get_rng_state()
    workload = small(name)
    workload.model()
    workload.inputs()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_missing_torchvision_is_named_with_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ImportError, match="resnet18 needs torchvision"):
        WORKLOADS["resnet18"].model()
