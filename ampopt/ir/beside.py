"""Runs a graph in float64 and, beside it, every call alone in its own dtypes on the same values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ampopt.ir.device_asserts import asserts_raised
from ampopt.ir.graph import aten
from ampopt.ir.numerics import is_rounded, relative_error, widened
from ampopt.ir.program import Program
from ampopt.system.interrupts import check_interrupted
from ampopt.system.quiet import quiet

LOW = frozenset((torch.float16, torch.bfloat16))

PROBES = 4
"""Number of random directions in which the outputs' derivatives are taken."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a call of a lane's graph gave on some inputs, of which every value was exact.

    `largest` is the largest magnitude of its result in float64, `largest_read` that of what it reads in a
    lower precision. `error` is the relative error of the call alone: of its arithmetic, its result's rounding
    and the casts of its inputs, not of inputs that come in a lower dtype. `overflows`: NaN or infinity came
    out where float64 has none. `gives` holds the dtypes of its results, and `reads` those of what it reads.
    """

    largest: float = 0.0
    largest_read: float = 0.0
    error: float = 0.0
    overflows: bool = False
    gives: frozenset[torch.dtype] = frozenset()
    reads: frozenset[torch.dtype] = frozenset()

    def joined(self, other: Seen) -> Seen:
        """What was seen on both inputs."""
        return Seen(
            max(self.largest, other.largest),
            max(self.largest_read, other.largest_read),
            max(self.error, other.error),
            self.overflows or other.overflows,
            self.gives | other.gives,
            self.reads | other.reads,
        )


def observe(program: Program, calls: Sequence[Sequence[Tensor]]) -> dict[str, Seen]:
    """What each call of a program's graph gives on inputs, by its name.

    Costs three or four runs for each input.
    Raises what an operator raises that knows no float64.
    """
    found: dict[str, Seen] = {}
    for tensors in calls:
        run = _Beside(program)
        run.run_on(tensors)
        for node, seen in run.seen.items():
            found[node.name] = seen.joined(found.get(node.name, Seen()))
    return found


def accumulated(program: Program, tensors: Sequence[Tensor]) -> dict[str, float]:
    """The relative error of each call's result when the whole graph runs in its own dtypes, by its name.

    It is what all calls up to this one have made together; infinite where NaN or infinity came out of a
    number. Costs four runs. Raises what an operator raises that knows no float64.
    """
    run = _Accumulated(program)
    run.run_on(tensors)
    return run.errors_of_all


def exact_outputs(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a program's graph in float64. Raises what an operator raises that knows no float64."""
    try:
        return list(_Exact(program).run_on(tensors))
    except Exception as error:  # of a result without elements, maybe, whose shape its own dtypes tell
        check_interrupted(error)
        return list(_Beside(program).run_on(tensors))


def contributions(program: Program, calls: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """About how much of the outputs' relative error each call of a program's graph makes, by its name.

    The error of a call alone, as a vector, is multiplied by the outputs' derivative in `PROBES` random
    directions; the root of the mean square is the length of what reaches the outputs, to first order. Costs
    about ten runs in float64 for each input, and the memory of every result at once. Raises what an operator
    raises that has no derivative; calls that no derivative reaches are left out.
    """
    found: dict[str, float] = {}
    for tensors in calls:
        run = _Beside(program, keep=True)
        for node, share in _reaching_the_outputs(run, run.run_on(tensors)).items():
            found[node.name] = max(share, found.get(node.name, 0.0))
    return found


def _reaching_the_outputs(run: _Beside, outputs: Sequence[Any]) -> dict[fx.Node, float]:
    ends = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    nodes = list(run.values)
    if not ends or not nodes:
        return {}
    generator = torch.Generator().manual_seed(0)
    squares = dict.fromkeys(nodes, 0.0)
    for _ in range(PROBES):
        reaching = _Numbers(ends[0].device)
        directions = []
        for end in ends:
            noise = torch.randn(end.shape, generator=generator, dtype=end.dtype, device="cpu").to(end.device)
            norm = float(torch.linalg.vector_norm(end.detach()))
            directions.append((noise / norm if norm > 0 else noise).to(end.dtype))
        with quiet():  # autograd's own thread warns that cuBLAS is its first user
            slopes = torch.autograd.grad(
                ends, [run.values[node] for node in nodes], directions, retain_graph=True, allow_unused=True
            )
        places = {
            node: reaching.add((slope.conj() * run.errors[node]).real.sum())
            for node, slope in zip(nodes, slopes, strict=True)
            if slope is not None
        }
        found = reaching.read()
        for node, place in places.items():
            squares[node] += found[place] ** 2 / PROBES
    return {node: square**0.5 for node, square in squares.items() if square > 0}


class _Numbers:
    """Numbers about tensors that stay on the device until all are read: each read waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._numbers = device, list[Tensor]()

    def add(self, number: Tensor) -> int:
        """The place of a number, a real tensor without dimensions, among those that `read` gives."""
        self._numbers.append(number.detach().to(self._device, torch.float64))
        return len(self._numbers) - 1

    def read(self) -> list[float]:
        """All numbers."""
        return torch.stack(self._numbers).tolist() if self._numbers else []


class _Exact(fx.Interpreter):
    """Runs a graph in float64."""

    def __init__(self, program: Program, *, keep: bool = False) -> None:
        """`keep`: derivatives are wanted."""
        super().__init__(program.graph)
        self._program, self._keep = program, keep

    def run_on(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """The outputs in float64."""
        own = self._program
        with asserts_raised(own.device), own.scope(), torch.set_grad_enabled(self._keep):
            return self.run(*tensors)  # type: ignore[no-any-return]

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            return self._call_exact(n)
        found = super().run_node(n)
        if n.op == "get_attr":
            found = n.meta.get("exact", found)
        return found if n.op == "output" else _wide(found)

    def _call_exact(self, node: fx.Node, value_of: Callable[[fx.Node], Any] | None = None) -> Any:
        """The result for what `value_of` gives for each node, float64 unless it is given."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of or self.env.__getitem__)
        args, kwargs = pytree.tree_map(_wide, (args, kwargs))  # `dtype=` asks for a lower one
        return node.target(*args, **kwargs)  # type: ignore[operator]


class _Beside(_Exact):
    """Compares each call with float64; `_kinds` holds the dtypes of the graph itself."""

    def __init__(self, program: Program, *, keep: bool = False) -> None:
        """`keep`: derivatives are wanted, so `values` and `errors` keep every floating-point result."""
        super().__init__(program, keep=keep)
        self._borders = iter(program.entry)
        self._kinds: dict[fx.Node, Any] = {}
        self._numbers = _Numbers(program.device)
        self._compared: dict[fx.Node, list[_Compared]] = {}
        self._largest: dict[fx.Node, list[int]] = {}
        self.values: dict[fx.Node, Tensor] = {}
        self.errors: dict[fx.Node, Tensor] = {}

    @property
    def seen(self) -> dict[fx.Node, Seen]:
        """What each call gave, of a run that has ended; of one with `keep` nothing."""
        numbers = self._numbers.read()

        def largest(nodes: Iterable[fx.Node]) -> float:
            return max((numbers[place] for node in nodes for place in self._largest[node]), default=0.0)

        found = {}
        for node, compared in self._compared.items():
            seen = Seen(
                largest([node]),
                largest(self._low(node)),
                reads=frozenset().union(*map(self._dtypes, node.all_input_nodes)),
            )
            for each in compared:
                seen = seen.joined(each.seen(numbers))
            found[node] = seen
        return found

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            if n.op == "placeholder":
                self._kinds[n] = next(self._borders).dtype
            elif n.op == "get_attr":
                self._kinds[n] = getattr(self.fetch_attr(str(n.target)), "dtype", None)
            return super().run_node(n)
        with torch.no_grad():
            own = self._call(n)
        if _is_empty(own):  # of which float64's kernels may not be capable
            exact = given = pytree.tree_map(_wide, own)
        else:
            exact = given = self._call_exact(n)
            with torch.no_grad():
                if any(map(self._comes_low, n.all_input_nodes)):
                    given = self._call_exact(n, self._as_it_comes)
        self._kinds[n] = pytree.tree_map(lambda leaf: getattr(leaf, "dtype", None), own)
        if not self._keep:
            self._compare(n, own, exact, given)
        elif _is_rounded(exact):
            if not exact.requires_grad:
                exact = exact.detach().requires_grad_()
            error = widened(own) - given.detach()
            self.values[n] = exact  # what overflows stays in FP32, and makes no error
            self.errors[n] = torch.where(torch.isfinite(error), error, 0.0)
        return exact

    def _call(self, node: fx.Node) -> Any:
        """The result in the graph's own dtypes for exact values, rounded to them."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._in_its_dtypes)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _comes_low(self, source: fx.Node) -> bool:
        """Whether a value is the result of a call in a lower dtype, whose rounding is that call's error."""
        is_result = source.op == "call_function" and source.target is not aten._to_copy.default
        return is_result and bool(self._dtypes(source) & LOW)

    def _as_it_comes(self, source: fx.Node) -> Any:
        return self._in_its_dtypes(source) if self._comes_low(source) else self.env[source]

    def _in_its_dtypes(self, source: fx.Node) -> Any:
        def rounded(leaf: Any, dtype: Any) -> Any:
            return leaf.detach().to(dtype) if _is_rounded(leaf) else leaf

        return pytree.tree_map(rounded, self.env[source], self._kinds[source])

    def _compare(self, node: fx.Node, own: Any, exact: Any, given: Any) -> None:
        pairs = zip(pytree.tree_leaves(own), pytree.tree_leaves(given), strict=True)
        self._compared[node] = [_Compared(a, r, self._numbers) for a, r in pairs if _is_rounded(r)]
        values = {node: exact, **{source: self.env[source] for source in self._low(node)}}
        for each, value in values.items():
            if each not in self._largest:
                leaves = [leaf for leaf in pytree.tree_leaves(value) if _is_rounded(leaf) and leaf.numel()]
                self._largest[each] = [self._numbers.add(_magnitude(leaf)) for leaf in leaves]

    def _low(self, node: fx.Node) -> list[fx.Node]:
        """What a call reads in a lower precision."""
        return [source for source in node.all_input_nodes if self._dtypes(source) & LOW]

    def _dtypes(self, source: fx.Node) -> frozenset[torch.dtype]:
        return frozenset(leaf for leaf in pytree.tree_leaves(self._kinds[source]) if leaf is not None)


class _Accumulated(_Beside):
    """Runs the graph in its own dtypes along with float64, every value from values in its own dtypes."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._rounded: dict[fx.Node, Any] = {}
        self.errors_of_all: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        exact = super().run_node(n)
        if n.op in ("placeholder", "get_attr"):
            self.env[n] = exact
            self._rounded[n] = self._in_its_dtypes(n)
        elif n.op == "call_function":
            with torch.no_grad():
                own = self._rounded[n] = self._call_rounded(n)
            pairs = zip(pytree.tree_leaves(own), pytree.tree_leaves(exact), strict=True)
            errors = [relative_error(a, r) for a, r in pairs if _is_rounded(r)]
            if errors:
                self.errors_of_all[n.name] = max(errors)
        for read in self.user_to_last_uses.get(n, ()):
            self._rounded.pop(read, None)
        return exact

    def _call_rounded(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._rounded[source])
        return node.target(*args, **kwargs)  # type: ignore[operator]


class _Compared:
    """A result of a call beside the same in float64: places of its numbers."""

    def __init__(self, own: Tensor, exact: Tensor, numbers: _Numbers) -> None:
        finite = torch.isfinite(exact)
        spoilt = finite & ~torch.isfinite(own)
        both = finite & ~spoilt
        self._dtype = own.dtype
        self._norm = numbers.add(torch.linalg.vector_norm(torch.where(both, exact, 0.0)))
        self._error = numbers.add(torch.linalg.vector_norm(torch.where(both, widened(own) - exact, 0.0)))
        self._spoilt = numbers.add(spoilt.any())

    def seen(self, numbers: Sequence[float]) -> Seen:
        """The relative error and whether it overflows."""
        norm, error = numbers[self._norm], numbers[self._error]
        return Seen(
            error=error / norm if norm > 0 else error,
            overflows=bool(numbers[self._spoilt]),
            gives=frozenset({self._dtype}),
        )


def _magnitude(leaf: Tensor) -> Tensor:
    """The largest finite magnitude of a tensor with elements; 0 where none is finite."""
    return torch.where(torch.isfinite(leaf), leaf.abs(), 0.0).amax()


def _is_empty(value: Any) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(tensor.numel() == 0 for tensor in tensors)


def _is_rounded(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and is_rounded(leaf)


def _wide(leaf: Any) -> Any:
    """A tensor in float64, or complex128, and these for the name of a lower dtype; others stay."""
    if isinstance(leaf, torch.dtype):
        return torch.complex128 if leaf.is_complex else torch.float64 if leaf.is_floating_point else leaf
    return widened(leaf) if isinstance(leaf, Tensor) else leaf
