"""Code that inductor has compiled in another process, loaded here without tracing its graph again.

Tracing a graph of 1,000 operators takes this process 11 s and more, even if all of its code is in inductor's
disk cache; loading the code takes 1 s. The cache keeps the code, but not the weights that inductor has folded
and frozen into it: they come from the process that compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

logger = logging.getLogger("ampopt")


@functools.cache
def options(device: str) -> dict[str, Any]:
    """How inductor compiles for inference on a kind of device, without CUDA graphs of its own.

    Its first passes may change strides: they pad the sizes of matrix products where that is faster. After
    them it looks at what its graph gives, and a view that such strides do not allow fails there, if the
    device's speed has decided so. It makes reshapes of all views itself, but later.

    The keys of its cache do not tell for which of a processor's instruction sets it has written its code, and
    it compiles what it finds for the one that this process has: what was written for AVX2 writes beyond a
    buffer's end where it is compiled for AVX-512, whose vectors are twice as wide. The pass tells it in them.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass  # inductor takes a second to load

    class ReshapesForViews(CustomGraphPass):
        """Gives each view the freedom to be a copy."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
                node.target = torch.ops.aten.reshape.default

        def uuid(self) -> str:
            """What stands for this pass in the keys of inductor's cache, asked before code is written."""
            if device != "cpu":
                return "ampopt: reshapes for views, 1"
            from torch._inductor.cpu_vec_isa import pick_vec_isa

            return f"ampopt: reshapes for views, 1; for {pick_vec_isa()}"

    return {
        "triton.cudagraphs": False,
        "freezing": True,
        "joint_custom_post_pass": ReshapesForViews(),
    }


@dataclasses.dataclass(frozen=True)
class InductorCode:
    """The key of a graph's code in inductor's cache, and the constants that the code refers to, by name."""

    key: str
    constants: dict[str, Tensor]

    @classmethod
    def of(cls, compiled: Any, graph: torch.fx.GraphModule) -> InductorCode | None:
        """The code that `compile_fx_inner` has made of a graph; None where it cannot be sent.

        It is not in the cache, or refers to what is not a plain tensor: weights in oneDNN's own layout.
        """
        from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstantsWithGm

        if not isinstance(compiled, CompiledFxGraph) or not (key := compiled._fx_graph_cache_key):
            return None
        constants: dict[str, Any] = CompiledFxGraphConstantsWithGm(graph).unwrap(compiled)
        if not all(isinstance(c, Tensor) and c.layout == torch.strided for c in constants.values()):
            return None
        return cls(key, constants)

    def load(self) -> LoadedCode:
        """The code as a callable; LookupError where the cache does not have it any more."""
        from torch._inductor import config
        from torch._inductor.codecache import FxGraphCache
        from torch._inductor.utils import BoxedBool

        constants: Any = _Sent(self.constants)  # its key is known: the options make none here
        with tracing(TracingContext(static_shapes())), config.patch(options("cuda")):
            graph, _ = FxGraphCache._lookup_graph(self.key, [], True, None, constants)
            if graph is None:
                raise LookupError(f"inductor's cache has no entry {self.key}")
            kind: Any = {"cudagraphs": BoxedBool(False), "is_backward": False}
            graph.post_compile([], constants, kind)  # it aligns inputs where the code expects that
        return LoadedCode(graph)


@runtime_checkable
class HasInductorCode(Protocol):
    """An engine that runs inductor's code; `inner` is a `CompiledFxGraph`, None where it is another's."""

    inner: Any


class LoadedCode:
    """Inductor's code for one graph, `inner`: flat inputs in, flat outputs out.

    PyTorch's own call of it keeps account of its caches and its profiles, and what `compile_fx` puts around
    that looks for aliases and sets modes: 11 µs a call in all, of 20 for a graph of 20 operators on a CPU,
    which a loop in Python may call 5,000 times.
    """

    def __init__(self, graph: Any, code: InductorCode | None = None) -> None:
        """`code`: what another process needs to load it."""
        self.inner, self.code = graph, code

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        return tuple(self.inner.current_callable([*tensors]))


class _Sent:
    """Constants that came with the code, in the place of those of a graph."""

    def __init__(self, constants: dict[str, Tensor]) -> None:
        self._constants = constants

    def unwrap(self, _compiled: object) -> dict[str, Tensor]:
        """By the names in the code."""
        return self._constants


def is_whole(engine: Any, code: Any, inputs: Sequence[Tensor]) -> bool:
    """Whether inductor's code answers as the engine around it does, which may add outputs that are inputs.

    What it answers with is verified where the code is loaded.
    """
    try:
        wanted, found = tuple(engine(*inputs)), tuple(code([*inputs]))
    except Exception:  # the engine ran before: its code takes other inputs, and is then not sent
        logger.debug("ampopt: inductor's code does not run by itself", exc_info=True)
        return False
    mine = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    forms = [[(t.shape, t.stride(), t.dtype, t.device) for t in some] for some in (wanted, found)]
    return forms[0] == forms[1] and not any(t.untyped_storage().data_ptr() in mine for t in wanted)


def static_shapes() -> FakeTensorMode:
    """What inductor describes tensors with, so that it keeps compiled graphs on disk.

    A repetition of what was rehearsed, and a later `optimize`, then only trace the graph. Without a
    `ShapeEnv` inductor passes over that cache; where it describes the inputs itself, it reasons about every
    shape as if that could change, which takes four times as long for Swin-T.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it takes seconds to load

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(assume_static_by_default=True))
