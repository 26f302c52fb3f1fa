"""Who runs in the race, lane by lane: what a user could pick instead of ampopt, and ampopt.

Each contestant says how it can be made of a model in evaluation mode with its inputs, on their device, at one
border; the fastest of its ways runs. It does so in a process of its own, in which cuDNN's algorithm search is
on. Whatever runs in a CUDA graph leaves its results in buffers that the next call overwrites; ampopt, too.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import ampopt
from benchmarks import by_compile, by_hand, by_onnx
from benchmarks.by_compile import AUTOTUNE, FREEZING
from benchmarks.by_hand import Call
from benchmarks.ways import (
    CHANNELS_LAST,
    CONTIGUOUS,
    FORMATS,
    IN_FP32,
    IN_LANE,
    Border,
    Made,
    Runner,
    Ways,
    graphed,
    in_formats,
)

Make = Callable[[nn.Module, tuple[Tensor, ...], Border], Ways]

LANES = ("fp32", "amp")


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A way to run a model: its name, the lane it is judged in, and how it is made.

    `tunes`: it times alternatives while it is prepared, so it has the device to itself then. `thorough` ones
    take minutes to prepare and run only where that is asked for. `engine`: it runs in the environment of this
    engine, without PyTorch, and needs no `make`.
    """

    name: str
    lane: str
    make: Make | None = None
    tunes: bool = False
    thorough: bool = False
    engine: str | None = None


def border_of(lane: str, io: str, device: torch.device) -> Border:
    """The border of a lane's table."""
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    return Border(io, torch.float32 if lane == "fp32" else half)


def ios_of(lane: str) -> Sequence[str]:
    """The borders that a lane can have: float32 is the FP32 lane's own."""
    return (IN_FP32,) if lane == "fp32" else (IN_FP32, IN_LANE)


def as_it_is(runner: Runner) -> Make:
    """The model in float32 as it is, with the given inputs."""

    def make(model: nn.Module, inputs: tuple[Tensor, ...], border: Border) -> Ways:
        given = border.given(inputs)
        return {"": lambda: Made(runner(model, given), given)}

    return make


def autocast(model: nn.Module, inputs: tuple[Tensor, ...], border: Border, *, channels_last: bool) -> Ways:
    """The model under autocast; its results in float32 where the border says so."""

    def make() -> Made:
        given = border.given(inputs, channels_last=channels_last)
        fp32, device = copy.deepcopy(model), inputs[0].device.type
        if channels_last:
            fp32 = fp32.to(memory_format=torch.channels_last)

        def call(*tensors: Tensor) -> object:
            entering = map(by_hand.as_channels_last, tensors) if channels_last else tensors
            with torch.autocast(device, border.dtype):
                found = fp32(*entering)
            return by_hand.as_float(found) if border.casts else found

        return Made(call, given)

    return {"": make}


def of(runners: dict[str, Runner], *formats: str) -> Make:
    """Each runner on the model in the lane's dtype and in each memory format."""
    return lambda model, inputs, border: in_formats(runners, model, inputs, border, formats)


def in_graphs(runners: dict[str, Runner]) -> Make:
    """Each runner as it is and in a plain CUDA graph, in both memory formats."""

    def make(model: nn.Module, inputs: tuple[Tensor, ...], border: Border) -> Ways:
        both = {
            **runners,
            **{f"{name} in a graph".strip(): graphed(r, border) for name, r in runners.items()},
        }
        return in_formats(both, model, inputs, border, FORMATS)

    return make


def graph_by_hand(model: nn.Module, inputs: tuple[Tensor, ...], border: Border) -> Ways:
    """A plain CUDA graph, with batch normalization folded and as it is, in both memory formats."""
    graph = graphed(by_hand.eager, border)
    return {
        **in_formats({"folded": graph}, by_hand.fold(model), inputs, border, FORMATS),
        **in_formats({"": graph}, model, inputs, border, FORMATS),
    }


def torchscript(model: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """Traced, frozen and put through `optimize_for_inference`."""
    traced = torch.jit.trace(model, inputs, check_trace=False, strict=False)
    optimized: Call = torch.jit.optimize_for_inference(torch.jit.freeze(traced.eval()))
    return optimized


def compile_on_cuda(
    model: nn.Module, inputs: tuple[Tensor, ...], border: Border, *, kinds: dict[str, by_compile.Options]
) -> Ways:
    """Inductor; in half precision its weights are in channels_last, in float32 it chooses formats itself."""
    formats = (CONTIGUOUS,) if border.dtype is torch.float32 else (CHANNELS_LAST,)
    return in_formats(by_compile.on_cuda(border, kinds), model, inputs, border, formats)


def ours(
    model: nn.Module, inputs: tuple[Tensor, ...], border: Border, *, lane: str, outputs: str = "static"
) -> Ways:
    """ampopt with its defaults, in one lane, with results as its peers have them."""
    options = {"precision": lane, "outputs": outputs, "cache": False, "progress": False}

    def make() -> Made:
        if border.io == IN_LANE:
            options["io"] = IN_LANE
        given = border.given(inputs, channels_last=True)
        return Made(ampopt.optimize(model, given, **options), given, f"outputs={outputs}")  # type: ignore[arg-type]

    return {"": make}


def contestants(device: torch.device) -> list[Contestant]:
    """Everybody who can be tried on a device, the original first."""
    found = _on_cuda() if device.type == "cuda" else _on_cpu()
    for lane in LANES:
        found.append(Contestant(f"ampopt {lane}", lane, functools.partial(ours, lane=lane), tunes=True))
    if device.type == "cuda":
        for lane in LANES:
            copied = functools.partial(ours, lane=lane, outputs="copy")
            found.append(Contestant(f"ampopt {lane}, copied", lane, copied, tunes=True, thorough=True))
    return found


def _on_cpu() -> list[Contestant]:
    compile_ = functools.partial(by_compile.compiled, options=FREEZING)
    autotune = functools.partial(by_compile.compiled, options={**FREEZING, **AUTOTUNE})
    eager: dict[str, Runner] = {"": by_hand.eager}
    return [
        Contestant("eager", "fp32", as_it_is(by_hand.eager)),
        Contestant("channels_last", "fp32", of(eager, CHANNELS_LAST)),
        Contestant("channels_last fold", "fp32", as_it_is(by_hand.channels_last_fold)),
        Contestant("TorchScript", "fp32", of({"": torchscript}, *FORMATS)),
        Contestant("compile freezing", "fp32", of({"": compile_}, *FORMATS)),
        Contestant("compile max-autotune", "fp32", of({"": autotune}, CONTIGUOUS), tunes=True, thorough=True),
        Contestant("ONNX Runtime", "fp32", as_it_is(by_onnx.on_cpu)),
        Contestant("ONNX Runtime, best options", "fp32", as_it_is(by_onnx.on_cpu_tuned), tunes=True),
        Contestant("OpenVINO", "fp32", by_onnx.openvino, tunes=True),
        *(Contestant(name, "fp32", engine=name.lower()) for name in ("ncnn", "MNN", "LiteRT")),
        Contestant("eager bf16 autocast", "amp", functools.partial(autocast, channels_last=False)),
        Contestant("bf16 autocast channels_last", "amp", functools.partial(autocast, channels_last=True)),
        Contestant("bf16 channels_last", "amp", of(eager, CHANNELS_LAST)),
        Contestant("compile freezing bf16", "amp", of({"": compile_}, *FORMATS)),
    ]


def _on_cuda() -> list[Contestant]:
    overhead: dict[str, by_compile.Options] = {"": {}, "freezing": FREEZING}
    autotune: dict[str, by_compile.Options] = {"freezing": {**FREEZING, **AUTOTUNE}}
    eager: dict[str, Runner] = {"": by_hand.eager}
    found = [
        Contestant("eager", "fp32", as_it_is(by_hand.eager)),
        Contestant("channels_last", "fp32", of(eager, CHANNELS_LAST)),
        Contestant("eager fp16 autocast", "amp", functools.partial(autocast, channels_last=False)),
        Contestant("fp16 autocast channels_last", "amp", functools.partial(autocast, channels_last=True)),
        Contestant("eager fp16", "amp", of(eager, *FORMATS)),
    ]
    for lane in LANES:
        on_cuda = functools.partial(compile_on_cuda, kinds=overhead)
        tuned = functools.partial(compile_on_cuda, kinds=autotune)
        found += [
            Contestant(f"graph by hand {lane}", lane, graph_by_hand),
            Contestant(f"TorchScript {lane}", lane, in_graphs({"": torchscript})),
            Contestant(f"compile reduce-overhead {lane}", lane, on_cuda),
            Contestant(f"compile max-autotune {lane}", lane, tuned, tunes=True, thorough=True),
            Contestant(f"ONNX Runtime {lane}", lane, by_onnx.on_cuda, tunes=True),
            Contestant(f"TensorRT {lane}", lane, by_onnx.tensorrt, tunes=True),
        ]
    return found
