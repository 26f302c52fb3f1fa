"""The kernels of an optimized program, each with the graph's nodes and the user's lines that it computes.

A profiler sees the kernels of a CUDA graph without anything that they belong to. So the program's nodes, or
the statements of inductor's code, also run one by one, each waited for: what the device does meanwhile is its
own. The replay's kernels are then matched by name, in order. On a CPU the operators themselves are timed, or
ONNX Runtime's nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._C._autograd import DeviceType
from torch.profiler import record_function

from ampopt.diagnosis.operators import LABEL, least_disturbed, recording
from ampopt.diagnosis.own_onnx import node_parts
from ampopt.engines.apart import Apart, without_copies
from ampopt.engines.cuda_graphs import CapturedGraph
from ampopt.engines.divided import Chain
from ampopt.engines.graph_capture import as_captured
from ampopt.engines.inductor_code import HasInductorCode
from ampopt.engines.inductor_labels import Label, labelled
from ampopt.engines.onnx_engine import OnnxEngine
from ampopt.engines.streams import Branched
from ampopt.ir.graph import calls
from ampopt.ir.origin import Origin, origins_of
from ampopt.ir.own_autocast import own_scope
from ampopt.ir.program import CHANNELS_LAST, Border, Program
from ampopt.measure.clocks import synchronize

RUNS = 5
"""Profiled runs, of which the median time of each kernel counts; of the host, in the half that took least."""

ENTRY, EXIT = "(inputs)", "(outputs)"
"""The nodes of conversions at a program's border."""

By = Literal["node", "order"]
"""How a kernel was attributed: it ran in its node's range, or under a known name; or only its place tells."""


@dataclasses.dataclass(frozen=True)
class OwnKernel:
    """A kernel of an optimized program, on a CPU an operator, with its time in seconds.

    `nodes` are those of the program's graph that it computes, `origins` their places in the user's model.
    """

    name: str
    seconds: float
    nodes: tuple[str, ...]
    origins: tuple[Origin, ...]
    by: By = "node"

    @property
    def place(self) -> str:
        """The first place, and how many more there are: `layer1.0.conv1, resnet.py:92 and 1 more`.

        Of a conversion at the program's border it is "(inputs)" or "(outputs)".
        """
        named = [text for text in map(str, self.origins) if text]
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        return f"{named[0]}{more}" if named else ", ".join(self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the time in milliseconds."""
        places = [str(origin) for origin in self.origins if str(origin)]
        own = {"name": self.name, "ms": round(1e3 * self.seconds, 6), "nodes": list(self.nodes)}
        return {**own, "places": places, "by": self.by}


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one range has done: what was called, for which nodes, and its kernels or its time on a CPU."""

    called: str
    names: str
    seconds: float
    kernels: tuple[tuple[str, float], ...] = ()


def own_kernels(program: Program) -> tuple[OwnKernel, ...]:
    """Every kernel of one call of a program in order, attributed; costs a few runs, on a GPU a capture.

    Raises LookupError for an engine into which nothing can look.
    """
    if isinstance(program.engine, OnnxEngine):
        by_value = node_parts(program)
        return tuple(OwnKernel(name, s, nodes, origins) for name, s, nodes, origins in by_value)
    own = program.engine is None or isinstance(program.engine, Branched) or _runs_code(program.engine)
    if not own and not program.cuda_graph:
        raise LookupError(f"nothing can look into what {program.recipe[-1].name} runs")
    parts = as_captured(program, functools.partial(_parts, program))
    if program.device.type != "cuda":
        timed = [(part.called, part.seconds, part.names) for part in parts]
        return _completed(resolved(timed, list(_origins(program))), program)
    alone = [(kernel, seconds, part.names) for part in parts for kernel, seconds in part.kernels]
    if program.cuda_graph:
        alone = matched(_replayed(program), alone)
    return _completed(resolved(alone, list(_origins(program))), program)


def matched(
    replayed: Sequence[tuple[str, float]], alone: Sequence[tuple[str, float, str]]
) -> list[tuple[str, float, str]]:
    """The replayed kernels with the names of the ranges in which those of the same name ran, in order.

    A kernel that only the replay has gets no names.
    """
    waiting: dict[str, deque[str]] = defaultdict(deque)
    for kernel, _, names in alone:
        waiting[kernel].append(names)
    return [(k, s, waiting[k].popleft() if waiting[k] else "") for k, s in replayed]


def resolved(kernels: Sequence[tuple[str, float, str]], known: Sequence[str]) -> tuple[OwnKernel, ...]:
    """The kernels with their nodes; one that nothing names gets those that no other has at its place.

    These are the nodes between the last node before it and the first one after it; where there are none,
    the one before it, or after it.
    """
    order = {name: place for place, name in enumerate(known)}
    named = [tuple(n for n in names.split(",") if n in order) for _, _, names in kernels]
    taken = {node for nodes in named for node in nodes}
    found: list[OwnKernel] = []
    last = -1
    for place, (kernel, seconds, _) in enumerate(kernels):
        nodes = named[place]
        by: By = "node" if nodes else "order"
        if not nodes:
            later = (order[n] for nodes in named[place + 1 :] for n in nodes)
            end = next((at for at in later if at > last), len(order))
            between = (n for n in known if last < order[n] < end and n not in taken)
            nodes = tuple(n for n in between if n not in (ENTRY, EXIT))
            taken.update(nodes)
            if not nodes and found:
                nodes = found[-1].nodes
            elif not nodes:
                nodes = next((each for each in named if each), ())
        last = max((order[node] for node in nodes), default=last)
        found.append(OwnKernel(kernel, seconds, nodes, (), by))
    return tuple(found)


def _completed(kernels: Sequence[OwnKernel], program: Program) -> tuple[OwnKernel, ...]:
    """The kernels with their origins, and with the nodes that none has: those fused into what reads them.

    Compiled code names only the last of some nodes that it fuses. What nothing reads is its source's.
    """
    nodes = [node for graph in _graphs(program) for node in calls(graph)]
    owner = {name: place for place, kernel in enumerate(kernels) for name in kernel.nodes}
    more: list[list[str]] = [[] for _ in kernels]
    read_by = [(node, tuple(node.users)) for node in reversed(nodes)]
    for node, beside in (*read_by, *((node, tuple(node.all_input_nodes)) for node in nodes)):
        place = next((owner[each.name] for each in beside if each.name in owner), None)
        if node.name not in owner and place is not None:
            owner[node.name] = place
            more[place].append(node.name)
    known = _origins(program)
    made = []
    for kernel, added in zip(kernels, more, strict=True):
        own = (*reversed(added), *kernel.nodes)
        places = dict.fromkeys(origin for name in own for origin in known[name])
        made.append(dataclasses.replace(kernel, nodes=own, origins=tuple(places)))
    return tuple(made)


def _graphs(program: Program) -> list[fx.GraphModule]:
    """The graph that is run, or those of its pieces."""
    if isinstance(engine := without_copies(program.engine), Chain):
        return [step.graph for step in engine.steps]
    return [program.graph]


def _origins(program: Program) -> dict[str, tuple[Origin, ...]]:
    """The origins of every node, by its name, in the order of the graph."""
    found = {node.name: origins_of(node) for graph in _graphs(program) for node in calls(graph)}
    border = (Origin("", ""),)
    return {ENTRY: border, **found, EXIT: border}


def _parts(program: Program) -> list[_Part]:
    """What each range has done: the median of a few runs."""
    run = _labelled_run(program)
    with torch.inference_mode(mode=False), torch.no_grad():
        run()
        synchronize(program.device)
        with recording(program.device) as recorded:
            for _ in range(RUNS):
                run()
            synchronize(program.device)
    events = list(recorded.events() or ())
    ranges = [e for e in events if e.name.startswith(LABEL) and e.device_type == DeviceType.CPU]
    ranges.sort(key=lambda event: event.time_range.start)
    per_run = len(ranges) // RUNS
    kernels = kernels_in(ranges, events) if program.device.type == "cuda" else [[] for _ in ranges]
    took = [1e-6 * each.cpu_time_total for each in ranges]
    quick = least_disturbed([sum(took[run * per_run : (run + 1) * per_run]) for run in range(RUNS)])
    parts = []
    for place in range(per_run):
        seconds = statistics.median(took[run * per_run + place] for run in quick)
        called, _, names = ranges[place].name.removeprefix(LABEL).partition("|")
        parts.append(_Part(called, names, seconds, tuple(kernels[place + per_run * (RUNS - 1)])))
    return parts


def kernels_in(ranges: Sequence[Any], events: Sequence[Any]) -> list[list[tuple[str, float]]]:
    """The kernels of each range: those that began after it did, and before the next one."""
    found: list[list[tuple[str, float]]] = [[] for _ in ranges]
    at = -1
    for event in device_events(events):
        while at + 1 < len(ranges) and ranges[at + 1].time_range.start <= event.time_range.start:
            at += 1
        found[max(at, 0)].append((event.name, 1e-6 * event.time_range.elapsed_us()))
    return found


def device_events(events: Sequence[Any]) -> list[Any]:
    """The kernels, copies and memsets on a GPU, in order of time; ranges are no work."""
    own = [e for e in events if e.device_type == DeviceType.CUDA and not _is_range(e)]
    return sorted(own, key=lambda event: event.time_range.start)


def _is_range(event: Any) -> bool:
    return bool(event.name.startswith(LABEL) or getattr(event, "is_user_annotation", False))


def _replayed(program: Program) -> list[tuple[str, float]]:
    """The kernels of a replay of the program's CUDA graph, in order; the median times of a few."""
    captured = CapturedGraph(program)
    launch = captured.bare_launch(*program.examples)
    launch()
    synchronize(program.device)
    with recording(program.device) as recorded:
        for _ in range(RUNS):
            launch()
            synchronize(program.device)
    found = [(e.name, 1e-6 * e.time_range.elapsed_us()) for e in device_events(list(recorded.events() or ()))]
    count = len(found) // RUNS
    if count * RUNS != len(found):  # the profiler has lost some
        return found[:count]
    runs = [found[place::count] for place in range(count)]
    return [(each[0][0], statistics.median(seconds for _, seconds in each)) for each in runs]


def _labelled_run(program: Program) -> Callable[[], object]:
    """A run of the program in which each node, or each statement of compiled code, is in a range."""
    label = functools.partial(_range, device=program.device)

    def run() -> object:
        with program.scope():
            entered = _converted(program.entry, program.examples, label, ENTRY)
            outputs = _run_engine(program, entered, label)
            return _converted(program.exit, outputs, label, EXIT)

    return run


def _converted(borders: Sequence[Border], tensors: Sequence[Tensor], label: Label, name: str) -> list[Tensor]:
    """Conversions at a border, in a range if there are any."""
    pairs = list(zip(borders, tensors, strict=True))
    is_needed = any(b.dtype is not t.dtype or not _has(t, b.memory_format) for b, t in pairs)
    with label(name, name) if is_needed else contextlib.nullcontext():
        return [border.convert(tensor) for border, tensor in pairs]


def _has(tensor: Tensor, memory_format: torch.memory_format) -> bool:
    is_image = tensor.dim() in CHANNELS_LAST and memory_format is CHANNELS_LAST[tensor.dim()]
    return tensor.is_contiguous(memory_format=memory_format if is_image else torch.contiguous_format)


def _run_engine(program: Program, entered: Sequence[Tensor], label: Label) -> Sequence[Tensor]:
    engine = program.engine
    if isinstance(engine, Apart):
        return engine.copied(_run_engine(program.replace(engine=engine.engine), entered, label))
    if engine is None or not _runs_code(engine):
        return tuple(_Labelled(program, label).run(*entered))
    if isinstance(engine, Chain):
        return engine.run(entered, lambda step: _ranges(step.function, step.graph, label))
    with _ranges(engine, program.graph, label):
        return tuple(engine(*entered))


def _runs_code(engine: object) -> bool:
    engine = without_copies(engine)
    functions = [step.function for step in engine.steps] if isinstance(engine, Chain) else [engine]
    return any(_code(function) is not None for function in functions)


def _ranges(
    function: object, graph: fx.GraphModule, label: Label
) -> contextlib.AbstractContextManager[object]:
    """Ranges in the calls of a function that runs inductor's code; equal pieces of a program share one."""
    code = _code(function)
    return contextlib.nullcontext() if code is None else labelled(code, graph, label)


def _code(function: object) -> Any:
    """Inductor's code, which a function runs; None in another, whose graph runs by nodes."""
    return function.inner if isinstance(function, HasInductorCode) else None


class _Labelled(fx.Interpreter):
    def __init__(self, program: Program, label: Label) -> None:
        super().__init__(program.graph)
        self._device, self._label = program.device, label

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        with own_scope(n, self._device), self._label(_operator(n), n.name):
            return super().run_node(n)


def _operator(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


@contextlib.contextmanager
def _range(called: str, names: str, *, device: torch.device) -> Iterator[None]:
    """A range of the profiler; on a GPU it ends when the device has done what was launched in it."""
    with record_function(f"{LABEL}{called}|{names}"):
        yield
        synchronize(device)
