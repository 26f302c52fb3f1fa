"""The architectures of the mixed-precision questions that ampopt answers, written from their descriptions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn_relu(
    in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, dilation: int = 1
) -> nn.Sequential:
    """A convolution without bias, BatchNorm and ReLU; the padding keeps the size at stride 1."""
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, dilation, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class SeparatedBlock(nn.Module):
    """EncDecMil18's residual block: 1x1 narrowing, (5,1) then (1,5), 1x1 widening, around an addition."""

    def __init__(self, channels: int = 16, inner: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv_bn_relu(channels, inner, 1),
            nn.Conv2d(inner, inner, (5, 1), padding=(2, 0), bias=False),
            nn.Conv2d(inner, inner, (1, 5), padding=(0, 2), bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) to the same shape."""
        out: Tensor = self.relu(self.body(x) + x)
        return out


class EncDecMil18(nn.Module):
    """Four pooling stages and two unpooling ones, three blocks each: 19,681 parameters in 74 convolutions."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()

        def stage() -> nn.Sequential:
            return nn.Sequential(*(SeparatedBlock(channels) for _ in range(3)))

        self.stem = conv_bn_relu(3, channels, 7)
        self.encoder = nn.ModuleList(stage() for _ in range(4))
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)
        self.decoder = nn.ModuleList(stage() for _ in range(2))
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, H, W), H and W multiples of 16, to (N, 1, H/4, W/4)."""
        x: Tensor = self.stem(image)
        pooled_from: list[Tensor] = []
        for stage in self.encoder:
            x, indices = self.pool(stage(x))
            pooled_from.append(indices)
        for stage in self.decoder:
            x = stage(self.unpool(x, pooled_from.pop()))
        out: Tensor = self.head(x)
        return out


class CropUNet(nn.Module):
    """A U-Net that stops decoding at a quarter of the input: 1,897,585 parameters.

    Of its 17 convolutions 15 are `Conv2d`; the two `ConvTranspose2d` are not in the count of 15.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w1, w2, w4, w8, w16 = (width * factor for factor in (1, 2, 4, 8, 16))
        self.pool = nn.MaxPool2d(2)
        self.input = self._pair(3, w1)
        self.down2 = self._pair(w1, w2)
        self.down4 = self._pair(w2, w4)
        self.down8 = self._pair(w4, w8)
        self.down16 = self._pair(w8, w16)
        self.up8 = nn.ConvTranspose2d(w16, w8, 2, stride=2)
        self.merge8 = self._pair(2 * w8, w8)
        self.up4 = nn.ConvTranspose2d(w8, w4, 2, stride=2)
        self.merge4 = self._pair(2 * w4, w4)
        self.head = nn.Conv2d(w4, 1, 1)

    @staticmethod
    def _pair(in_channels: int, out_channels: int) -> nn.Sequential:
        first = conv_bn_relu(in_channels, out_channels, 3)
        return nn.Sequential(*first, *conv_bn_relu(out_channels, out_channels, 3))

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, H, W), H and W multiples of 16, to (N, 1, H/4, W/4)."""
        half = self.down2(self.pool(self.input(image)))
        quarter = self.down4(self.pool(half))
        eighth = self.down8(self.pool(quarter))
        x = self.down16(self.pool(eighth))
        x = self.merge8(torch.cat((eighth, self.up8(x)), dim=1))
        x = self.merge4(torch.cat((quarter, self.up4(x)), dim=1))
        out: Tensor = self.head(x)
        return out


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1 block with four times `width` output channels."""

    def __init__(self, in_channels: int, width: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        out_channels = 4 * width
        self.body = nn.Sequential(
            *conv_bn_relu(in_channels, width, 1),
            *conv_bn_relu(width, width, 3, stride=stride, dilation=dilation),
            nn.Conv2d(width, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, 4 * width, H / stride, W / stride)."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


class ResNet101Stride16(nn.Module):
    """ResNet-101 without classifier whose last layer dilates by 2 x (1, 2, 4) where it would have strided."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn_relu(3, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))
        self.layer1 = self._layer(64, 64, stride=1, dilations=(1,) * 3)
        self.layer2 = self._layer(256, 128, stride=2, dilations=(1,) * 4)
        self.layer3 = self._layer(512, 256, stride=2, dilations=(1,) * 23)
        self.layer4 = self._layer(1024, 512, stride=1, dilations=(2, 4, 8))

    @staticmethod
    def _layer(in_channels: int, width: int, *, stride: int, dilations: Sequence[int]) -> nn.Sequential:
        first = Bottleneck(in_channels, width, stride=stride, dilation=dilations[0])
        return nn.Sequential(first, *(Bottleneck(4 * width, width, dilation=d) for d in dilations[1:]))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, H, W) to layer 1's (N, 256, H/4, W/4) and layer 4's (N, 2048, H/16, W/16)."""
        low = self.layer1(self.stem(image))
        return low, self.layer4(self.layer3(self.layer2(low)))


class AtrousPyramid(nn.Module):
    """DeepLab's ASPP: 1x1, three dilated 3x3 and image pooling, concatenated to 1280 and projected to 256."""

    def __init__(self, in_channels: int = 2048, channels: int = 256) -> None:
        super().__init__()
        self.branches = nn.ModuleList([conv_bn_relu(in_channels, channels, 1)])
        self.branches.extend(conv_bn_relu(in_channels, channels, 3, dilation=d) for d in (6, 12, 18))
        self.image_pooling = nn.Sequential(nn.AdaptiveAvgPool2d(1), *conv_bn_relu(in_channels, channels, 1))
        self.project = conv_bn_relu(5 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, channels, H, W)."""
        pooled = F.interpolate(self.image_pooling(x), size=x.shape[-2:], mode="bilinear")
        out: Tensor = self.project(torch.cat((*(branch(x) for branch in self.branches), pooled), dim=1))
        return out


class DeepLabV3PlusR101(nn.Module):
    """DeepLabV3+ on ResNet-101, output stride 16, with a 48-channel low-level branch in its decoder.

    Upsampling the logits to the input's size belongs to the loss, as in the question, and is not in here.
    """

    def __init__(self, classes: int = 19) -> None:
        super().__init__()
        self.backbone = ResNet101Stride16()
        self.aspp = AtrousPyramid()
        self.low_level = conv_bn_relu(256, 48, 1)
        self.decoder = nn.Sequential(*conv_bn_relu(256 + 48, 256, 3), *conv_bn_relu(256, 256, 3))
        self.classifier = nn.Conv2d(256, classes, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 3, H, W) to the decoder's features (N, 256, H/4, W/4) and logits (N, classes, H/4, W/4)."""
        low, deep = self.backbone(image)
        low = self.low_level(low)
        deep = F.interpolate(self.aspp(deep), size=low.shape[-2:], mode="bilinear")
        features = self.decoder(torch.cat((deep, low), dim=1))
        return features, self.classifier(features)


def linear_chain(depth: int, features: int) -> nn.Sequential:
    """`depth` square linear layers with no nonlinearity between: (N, features) to (N, features).

    Weights have variance 1/features. PyTorch's default, a third of that, loses a factor of 3^(depth/2): after
    50 layers no float32 output would depend on the input, and no comparison could tell right from wrong.
    """
    layers = [nn.Linear(features, features) for _ in range(depth)]
    for layer in layers:
        nn.init.xavier_normal_(layer.weight)
    return nn.Sequential(*layers)


def mlp3x4096() -> nn.Sequential:
    """Three Linear(4096, 4096) with ReLU between: (N, 4096) to (N, 4096)."""
    width = 4096
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
    )


def conv3x64() -> nn.Conv2d:
    """The single convolution that mixed precision made slower: (N, 3, H, W) to (N, 64, H/2, W/2)."""
    return nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)


def mnist_cnn() -> nn.Sequential:
    """The usual MNIST classifier: (N, 1, 28, 28) to logits (N, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
