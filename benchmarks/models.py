"""The list of workloads: a seeded network and seeded inputs for every row of the benchmark tables."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.networks import (
    CropUNet,
    DeepLabV3PlusR101,
    EncDecMil18,
    conv3x64,
    linear_chain,
    mlp3x4096,
    mnist_cnn,
)

# Keeps a workload's inputs off the random stream that drew its weights from the same seed.
_INPUT_SEED_OFFSET = 1_000_003
# Large enough for dilated and pooled layers to see typical values, small enough for well under a second.
_CALIBRATION_SIDE = 256


@dataclass(frozen=True)
class Workload:
    """A network and the shapes of the float32 inputs, batch first, that it is measured on."""

    name: str
    make_model: Callable[[], nn.Module]
    input_shapes: tuple[tuple[int, ...], ...]

    def model(self, seed: int = 0) -> nn.Module:
        """The network in eval mode, float32, on the CPU, with random weights and BatchNorm statistics.

        Equal seeds give equal bits on one machine. Between machines the statistics, which a forward pass
        measures, differ by rounding. The global random state is untouched.
        """
        # Not `torch.manual_seed`, which would seed every accelerator, too.
        generator = torch.default_generator
        with torch.random.fork_rng(devices=[]):
            generator.manual_seed(seed)
            model = self.make_model().eval()
            randomize_batch_norm(model, self._calibration_inputs(generator), generator)
        return model

    def inputs(self, seed: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        """Standard normal float32 inputs of `input_shapes`; equal seeds give equal values on any device."""
        generator = torch.Generator().manual_seed(seed + _INPUT_SEED_OFFSET)
        return tuple(_randn(shape, generator).to(device) for shape in self.input_shapes)

    def _calibration_inputs(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """One sample of every input, images cropped to `_CALIBRATION_SIDE`."""
        return tuple(
            _randn((1, *sample[:-2], *(min(side, _CALIBRATION_SIDE) for side in sample[-2:])), generator)
            for _, *sample in self.input_shapes
        )


def randomize_batch_norm(model: nn.Module, inputs: tuple[Tensor, ...], generator: torch.Generator) -> None:
    """Give every BatchNorm2d of an eval-mode `model` the statistics and affine that training might have left.

    Folding a fresh BatchNorm (mean 0, variance 1, weight 1, bias 0) wrongly can go unnoticed. So each channel
    draws a mean from N(0, 0.1) r, a variance from U(0.5, 1.5) r^2, a weight from U(0.8, 1.2) and a bias from
    N(0, 0.1), where r is the root mean square of what the layer receives in one forward pass of `inputs`. It
    is set just before the layer computes, so that later layers see the result and the scale does not drift.

    Why r, and why of the layer: without r the scale drifts by a factor per layer, and the output of
    MobileNetV3-small changed by 3e-7 from one input to another. With each channel's own mean and variance,
    random networks are chaotic: noise of 1e-3 on the input grew to 0.6 of DeepLabV3+'s output, so that no
    reduced precision could be judged. This way noise does not grow in the deep networks, and bfloat16
    autocast is 0.4 to 1 % from float32 (relative L2 norm) on DeepLabV3+ and the classifiers.
    """

    def normal(channels: int) -> Tensor:
        return 0.1 * _randn((channels,), generator)

    def uniform(channels: int, low: float, high: float) -> Tensor:
        return torch.empty(channels, device="cpu").uniform_(low, high, generator=generator)

    def set_from_input(norm: nn.BatchNorm2d, args: tuple[Tensor, ...]) -> None:
        mean_square = args[0].square().mean()
        channels = norm.num_features
        norm.get_buffer("running_mean").copy_(normal(channels) * mean_square.sqrt())
        norm.get_buffer("running_var").copy_(uniform(channels, 0.5, 1.5) * mean_square)
        norm.weight.copy_(uniform(channels, 0.8, 1.2))
        norm.bias.copy_(normal(channels))

    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if not norms:
        return
    hooks = [norm.register_forward_pre_hook(set_from_input) for norm in norms]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _torchvision(name: str) -> nn.Module:
    """torchvision's classifier `name` with random weights.

    Raises ImportError if torchvision is missing.
    """
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError as e:
        raise ImportError(f"the workload on {name} needs torchvision: install the one for your torch") from e
    model: nn.Module = models.get_model(name, weights=None)
    return model


_ROBOT = (1, 3, 480, 640)
_STREET = (3, 512, 896)
_IMAGENET = (3, 224, 224)

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("encdecmil18", EncDecMil18, (_ROBOT,)),
        Workload("cropunet", CropUNet, (_ROBOT,)),
        Workload("resnet18", partial(_torchvision, "resnet18"), ((1, *_IMAGENET),)),
        Workload("resnet18-b64", partial(_torchvision, "resnet18"), ((64, *_IMAGENET),)),
        Workload("deeplabv3plus-r101", DeepLabV3PlusR101, ((1, *_STREET),)),
        Workload("deeplabv3plus-r101-b4", DeepLabV3PlusR101, ((4, *_STREET),)),
        Workload("mobilenet-v3-small", partial(_torchvision, "mobilenet_v3_small"), ((1, *_IMAGENET),)),
        Workload("resnext50", partial(_torchvision, "resnext50_32x4d"), ((1, *_IMAGENET),)),
        Workload("regnet-y-400mf", partial(_torchvision, "regnet_y_400mf"), ((1, *_IMAGENET),)),
        Workload("shufflenet-v2", partial(_torchvision, "shufflenet_v2_x1_0"), ((1, *_IMAGENET),)),
        Workload("linear5x128", partial(linear_chain, 5, 128), ((20, 128),)),
        Workload("linear50x512", partial(linear_chain, 50, 512), ((1024, 512),)),
        Workload("mlp3x4096", mlp3x4096, ((512, 4096),)),
        Workload("conv3x64", conv3x64, ((64, *_IMAGENET),)),
        Workload("mnist-b512", mnist_cnn, ((512, 1, 28, 28),)),
    )
}
"""Every workload by name, in the order of the tables."""

CPU_WORKLOADS: tuple[str, ...] = (
    "encdecmil18",
    "cropunet",
    "resnet18",
    "mobilenet-v3-small",
    "resnext50",
    "regnet-y-400mf",
)
"""Names of the workloads that are measured on a CPU, too."""
