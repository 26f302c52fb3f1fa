"""Lets NaN through an OpenVINO model: its maxima, clamps, softmaxes, comparisons make something else of it.

Measured with OpenVINO 2026.4 on an AVX-512 processor: ReLU, clamp, hard sigmoid, maximum, minimum, maxima of
windows and of axes lose NaN, alone and fused into a convolution; softmax loses NaN and infinity; exp makes
infinity of NaN, of which a clamp makes a number; `x > y` and `x >= y` are true for NaN, and as a boolean it
is false. All other operators that vision models have keep it. What is added here depends on three properties
of the processor only: for NaN `x == x`, `x < y` and `x <= y` are false.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ampopt.ort.options import SessionError

_BY_ELEMENT = ("Relu", "Clamp", "HardSigmoid", "Exp")
_OF_TWO = ("Maximum", "Minimum")
_OF_AXES = ("ReduceMax", "ReduceMin")
_SOFTMAXES = ("Softmax", "LogSoftmax")
_COMPARISONS = ("Greater", "GreaterEqual")
_MOVES = ("Convert", "Reshape", "Squeeze", "Unsqueeze")
_LARGEST = float(np.finfo(np.float32).max)


class LostNanError(SessionError):
    """An operator, by its name in the model, that loses NaN, and cannot be repaired."""

    def __init__(self, operator: str, reason: str) -> None:
        super().__init__(f"{reason}: {operator}")
        self.operator, self.reason = operator, reason


def keep_nan(model: Any) -> int:
    """Change an `openvino.Model` so that NaN reaches its outputs; returns how many operators changed.

    `relu(x)` -> `relu(x) + zero(x)`, where `zero(x)` is NaN for NaN and 0 for all other numbers, infinity
    too: no finite result changes. Where a maximum is of several numbers, the result is NaN if one of them is;
    of a softmax, also if one of them is infinity. `x > y` -> `y < x`, and a boolean of x is `x != 0`. Not
    repaired: a maximum over nothing but negative infinity is the smallest float, and likewise a minimum.

    Raises LostNanError where a result cannot be repaired: the values of a top-k,
    and the places of maxima, if anything is computed of them.
    """
    return sum(_repaired(op) for op in model.get_ordered_ops())


def _repaired(op: Any) -> bool:
    kind = op.get_type_name()
    if op.get_output_size() == 0:
        return False
    result = op.output(0)
    readers = list(result.get_target_inputs())
    if not result.get_element_type().is_real():
        return _replaced(readers, _as_boolean(op, kind))
    if kind == "TopK" and readers:
        raise LostNanError(op.get_friendly_name(), "OpenVINO's TopK loses NaN")
    if kind in ("TopK", "MaxPool") and op.get_output_size() == 2 and not _is_only_returned(op.output(1)):
        raise LostNanError(op.get_friendly_name(), f"OpenVINO's {kind} gives other places than NaN's")
    return _replaced(readers, _with_nan(op, kind, result))


def _replaced(readers: Sequence[Any], repaired: Any) -> bool:
    for reader in readers if repaired is not None else ():
        reader.replace_source_output(repaired.output(0))
    return repaired is not None


def _as_boolean(op: Any, kind: str) -> Any:
    """The node that gives PyTorch's boolean of numbers; None if `op` gives it, or is of integers."""
    if op.get_input_size() == 0 or not (source := op.input_value(0)).get_element_type().is_real():
        return None
    if kind in _COMPARISONS:
        swapped = _opset().less if kind == "Greater" else _opset().less_equal
        return swapped(op.input_value(1), source)
    is_boolean = kind == "Convert" and op.output(0).get_element_type().get_type_name() == "boolean"
    return _opset().not_equal(source, _number(0)) if is_boolean else None


def _is_only_returned(places: Any) -> bool:
    """Whether places of maxima are results of the model, and nothing is computed of them."""
    readers = [reader.get_node() for reader in places.get_target_inputs()]
    return all(
        reader.get_type_name() == "Result"
        or (reader.get_type_name() in _MOVES and _is_only_returned(reader.output(0)))
        for reader in readers
    )


def _with_nan(op: Any, kind: str, result: Any) -> Any:
    """The node that gives what `op` gives, or NaN; None if `op` keeps NaN, or its only reader is repaired."""
    ops = _opset()
    if kind in _BY_ELEMENT:
        added = _added_to_clamp(op) if kind == "Clamp" else _zero
        return ops.add(result, added(op.input_value(0)))
    if kind in _OF_TWO:
        if _is_read_by_another(op):
            return None
        sources, bounded = list[Any](), set[str]()
        _follow(op, sources, bounded)
        added = _added(lower="Maximum" in bounded, upper="Minimum" in bounded)
        for source in sources:
            result = ops.add(result, added(source)).output(0)
        return result.get_node() if sources else None
    if kind in _OF_AXES:
        found = ops.reduce_max(_is_nan(op.input_value(0)), op.input_value(1), _keeps_dims(op))
    elif kind == "MaxPool":
        found = _pooled(op)
    elif kind in _SOFTMAXES:
        axes = ops.constant(np.array([op.get_attributes()["axis"]], np.int64))
        found = ops.reduce_max(_is_not_below_infinity(op.input_value(0)), axes, True)
    else:
        return None
    return ops.select(ops.less(_number(0.5), found), _number(np.nan), result)


def _added_to_clamp(op: Any) -> Any:
    """What keeps NaN in a clamp."""
    bounds = op.get_attributes()
    return _added(lower=bounds["min"] > -_LARGEST, upper=bounds["max"] < _LARGEST)


def _added(*, lower: bool, upper: bool) -> Callable[[Any], Any]:
    """What keeps NaN in a clamp, and infinity where there is no bound: OpenVINO puts the largest float."""
    if lower and upper:
        return _zero
    return _zero_below_infinity if lower else _zero_above_infinity


def _follow(op: Any, sources: list[Any], bounded: set[str]) -> None:
    """Collect the computed numbers that a chain of maxima and minima is of, and the kinds that bound them."""
    values = [(value, value.get_node()) for value in op.input_values()]
    computed = [pair for pair in values if pair[1].get_type_name() != "Constant"]
    constants = [node.data for _, node in values if node.get_type_name() == "Constant"]
    if len(computed) == 2 or any((np.abs(each) < _LARGEST).any() for each in constants):
        bounded.add(op.get_type_name())
    for value, node in computed:
        if node.get_type_name() in _OF_TWO and _is_read_by_another(node):
            _follow(node, sources, bounded)
        else:
            sources.append(value)


def _is_read_by_another(op: Any) -> bool:
    """Whether only a maximum or minimum reads this one, as in a clamp, which stays one operator so."""
    (reader, *others) = op.output(0).get_target_inputs() or [None]
    return reader is not None and not others and reader.get_node().get_type_name() in _OF_TWO


def _pooled(pool: Any) -> Any:
    """1 for each window that holds NaN, by a pooling of the same geometry."""
    given = pool.get_attributes()
    rank = len(given["kernel"])
    geometry: Sequence[Any] = (
        given["strides"],
        given.get("dilations", [1] * rank),
        given["pads_begin"],
        given["pads_end"],
        given["kernel"],
        given["rounding_type"],
        given["auto_pad"],
    )
    return _opset().max_pool(_is_nan(pool.input_value(0)), *geometry).output(0)


def _keeps_dims(op: Any) -> bool:
    return bool(op.get_attributes()["keep_dims"])


def _zero(value: Any) -> Any:
    """0, or NaN where the value is."""
    return _opset().select(_opset().equal(value, value), _number(0), value)


def _zero_below_infinity(value: Any) -> Any:
    """0, or the value where it is NaN or positive infinity."""
    return _opset().select(_opset().less(value, _number(np.inf)), _number(0), value)


def _zero_above_infinity(value: Any) -> Any:
    """0, or the value where it is NaN or negative infinity."""
    return _opset().select(_opset().less(_number(-np.inf), value), _number(0), value)


def _is_nan(value: Any) -> Any:
    """0, or 1 where the value is NaN."""
    return _opset().select(_opset().equal(value, value), _number(0), _number(1))


def _is_not_below_infinity(value: Any) -> Any:
    """0, or 1 where the value is NaN or infinity: those that make a softmax NaN."""
    return _opset().select(_opset().less(value, _number(np.inf)), _number(0), _number(1))


def _number(value: float) -> Any:
    return _opset().constant(np.float32(value))


def _opset() -> Any:
    return importlib.import_module("openvino.opset14")
