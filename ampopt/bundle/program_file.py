"""Stores a Program as JSON and weight tensors, and reads it back without evaluating the file's content.

The file holds the graph, its border and its settings. It does not hold the examples (the reader supplies
them), the recipe, the engine (which cannot be written), the CUDA graph setting (the reader decides), or the
nodes' metadata: lines of the user's code, and unrounded weights.

The reader trusts nothing: see `stored_graph` for names and strings, `operator_list` for operators. Each call
is tested on tensors without memory (`trial_run`) before a weight is copied to the device. A malicious file
can only waste time and memory, more when it runs than when it is read.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ampopt.bundle.stored_graph import read_graph, write_nodes
from ampopt.bundle.stored_sizes import StoredSizes, stored_sizes
from ampopt.bundle.stored_values import (
    DTYPES,
    MEMORY_FORMATS,
    OF_A_FILE,
    array,
    boolean,
    integer,
    members,
    named,
    refuse,
)
from ampopt.bundle.stored_weights import StoredWeight, read_weights, write_weights
from ampopt.bundle.trial_run import try_out
from ampopt.errors import BundleError, ExportError
from ampopt.ir.lanes import lane_of
from ampopt.ir.program import Border, Program
from ampopt.ir.settings import Settings
from ampopt.ir.signature import describe
from ampopt.ir.size_range import Sizes

FILE = "program.json"
SCHEMA = 1

_LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_STATIC = StoredSizes()

_LANES = {"float32": torch.float32, **_LOW}


def write_program(program: Program) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A program as a JSON value, and its weights: contiguous tensors on the CPU by name.

    The written data is read back as a check. Raises ExportError, naming the node, for content that a file
    cannot hold: an engine, operators that `operator_list` refuses, weights that are not plain arrays.
    """
    if program.engine is not None:
        raise ExportError(
            "the program runs in an engine (TorchScript, inductor), which a file cannot hold: "
            "write the program from before that pass"
        )
    graph, settings = program.graph.graph, program.settings
    nodes = write_nodes(graph, program.device, FILE)
    table, tensors = write_weights(_weights_of(program.graph), program.device, FILE)
    data = {
        "schema": SCHEMA,
        "lane_dtype": _name(program.lane.dtype),
        "settings": {
            "autocast": _name(program.lane.dtype) if program.under_autocast else None,
            "tf32": settings.tf32,
            "search_algorithms": settings.search_algorithms,
        },
        "inputs": [
            {"shape": list(example.shape), "dtype": _name(example.dtype), "entry": _write_border(border)}
            for example, border in zip(program.examples, program.entry, strict=True)
        ],
        "weights": table,
        "nodes": nodes,
        "outputs": [
            {"node": name, "exit": _write_border(border)}
            for name, border in zip(_results_of(graph), program.exit, strict=True)
        ],
    }
    try:
        read_program(
            data, tensors, program.examples, device=program.device, stored=stored_sizes(program.sizes)
        )
    except BundleError as error:
        reason = str(error).removesuffix(OF_A_FILE)
        raise ExportError(f"a file cannot hold the program: {reason}") from error
    return data, tensors


def _weights_of(module: fx.GraphModule) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if not isinstance(value, Tensor):
                raise ExportError(f"{FILE}, node {node.name!r}: {node.target} is not a tensor of the graph")
            weights[str(node.target)] = value
    return weights


def _results_of(graph: fx.Graph) -> list[str]:
    results = graph.output_node().args[0]
    if not isinstance(results, (list, tuple)):
        raise ExportError(f"{FILE}: the graph does not return a flat tuple")
    names = [result.name for result in results if isinstance(result, fx.Node)]
    if len(names) != len(results):
        raise ExportError(f"{FILE}: the graph returns what is not a tensor")
    return names


def _name(value: torch.dtype | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def _write_border(border: Border) -> dict[str, str]:
    return {"dtype": _name(border.dtype), "memory_format": _name(border.memory_format)}


def read_program(
    data: object,
    tensors: Mapping[str, Tensor],
    examples: Sequence[Tensor],
    *,
    device: torch.device,
    stored: StoredSizes = _STATIC,
    was_tried: bool = False,
) -> Program:
    """The program that `write_program` wrote, on `device`; `examples` are tensors for its inputs.

    `data` is the parsed JSON, `tensors` are those from safetensors; weights may share their memory. `stored`
    has the ranges of the inputs' sizes, and the corners that the graph is tried at besides the examples'.
    `was_tried`: the same data was read here before, so that only what it says is checked; to try the graph
    on tensors without memory takes 2.5 s in a new process, most of it for PyTorch's own imports.
    Raises BundleError, naming the node, for data that `write_program` does not write, or that does not fit
    `tensors` and `examples`.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        found = reprlib.repr(schema)
        raise BundleError(f"{FILE}: it is of schema {found}, and this ampopt reads schema {SCHEMA}")
    parts = ("schema", "lane_dtype", "settings", "inputs", "weights", "nodes", "outputs")
    _, lane_dtype, settings_data, inputs, table, nodes, outputs = members(data, parts, FILE)
    dtype = named(lane_dtype, _LANES, f"{FILE}, lane_dtype")
    settings, autocast = _read_settings(settings_data)
    if autocast not in (None, dtype):
        refuse(f"{FILE}, settings", f"an autocast to {_name(autocast)} in a lane of {_name(dtype)}")
    entry, here = _read_inputs(inputs, examples, device)
    results, exit = _read_outputs(outputs)
    weights = read_weights(table, tensors, device, FILE)
    graph = read_graph(nodes, results, weights.keys(), device, FILE, sizes_vary=bool(stored))
    if len(graph.find_nodes(op="placeholder")) != len(entry):
        refuse(f"{FILE}, nodes", f"not as many nodes for inputs as there are inputs, {len(entry)}")
    corners = () if was_tried else (here, *(_empty(here, stored.sizes, each) for each in stored.corners))
    for there in corners:
        try_out(graph, weights, zip(entry, there, strict=True), settings.scope(device, autocast), FILE)
    module = _module(graph, weights)
    lane = lane_of(dtype, device)
    in_autocast = autocast is not None
    return Program(module, here, entry, exit, device, lane, in_autocast, settings, sizes=stored.sizes)


def _empty(tensors: Sequence[Tensor], sizes: Sizes, corner: Mapping[str, int]) -> list[Tensor]:
    """Tensors like these, of other sizes and without memory of their own."""
    found = []
    for tensor, own in zip(tensors, sizes, strict=True):
        shape = [corner[own[i].name] if i in own else size for i, size in enumerate(tensor.shape)]
        found.append(torch.empty_strided((), (), dtype=tensor.dtype, device=tensor.device).expand(shape))
    return found


def _module(graph: fx.Graph, weights: Mapping[str, StoredWeight]) -> fx.GraphModule:
    root = torch.nn.Module()
    loaded: dict[object, Tensor] = {}
    for name, weight in weights.items():
        key = (id(weight.tensor), weight.strides, weight.device)
        if key not in loaded:
            loaded[key] = weight.load()
        root.register_buffer(name, loaded[key])
    graph.lint()
    return fx.GraphModule(root, graph)


def _read_settings(data: object) -> tuple[Settings, torch.dtype | None]:
    """The switches, and the dtype of the autocast that the program runs under."""
    where = f"{FILE}, settings"
    autocast, tf32, search = members(data, ("autocast", "tf32", "search_algorithms"), where)
    switches = Settings(tf32=boolean(tf32, where), search_algorithms=boolean(search, where))
    return switches, None if autocast is None else named(autocast, _LOW, where)


def _read_inputs(
    data: object, examples: Sequence[Tensor], device: torch.device
) -> tuple[tuple[Border, ...], tuple[Tensor, ...]]:
    """The borders of the inputs, and the examples on `device`, which must have the shapes and dtypes here."""
    inputs = array(data, f"{FILE}, inputs")
    if len(inputs) != len(examples):
        refuse(f"{FILE}, inputs", f"{len(inputs)} inputs, while the self-test has {len(examples)}")
    borders = []
    for number, (item, example) in enumerate(zip(inputs, examples, strict=True)):
        where = f"{FILE}, input {number}"
        sizes, dtype, entry = members(item, ("shape", "dtype", "entry"), where)
        shape = [integer(size, where) for size in array(sizes, where)]
        if shape != list(example.shape) or named(dtype, DTYPES, where) is not example.dtype:
            refuse(where, f"{dtype}{shape}, while the self-test has {describe(example)}")
        borders.append(_read_border(entry, where))
    return tuple(borders), tuple(example.to(device) for example in examples)


def _read_outputs(data: object) -> tuple[list[object], tuple[Border, ...]]:
    """What the outputs say of their nodes' names, and their borders."""
    where = f"{FILE}, outputs"
    outputs = [members(item, ("node", "exit"), where) for item in array(data, where)]
    return [node for node, _ in outputs], tuple(_read_border(exit, where) for _, exit in outputs)


def _read_border(data: object, where: str) -> Border:
    dtype, memory_format = members(data, ("dtype", "memory_format"), where)
    return Border(named(dtype, DTYPES, where), named(memory_format, MEMORY_FORMATS, where))
