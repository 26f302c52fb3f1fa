"""A program's file to attack, and the proof that what was read from one only computes."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.bundle.program_file import read_program, write_program
from ampopt.ir.program import Program
from tests.helpers import Model, program_of

Data = dict[str, Any]


def _forward(m: Any, x: Tensor) -> Any:
    y = F.gelu(m.conv(x), approximate="tanh")
    pooled, indices = F.max_pool2d(y, 2, return_indices=True)
    halves = torch.split(F.dropout(pooled, 0.5, training=False), [1, 2], dim=1)
    back = F.max_unpool2d(pooled, indices, [2, 2])
    ramp = torch.arange(4, dtype=torch.float64, device=x.device) * 0.25
    return torch.cat([halves[1], halves[0]], 1), back.to(torch.float16), torch.add(y, m.shift, alpha=2), ramp


def sample_program() -> Program:
    """A program with every kind of node and argument in it."""
    torch.manual_seed(0)
    model = Model(_forward, conv=nn.Conv2d(2, 3, 3, padding=1), shift=torch.tensor(0.5))
    return program_of(model, torch.randn(1, 2, 4, 4))


def written_sample(program: Program) -> tuple[Data, dict[str, Tensor]]:
    """Its file, as it comes out of JSON, and its tensors."""
    data, tensors = write_program(program)
    return json.loads(json.dumps(data)), tensors


def read(data: object, tensors: dict[str, Tensor], program: Program) -> Program:
    """What a file gives, with the examples of `program`."""
    return read_program(data, tensors, program.examples, device=torch.device("cpu"))


def check_code(module: torch.fx.GraphModule) -> None:
    """Assert that the generated code only calls ATen operators, takes items, and reads own attributes."""
    tree = ast.parse(module.code.strip())
    assert len(tree.body) == 1
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    for statement in function.body:
        assert isinstance(statement, (ast.Assign, ast.Return)), ast.unparse(statement)
    for node in ast.walk(function):
        assert not isinstance(node, (ast.Lambda, ast.Import, ast.ImportFrom, ast.JoinedStr)), ast.dump(node)
        if isinstance(node, ast.Call):
            assert re.fullmatch(r"torch\.ops\.aten\.\w+\.\w+|device", ast.unparse(node.func)), ast.dump(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id in ("self", "torch"), ast.unparse(node)


def call_of(data: Data, operator: str) -> Data:
    """The first call of an operator."""
    found: Data = next(node for node in data["nodes"] if operator in node.get("operator", ""))
    return found
