"""What an operator computes and moves: FLOP, bytes and parameters, against figures by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ampopt.diagnosis.layers import layers_of
from ampopt.diagnosis.operators import Spent
from ampopt.diagnosis.work import Work, works
from ampopt.ir.lanes import FP32, Lane
from tests.helpers import BF16, Model, program_of
from tests.support.cases import CEILINGS

TABLE = nn.Parameter(torch.ones(1000, 64))
ROWS = torch.arange(8)
ROW_BYTES, INDEX_BYTES = 64 * 4, 8 * 8


def work_of(operator: str, model: nn.Module, *inputs: Tensor, lane: Lane = FP32) -> Work:
    """The work of the only call of an operator."""
    found = works(program_of(model.eval(), *inputs, lane=lane))
    (work,) = (each for each in found.values() if each.operator == operator)
    return work


def reading(function: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """A model that reads a part of a large table."""
    return Model(lambda m, x: function(m.table, x), table=TABLE)


@pytest.mark.parametrize(
    ("operator", "model", "index", "read"),
    [
        ("embedding", nn.Embedding(1000, 64), ROWS, 8 * ROW_BYTES),
        ("embedding", nn.Embedding(4, 64), ROWS % 4, 4 * ROW_BYTES),
        ("index_select", reading(lambda t, i: t.index_select(0, i)), ROWS, 8 * ROW_BYTES),
        ("index", reading(lambda t, i: t[i]), ROWS, 8 * ROW_BYTES),
        ("gather", reading(lambda t, i: t.gather(0, i)), ROWS.reshape(8, 1), 8 * 4),
        ("take", reading(torch.take), ROWS, 8 * 4),
    ],
)
def test_of_a_table_only_what_is_looked_up_is_read(
    operator: str, model: nn.Module, index: Tensor, read: int
) -> None:
    found = work_of(operator, model, index)
    written = 8 * ROW_BYTES if operator not in ("gather", "take") else 8 * 4
    assert found.moved == read + INDEX_BYTES + written
    assert found.parameters == sum(weight.numel() for weight in model.parameters())


def test_a_bag_of_embeddings_reads_its_rows() -> None:
    found = work_of("embedding_bag", nn.EmbeddingBag(1000, 64), ROWS[None])
    assert 8 * ROW_BYTES + ROW_BYTES < found.moved < 10 * ROW_BYTES


def _written(x: Tensor, at: Any) -> Tensor:
    made = torch.zeros(1000, 64)
    made[at] = x
    return made


@pytest.mark.parametrize(
    ("operator", "function", "moved"),
    [
        ("add", lambda x: x[:8] + 1, 2 * 8 * ROW_BYTES),
        ("add", lambda x: x[:1].expand(1000, 64) + 1, 1001 * ROW_BYTES),
        ("add", lambda x: x[0].unfold(0, 4, 1) + 1, ROW_BYTES + 61 * 4 * 4),
        ("add", lambda x: x + x, 2 * 1000 * ROW_BYTES),
        ("cat", lambda x: torch.cat([x[:8], x[8:16]]), 2 * 16 * ROW_BYTES),
        ("matmul", lambda x: x[:64] @ x[:64].t(), 2 * 64 * ROW_BYTES),
        ("zeros_like", torch.zeros_like, 1000 * ROW_BYTES),
        ("copy", lambda x: _written(x[:8], slice(8, 16)), 2 * 8 * ROW_BYTES),
        ("slice_scatter", lambda x: _written(x[:8], slice(8, 16)), (2 * 1000 + 8) * ROW_BYTES),
        ("index_put", lambda x: _written(x[:8], ROWS), (2 * 1000 + 8) * ROW_BYTES + INDEX_BYTES),
        ("slice", lambda x: x[:8] + 1, 0),
    ],
)
def test_views_move_what_lies_in_them(
    operator: str, function: Callable[[Tensor], Tensor], moved: int
) -> None:
    assert work_of(operator, Model(lambda m, x: function(x)), torch.randn(1000, 64)).moved == moved


class Mixed(nn.Module):
    """Reads FP32 weights and an FP32 mask in any lane, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 1, bias=False)
        self.register_buffer("mask", torch.rand(1, 16, 8, 8))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return (self.conv(x).relu() + self.mask)[rows]  # type: ignore[no-any-return]


def test_a_lane_moves_bytes_of_its_own_dtypes_and_every_figure_is_of_them() -> None:
    given, elements = (torch.randn(2, 16, 8, 8), torch.tensor([1, 0, 1])), 2 * 16 * 8 * 8
    model = Mixed().eval()
    found = {lane.name: works(program_of(model, *given, lane=lane)) for lane in (FP32, BF16)}
    moved = {work.operator: work.moved for work in found[BF16.name].values()}
    assert moved["conv2d"] == 4 * (elements + 256) + 2 * elements
    assert moved["relu"] == 2 * 2 * elements
    assert moved["add"] == 2 * elements + 4 * elements // 2 + 4 * elements
    assert moved["index"] == 3 * 8 + 2 * 4 * 3 * elements // 2 - 4 * elements // 2
    assert next(w for w in found["fp32"].values() if w.operator == "relu").moved == 2 * 4 * elements
    spent = {lane: {name: Spent(1e-6) for name in done} for lane, done in found.items()}
    dtypes = {FP32.name: FP32.dtype, BF16.name: BF16.dtype}
    for layer in layers_of(found, spent, dtypes, CEILINGS):
        for lane, told in layer.to_dict()["lanes"].items():
            assert told["moved"] == found[lane][layer.name].moved
            assert told["gb_s"] == round(told["moved"] / 1e-6 / 1e9, 3)
            if told["bound_by"] == "memory":
                reached = told["moved"] / CEILINGS.bandwidth / 1e-6
                assert told["of_ceiling"] == round(min(reached, 1.0), 4)


def test_a_program_of_another_dtype_moves_less_of_what_is_fp32() -> None:
    found = work_of("index", Model(lambda m, x, i: x[i]), torch.randn(100, 8), ROWS)
    assert found.moved == 2 * 8 * 32 + INDEX_BYTES
    assert found.moved_in(torch.float16) == 8 * 32 + INDEX_BYTES


ENDS = torch.tensor([16, 32], dtype=torch.int32)
"""Where each of two groups ends."""

Q, K = torch.randn(2, 4, 128, 64), torch.randn(2, 2, 32, 64)


@pytest.mark.parametrize(
    ("operator", "model", "inputs", "madds"),
    [
        ("lstm", nn.LSTM(64, 32), (torch.randn(50, 2, 64),), 100 * 4 * 32 * (64 + 32)),
        ("lstm", nn.LSTM(64, 32, batch_first=True), (torch.randn(2, 50, 64),), 100 * 4 * 32 * (64 + 32)),
        ("lstm", nn.LSTM(64, 32), (torch.randn(50, 64),), 50 * 4 * 32 * (64 + 32)),
        (
            "lstm",
            nn.LSTM(8, 16, 2, bidirectional=True, proj_size=4),
            (torch.randn(5, 2, 8),),
            10 * 2 * 2 * (4 * 16 * (8 + 4) + 4 * 16),
        ),
        (
            "lstm",
            nn.LSTM(8, 16, 2, bidirectional=True, bias=False),
            (torch.randn(5, 2, 8),),
            10 * 2 * 4 * 16 * ((8 + 16) + (32 + 16)),
        ),
        ("gru", nn.GRU(64, 32), (torch.randn(50, 2, 64),), 100 * 3 * 32 * (64 + 32)),
        ("rnn_tanh", nn.RNN(64, 32), (torch.randn(50, 2, 64),), 100 * 32 * (64 + 32)),
        ("rnn_relu", nn.RNN(64, 32, nonlinearity="relu"), (torch.randn(5, 2, 64),), 10 * 32 * (64 + 32)),
        (
            "scaled_dot_product_attention",
            Model(lambda m, q: F.scaled_dot_product_attention(q, q, q)),
            (Q,),
            2 * 2 * 4 * 128 * 128 * 64,
        ),
        (
            "scaled_dot_product_attention",
            Model(lambda m, q, k: F.scaled_dot_product_attention(q, k, k[..., :16], enable_gqa=True)),
            (Q, K),
            2 * 4 * 128 * 32 * (64 + 16),
        ),
        ("matmul", Model(lambda m, x, w: w @ x), (torch.randn(64), torch.randn(32, 64)), 32 * 64),
        ("matmul", Model(lambda m, x: x @ x), (torch.randn(64),), 64),
        ("mv", Model(lambda m, x, w: torch.mv(w, x)), (torch.randn(64), torch.randn(32, 64)), 32 * 64),
        ("dot", Model(lambda m, x: torch.dot(x, x)), (torch.randn(64),), 64),
        ("inner", Model(lambda m, x: torch.inner(x, x)), (torch.randn(64),), 64),
        (
            "inner",
            Model(lambda m, x, y: torch.inner(x, y)),
            (torch.randn(7, 5), torch.randn(3, 5)),
            7 * 3 * 5,
        ),
        (
            "linalg_vecdot",
            Model(lambda m, x, y: torch.linalg.vecdot(x, y)),
            (torch.randn(7, 5), torch.randn(5)),
            7 * 5,
        ),
        (
            "addbmm",
            Model(lambda m, y, a, b: torch.addbmm(y, a, b)),
            (torch.randn(7, 9), torch.randn(8, 7, 5), torch.randn(8, 5, 9)),
            8 * 7 * 5 * 9,
        ),
        (
            "_int_mm",
            Model(lambda m, x: torch._int_mm(x, x)),
            (torch.ones(32, 32, dtype=torch.int8),),
            32**3,
        ),
        (
            "_grouped_mm",
            Model(lambda m, x, w: F.grouped_mm(x, w, offs=m.ends), ends=ENDS),
            (torch.randn(32, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()),
            32 * 16 * 8,
        ),
        (
            "_grouped_mm",
            Model(lambda m, x: F.grouped_mm(x, x, offs=m.ends), ends=ENDS),
            (torch.randn(32, 32).bfloat16(),),
            32**3,
        ),
        (
            "conv_tbc",
            Model(lambda m, x, w: torch.conv_tbc(x, w, w[0, 0])),
            (torch.randn(10, 2, 4), torch.randn(3, 4, 5)),
            8 * 2 * 5 * 3 * 4,
        ),
        ("bilinear", nn.Bilinear(8, 6, 4), (torch.randn(2, 8), torch.randn(2, 6)), 2 * 4 * 8 * 6),
    ],
)
def test_operators_that_pytorchs_counter_does_not_know_have_their_products(
    operator: str, model: nn.Module, inputs: tuple[Tensor, ...], madds: int
) -> None:
    assert work_of(operator, model, *inputs).madds == madds


@pytest.mark.parametrize(
    ("operator", "model", "inputs"),
    [
        ("matmul", Model(lambda m, x: x @ x.transpose(-1, -2)), (Q,)),
        ("matmul", Model(lambda m, x: x @ x[0, 0].t()), (Q,)),
        ("gru", nn.GRU(8, 16, 2, bidirectional=True), (torch.randn(5, 2, 8),)),
        ("rnn_tanh", nn.RNN(8, 16, 2), (torch.randn(5, 2, 8),)),
    ],
)
def test_where_both_count_they_agree(operator: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(*inputs)
    assert work_of(operator, model, *inputs).flops == counter.get_total_flops()


class Shared(nn.Module):
    """Two layers with one weight, a layer that is called twice, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.other.weight = self.one.weight
        self.register_buffer("mask", torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.other(self.one(self.norm(x)))) * self.mask  # type: ignore[no-any-return]


def test_parameters_are_those_of_the_model_once_and_no_buffers() -> None:
    model = Shared().eval()
    found = works(program_of(model, torch.randn(4, 8))).values()
    assert sum(work.parameters for work in found) == sum(weight.numel() for weight in model.parameters())
    assert [work.parameters for work in found if work.operator == "linear"] == [72, 8, 0]
    assert [work.parameters for work in found if work.operator in ("batch_norm", "mul")] == [16, 0]
