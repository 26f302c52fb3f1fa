"""Who runs in the race, lane by lane: what a user could pick instead of ampopt, and ampopt.

Each contestant takes a model in evaluation mode with its inputs, on their device, and returns a function of
those inputs. It runs in a process of its own, so it may leave global settings changed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ampopt
from benchmarks import by_hand, by_onnx
from benchmarks.by_hand import Call

Make = Callable[[nn.Module, tuple[Tensor, ...]], Call]

BUDGET_S = 60.0
"""The time budget of `optimize`, its default."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A way to run a model: its name, the lane it is judged in, and how it is made.

    `tunes`: it times alternatives while it is prepared, so it has the device to itself then. `thorough` ones
    take minutes to prepare and run only where that is asked for.
    """

    name: str
    lane: str
    make: Make
    tunes: bool = False
    thorough: bool = False


def channels_last(model: nn.Module, _: tuple[Tensor, ...]) -> Call:
    """The model and its inputs in channels_last."""
    model = copy.deepcopy(model).to(memory_format=torch.channels_last)
    return lambda *tensors: model(*map(_as_channels_last, tensors))


def _as_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def autocast_channels_last(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """bfloat16 autocast around channels_last."""
    inner = channels_last(model, inputs)

    def call(*tensors: Tensor) -> object:
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            return inner(*tensors)

    return call


class InHalf(nn.Module):
    """A model in float16 and channels_last that takes and gives float32: the casts are part of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half().to(memory_format=torch.channels_last)

    def forward(self, *tensors: Tensor) -> object:
        """Cast, run, cast back."""
        return by_hand.as_float(self.model(*map(by_hand.as_half_channels_last, tensors)))


def in_half(make: Make) -> Make:
    """A contestant on the model in float16, see `InHalf`."""
    return lambda model, inputs: make(InHalf(model).eval(), inputs)


def torchscript(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Traced, frozen and put through `optimize_for_inference`."""
    traced = torch.jit.trace(model, inputs, check_trace=False, strict=False)
    optimized: Call = torch.jit.optimize_for_inference(torch.jit.freeze(traced.eval()))
    return optimized


def compiled(model: nn.Module, inputs: tuple[Tensor, ...], *, mode: str | None, freezing: bool) -> Call:
    """`torch.compile` in one of its modes; results of its CUDA graphs are cloned, as those of others are."""
    import torch._inductor.config as inductor

    inductor.freezing = freezing
    function = torch.compile(model, mode=mode, dynamic=False)
    if mode is None or inputs[0].device.type == "cpu":
        return function

    def call(*tensors: Tensor) -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return torch.utils._pytree.tree_map_only(Tensor, torch.clone, function(*tensors))

    return call


def ours(model: nn.Module, inputs: tuple[Tensor, ...], *, lane: str) -> Call:
    """ampopt with its defaults, in one lane."""
    return ampopt.optimize(model, inputs, precision=lane, budget_s=BUDGET_S, cache=False, progress=False)


def contestants(device: torch.device) -> list[Contestant]:
    """Everybody who can be tried on a device, the original first."""
    ampopts = [
        Contestant(f"ampopt {lane}", lane, functools.partial(ours, lane=lane), tunes=True) for lane in LANES
    ]
    return [*(_on_cuda() if device.type == "cuda" else _on_cpu()), *ampopts]


LANES = ("fp32", "amp")


def _on_cpu() -> list[Contestant]:
    compile_ = functools.partial(compiled, mode=None, freezing=True)
    autotune = functools.partial(compiled, mode="max-autotune-no-cudagraphs", freezing=True)
    return [
        Contestant("eager", "fp32", by_hand.eager),
        Contestant("channels_last", "fp32", channels_last),
        Contestant("TorchScript", "fp32", torchscript),
        Contestant("compile freezing", "fp32", compile_),
        Contestant("compile max-autotune", "fp32", autotune, tunes=True, thorough=True),
        Contestant("ONNX Runtime", "fp32", by_onnx.on_cpu),
        Contestant("ONNX Runtime, best options", "fp32", by_onnx.on_cpu_tuned, tunes=True),
        Contestant("OpenVINO", "fp32", by_onnx.openvino),
        Contestant("eager bf16 autocast", "amp", by_hand.autocast(torch.bfloat16)),
        Contestant("bf16 autocast channels_last", "amp", autocast_channels_last),
    ]


def _on_cuda() -> list[Contestant]:
    overhead = functools.partial(compiled, mode="reduce-overhead", freezing=False)
    autotune = functools.partial(compiled, mode="max-autotune", freezing=True)
    found = [
        Contestant("eager", "fp32", by_hand.eager),
        Contestant("graph by hand", "fp32", by_hand.cuda_graph),
        Contestant("eager fp16 autocast", "amp", by_hand.autocast(torch.float16)),
        Contestant("fp16 channels_last fold graph", "amp", by_hand.half_channels_last_fold_graph),
    ]
    for lane, wrap in (("fp32", lambda make: make), ("amp", in_half)):
        found += [
            Contestant(f"TorchScript {lane}", lane, wrap(torchscript)),
            Contestant(f"compile reduce-overhead {lane}", lane, wrap(overhead)),
            Contestant(f"compile max-autotune {lane}", lane, wrap(autotune), tunes=True, thorough=True),
            Contestant(f"ONNX Runtime {lane}", lane, wrap(by_onnx.on_cuda), tunes=True),
            Contestant(f"TensorRT {lane}", lane, wrap(by_onnx.tensorrt), tunes=True),
        ]
    return found
