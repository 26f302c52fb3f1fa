"""Inverses, solutions, factors and determinants of small matrices for ONNX, which has only the last.

Cameras' intrinsics, poses and homographies are such matrices.

Correct because: Gauss and Jordan's elimination makes the identity of A in [A | B], with steps that leave the
solution of A X = B as it is, so that X takes the place of B; each step exchanges two rows for the largest
pivot of a column, as LAPACK does, and the determinant is the product of the pivots, with a change of sign for
each exchange. Cholesky's factor is the outer product that is taken away, column by column; of a matrix that
is not positive definite it has NaN, where PyTorch raises an error. In float64 its rounding is below that of
LAPACK in float32, but OpenVINO computes in float32. NaN anywhere in a matrix makes all of its numbers NaN,
and so does a pivot of 0, for which PyTorch raises an error; infinity may do so, too, where PyTorch's inverse
has a 0 in its place. At a singular matrix rounding may leave another pivot, here as in PyTorch, and large
numbers come of it. So engines that answer in the original's place do not run what raises errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ampopt.ir.deciding_forms import Call
from ampopt.ir.graph import arguments, aten, calls, dtype_of, replace_result, shape_of, where

LARGEST = 8
"""The most rows of a matrix: each takes twenty operators."""

_REAL = (torch.float32, torch.float64)

_RAISING = (
    *(aten.linalg_inv.default, aten.inverse.default, aten.linalg_solve.default),
    aten.linalg_cholesky.default,
)


def in_float64(module: fx.GraphModule) -> fx.Node | None:
    """The first call of an exported graph, with its shapes, whose form computes in float64."""
    return next((node for node in calls(module, FORMS) if _size(_matrix_of(node)) is not None), None)


def why_not_answered(module: fx.GraphModule) -> str | None:
    """Why what runs a graph by ONNX may answer a call in which PyTorch raises an error; None: it does not."""
    node = next(calls(module, _RAISING), None)
    return (
        None
        if node is None
        else f"{where(node)} raises an error for some matrices, such as of 0, which ONNX does not"
    )


def _inverse(call: Call, node: fx.Node) -> Any:
    matrix = _matrix_of(node)
    if (size := _size(matrix)) is None:
        return None
    identity = call(aten.eye.default, size, dtype=torch.float64)
    wide = call(aten._to_copy.default, matrix, dtype=torch.float64)
    sides = call(aten.add.Tensor, call(aten.mul.Tensor, wide, 0.0), identity)
    return _narrow(call, _eliminated(call, wide, sides, size)[0], node)


def _solution(call: Call, node: fx.Node) -> Any:
    """None where the right side is a vector, or matrices are repeated along a batch."""
    values = arguments(node)
    matrix, sides = values["A"], values["B"]
    if (size := _size(matrix)) is None or not values.get("left", True):
        return None
    if shape_of(sides)[:-1] != shape_of(matrix)[:-1] or len(shape_of(sides)) != len(shape_of(matrix)):
        return None
    wide, right = (call(aten._to_copy.default, each, dtype=torch.float64) for each in (matrix, sides))
    return _narrow(call, _eliminated(call, wide, right, size)[0], node)


def _determinant(call: Call, node: fx.Node) -> Any:
    matrix = _matrix_of(node)
    if (size := _size(matrix)) is None:
        return None
    wide = call(aten._to_copy.default, matrix, dtype=torch.float64)
    pivots = _eliminated(call, wide, None, size)[1]
    return _narrow(call, functools.reduce(functools.partial(call, aten.mul.Tensor), pivots), node)


def _sign_and_logarithm(call: Call, node: fx.Node) -> None:
    """Of the determinant, each by itself."""
    if (parts := _of_pivots(call, _matrix_of(node))) is None:
        return
    for reader in list(node.users):
        replace_result(reader, _narrow(call, parts[reader.args[1]], reader))  # type: ignore[index]


def _logarithm(call: Call, node: fx.Node) -> Any:
    """NaN for a determinant below 0."""
    if (parts := _of_pivots(call, _matrix_of(node))) is None:
        return None
    sign, logarithm = parts
    below = call(aten.lt.Scalar, sign, 0)
    return _narrow(call, call(aten.masked_fill.Scalar, logarithm, below, torch.nan), node)


def _of_pivots(call: Call, matrix: fx.Node) -> tuple[Any, Any] | None:
    """The sign of a determinant, and the logarithm of its size, which as a number may be beyond float64."""
    if (size := _size(matrix)) is None:
        return None
    pivots = _eliminated(call, call(aten._to_copy.default, matrix, dtype=torch.float64), None, size)[1]
    signs = (call(aten.sign.default, pivot) for pivot in pivots)
    logarithms = (call(aten.log.default, call(aten.abs.default, pivot)) for pivot in pivots)
    sign = functools.reduce(functools.partial(call, aten.mul.Tensor), signs)
    return sign, functools.reduce(functools.partial(call, aten.add.Tensor), logarithms)


def _factor(call: Call, node: fx.Node) -> Any:
    """Cholesky's factor, one column after another, of the half that PyTorch reads."""
    matrix, is_upper = _matrix_of(node), arguments(node)["upper"]
    if (size := _size(matrix)) is None:
        return None
    rest, columns = call(aten._to_copy.default, matrix, dtype=torch.float64), []
    rest = call(aten.transpose.int, rest, -2, -1) if is_upper else rest
    places = call(aten.arange.default, size)
    for step in range(size):
        column = call(aten.select.int, rest, -1, step)
        root = call(aten.sqrt.default, call(aten.slice.Tensor, column, -1, step, step + 1))
        column = call(aten.masked_fill.Scalar, column, call(aten.lt.Scalar, places, step), 0.0)
        columns.append(column := call(aten.div.Tensor, column, root))
        sides = (call(aten.unsqueeze.default, column, dim) for dim in (-1, -2))
        rest = call(aten.sub.Tensor, rest, call(aten.mul.Tensor, *sides))
    return _narrow(call, call(aten.stack.default, columns, -2 if is_upper else -1), node)


def _triangular_solution(call: Call, node: fx.Node) -> Any:
    """Row by row, of the half that PyTorch reads: where it is singular PyTorch raises no error."""
    values = arguments(node)
    if (size := _size(values["self"])) is None or not values["left"]:
        return None
    matrix, sides = (call(aten._to_copy.default, values[name], dtype=torch.float64) for name in ("self", "B"))
    found: dict[int, Any] = {}
    for row in reversed(range(size)) if values["upper"] else range(size):
        own = call(aten.slice.Tensor, matrix, -2, row, row + 1)
        rest = call(aten.slice.Tensor, sides, -2, row, row + 1)
        for column, solved in found.items():
            factor = call(aten.slice.Tensor, own, -1, column, column + 1)
            rest = call(aten.sub.Tensor, rest, call(aten.mul.Tensor, factor, solved))
        pivot = call(aten.slice.Tensor, own, -1, row, row + 1)
        found[row] = rest if values["unitriangular"] else call(aten.div.Tensor, rest, pivot)
    return _narrow(call, call(aten.cat.default, [found[row] for row in range(size)], -2), node)


def _matrix_of(node: fx.Node) -> fx.Node:
    overload = node.target
    assert isinstance(overload, torch._ops.OpOverload)
    matrix: fx.Node = arguments(node)[overload._schema.arguments[0].name]
    return matrix


def _size(matrix: fx.Node) -> int | None:
    """The rows of matrices that are eliminated; None for others."""
    size = shape_of(matrix)[-1]
    return size if 0 < size <= LARGEST and dtype_of(matrix) in _REAL else None


def _narrow(call: Call, value: Any, node: fx.Node) -> Any:
    return call(aten._to_copy.default, value, dtype=dtype_of(node))


def _eliminated(call: Call, matrix: Any, sides: Any, size: int) -> tuple[Any, list[Any]]:
    """What becomes of the right sides, and the determinant's factors, for float64 matrices of so many rows.

    Without right sides a pivot of 0, below which nothing is left, is no fault: the determinant is 0.
    """
    zeros = call(aten.mul.Tensor, call(aten.tanh.default, matrix), 0.0)  # but for NaN, which no maximum keeps
    matrix = call(aten.add.Tensor, matrix, call(aten.sum.dim_IntList, zeros, [-2, -1], True))
    rows = matrix if sides is None else call(aten.cat.default, [matrix, sides], -1)
    instead = 1.0 if sides is None else torch.nan
    places = call(aten.arange.default, size)
    pivots = []
    for step in range(size):
        column = call(aten.select.int, rows, -1, step)
        is_here, is_done = call(aten.eq.Scalar, places, step), call(aten.lt.Scalar, places, step)
        sizes = call(aten.masked_fill.Scalar, call(aten.abs.default, column), is_done, -1.0)
        largest = call(aten.argmax.default, sizes, -1, True)
        is_largest = call(aten.unsqueeze.default, call(aten.eq.Tensor, places, largest), -1)
        here = call(aten.slice.Tensor, rows, -2, step, step + 1)
        chosen = call(aten.sum.dim_IntList, call(aten.where.ScalarOther, is_largest, rows, 0.0), [-2], True)
        pivot = call(aten.slice.Tensor, chosen, -1, step, step + 1)
        is_other = call(aten.ne.Scalar, call(aten.unsqueeze.default, largest, -1), step)
        signed = call(aten.where.self, is_other, call(aten.neg.default, pivot), pivot)
        pivots.append(call(aten.select.int, call(aten.select.int, signed, -1, 0), -1, 0))
        pivot = call(aten.masked_fill.Scalar, pivot, call(aten.eq.Scalar, pivot, 0.0), instead)
        unit = call(aten.div.Tensor, chosen, pivot)
        rows = call(aten.where.self, is_largest, here, rows)
        factors = call(aten.div.Tensor, call(aten.slice.Tensor, rows, -1, step, step + 1), pivot)
        reduced = call(aten.sub.Tensor, rows, call(aten.mul.Tensor, factors, chosen))
        rows = call(aten.where.self, call(aten.unsqueeze.default, is_here, -1), unit, reduced)
    return call(aten.slice.Tensor, rows, -1, size, 2**62), pivots


FORMS: Mapping[Any, Callable[[Call, fx.Node], Any]] = {
    aten.linalg_inv.default: _inverse,
    aten.inverse.default: _inverse,
    aten.linalg_solve.default: _solution,
    aten.linalg_solve_triangular.default: _triangular_solution,
    aten.linalg_cholesky.default: _factor,
    aten.linalg_slogdet.default: _sign_and_logarithm,
    aten.slogdet.default: _sign_and_logarithm,
    aten.logdet.default: _logarithm,
    aten.linalg_det.default: _determinant,
    aten.det.default: _determinant,
}
"""For each operator, a function of (call, node) that makes its form; None: no change needed."""
