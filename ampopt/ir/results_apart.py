"""Keeps results apart that are so in the original: who writes to one of them may not change another.

Whether `reshape` and `contiguous` copy depends on how their argument lies in memory, which passes change.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from ampopt.ir.aliasing import sharing
from ampopt.ir.graph import aten, insert_call
from ampopt.ir.program import Program
from ampopt.ir.shapes import described
from ampopt.system.interrupts import check_interrupted


def keep_results_apart(before: Program, module: fx.GraphModule) -> None:
    """Copy results of a graph that may be views of one memory now, and are not in the program before.

    `permute(0, 2, 3, 1).reshape(…)` copies what lies in the usual format, and is a view of a tensor whose
    channels are innermost. Results that lie in one memory before stay as they are: a copy of one would be
    apart from the others.
    """
    output, earlier = module.graph.output_node(), _results(before.graph)
    family = {result: sharing(result, _is_kernel) for result in earlier}
    places = itertools.combinations(range(len(earlier)), 2)
    pairs = [(one, other) for one, other in places if earlier[other] in family[earlier[one]]]
    memory = _memory_of_results(before) if pairs else []
    alone = {place for place, its in enumerate(memory) if memory.count(its) == 1}
    copied, results = set[int](), _results(module)
    for pair in pairs:
        if memory[pair[0]] != memory[pair[1]] and copied.isdisjoint(pair):
            copied |= set(sorted(alone.intersection(pair))[-1:])
    for place in copied:
        results[place] = insert_call(module, output, aten.clone.default, results[place])
    if copied:
        output.args = (tuple(results),)


def _memory_of_results(program: Program) -> list[object]:
    """The memory of each of a program's results, told without a run where that can be."""
    try:
        told: Sequence[Tensor] = [result.meta["val"] for result in _results(described(program))]
    except Exception as error:
        check_interrupted(error)
        with program.scope():
            entered = [b.convert(t) for b, t in zip(program.entry, program.examples, strict=True)]
            told = program.function(*entered)
    return [StorageWeakRef(y.untyped_storage()) if y.layout is torch.strided else object() for y in told]


def _results(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def _is_kernel(node: fx.Node) -> bool:
    """Whether a call is to a kernel that a pass has put in: its result is memory of its own."""
    return getattr(node.target, "namespace", None) in ("ampopt", "mkldnn")
