"""The networks of the breadth: every family of torchvision and timm, transformers' vision models, our own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.breadth_own import OWN
from benchmarks.by_hand import Inputs
from benchmarks.cold_networks import CALIBRATION_BATCH, UnknownNetworkError, take_statistics
from benchmarks.export_networks import make_small_constants_random

TORCHVISION = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet"),
    *("inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_large", "regnet_x_400mf"),
    *("regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1"),
    *("swin_t", "swin_v2_t", "vgg11", "vgg11_bn", "vit_b_16", "wide_resnet50_2"),
)

SEGMENTATION = (
    *("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"),
)

DETECTION = (
    *("ssdlite320_mobilenet_v3_large", "ssd300_vgg16", "fasterrcnn_mobilenet_v3_large_320_fpn"),
    *("fasterrcnn_resnet50_fpn_v2", "retinanet_resnet50_fpn", "fcos_resnet50_fpn"),
    *("maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn"),
)

VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "swin3d_t")

FLOW = ("raft_small", "raft_large")

TIMM = (
    *("beit_base_patch16_224", "botnet26t_256", "halonet26t", "lambda_resnet26t", "mobileone_s0"),
    *("repvgg_a0", "gernet_s", "regnetz_b16", "bat_resnext26ts", "gcresnet33ts", "resnet51q"),
    *("resnet50_clip", "cait_xxs24_224", "coat_tiny", "coat_lite_tiny", "convit_tiny"),
    *("convmixer_768_32", "convnext_atto", "convnextv2_atto", "cpubone_nano", "crossvit_tiny_240"),
    *("csatv2", "cs3darknet_s", "cspdarknet53", "cspresnet50", "cspnext_tiny", "davit_tiny"),
    *("deepseek_vit_412m", "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"),
    *("deit3_small_patch16_224", "densenet121", "dla34", "dla46_c", "dpn48b", "edgenext_xx_small"),
    *("efficientformer_l1", "efficientformerv2_s0", "efficientnet_b0", "efficientnet_b0_gn"),
    *("efficientnet_cc_b0_4e", "efficientnet_lite0", "efficientnetv2_rw_t", "fbnetc_100", "mixnet_s"),
    *("mnasnet_small", "mobilenetv1_100", "mobilenetv2_050", "spnasnet_100", "tinynet_e"),
    *("efficientvim_m1", "efficientvit_b0", "efficientvit_m0", "eva02_tiny_patch14_224"),
    *("vit_small_patch16_dinov3", "vit_small_patch16_rope_224", "fasternet_t0", "fastvit_t8"),
    *("focalnet_tiny_srf", "gcvit_xxtiny", "gemma4_vit_167m", "ghostnet_050", "ghostnetv2_100"),
    *("ghostnetv3_050", "hardcorenas_a", "hgnet_tiny", "hgnetv2_b0", "hiera_tiny_224"),
    *("sam2_hiera_tiny", "hrnet_w18_small", "iformer_t", "inception_next_atto", "inception_resnet_v2"),
    *("inception_v3", "inception_v4", "lcnetv2_small", "levit_128s", "levit_conv_128s", "lowformer_b0"),
    *("mambaout_femto", "coatnet_nano_rw_224", "maxvit_pico_rw_256", "maxxvit_rmlp_nano_rw_256"),
    *("caformer_s18", "convformer_s18", "poolformer_s12", "gmixer_12_224", "gmlp_ti16_224"),
    *("mixer_s32_224", "resmlp_12_224", "fbnetv3_b", "lcnet_050", "mobilenetv3_small_050"),
    *("mobilenetv4_conv_small", "mobilenetv4_hybrid_medium", "mobilenetv5_base", "mobilevit_xxs"),
    *("mobilevitv2_050", "mvitv2_tiny", "naflexvit_base_patch16_gap", "nasnetalarge", "nest_tiny"),
    *("nextvit_small", "dm_nfnet_f0", "eca_nfnet_l0", "nf_regnet_b0", "nf_resnet26", "pit_ti_224"),
    *("pnasnet5large", "pvt_v2_b0", "qwen3_vit_88m", "rdnet_tiny", "regnetx_002", "regnety_002"),
    *("regnetv_040", "regnetz_005", "repghostnet_050", "repvit_m0_9", "res2net50_26w_4s"),
    *("resnest14d", "resnet10t", "resnet26t", "resnetaa34d", "resnetblur18", "resnetrs50"),
    *("ecaresnetlight", "seresnet18", "resnetv2_18", "resnetv2_50x1_bit", "resnetv2_50d_evos"),
    *("rexnet_100", "selecsls42", "legacy_seresnet18", "legacy_xception", "sequencer2d_s", "shvit_s1"),
    *("skresnet18", "starnet_s050", "swiftformer_xs", "swin_tiny_patch4_window7_224"),
    *("swin_s3_tiny_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224", "tiny_vit_5m_224"),
    *("tnt_s_patch16_224", "tresnet_m", "twins_pcpvt_small", "twins_svt_small", "vgg11_bn"),
    *("visformer_tiny", "vit_tiny_patch16_224", "flexivit_small", "vit_small_patch14_dinov2"),
    *("vit_base_patch32_siglip_256", "vit_tiny_r_s16_p8_224", "vit_relpos_small_patch16_224"),
    *("vit_srelpos_small_patch16_224", "samvit_base_patch16_224", "vitamin_small_224", "volo_d1_224"),
    *("ese_vovnet19b_dw", "vovnet39a", "xception41", "xcit_nano_12_p16_224"),
)

TRANSFORMERS = (
    *("BeitForImageClassification", "BitForImageClassification", "CLIPVisionModel"),
    *("ConditionalDetrForObjectDetection", "ConvNextForImageClassification"),
    *("ConvNextV2ForImageClassification", "CvtForImageClassification", "DPTForDepthEstimation"),
    *("DeformableDetrForObjectDetection", "DeiTForImageClassification"),
    *("DepthAnythingForDepthEstimation", "DetrForObjectDetection", "Dinov2ForImageClassification"),
    *("EfficientNetForImageClassification", "FocalNetForImageClassification", "GLPNForDepthEstimation"),
    *("HGNetV2ForImageClassification", "HieraForImageClassification", "IJepaForImageClassification"),
    *("LevitForImageClassification", "Mask2FormerForUniversalSegmentation"),
    *("MaskFormerForInstanceSegmentation", "MobileNetV1ForImageClassification"),
    *("MobileNetV2ForImageClassification", "MobileViTForImageClassification"),
    *("MobileViTV2ForImageClassification", "PoolFormerForImageClassification"),
    *("PvtForImageClassification", "PvtV2ForImageClassification", "RTDetrForObjectDetection"),
    *("RegNetForImageClassification", "ResNetForImageClassification", "SamVisionModel"),
    *("SegformerForSemanticSegmentation", "SiglipVisionModel", "SuperPointForKeypointDetection"),
    *("SwiftFormerForImageClassification", "Swin2SRForImageSuperResolution"),
    *("SwinForImageClassification", "Swinv2ForImageClassification", "TextNetForImageClassification"),
    *("TimesformerForVideoClassification", "UperNetForSemanticSegmentation"),
    *("ViTForImageClassification", "VideoMAEForVideoClassification", "VitPoseForPoseEstimation"),
    *("YolosForObjectDetection", "ZoeDepthForDepthEstimation"),
)

PACKAGES: dict[str, tuple[str, ...]] = {
    "own": tuple(OWN),
    "torchvision": (*TORCHVISION, *SEGMENTATION, *DETECTION, *VIDEO, *FLOW),
    "timm": TIMM,
    "transformers": TRANSFORMERS,
}

BREADTH: tuple[str, ...] = tuple(f"{package}/{name}" for package, names in PACKAGES.items() for name in names)
"""The names of all networks, in the order of the table."""

_FEW = 2
"""Large inputs whose statistics batch normalization takes: their maps have many pixels in every layer."""

Build = tuple[nn.Module, Callable[[int, torch.Generator], Inputs]]
"""A model, and what makes its inputs for a batch of a size."""


def subject(name: str) -> tuple[nn.Module, Inputs]:
    """A network of `BREADTH` in eval mode with seeded random weights, and its inputs, on the CPU.

    Batch normalization has the statistics of one batch in training mode. Raises UnknownNetworkError.
    """
    package, _, inner = name.partition("/")
    build = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers, "own": _own}[package]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model, inputs = build(inner)
        unused = build(inner)[0].eval() if package == "own" else None  # it has no state yet
    generator = torch.Generator().manual_seed(1)
    model.eval()
    make_small_constants_random(model, generator)
    large = inner in (*DETECTION, *VIDEO, *FLOW)
    several = 1 if unused is not None else _FEW if large else CALIBRATION_BATCH
    take_statistics(model, *inputs(several, generator))
    return model if unused is None else _with_weights_of(model, unused), inputs(1, generator)


def _with_weights_of(model: nn.Module, unused: nn.Module) -> nn.Module:
    """A model that was never called, with the weights and the statistics of one that was."""
    called = dict(model.named_modules())
    for name, module in unused.named_modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.GRUCell)):
            module.load_state_dict(called[name].state_dict())
    return unused


def _images(*shapes: tuple[int, ...]) -> Callable[[int, torch.Generator], Inputs]:
    """What makes normal inputs of these shapes, which have a batch of 1 first."""
    return lambda batch, generator: tuple(
        torch.randn(batch, *shape[1:], generator=generator) for shape in shapes
    )


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnknownNetworkError(f"no {name} here: {error}") from error


def _torchvision(name: str) -> Build:
    models = _package("torchvision").models
    extra: dict[str, Any] = {}
    if name in (*SEGMENTATION, *DETECTION):
        extra = {"weights_backbone": None}
    elif name in ("googlenet", "inception_v3"):
        extra = {"init_weights": True}
    try:
        model: nn.Module = models.get_model(name, weights=None, **extra)
    except ValueError as error:
        raise UnknownNetworkError(f"no {name} in torchvision: {error}") from error
    if name in DETECTION:
        return model, _list_of_images
    if name in FLOW:
        return model, _images((1, 3, 240, 320), (1, 3, 240, 320))
    if name in SEGMENTATION:
        return model, _images((1, 3, 520, 520))
    side = getattr(models.get_model_weights(name).DEFAULT.transforms(), "crop_size", [224])[0]
    return model, _images((1, 3, 16, side, side) if name in VIDEO else (1, 3, side, side))


def _list_of_images(batch: int, generator: torch.Generator) -> Inputs:
    """Detectors of torchvision take a list of images in [0, 1]."""
    return ([torch.rand(3, 480, 640, generator=generator) for _ in range(batch)],)


def _timm(name: str) -> Build:
    try:
        model: nn.Module = _package("timm").create_model(name, pretrained=False)
    except RuntimeError as error:
        raise UnknownNetworkError(f"no {name} in timm: {error}") from error
    shape: tuple[int, ...] = model.pretrained_cfg["input_size"]  # type: ignore[index, assignment]
    return model, _images((1, *shape))


def _transformers(name: str) -> Build:
    transformers = _package("transformers")
    kind = getattr(transformers, name, None)
    if kind is None:
        raise UnknownNetworkError(f"no {name} in transformers {transformers.__version__}")
    model: nn.Module = kind(kind.config_class())
    config: Any = model.config
    side = getattr(config, "image_size", None) or 224
    height, width = (side, side) if isinstance(side, int) else side
    frames = getattr(config, "num_frames", None)
    channels = getattr(config, "num_channels", None) or 3
    return model, _images((1, *(() if frames is None else (frames,)), channels, height, width))


def _own(name: str) -> Build:
    model, shapes = OWN[name]()
    return model, _images(*shapes)
