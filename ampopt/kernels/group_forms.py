"""The equivalent forms of a grouped convolution, and their measured times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.engines.graph_capture import capture_calls
from ampopt.errors import PassError
from ampopt.ir.program import Program
from ampopt.measure.clocks import device_time, latency
from ampopt.measure.sampling import interleave


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to compute a grouped convolution.

    Every `merge` neighbouring groups become one (1: unchanged; all of them: dense), or with `split` each
    group becomes a separate convolution; `other_layout` uses the other memory format.
    """

    merge: int = 1
    split: bool = False
    other_layout: bool = False

    def __str__(self) -> str:
        return ("split" if self.split else f"merge={self.merge}") + (
            "@other-layout" if self.other_layout else ""
        )

    @classmethod
    def parse(cls, text: str) -> Form:
        """Parse the output of `str`."""
        kind, _, layout = text.partition("@")
        if kind == "split":
            return cls(split=True, other_layout=bool(layout))
        return cls(merge=int(kind.removeprefix("merge=")), other_layout=bool(layout))


AS_IS = Form()


@dataclasses.dataclass(frozen=True)
class GroupedConv:
    """The parameters that decide the speed of a grouped 2d convolution; equal ones are measured once."""

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    has_bias: bool
    dtype: torch.dtype
    channels_last: bool

    def __str__(self) -> str:
        kind = "depthwise" if self.weight_shape[1] == 1 else f"groups={self.groups}"
        size = "x".join(map(str, self.input_shape))
        channels = f"{self.weight_shape[1]} channel{'s' * (self.weight_shape[1] != 1)}"
        return f"{kind}, {channels} a group, input {size}"

    @property
    def format(self) -> torch.memory_format:
        """The memory format of its input in the program."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @property
    def other_format(self) -> torch.memory_format:
        """The other memory format."""
        return torch.contiguous_format if self.channels_last else torch.channels_last

    def tensor_core_hint(self, device: torch.device) -> str:
        """Whether the convolution can run on Tensor Cores, and if not, the reason.

        NVIDIA's guide to convolutional layers asks for channels a group in multiples of 8 at 16 bits (of 4
        in TF32); depthwise convolutions have one, and run on the ordinary cores.
        """
        if device.type != "cuda":
            return "no Tensor Cores on this device"
        if torch.cuda.get_device_capability(device) < (7, 0):
            return "this GPU has no Tensor Cores"
        if self.dtype not in (torch.float16, torch.bfloat16):
            return f"misses Tensor Cores: {str(self.dtype).removeprefix('torch.')} (16 bits would be needed)"
        per_group = (self.weight_shape[1], self.weight_shape[0] // self.groups)
        if any(channels % 8 for channels in per_group):
            return f"misses Tensor Cores: {per_group[0]} in and {per_group[1]} out a group, no multiples of 8"
        return "can use Tensor Cores"


def forms_for(conv: GroupedConv) -> list[Form]:
    """The forms to time: merges up to 64 channels a group and the dense one, and a split up to 8 groups.

    The dense form is left out if it needs over 64 times the arithmetic.
    """
    width, merges, factor = conv.weight_shape[1], [1], 2
    while factor < conv.groups:
        if conv.groups % factor == 0 and width * factor <= 64:
            merges.append(factor)
        factor *= 2
    if conv.groups <= 64:
        merges.append(conv.groups)
    forms = [Form(merge=m, other_layout=other) for m in merges for other in (False, True)]
    return forms + [Form(split=True, other_layout=other) for other in (False, True) if conv.groups <= 8]


def merge_groups(weight: Tensor, groups: int, merge: int) -> Tensor:
    """The weight [out, in / groups, *k] for `groups / merge` groups, block-diagonal within each."""
    out, width = weight.shape[:2]
    rows = out // groups
    merged = weight.new_zeros(out, width * merge, *weight.shape[2:])
    for group in range(groups):
        place = group % merge
        block = slice(group * rows, (group + 1) * rows)
        merged[block, place * width : (place + 1) * width] = weight[block]
    return merged


def _runner(conv: GroupedConv, form: Form, device: torch.device) -> Callable[[], Tensor]:
    layout = conv.other_format if form.other_layout else conv.format
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(conv.input_shape, generator=generator, device="cpu")
    x = x.to(device, conv.dtype, memory_format=conv.format)
    weight = torch.randn(conv.weight_shape, generator=generator, device="cpu").to(device, conv.dtype)
    bias = torch.zeros(conv.weight_shape[0], device=device, dtype=conv.dtype) if conv.has_bias else None
    merged = merge_groups(weight, conv.groups, form.merge).contiguous(memory_format=layout)
    parts = [part.contiguous(memory_format=layout) for part in weight.chunk(conv.groups)]
    biases = [None] * conv.groups if bias is None else list(bias.chunk(conv.groups))
    geometry = (conv.stride, conv.padding, conv.dilation)

    def run() -> Tensor:
        source = x.contiguous(memory_format=layout) if form.other_layout else x
        if form.split:
            pieces = source.chunk(conv.groups, dim=1)
            outs = [F.conv2d(p, w, b, *geometry) for p, w, b in zip(pieces, parts, biases, strict=True)]
            out = torch.cat(outs, 1)
        else:
            out = F.conv2d(source, merged, bias, *geometry, groups=conv.groups // form.merge)
        return out.contiguous(memory_format=conv.format) if form.other_layout else out

    return run


def measure_forms(
    conv: GroupedConv, forms: list[Form], program: Program, seconds: float = 0.1
) -> list[tuple[Form, float]]:
    """The median time in seconds of each form, in the program's own settings, sampled in turn.

    A form that the device's libraries refuse is left out.
    """
    samplers, alive = {}, []  # a captured graph does not keep the tensors that it reads
    with program.scope():
        for form in forms:
            run = _runner(conv, form, program.device)
            alive.append(run)
            try:
                run()
                if program.device.type == "cuda":
                    graph = _captured(run)
                    samplers[str(form)] = device_time(graph.replay, program.device)
                else:
                    samplers[str(form)] = latency(run, program.device)
            except (RuntimeError, PassError):
                if form == AS_IS:
                    raise
        timed = interleave(samplers, seconds=seconds, least=6, most=60)
    return [(Form.parse(name), m.median) for name, m in timed.items()]


def _captured(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    return capture_calls(lambda: (run(),))[0]
