"""Mixed-precision policies: which dtype each operator of a graph takes its floating-point inputs in.

A policy decides, `bake` rewrites. `amp` does not repeat autocast's lists, which differ between devices and
versions of PyTorch: it runs the graph once under `torch.autocast` and writes down what autocast does.
`O1` and `O2` follow apex's documentation: O1 casts by lists (matrix products and convolutions down,
functions that need range up, mixed arguments to the widest), O2 stores everything in the lower precision
but keeps normalization in FP32. `half` is everything in the lower precision. Under both, what the model
itself casts to FP32 is computed in it, as it is after `model.half()`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampopt.ir.graph import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, arguments, aten, constant, is_constant
from ampopt.ir.own_autocast import FULL_PRECISION
from ampopt.ir.program import Program
from ampopt.ir.settings import autocast_scope
from ampopt.ir.shapes import GraphRun, run_on_examples

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
_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
"""Their kernels take their weights as one block and break on cast ones: they stay in FP32."""
_CASTS = {aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.type_as.default}


def is_product(node: fx.Node) -> bool:
    """Whether a call is a matrix product or a convolution, which every policy lowers."""
    return node.target in _PRODUCTS


def stays_in_fp32(node: fx.Node) -> bool:
    """Whether no policy may lower a call: it is recurrent, or the model disables autocast for it."""
    return node.target in _RECURRENT or FULL_PRECISION in node.meta


def own_dtype(module: fx.GraphModule, node: fx.Node) -> torch.dtype:
    """The dtype of a call that `stays_in_fp32`: FP32, or lower if the model stores its weights so.

    A call that is marked with a dtype has that one.
    """
    if isinstance(marked := node.meta.get(FULL_PRECISION), torch.dtype):
        return marked
    weights = (constant(module, source) for source in node.all_input_nodes if is_constant(source))
    dtypes = {weight.dtype for weight in weights if weight is not None and weight.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


class _CastRecorder(TorchDispatchMode):
    """Notes every cast of a floating-point tensor that happens while it is active."""

    supports_higher_order_operators = True
    """They run as they are, as operators of the user's do: what they cast inside is their own business."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: list[tuple[Tensor, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and isinstance(kwargs.get("dtype"), torch.dtype):
            self.casts.append((args[0], kwargs["dtype"]))
        return func(*args, **kwargs)


class _Run(GraphRun):
    """Runs a graph and keeps the dtype of every result; subclasses also decide about casts."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.decisions: Decisions = {}
        self.dtypes: dict[fx.Node, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.target in _CASTS:  # the graph's own: no policy decides about them
            result = self.call_with(n, {})
        else:
            result = self.decide_and_call(n) if n.op == "call_function" else super().run_node(n)
        if isinstance(result, Tensor):
            self.dtypes[n] = result.dtype
        return result

    def decide_and_call(self, node: fx.Node) -> Any:
        return super().run_node(node)

    def call_with(self, node: fx.Node, wanted: dict[fx.Node, torch.dtype]) -> Any:
        """Call a node with some inputs cast, and keep that as the decision."""
        self.decisions[node] = wanted
        values = {source: self.env[source] for source in node.all_input_nodes}
        values |= {source: values[source].to(dtype) for source, dtype in wanted.items()}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: values[source])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def casts_to(self, node: fx.Node, dtype: torch.dtype) -> dict[fx.Node, torch.dtype]:
        """The casts that bring every floating-point input of a node to one dtype."""
        sources = [n for n in node.all_input_nodes if self.dtypes.get(n) in _FLOATING]
        return {source: dtype for source in sources if self.dtypes[source] is not dtype}


class _AutocastRun(_Run):
    """Runs under autocast to `low` and notes which inputs of each call autocast casts, and to what.

    Operators made of others may cast inside: then the same casts of their inputs are decided. A cast to
    FP32 inside an operator whose result is `low` is the operator's own business and not autocast's.
    """

    def __init__(self, module: fx.GraphModule, low: torch.dtype, device: torch.device) -> None:
        super().__init__(module)
        self._graph, self._low, self._device = module, low, device

    def decide_and_call(self, node: fx.Node) -> Any:
        if stays_in_fp32(node):
            return self._in_own_dtype(node)
        with _CastRecorder() as recorder:
            result = super().decide_and_call(node)
        is_low = isinstance(result, Tensor) and result.dtype is self._low
        wanted: dict[fx.Node, torch.dtype] = {}
        for source in node.all_input_nodes:
            value = self.env[source]
            found = [dtype for tensor, dtype in recorder.casts if tensor is value]
            if found and found[0] is not value.dtype and not (is_low and found[0] is torch.float32):
                wanted[source] = found[0]
        if not wanted and is_low and any(dtype is self._low for _, dtype in recorder.casts):
            wanted = self.casts_to(node, self._low)
        if wanted and node.target not in _PRODUCTS and not self._gives(node, wanted, result):
            return self._in_own_dtype(node)
        self.decisions[node] = wanted
        return result

    def _in_own_dtype(self, node: fx.Node) -> Any:
        with autocast_scope(self._device, None):
            return self.call_with(node, self.casts_to(node, own_dtype(self._graph, node)))

    def _gives(self, node: fx.Node, wanted: dict[fx.Node, torch.dtype], result: Any) -> bool:
        """Whether casts of a call's inputs alone give results of these dtypes, or its `dtype` argument can.

        They do not where an operator made of others uses an input as it is and as autocast casts it, as a
        recurrent cell its state.
        """
        if not isinstance(node.target, torch._ops.OpOverload) or "dtype" in arguments(node):
            return True
        try:
            with autocast_scope(self._device, None):
                found = self.call_with(node, wanted)
        except RuntimeError:  # it takes no inputs of different dtypes
            return False
        return [*map(_dtype_of, tree_leaves(found))] == [*map(_dtype_of, tree_leaves(result))]


def _dtype_of(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, Tensor) else None


class _PolicyRun(_Run):
    """Runs with every input in the dtype that a policy wants; None: mixed inputs go to the widest.

    `keeps_wide`: calls with an operand that the model itself casts to FP32 are in FP32, up to the next
    product with another operand, or cast. A cast to FP32 of what is computed in it was one back to the dtype
    of another tensor, `y.to(x.dtype)`; one of a cast is the same cast again, as PyTorch's export writes it.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        wants: Callable[[fx.Node], torch.dtype | None],
        *,
        keeps_wide: bool = False,
    ) -> None:
        super().__init__(module)
        self._wants, self._keeps_wide = wants, keeps_wide
        self._wide = set[fx.Node]()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self._keeps_wide and n.op == "call_function" and self._is_wide(n):
            self._wide.add(n)
        return result

    def _is_wide(self, node: fx.Node) -> bool:
        """Whether the result of a call is in FP32 because the model wants it to be."""
        if node.target is operator.getitem:
            return node.args[0] in self._wide
        if stays_in_fp32(node):
            return False  # where the model switches autocast off, it says itself where that ends
        if node.target not in _CASTS:
            dtype = self.dtypes.get(node, torch.float32)  # several results
            return self._takes_wide(node) and (dtype is torch.float32 or dtype.is_complex)
        source = node.all_input_nodes[0]
        is_up = self.dtypes.get(source) in _FLOATING and self.dtypes[node] is torch.float32
        return is_up and (source not in self._wide or source.target in _CASTS)

    def _takes_wide(self, node: fx.Node) -> bool:
        dtypes = {source: self.dtypes.get(source) for source in node.all_input_nodes}
        operands = [n for n, dtype in dtypes.items() if dtype and (dtype in _FLOATING or dtype.is_complex)]
        takes = all if is_product(node) else any
        return bool(operands) and takes(operand in self._wide for operand in operands)

    def decide_and_call(self, node: fx.Node) -> Any:
        dtype = self._wants(node)
        if self._takes_wide(node) and not stays_in_fp32(node):
            dtype = torch.float32
        if dtype is None and node.target not in _NORMALIZATIONS:
            found = {self.dtypes[n] for n in node.all_input_nodes if self.dtypes.get(n) in _FLOATING}
            dtype = torch.float32 if len(found) > 1 else None
        return self.call_with(node, {} if dtype is None else self.casts_to(node, dtype))


def _run(run: _Run, program: Program, autocast: torch.dtype | None = None) -> _Run:
    def run_under_autocast(*entered: Tensor) -> None:
        with autocast_scope(program.device, autocast):
            run.run(*entered)

    run_on_examples(program, run_under_autocast)
    return run


def record_autocast(
    program: Program, module: fx.GraphModule, dtype: torch.dtype
) -> tuple[Decisions, dict[fx.Node, torch.dtype]]:
    """The casts of each call of `module` under autocast to `dtype`, and the dtype of every result."""
    run = _run(_AutocastRun(module, dtype, program.device), program, dtype)
    return run.decisions, run.dtypes


def result_dtypes(program: Program, module: fx.GraphModule) -> dict[fx.Node, torch.dtype]:
    """The dtype of every result of `module` without autocast."""
    return _run(_Run(module), program).dtypes


def decide(policy: str, program: Program, module: fx.GraphModule, dtype: torch.dtype) -> Decisions:
    """The decisions of one of `POLICIES` for a graph that runs in FP32 now."""
    if policy == "amp":
        return record_autocast(program, module, dtype)[0]
    wants: Callable[[fx.Node], torch.dtype | None] = {
        "O1": lambda node: _o1(node, dtype),
        "O2": lambda node: torch.float32 if node.target in _NORMALIZATIONS else dtype,
        "half": lambda _: dtype,
    }[policy]

    def own_or_wanted(node: fx.Node) -> torch.dtype | None:
        return own_dtype(module, node) if stays_in_fp32(node) else wants(node)

    run = _PolicyRun(module, own_or_wanted, keeps_wide=policy in ("O2", "half"))
    return _run(run, program).decisions


def _o1(node: fx.Node, dtype: torch.dtype) -> torch.dtype | None:
    if node.target in _PRODUCTS:
        return dtype
    return torch.float32 if node.target in _NEED_RANGE else None
