"""Mixed-precision policies: which dtype each operator of a graph takes its floating-point inputs in.

A policy decides, `bake` rewrites. `amp` does not repeat autocast's lists, which differ between devices and
versions of PyTorch: it runs the graph once under `torch.autocast` and writes down what autocast does.
`O1` and `O2` follow apex's documentation: O1 casts by lists (matrix products and convolutions down,
functions that need range up, mixed arguments to the widest), O2 stores everything in the lower precision
but keeps normalization in FP32. `half` is everything in the lower precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt.graph import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, aten, calls
from ampopt.program import Program, autocast_scope

Decisions = dict[fx.Node, dict[fx.Node, torch.dtype]]
"""For each call: the dtype that it wants each of its input nodes in; inputs not named stay as they are."""

POLICIES = ("amp", "O1", "O2", "half")

_PRODUCTS = {
    *CONVOLUTIONS,
    *TRANSPOSED_CONVOLUTIONS,
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.einsum.default,
    aten.scaled_dot_product_attention.default,
}
_NORMALIZATIONS = {
    aten.batch_norm.default,
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.instance_norm.default,
}
_NEED_RANGE = {
    aten.softmax.int,
    aten.log_softmax.int,
    aten.exp.default,
    aten.log.default,
    aten.pow.Tensor_Scalar,
    aten.softplus.default,
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.cosine_similarity.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.prod.default,
    aten.cumsum.default,
    aten.norm.Scalar,
    aten.linalg_vector_norm.default,
}
_RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
"""Their kernels take their weights as one block and break on cast ones: they stay in FP32."""


class _CastRecorder(TorchDispatchMode):
    """Notes every cast of a floating-point tensor that happens while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[tuple[Tensor, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and isinstance(kwargs.get("dtype"), torch.dtype):
            self.casts.append((args[0], kwargs["dtype"]))
        return func(*args, **kwargs)


class _Recording(fx.Interpreter):
    """Runs a graph under autocast and notes which inputs of each call autocast casts, and to what."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.decisions: Decisions = {}
        self.dtypes: dict[fx.Node, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        with _CastRecorder() as recorder:
            result = super().run_node(n)
        if n.op == "call_function":
            wanted: dict[fx.Node, torch.dtype] = {}
            for source in n.all_input_nodes:
                value = self.env[source]
                found = [dtype for tensor, dtype in recorder.casts if tensor is value]
                if found and found[0] is not value.dtype:
                    wanted[source] = found[0]
            self.decisions[n] = wanted
        if isinstance(result, Tensor):
            self.dtypes[n] = result.dtype
        return result


def _enter(program: Program) -> list[Tensor]:
    return [b.convert(t) for b, t in zip(program.entry, program.examples, strict=True)]


def record_autocast(
    program: Program, module: fx.GraphModule, dtype: torch.dtype
) -> tuple[Decisions, dict[fx.Node, torch.dtype]]:
    """What autocast to `dtype` does to each call of `module`, and the dtype of every result under it."""
    recording = _Recording(module)
    with program.settings.scope(program.device), autocast_scope(program.device, dtype):
        recording.run(*_enter(program))
    return recording.decisions, recording.dtypes


def result_dtypes(program: Program, module: fx.GraphModule) -> dict[fx.Node, torch.dtype]:
    """The dtype of every result of `module` as it stands, without autocast."""
    recording = _Recording(module)
    with program.settings.scope(program.device), autocast_scope(program.device, None):
        recording.run(*_enter(program))
    return recording.dtypes


def decide(policy: str, program: Program, module: fx.GraphModule, dtype: torch.dtype) -> Decisions:
    """The decisions of one of `POLICIES` for a graph that runs in FP32 now."""
    if policy == "amp":
        decisions = record_autocast(program, module, dtype)[0]
        for node in calls(module, _RECURRENT):
            decisions[node] = {
                source: torch.float32 for source in _floating(node, result_dtypes(program, module))
            }
        return decisions
    current = result_dtypes(program, module)
    wants: Callable[[fx.Node], torch.dtype | None] = {
        "O1": lambda node: _o1(node, dtype),
        "O2": lambda node: torch.float32 if node.target in _NORMALIZATIONS | _RECURRENT else dtype,
        "half": lambda node: torch.float32 if node.target in _RECURRENT else dtype,
    }[policy]
    return {node: _to(node, wants(node), current) for node in calls(module)}


def _o1(node: fx.Node, dtype: torch.dtype) -> torch.dtype | None:
    if node.target in _PRODUCTS:
        return dtype
    return torch.float32 if node.target in _NEED_RANGE | _RECURRENT else None


def _floating(node: fx.Node, dtypes: dict[fx.Node, torch.dtype]) -> list[fx.Node]:
    floating = (torch.float32, torch.float16, torch.bfloat16)
    return [source for source in node.all_input_nodes if dtypes.get(source) in floating]


def _to(
    node: fx.Node, dtype: torch.dtype | None, dtypes: dict[fx.Node, torch.dtype]
) -> dict[fx.Node, torch.dtype]:
    return {} if dtype is None else dict.fromkeys(_floating(node, dtypes), dtype)
