"""bake-autocast: the casts that autocast makes, written down."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.errors import PassError
from ampopt.ir.graph import aten, calls, is_constant
from ampopt.ir.lanes import Lane
from ampopt.ir.numerics import relative_error
from ampopt.ir.program import Program
from ampopt.ir.transform import Result
from ampopt.passes import BakeAutocast
from tests.helpers import (
    BF16,
    FP16,
    Model,
    apply_to_untouched,
    check_pass,
    dtypes_of,
    eager_of,
    largest_error,
    program_of,
    spoilt,
    targets_of,
    text_of,
    with_statistics,
)

POLICIES = ["amp", "O1", "O2", "half"]
IMAGE, TOKENS = (2, 3, 12, 12), (2, 5, 16)


class _Attention(nn.Module):
    """Self-attention written out: products, a softmax, a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.mT / 4).softmax(-1)
        return x + self.out(weights @ v)  # type: ignore[no-any-return]


def _model(function: Callable[..., Any], **members: nn.Module | Tensor) -> Callable[[], nn.Module]:
    model = with_statistics(Model(function, **members))
    return lambda: copy.deepcopy(model)


def _conv(cin: int = 3, cout: int = 8) -> nn.Conv2d:
    return nn.Conv2d(cin, cout, 3, padding=1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (
        lambda: with_statistics(
            nn.Sequential(_conv(), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), _conv(8))
        ),
        IMAGE,
    ),
    "transposed": (
        lambda: nn.Sequential(_conv(), nn.ConvTranspose2d(8, 4, 2, 2, groups=2), nn.Sigmoid()),
        IMAGE,
    ),
    "depthwise": (
        lambda: nn.Sequential(_conv(), nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish(), _conv(8)),
        IMAGE,
    ),
    "perceptron": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), TOKENS),
    "dropout": (lambda: nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.ReLU(), nn.Linear(32, 4)), TOKENS),
    "softmax": (lambda: nn.Sequential(nn.Linear(16, 8), nn.Softmax(-1)), TOKENS),
    "log softmax": (lambda: nn.Sequential(nn.Linear(16, 8), nn.LogSoftmax(-1)), TOKENS),
    "layer norm": (lambda: nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 8)), TOKENS),
    "group norm": (lambda: nn.Sequential(_conv(), nn.GroupNorm(2, 8), nn.SiLU(), _conv(8)), IMAGE),
    "attention": (_Attention, TOKENS),
    "multi-head attention": (_model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(16, 4)), TOKENS),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), TOKENS),
    "fused attention": (
        _model(lambda m, x: F.scaled_dot_product_attention(m.q(x), x, x), q=nn.Linear(16, 16)),
        TOKENS,
    ),
    "residual": (_model(lambda m, x: x + m.b(m.a(x).relu()), a=_conv(3, 8), b=_conv(8, 3)), IMAGE),
    "two readers": (_model(lambda m, x: (m.b(y := m.a(x)), y.exp().sum(1)), a=_conv(), b=_conv(8)), IMAGE),
    "input with two readers": (_model(lambda m, x: (m.a(x), x.exp()), a=_conv()), IMAGE),
    "concatenation": (_model(lambda m, x: m.b(torch.cat([m.a(x), x], 1)), a=_conv(), b=_conv(11)), IMAGE),
    "upsampling": (
        _model(
            lambda m, x: m.b(F.interpolate(m.a(x), scale_factor=2, mode="bilinear")), a=_conv(), b=_conv(8)
        ),
        IMAGE,
    ),
    "prelu": (lambda: nn.Sequential(_conv(), nn.PReLU(8), _conv(8)), IMAGE),
    "norm and mean": (
        _model(lambda m, x: (m.a(x).norm(dim=1), m.a(x).mean((2, 3)), m.a(x).std()), a=_conv()),
        IMAGE,
    ),
    "where and mask": (_model(lambda m, x: torch.where(m.a(x) > 0, m.a(x), x.mean()), a=_conv()), IMAGE),
    "integers": (_model(lambda m, x: (m.a(x).argmax(1), m.a(x) > 0), a=_conv()), IMAGE),
    "explicit casts": (
        _model(lambda m, x: m.b(m.a(x).float().relu()).double(), a=_conv(), b=_conv(8)),
        IMAGE,
    ),
    "a weight used twice": (_model(lambda m, x: F.linear(m.a(x), m.a.weight), a=nn.Linear(16, 16)), TOKENS),
    "a weight in arithmetic": (
        _model(lambda m, x: m.a(x) * m.scale + m.a.weight.sum(), a=nn.Linear(16, 16), scale=torch.rand(16)),
        TOKENS,
    ),
    "embedding by position": (
        _model(lambda m, x: m.a(x + m.p[: x.shape[1]]), a=nn.Linear(16, 4), p=torch.randn(9, 16)),
        TOKENS,
    ),
    "einsum": (
        _model(
            lambda m, x: torch.einsum("btc,dc->btd", m.a(x), m.w), a=nn.Linear(16, 16), w=torch.randn(4, 16)
        ),
        TOKENS,
    ),
    "tensordot": (
        _model(lambda m, x: m.a(torch.tensordot(x, m.w, 1)), a=nn.Linear(4, 4), w=torch.randn(16, 4)),
        TOKENS,
    ),
}


@functools.cache
def captured(name: str) -> tuple[nn.Module, Tensor, Program]:
    """A model, its input, and its program, for all tests that leave them as they are."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build().eval(), torch.randn(shape)
    return model, x, program_of(model, x)


def _check_bits(program: Program, wanted: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    assert not program.under_autocast
    for got, want in zip(program.run(*inputs), wanted, strict=True):
        same = torch.equal(got, want.to(got.dtype))
        assert same, f"not what autocast gives: {largest_error([got], [want]):.2g} away"


@pytest.mark.parametrize("lane", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_amp_gives_the_bits_that_autocast_gives(name: str, lane: Lane) -> None:
    model, x, program = captured(name)
    program = lane.start(program)
    baked = apply_to_untouched(BakeAutocast(), program).program
    _check_bits(baked, program.run(x), [x])
    if name != "transformer layer":  # called eagerly it takes a path of its own, which rounds otherwise
        _check_bits(baked, eager_of(model, [x], lane), [x])


@pytest.mark.parametrize("name", ["convolutions", "attention", "two readers", "concatenation", "prelu"])
def test_what_is_baked_is_a_sound_program(name: str) -> None:
    model, x, program = captured(name)
    found = BakeAutocast().apply(BF16.start(program)).rewrites
    elsewhere = [torch.randn(3, *x.shape[1:])]
    check_pass(BakeAutocast(), model, x, rewrites=found, lane=BF16, elsewhere=elsewhere)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_no_cast_of_a_weight_is_left(name: str, policy: str) -> None:
    baked = apply_to_untouched(BakeAutocast(policy), BF16.start(captured(name)[2])).program
    assert not [
        node.name for node in calls(baked.graph, [aten._to_copy.default]) if is_constant(node.args[0])
    ]


def test_the_baked_graph_reads_as_the_original_with_other_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    x = torch.randn(1, 3, 8, 8)
    result = check_pass(BakeAutocast(), model, x, rewrites=4, lane=BF16, elsewhere=[torch.randn(2, 3, 9, 7)])
    assert text_of(result.program).splitlines() == [
        "conv2d = aten.conv2d.default(input_1, p_0_weight_bfloat16, p_0_bias_bfloat16)",
        "relu = aten.relu.default(conv2d)",
        "conv2d_1 = aten.conv2d.default(relu, p_2_weight_bfloat16, p_2_bias_bfloat16)",
    ]
    assert {weight.dtype for weight in result.program.graph.buffers()} == {torch.bfloat16}
    assert [border.dtype for border in result.program.entry] == [torch.bfloat16]
    assert [border.dtype for border in result.program.exit] == [torch.float32]


def test_an_input_that_someone_reads_in_full_precision_is_cast_inside() -> None:
    model = Model(lambda m, x: m.conv(x) + x, conv=nn.Conv2d(3, 3, 1))
    result = check_pass(BakeAutocast(), model, torch.randn(1, 3, 4, 4), rewrites=3, lane=BF16)
    assert [border.dtype for border in result.program.entry] == [torch.float32]
    assert targets_of(result.program) == [aten._to_copy.default, aten.conv2d.default, aten.add.Tensor]


def test_a_result_is_cast_once_for_all_who_want_it_so() -> None:
    model = Model(
        lambda m, x: (m.a(y := x.exp()), m.b(y), y),
        a=nn.Linear(4, 4, bias=False),
        b=nn.Linear(4, 4, bias=False),
    )
    result = check_pass(BakeAutocast(), model, torch.randn(2, 4), rewrites=4, lane=BF16)
    assert targets_of(result.program).count(aten._to_copy.default) == 1


def test_a_recurrent_layer_stays_in_full_precision() -> None:
    model = Model(
        lambda m, x: m.out(m.rnn(m.inp(x))[0]),
        inp=nn.Linear(16, 8),
        rnn=nn.LSTM(8, 8, batch_first=True),
        out=nn.Linear(8, 4),
    )
    for policy in POLICIES:
        program = BakeAutocast(policy).apply(program_of(model, torch.randn(TOKENS), lane=BF16)).program
        dtypes = dtypes_of(program)
        assert dtypes["getitem"] is torch.float32, policy
        assert dtypes["linear"] is dtypes["linear_1"] is torch.bfloat16, policy


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recurrent_layer_whose_weights_are_lower_computes_in_their_dtype(policy: str) -> None:
    """`lerp` takes one dtype alone: its other argument is in the model's."""
    rnn = nn.LSTM(8, 8, batch_first=True)
    model = Model(lambda m, x: torch.lerp(m.rnn(x)[0], x, 0.3), rnn=rnn).bfloat16()
    x = torch.randn(2, 4, 8).bfloat16()
    program = BakeAutocast(policy).apply(program_of(model, x, lane=BF16)).program
    assert dtypes_of(program)["getitem"] is torch.bfloat16
    assert relative_error(program.run(x)[0], model(x)) < 0.05


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cast_of_the_models_own_is_not_doubled(policy: str) -> None:
    model = Model(lambda m, x: m.a((x + 1).bfloat16().float()), a=nn.Linear(4, 4))
    program = BakeAutocast(policy).apply(program_of(model, torch.randn(2, 4), lane=BF16)).program
    assert targets_of(program).count(aten.to.dtype) == 2, text_of(program)
    assert targets_of(program).count(aten._to_copy.default) == 1, text_of(program)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda layer: layer.__name__)
def test_recurrent_models_run_under_every_policy(layer: type[nn.LSTM], policy: str) -> None:
    model = Model(lambda m, x: m.rnn(m.inp(x))[0], inp=nn.Linear(16, 8), rnn=layer(8, 8, 2, batch_first=True))
    x = torch.randn(TOKENS)
    found = BakeAutocast(policy).apply(program_of(model, x, lane=BF16)).rewrites
    check_pass(BakeAutocast(policy), model, x, rewrites=found, lane=BF16, limit=2.0**-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "name", ["convolutions", "attention", "two readers", "concatenation", "prelu", "integers"]
)
def test_every_policy_gives_outputs_in_the_original_dtypes(name: str, policy: str) -> None:
    (model, x, program), step = captured(name), BakeAutocast(policy)
    found = step.apply(BF16.start(program)).rewrites
    check_pass(step, model, x, rewrites=found, lane=BF16, limit=None if name == "integers" else 2.0**-5)


LOW, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("amp", {"conv2d": LOW, "batch_norm": LOW, "relu": LOW, "mean": LOW, "softmax": LOW, "add": FULL}),
        ("O1", {"conv2d": LOW, "batch_norm": LOW, "relu": LOW, "mean": LOW, "softmax": FULL, "add": FULL}),
        ("O2", {"conv2d": LOW, "batch_norm": FULL, "relu": LOW, "mean": LOW, "softmax": LOW, "add": LOW}),
        ("half", {"conv2d": LOW, "batch_norm": LOW, "relu": LOW, "mean": LOW, "softmax": LOW, "add": LOW}),
    ],
)
def test_the_policies_differ_as_documented(policy: str, expected: dict[str, torch.dtype]) -> None:
    model = with_statistics(
        Model(
            lambda m, x: m.norm(m.conv(x)).relu().mean((2, 3)).softmax(1) + x.mean((1, 2, 3))[:, None],
            conv=nn.Conv2d(3, 4, 3),
            norm=nn.BatchNorm2d(4),
        )
    )
    program = BakeAutocast(policy).apply(program_of(model, torch.randn(2, 3, 8, 8), lane=BF16)).program
    dtypes = dtypes_of(program)
    assert {name: dtypes[name] for name in expected} == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_cast_to_the_dtype_that_it_has(policy: str) -> None:
    model = with_statistics(nn.Sequential(_conv(), nn.BatchNorm2d(8), nn.ReLU(), _conv(8), nn.Softmax(1)))
    program = BakeAutocast(policy).apply(program_of(model, torch.randn(IMAGE), lane=BF16)).program
    dtypes = dtypes_of(program)
    casts = calls(program.graph, [aten._to_copy.default])
    assert [cast.name for cast in casts if dtypes[str(cast.args[0])] is dtypes[cast.name]] == []


def test_a_cast_at_the_border_alone_counts() -> None:
    model = Model(lambda m, x: (x @ x).relu())
    result = check_pass(BakeAutocast(), model, torch.randn(4, 4), rewrites=1, lane=BF16)
    assert [border.dtype for border in result.program.entry] == [torch.bfloat16]


def test_a_program_in_which_autocast_casts_nothing_still_leaves_autocast() -> None:
    """Or else no engine would take it."""
    program = program_of(nn.ReLU(), torch.randn(4, 4), lane=BF16)
    result = BakeAutocast().apply(program)
    assert result.modified
    assert not result.program.under_autocast


def test_a_program_that_does_not_run_under_autocast_is_refused() -> None:
    program = program_of(nn.Linear(4, 4), torch.randn(2, 4))
    assert BakeAutocast().why_not(program) == "the lane does not compute in mixed precision"


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PassError, match=r"unknown precision policy 'O3': choose from amp, O1, O2, half"):
        BakeAutocast(policy="O3")


class _DoublesAWeight(BakeAutocast):
    def apply(self, program: Program) -> Result:
        result = super().apply(program)
        name, weight = next(result.program.graph.named_buffers())
        return spoilt(result, lambda module: setattr(module, name, weight * 2))


def test_the_check_catches_a_weight_that_was_cast_wrongly() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(_DoublesAWeight(), model, torch.randn(2, 4), rewrites=2, lane=BF16)


def test_the_check_catches_another_policy_than_autocasts() -> None:
    model, x = (
        Model(lambda m, x: m.conv(x).relu() + x.mean((1, 2, 3), keepdim=True), conv=_conv()),
        torch.randn(IMAGE),
    )
    program = program_of(model, x, lane=BF16)
    with pytest.raises(AssertionError, match="not what autocast gives"):
        _check_bits(BakeAutocast("half").apply(program).program, program.run(x), [x])


@pytest.mark.gpu
@pytest.mark.parametrize("lane", [FP16, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_amp_gives_what_autocast_gives_within_rounding(name: str, lane: Lane) -> None:
    build, shape = MODELS[name]
    model, inputs = build().eval().cuda(), [torch.randn(shape, device="cuda")]
    baked = BakeAutocast().apply(program_of(model, *inputs, lane=lane)).program
    for got, want in zip(baked.run(*inputs), eager_of(model, inputs, lane), strict=True):
        assert largest_error([got], [want.to(got.dtype)]) <= 2 * torch.finfo(lane.dtype).eps


@pytest.mark.gpu
def test_on_a_gpu_a_softmax_is_asked_for_full_precision() -> None:
    model, x = nn.Sequential(nn.Linear(16, 8), nn.Softmax(-1)).cuda(), torch.randn(TOKENS, device="cuda")
    program = program_of(model, x, lane=FP16)
    baked = BakeAutocast().apply(program).program
    assert dtypes_of(baked)["linear"] is torch.float16
    assert dtypes_of(baked)["softmax"] is torch.float32
    _check_bits(baked, program.run(x), [x])


def _normalized_in_fp32(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    with torch.autocast("cpu", enabled=False):
        weights = (y.float() @ y.float().mT).relu()
    out: Tensor = m.last(weights @ y.to(weights.dtype))
    return out


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_model_takes_out_of_autocast_stays_in_fp32(policy: str) -> None:
    make = _model(_normalized_in_fp32, conv=_conv(), last=nn.Conv2d(8, 3, 1))
    program = program_of(make(), torch.randn(IMAGE), lane=BF16)
    baked = BakeAutocast(policy).apply(program).program
    dtypes = dtypes_of(baked)
    first, last = (node for node in calls(baked.graph, [aten.matmul.default]))
    assert dtypes[first.name] is torch.float32
    assert dtypes[last.name] is torch.bfloat16


@pytest.mark.parametrize("policy", ["O2", "half"])
def test_squares_and_spectra_that_the_model_takes_in_fp32_are_right_under_every_policy(policy: str) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = 300.0 * m.linear(x)
        wide = y.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        spectrum = torch.fft.rfft(y.float(), norm="ortho")  # which no CPU has in float16
        return scaled.to(y.dtype), torch.fft.irfft(spectrum * 0.5, norm="ortho")

    model = Model(forward, linear=nn.Linear(16, 16)).eval()
    x = 30.0 * torch.randn(TOKENS)
    program = BakeAutocast(policy=policy).apply(program_of(model, x, lane=FP16)).program
    with torch.no_grad():
        expected = model(x)
    for found, wanted in zip(program.run(x), expected, strict=True):
        assert relative_error(found, wanted) < 2e-3
