"""The remedies of `ampopt.diagnose` in plain PyTorch, as a user would write them, without ampopt."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ampopt.system.flags import older_flags_readable
from benchmarks.by_hand import Inputs, as_channels_last, cuda_graph, device_of, fold

HALF = {"cuda": torch.float16, "cpu": torch.bfloat16}
"""The dtype of AMP by device."""

IDLE_S = 0.3

MULTIPLE = 8

HEAP = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "268435456"}
"""The environment of a process whose heap keeps what is freed."""

GRAPH = "graph "
"""Begins the remedies of exported graphs."""

CANDIDATE_S = 0.1
"""Seconds of timing for each form of a grouped convolution."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run a network: `lane` "fp32" or "amp", a remedy of `REMEDIES`, and what that is applied to.

    A remedy that begins with "graph" is applied to the model's exported graph, in which AMP is half weights.
    """

    lane: str
    remedy: str = "as it is"
    of: str = ""

    def __str__(self) -> str:
        return ", ".join(part for part in (self.lane, self.remedy, self.of) if part)

    @property
    def chooses(self) -> bool:
        """Whether it is made by timing: then nothing else may run meanwhile."""
        return self.remedy in ("searched", "graph with other groups")

    @property
    def environment(self) -> Mapping[str, str]:
        """What its process needs from its beginning: as in a diagnosis, its heap keeps what is freed."""
        return {} if self.remedy == "heap given back" else HEAP


@dataclasses.dataclass(frozen=True)
class Run:
    """What is timed: `call`, after `before` where that is something; neither has gradients."""

    call: Callable[[], object]
    before: Callable[[], object] | None = None


def ways_of(finding: Mapping[str, Any]) -> tuple[Way, Way] | None:
    """How a finding's "before" and "after" are measured by themselves; None where nobody knows."""
    name, lane = finding["name"], finding["lane"]
    change = (finding.get("counterfactual") or {}).get("change", "")
    plain = Way(lane)
    if name == "amp-pays":
        return Way("fp32"), Way("amp")
    if name in ("amp-harmful", "amp-useless"):
        return plain, Way("fp32")
    if name.endswith(_TRAINING):
        kind = name.removesuffix(_TRAINING).removesuffix("-in-")
        if change.endswith("alone"):
            plain = Way(lane, "one kind evaluated", kind)
        return (Way(lane, "as given"), plain) if kind in _KINDS or not plain.of else None
    if name == "input-on-another-device":
        return Way(lane, "inputs copied"), plain
    if name == "page-faults":
        return Way(lane, "heap given back"), plain
    if name == "slow-after-idling":
        after = "in one thread after idling" if change.startswith("in one thread") else "second after idling"
        return Way(lane, "after idling"), Way(lane, after)
    if name == "misaligned-channels":
        module = finding["places"][0].partition(",")[0]
        return Way(lane, "alone", module), Way(lane, "alone and padded", module)
    if name == "cpu-threads":
        threads = re.findall(r"\d+", finding["advice"])
        return plain, Way(lane, "threads", threads[-1])
    if name == "autocast-casts":
        return Way(lane, "graph under autocast"), Way(lane, "graph as it is")
    if name in _OF_GRAPHS:
        return Way(lane, "graph as it is"), Way(lane, f"graph {_OF_GRAPHS[name]}")
    remedy = _OF_CALLS.get(name)
    return None if remedy is None else (plain, Way(lane, remedy))


_TRAINING = "training-mode"

_KINDS: dict[str, type[nn.Module]] = {
    "batch-norm": nn.modules.batchnorm._BatchNorm,
    "dropout": nn.modules.dropout._DropoutNd,
}
"""The kinds of modules that can be evaluated alone, by the findings that they are told by."""

_OF_CALLS = {
    "memory-layout": "channels_last",
    "launch-bound": "CUDA graph",
    "allow-tf32": "TF32",
    "search-conv-algorithms": "searched",
}

_OF_GRAPHS = {
    "batch-norm": "folded",
    "grouped-convolution": "with other groups",
    "fold-constants": "computed once",
    "remove-inference-noops": "without no-ops",
    "merge-linear-chain": "merged",
}


def prepared(way: Way, model: nn.Module, inputs: Inputs) -> Run:
    """The way as calls, in a process that does nothing else: flags are set for good. `model` is its own."""
    if way.remedy == "threads":
        torch.set_num_threads(int(way.of))
    if way.remedy == "in one thread after idling":
        torch.set_num_threads(1)
    if way.remedy not in ("as given", "one kind evaluated"):
        model.eval()
    home = next(model.parameters()).device
    if home.type == "cuda":
        backends: Any = torch.backends  # all three: the older flag cannot be read while they differ
        for kind in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
            kind.fp32_precision = "tf32" if way.remedy == "TF32" else "ieee"
        backends.cudnn.benchmark = way.remedy == "searched"
    given = inputs
    if way.remedy != "inputs copied":
        given = pytree.tree_map_only(Tensor, lambda t: t.to(home), inputs)
    call, given = REMEDIES[way.remedy.removeprefix(GRAPH)](way, model, given)
    if way.remedy.startswith(GRAPH):
        return Run(functools.partial(_exported(way, call, given), *given))
    if way.remedy == "CUDA graph":
        graphed = cuda_graph(lambda *own: _in_lane(way, home, lambda: call(*own))(), given, copied=True)
        return Run(functools.partial(graphed, *given))

    def run() -> object:
        if way.remedy == "inputs copied":
            return call(*pytree.tree_map_only(Tensor, lambda t: t.to(home), given))
        return call(*given)

    def rest() -> None:
        time.sleep(IDLE_S)
        if way.remedy == "second after idling":
            once()

    once = _in_lane(way, home, run)
    return Run(once, rest if way.remedy.endswith("after idling") else None)


def _exported(way: Way, model: Callable[..., object], inputs: Inputs) -> Callable[..., object]:
    """The graph that `torch.export` makes of a module, in half in AMP; a function is one already."""
    if not isinstance(model, nn.Module):
        return model
    if way.lane == "fp32":
        return _bare(model, inputs)
    if way.remedy == "graph under autocast":
        graph = _bare(model, inputs)
        return lambda *given: _in_lane(way, device_of(inputs), functools.partial(graph, *given))()
    half = HALF[device_of(inputs).type]
    low = pytree.tree_map_only(Tensor, lambda t: t.to(half), inputs)
    low_graph = _bare(model.to(half), low)
    return lambda *given: low_graph(*[x.to(half) for x in given])


def _bare(model: nn.Module, inputs: Inputs) -> Callable[..., object]:
    """A module's graph as a function of tensors, without `torch.export`'s checks and trees, which take 40 µs.

    Its results are a tuple.
    """
    with older_flags_readable():
        graph = torch.export.export(model, inputs).module()
    assert isinstance(graph, fx.GraphModule)
    graph._forward_pre_hooks.clear()
    graph.graph.set_codegen(fx.graph.CodeGen())
    for node in list(graph.graph.nodes):
        if node.op == "call_module" and not node.users:  # guards
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _in_lane(way: Way, device: torch.device, run: Callable[[], object]) -> Callable[[], object]:
    if way.lane == "fp32":
        return run

    def mixed() -> object:
        with torch.autocast(device.type, HALF[device.type]):
            return run()

    return mixed


Changed = tuple[Callable[..., object], Inputs]


def _as_it_is(_: Way, model: nn.Module, inputs: Inputs) -> Changed:
    return model, inputs


def _channels_last(_: Way, model: nn.Module, inputs: Inputs) -> Changed:
    return model.to(memory_format=torch.channels_last), pytree.tree_map_only(Tensor, as_channels_last, inputs)


def _one_kind_evaluated(way: Way, model: nn.Module, inputs: Inputs) -> Changed:
    """The batch norms, or the dropouts, in evaluation mode, and all else as it is."""
    for module in model.modules():
        if isinstance(module, _KINDS[way.of]):
            module.eval()
    return model, inputs


def _folded(_: Way, model: nn.Module, inputs: Inputs) -> Changed:
    return fold(model), inputs


def _other_groups(way: Way, model: nn.Module, inputs: Inputs) -> Changed:
    """Each grouped convolution with as many groups as are fastest for it alone."""
    for path, x in _entering(model, inputs, lambda m: isinstance(m, nn.Conv2d) and m.groups > 1).items():
        conv = model.get_submodule(path)
        assert isinstance(conv, nn.Conv2d)
        counts = [count for count in range(1, conv.groups + 1) if conv.groups % count == 0]
        forms = [_regrouped(conv, count) for count in counts]
        seconds = [_seconds(_in_lane(way, x.device, functools.partial(form, x))) for form in forms]
        model.set_submodule(path, forms[seconds.index(min(seconds))])
    return model, inputs


def _regrouped(conv: nn.Conv2d, count: int) -> nn.Conv2d:
    """The same convolution with fewer groups: weights between what were two groups are zero."""
    merged = conv.groups // count
    made = copy.deepcopy(conv)
    made.groups = count
    leaving, entering = conv.weight.shape[:2]
    each = leaving // conv.groups
    weight = conv.weight.new_zeros(leaving, entering * merged, *conv.weight.shape[2:])
    for group in range(conv.groups):
        rows, place = slice(group * each, (group + 1) * each), group % merged
        weight[rows, place * entering : (place + 1) * entering] = conv.weight[rows]
    made.weight = nn.Parameter(weight)
    return made


def _alone(way: Way, model: nn.Module, inputs: Inputs, multiple: int = 1) -> Changed:
    """One convolution or linear layer on random numbers, its sizes padded to a multiple."""
    (x,) = _entering(model, inputs, lambda m: m is model.get_submodule(way.of)).values()
    layer = model.get_submodule(way.of)
    assert isinstance(layer, (nn.Conv2d, nn.Linear))
    dtype = torch.float32 if way.lane == "fp32" else HALF[x.device.type]
    leaving, entering = (-(-size // multiple) * multiple for size in layer.weight.shape[:2])
    weight = torch.rand(leaving, entering, *layer.weight.shape[2:], device=x.device, dtype=dtype)
    if isinstance(layer, nn.Linear):
        given = torch.rand(*x.shape[:-1], entering, device=x.device, dtype=dtype)
        return (lambda own: F.linear(own, weight)), (given,)
    given = torch.rand(len(x), entering, *x.shape[2:], device=x.device, dtype=dtype)
    geometry: Any = (layer.stride, layer.padding, layer.dilation)
    return (lambda own: F.conv2d(own, weight, None, *geometry)), (given,)


def _alone_and_padded(way: Way, model: nn.Module, inputs: Inputs) -> Changed:
    return _alone(way, model, inputs, MULTIPLE)


def _computed_once(_: Way, model: nn.Module, inputs: Inputs) -> Changed:
    """Of `counterfactual_networks.Scaled`."""
    weight = model.get_parameter("weight")
    scaled = (weight * 2 - weight.mean()).t()
    return (lambda x: x @ scaled), inputs


def _without_noops(_: Way, model: nn.Module, inputs: Inputs) -> Changed:
    """Sequences without their dropouts and identities."""
    for module in model.modules():
        if isinstance(module, nn.Sequential):
            kept = [each for each in module if not isinstance(each, (nn.Identity, nn.Dropout, nn.Dropout2d))]
            module._modules = {str(place): each for place, each in enumerate(kept)}
    return model, inputs


def _merged(_: Way, model: nn.Module, inputs: Inputs) -> Changed:
    """A sequence of linear layers as one."""
    assert isinstance(model, nn.Sequential)
    first, *others = (layer for layer in model if isinstance(layer, nn.Linear))
    weight: Tensor = first.weight
    bias: Tensor = first.bias
    for layer in others:
        weight, bias = layer.weight @ weight, layer.weight @ bias + layer.bias
    merged = nn.Linear(weight.shape[1], weight.shape[0])
    merged.load_state_dict({"weight": weight, "bias": bias})
    return merged.to(weight.device), inputs


REMEDIES: dict[str, Callable[[Way, nn.Module, Inputs], Changed]] = {
    "as it is": _as_it_is,
    "as given": _as_it_is,
    "inputs copied": _as_it_is,
    "after idling": _as_it_is,
    "second after idling": _as_it_is,
    "in one thread after idling": _as_it_is,
    "threads": _as_it_is,
    "TF32": _as_it_is,
    "searched": _as_it_is,
    "heap given back": _as_it_is,
    "CUDA graph": _as_it_is,
    "channels_last": _channels_last,
    "one kind evaluated": _one_kind_evaluated,
    "folded": _folded,
    "under autocast": _as_it_is,
    "with other groups": _other_groups,
    "alone": _alone,
    "alone and padded": _alone_and_padded,
    "computed once": _computed_once,
    "without no-ops": _without_noops,
    "merged": _merged,
}
"""By name; those that are the model as it is are flags, or another way to call it."""


def _entering(model: nn.Module, inputs: Inputs, which: Callable[[nn.Module], bool]) -> dict[str, Tensor]:
    """What enters each of some modules, by path, in one call."""
    seen: dict[str, Tensor] = {}

    def note(path: str) -> Callable[..., None]:
        def called(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[path] = args[0]

        return called

    handles = [m.register_forward_pre_hook(note(path)) for path, m in model.named_modules() if which(m)]
    model(*inputs)
    for handle in handles:
        handle.remove()
    return seen


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of a call: the best of some."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    call()
    best, end = float("inf"), time.perf_counter() + CANDIDATE_S
    while time.perf_counter() < end:
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        best = min(best, time.perf_counter() - start)
    return best
