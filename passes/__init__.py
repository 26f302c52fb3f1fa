"""The passes, one file each. `PIPELINE` is the order in which they are tried."""

from __future__ import annotations

from ampopt.ir.pipeline import Pipeline
from ampopt.passes.allow_tf32 import AllowTf32
from ampopt.passes.bake_autocast import BakeAutocast
from ampopt.passes.channels_last import ChannelsLast
from ampopt.passes.compile import Compile
from ampopt.passes.cuda_graph import CudaGraph
from ampopt.passes.degroup import Degroup
from ampopt.passes.fold_constants import FoldConstants
from ampopt.passes.fold_conv_bn import FoldConvBn
from ampopt.passes.fuse_conv_act import FuseConvAct
from ampopt.passes.fuse_conv_onednn import FuseConvOnednn
from ampopt.passes.fuse_conv_triton import FuseConvTriton
from ampopt.passes.fuse_image_conv import FuseImageConv
from ampopt.passes.fuse_linear_act import FuseLinearAct
from ampopt.passes.keep_fp32 import KeepFp32
from ampopt.passes.merge_linear_chain import MergeLinearChain
from ampopt.passes.onnx_runtime import OnnxRuntime
from ampopt.passes.openvino import Openvino
from ampopt.passes.parallel_branches import ParallelBranches
from ampopt.passes.remove_inference_noops import RemoveInferenceNoops
from ampopt.passes.script import Script
from ampopt.passes.search_conv_algorithms import SearchConvAlgorithms

__all__ = [
    "PIPELINE",
    "AllowTf32",
    "BakeAutocast",
    "ChannelsLast",
    "Compile",
    "CudaGraph",
    "Degroup",
    "FoldConstants",
    "FoldConvBn",
    "FuseConvAct",
    "FuseConvOnednn",
    "FuseConvTriton",
    "FuseImageConv",
    "FuseLinearAct",
    "KeepFp32",
    "MergeLinearChain",
    "OnnxRuntime",
    "Openvino",
    "ParallelBranches",
    "RemoveInferenceNoops",
    "Script",
    "SearchConvAlgorithms",
]

PIPELINE = Pipeline(
    rewrites=(
        RemoveInferenceNoops(),
        FoldConstants(),
        BakeAutocast(),
        KeepFp32(),
        FoldConvBn(),
        MergeLinearChain(),
        AllowTf32(),
        SearchConvAlgorithms(),
        ChannelsLast(),
        FuseConvTriton(),
        Degroup(),
        FuseConvAct(),
        FuseConvOnednn(),
        FuseLinearAct(),
        FuseImageConv(),
    ),
    engines=(OnnxRuntime(), Openvino(), Compile(), Script(), ParallelBranches()),
    launches=(CudaGraph(),),
)
"""The passes that `optimize` tries: clean-up, precision, algebra, layout, kernels; likely best engines first.

Precision comes before algebra, so that algebra is timed in its final precision; passes still compute new
weights from the unrounded ones.
"""
