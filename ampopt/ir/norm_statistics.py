"""Writes the running statistics of norms out, which PyTorch's operators change without saying so.

`batch_norm` and `instance_norm` that normalize by their input also move the mean and the variance that they
are given, in place. Their schemas do not tell: a graph would lose it, or change what it was given.

    y = batch_norm(x, w, b, mean, var, True, m)  →  y = batch_norm(x, w, b, None, None, True, m)
                                                    mean ← (1 - m) mean + m (mean of x)
                                                    var ← (1 - m) var + m (unbiased variance of x)

Correct because: that is their definition (`torch.nn.BatchNorm2d`), over all dimensions but the channels', and
what they return does not depend on the statistics given. A mean of the images' means is the mean of all, as
each is of equally many pixels. `instance_norm` takes the mean over the images of each one's own mean and
variance. A batch norm of no elements moves nothing, nor does a norm with momentum 0, but for inputs that are
not finite. Half precision is computed in float32 and rounded once. Where calls of this graph alone read a
statistic, those after the norm read the new one; elsewhere it is written to the memory that it has, and
PyTorch makes the graph functional.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from ampopt.errors import CaptureError
from ampopt.ir.aliasing import never_written
from ampopt.ir.graph import arguments, aten, calls, insert_call, makes_fresh_tensor, replace, where

_OF_IMAGES = aten.instance_norm.default

_OF_ONE_RESULT = (aten.batch_norm.default, _OF_IMAGES)

_FUNCTIONAL = aten._native_batch_norm_legit_functional.default

_OF_SEVERAL = (aten.native_batch_norm.default, aten._native_batch_norm_legit.default, _FUNCTIONAL)
"""Norms that also return what a gradient needs."""

_FROZEN = (aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)

_STATISTICS = {"running_mean": 3, "running_var": 4}
"""Names of arguments, and which results of the functional operator are the new ones."""


def write_out_statistics(exported: ExportedProgram) -> None:
    """Let norms that normalize by their input take no statistics, and compute the new ones beside them."""
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        norms = list(calls(module, (*_OF_ONE_RESULT, *_OF_SEVERAL)))
        unwritten = never_written(module.graph) if norms else set()
        for node in norms:
            norm = _Norm(module, node, arguments(node), unwritten)
            if norm.moves_statistics:
                norm.write_out()
                norm.forget_statistics()


def check_statistics(module: fx.GraphModule) -> None:
    """Raise CaptureError where another operator moves statistics, whose schema does not tell that either."""
    for node in calls(module):
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace != "aten" or target in _FROZEN:
            continue  # a library's operator tells what it changes, or breaks PyTorch's own rules
        own = arguments(node)
        is_given = any(isinstance(own.get(name), fx.Node) for name in _STATISTICS)
        if is_given and own.get("training", own.get("use_input_stats", True)):
            raise CaptureError(
                f"the model changes running statistics by an operator that hides it: {where(node)}"
            )


@dataclasses.dataclass(frozen=True)
class _Norm:
    """A norm in a graph, with its arguments by name; `unwritten` are the nodes that nothing writes to."""

    module: fx.GraphModule
    node: fx.Node
    own: dict[str, Any]
    unwritten: set[fx.Node]
    inserted: list[fx.Node] = dataclasses.field(default_factory=list)
    """What was inserted behind it, in order."""

    @property
    def statistics(self) -> dict[str, fx.Node]:
        """Those that it is given."""
        return {name: self.own[name] for name in _STATISTICS if isinstance(self.own[name], fx.Node)}

    @property
    def moves_statistics(self) -> bool:
        """Whether it normalizes by its input, and is given statistics.

        Not so where one tensor is both: PyTorch moves that twice.
        """
        by_input = self.own["use_input_stats" if self.node.target is _OF_IMAGES else "training"]
        return bool(by_input and self.statistics) and self.own["running_mean"] is not self.own["running_var"]

    def write_out(self) -> None:
        """Compute the new value of each statistic that something reads, and give it to what reads it."""
        if self.node.target is _FUNCTIONAL:
            for name, index in _STATISTICS.items():
                for reader in [user for user in self.node.users if user.args[1] == index]:
                    replace(reader, self._new(name))
            return
        if self._keeps_them:
            return
        read = [name for name in self.statistics if self._is_shared(name) or self._later(name)]
        for name, new in [(name, self._new(name)) for name in read]:  # before one of them is written
            statistic = self.statistics[name]
            if self._is_shared(name):
                self._insert(aten.copy_.default, statistic, new, value=statistic.meta["val"])
            for reader in () if self._is_shared(name) else self._later(name):
                reader.replace_input_with(statistic, new)

    def _later(self, name: str) -> list[fx.Node]:
        """What reads a statistic after the norm."""
        users = self.statistics[name].users
        return [user for user in users if user > self.node and user not in self.inserted]

    def _is_shared(self, name: str) -> bool:
        """Whether a statistic may share memory with anything else."""
        statistic = self.statistics[name]
        others = [user for user in statistic.users if user is not self.node and user.op != "output"]
        return not makes_fresh_tensor(statistic) or not all(map(makes_fresh_tensor, others))

    def forget_statistics(self) -> None:
        """Let the call take no statistics; one of several results has one where that is all that is read."""
        own = {**self.own, **dict.fromkeys(_STATISTICS)}
        if self.node.target in _OF_ONE_RESULT:
            schema = self.node.target._schema
            self.node.args, self.node.kwargs = tuple(own[each.name] for each in schema.arguments), {}
            return
        given = [own[name] for name in ("input", "weight", "bias")]
        options = [own[name] for name in ("training", "momentum", "eps")]
        readers = [user for user in self.node.users if user.users]
        if all(reader.args[1] == 0 for reader in readers):
            plain = (*given, None, None, *options, True)
            for reader in readers:
                norm = insert_call(self.module, self.node, aten.batch_norm.default, *plain)
                norm.meta["val"] = reader.meta["val"]
                replace(reader, norm)
        else:
            norm = insert_call(
                self.module, self.node, aten._native_batch_norm_legit.no_stats, *given, *options
            )
            norm.meta["val"] = self.node.meta["val"][:3]
            for reader in readers:
                reader.replace_input_with(self.node, norm)
        for idle in [*self.node.users, self.node]:
            self.module.graph.erase_node(idle)

    @property
    def _keeps_them(self) -> bool:
        sizes = self.own["input"].meta["val"].shape
        is_empty = any(isinstance(size, int) and size == 0 for size in sizes)
        return self.own["momentum"] == 0 or (is_empty and self.node.target is not _OF_IMAGES)

    def _new(self, name: str) -> fx.Node:
        """The new value of a statistic."""
        statistic, momentum = self.statistics[name], self.own["momentum"]
        if self._keeps_them:
            return statistic
        value = statistic.meta["val"]
        wide = torch.float64 if value.dtype is torch.float64 else torch.float32
        batch = self._mean(wide) if name == "running_mean" else self._variance(wide)
        is_wide = value.dtype is wide
        before = statistic if is_wide else self._insert(aten._to_copy.default, statistic, dtype=wide)
        kept = self._insert(aten.mul.Tensor, before, 1 - momentum)
        moved = self._insert(aten.add.Tensor, kept, batch, alpha=momentum)
        if not is_wide:
            moved = self._insert(aten._to_copy.default, moved, dtype=value.dtype)
        moved.meta["val"] = value
        return moved

    def _mean(self, wide: torch.dtype) -> fx.Node:
        """The mean of each channel: that of the images' means."""
        of_images = self._wide_input(wide)
        if pixels := self._pixels:
            of_images = self._insert(aten.mean.dim, of_images, pixels)
        return self._insert(aten.mean.dim, of_images, [0])

    def _variance(self, wide: torch.dtype) -> fx.Node:
        """The unbiased variance of each channel; of an `instance_norm`, the mean of the images' variances."""
        source = self._wide_input(wide)
        if self.node.target is not _OF_IMAGES:
            return self._insert(aten.var.correction, source, [0, *self._pixels], correction=1)
        of_images = self._insert(aten.var.correction, source, self._pixels, correction=1)
        return self._insert(aten.mean.dim, of_images, [0])

    @property
    def _pixels(self) -> list[int]:
        """The dimensions behind the channels'."""
        return list(range(2, self.own["input"].meta["val"].dim()))

    def _wide_input(self, wide: torch.dtype) -> fx.Node:
        """The input in the statistics' precision: under autocast it may have another than in the export.

        PyTorch takes an idle cast of what is written to in place for nothing; a copy stays.
        """
        source = self.own["input"]
        cast = next((node for node in self.inserted if node.args[0] is source), None)
        if cast is not None:
            return cast
        if source not in self.unwritten:
            return self._insert(aten._to_copy.default, source, dtype=wide)
        is_idle = source.meta["val"].dtype is wide
        return self._insert(aten.to.dtype, source, wide, value=source.meta["val"] if is_idle else None)

    def _insert(self, target: Any, *args: Any, value: Tensor | None = None, **kwargs: Any) -> fx.Node:
        """Insert a call behind what was inserted behind the norm, and note the tensor that it gives."""
        end = self.node.next
        while end in self.inserted or (end.target is operator.getitem and end in self.node.users):
            end = end.next
        node = insert_call(self.module, end, target, *args, **kwargs)
        self.inserted.append(node)
        if value is not None:
            node.meta["val"] = value
        return node
