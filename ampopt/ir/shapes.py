"""The shapes, dtypes and strides of a program's tensors: recorded in a run, or told without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.fx.passes.shape_prop import TensorMetadata, _extract_tensor_metadata
from torch.utils import _pytree as pytree

from ampopt.ir.deciding_calls import deciding_node
from ampopt.ir.graph import copy_of
from ampopt.ir.own_autocast import own_scope
from ampopt.ir.program import Program
from ampopt.system.interrupts import check_interrupted
from ampopt.system.quiet import quiet


def record_shapes(program: Program) -> fx.GraphModule:
    """A copy of the program's graph whose nodes have their tensors' shape, dtype and strides recorded.

    One real run on the example inputs fills `node.meta["tensor_meta"]`, see `graph.shape_of` and `dtype_of`,
    `node.meta["device"]`, and `node.meta["signs"]`: whether its memory has conjugates, or negatives.
    While shapes are `foretold`, they are told without it.
    """
    foretold = _foretold.get()
    return _recorded(program) if foretold is None else foretold.shapes_of(program)


def expected_shapes(program: Program) -> fx.GraphModule:
    """What `record_shapes` is going to give, told without a run; recorded where that cannot be.

    Shapes and dtypes are right, strides may turn out otherwise. A first real run of depthwise convolutions in
    float16 takes cuDNN 0.2 to 0.9 s each, in which it compiles their kernels.
    """
    return _told(program) or _recorded(program)


class Foretold:
    """Shapes that were told without a run, to passes that were applied ahead of their trial."""

    def __init__(self) -> None:
        self._told: list[tuple[Program, dict[str, Any]]] = []

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """In the block `record_shapes` tells what it would record, without a run."""
        foretold, mode = _foretold.set(self), _mode.set(_Mode())
        try:
            yield
        finally:
            _foretold.reset(foretold)
            _mode.reset(mode)

    def shapes_of(self, program: Program) -> fx.GraphModule:
        """See `expected_shapes`; what is told here is to come true."""
        if (module := _told(program)) is None:
            return _recorded(program)
        self._told.append((program, _metadata(module)))
        return module

    def came_true(self) -> bool:
        """Whether runs record what was told, strides too where they matter; what did is not run again."""
        while self._told:
            program, told = self._told[-1]
            if _metadata(_recorded(program)) != told:
                return False
            self._told.pop()
        return True


class _Mode(FakeTensorMode):
    """A mode of fake tensors in which a weight is made fake once.

    Made anew for each run, they took two fifths of the time in which a network's shapes are told.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def of_weight(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for a weight, which lives as long as the mode."""
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, self.from_tensor(tensor)
        return self._weights[id(tensor)][1]


_foretold: ContextVar[Foretold | None] = ContextVar("foretold", default=None)
_mode: ContextVar[_Mode | None] = ContextVar("mode of fake tensors", default=None)


def run_on_examples(program: Program, run: Callable[..., object]) -> None:
    """Call `run` on the examples as they enter the program's graph.

    While shapes are foretold it is called on fake tensors; once more on real ones where those do not do.
    """
    if _foretold.get() is None or not _runs_on_fakes(program, run):
        _run_on_real(program, run)


def _run_on_real(program: Program, run: Callable[..., object]) -> None:
    with program.scope():
        run(*(border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)))


def _run_on_fakes(program: Program, run: Callable[..., object]) -> None:
    mode = _mode.get() or _Mode()
    with quiet(), program.scope(), mode:  # what an operator raises is logged, too
        entered = [border.convert(t) for border, t in zip(program.entry, program.examples, strict=True)]
        run(*map(mode.from_tensor, entered))


def _runs_on_fakes(program: Program, run: Callable[..., object]) -> bool:
    """False where shapes depend on values, or an operator does not tell them."""
    try:
        _run_on_fakes(program, run)
    except Exception as error:
        check_interrupted(error)
        return False
    return True


def described(program: Program) -> fx.GraphModule:
    """A copy of the program's graph whose nodes have fake tensors as `node.meta["val"]`, told without a run.

    They are as `record_shapes` would find the real ones, as far as fake tensors tell, and share memory where
    those do. Raises what an operator raises whose shapes depend on values, or that does not tell them.
    """
    module = copy_of(program.graph)
    _run_on_fakes(program, _Values(module, program.device).run)
    return module


def _recorded(program: Program) -> fx.GraphModule:
    module = copy_of(program.graph)
    _run_on_real(program, _Shapes(module, program.device).run)
    return module


def _told(program: Program) -> fx.GraphModule | None:
    try:
        module = described(program)
    except Exception as error:
        check_interrupted(error)
        return None
    for node in module.graph.nodes:
        del node.meta["val"]  # a pass changes what it is given, and others read it
    return module


def _metadata(module: fx.GraphModule) -> dict[str, Any]:
    found = {node.name: node.meta.get("tensor_meta") for node in module.graph.nodes}
    return {name: pytree.tree_map(_look, meta, is_leaf=_is_meta) for name, meta in found.items()}


def _is_meta(value: object) -> bool:
    return isinstance(value, TensorMetadata)


def _look(value: Any) -> Any:
    """What tells tensors apart: the stride of a size of 1 says nothing, and is another on fake tensors."""
    if not isinstance(value, TensorMetadata):
        return value
    strides = tuple(step for size, step in zip(value.shape, value.stride, strict=True) if size != 1)
    return tuple(value.shape), value.dtype, strides


class GraphRun(fx.Interpreter):
    """Runs a graph call by call; where that is on fake tensors, weights are fake, too.

    What fake tensors tell of an operator is kept by PyTorch for the next time, but not where a real tensor is
    among its arguments: then to tell the shapes of a whole network takes twice as long.
    """

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value, mode = super().get_attr(target, args, kwargs), active_fake_mode()
        return mode.of_weight(value) if isinstance(mode, _Mode) and isinstance(value, Tensor) else value


class _Shapes(GraphRun):
    """Runs each call as the program does, also where the model switches autocast off; notes devices, too."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self._device = device

    def run_node(self, n: fx.Node) -> Any:
        with own_scope(n, self._device):
            result = super().run_node(n)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            n.meta["tensor_meta"] = map_aggregate(result, _meta_of)
        if isinstance(result, Tensor):
            n.meta["device"], n.meta["signs"] = result.device, (result.is_conj(), result.is_neg())
        return result


def _meta_of(value: Any) -> Any:
    return _extract_tensor_metadata(value) if isinstance(value, Tensor) else value


class _Values(_Shapes):
    """Runs on fake tensors, which it notes."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = result = super().run_node(n)
        return result


def decides_by_values(program: Program) -> fx.Node | None:
    """The first operator of which one NaN more is another number in a result; None if there is none.

    It makes integers or booleans of numbers, and has readers: the index of a maximum, a comparison. If an
    input becomes NaN, they read other elements, or none. Or it takes NaN itself for a number, or leaves it
    out, as `nan_to_num`, `fmax` and `nansum` do, and a sort in another way; but not what takes inputs one by
    one, before anything could have spread NaN from one to others.
    """
    return deciding_node(record_shapes(program))
