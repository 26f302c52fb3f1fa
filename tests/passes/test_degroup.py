"""degroup: every form of a grouped convolution is the same convolution; the fastest is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.graph import arguments, aten, calls
from ampopt.ir.program import Program
from ampopt.kernels.group_forms import AS_IS, Form, GroupedConv, forms_for, merge_groups
from ampopt.passes import BakeAutocast, ChannelsLast, Degroup
from tests.helpers import (
    BF16,
    FP16,
    Model,
    check_pass,
    error_of,
    largest_error,
    program_of,
    targets_of,
    text_of,
)


def _choose(*forms: str) -> Degroup:
    names = ["conv2d", *[f"conv2d_{i}" for i in range(1, len(forms))]]
    return Degroup(choices=tuple(zip(names, forms, strict=True)))


def _pretend(monkeypatch: pytest.MonkeyPatch, times: dict[Form, float]) -> list[GroupedConv]:
    """Let every form take the given time; return the list of what is measured from now on."""
    measured: list[GroupedConv] = []

    def measure(conv: GroupedConv, forms: list[Form], program: Program) -> list[tuple[Form, float]]:
        measured.append(conv)
        return [(Form.parse(str(form)), times.get(form, 1.0)) for form in forms]

    monkeypatch.setattr("ampopt.passes.degroup.measure_forms", measure)
    return measured


LAYERS: dict[str, Callable[[], nn.Conv2d]] = {
    "two groups": lambda: nn.Conv2d(8, 12, 3, groups=2),
    "four groups, strided": lambda: nn.Conv2d(8, 8, (3, 2), stride=2, padding=1, groups=4, bias=False),
    "depthwise, dilated": lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8),
    "depthwise with a multiplier": lambda: nn.Conv2d(4, 8, 3, groups=4),
}


def _forms(layer: nn.Conv2d) -> list[Form]:
    weight = tuple(layer.weight.shape)
    pair = (1, 1)
    conv = GroupedConv((1, 8, 8, 8), weight, pair, pair, pair, layer.groups, True, torch.float32, False)
    return [form for form in forms_for(conv) if form != AS_IS]


CASES = [(name, form) for name, build in LAYERS.items() for form in _forms(build())]


@pytest.mark.parametrize(("name", "form"), CASES, ids=lambda value: str(value))
def test_every_form_computes_the_same_convolution(name: str, form: Form) -> None:
    layer = LAYERS[name]()
    x, elsewhere = torch.randn(2, layer.in_channels, 8, 9), [torch.randn(1, layer.in_channels, 11, 6)]
    result = check_pass(_choose(str(form)), layer, x, rewrites=1, elsewhere=elsewhere)
    assert result.replay == _choose(str(form))


@pytest.mark.parametrize(
    "form", ["merge=2", "merge=4", "split", "merge=1@other-layout", "split@other-layout"]
)
def test_forms_hold_in_a_baked_channels_last_program(form: str) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 4, 1))
    before = [BakeAutocast(), ChannelsLast()]
    check_pass(_choose(form), model, torch.randn(2, 8, 8, 8), rewrites=1, lane=BF16, on_top_of=before)


def test_merging_leaves_one_convolution_with_fewer_groups() -> None:
    result = check_pass(_choose("merge=2"), nn.Conv2d(8, 8, 3, groups=4), torch.randn(1, 8, 6, 6), rewrites=1)
    (line,) = text_of(result.program).splitlines()
    assert line.endswith("[1, 1], [0, 0], [1, 1], 2)")
    assert sorted(tuple(weight.shape) for weight in result.program.graph.buffers()) == [(8,), (8, 4, 3, 3)]


def test_splitting_makes_one_convolution_for_each_group() -> None:
    result = check_pass(_choose("split"), nn.Conv2d(8, 6, 3, groups=2), torch.randn(1, 8, 6, 6), rewrites=1)
    assert targets_of(result.program) == [
        aten.slice.Tensor,
        aten.conv2d.default,
        aten.slice.Tensor,
        aten.conv2d.default,
        aten.cat.default,
    ]


def test_the_other_layout_is_entered_and_left_around_the_convolution() -> None:
    step = _choose("merge=1@other-layout")
    model, x = nn.Conv2d(8, 8, 3, groups=4), torch.randn(1, 8, 6, 6)
    result = check_pass(step, model, x, rewrites=1)
    first, _, last = text_of(result.program).splitlines()
    assert "memory_format=torch.channels_last" in first
    assert "memory_format=torch.contiguous_format" in last
    result = check_pass(step, model, x, rewrites=1, on_top_of=[ChannelsLast()])
    first, _, last = text_of(result.program).splitlines()
    assert "memory_format=torch.contiguous_format" in first
    assert "memory_format=torch.channels_last" in last


def test_only_the_chosen_convolutions_are_rewritten() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4))
    step = Degroup(choices=(("conv2d_2", "merge=4"),))
    result = check_pass(step, model, torch.randn(1, 4, 8, 8), rewrites=1, elsewhere=[torch.randn(2, 4, 7, 9)])
    first, dense, last = [arguments(node)["groups"] for node in calls(result.program.graph)]
    assert (first, dense, last) == (2, 1, 1)


def test_a_choice_to_leave_it_as_it_is_changes_nothing() -> None:
    check_pass(_choose("merge=1"), nn.Conv2d(4, 4, 3, groups=4), torch.randn(1, 4, 6, 6), rewrites=0)


def test_a_replay_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _pretend(monkeypatch, {})
    check_pass(_choose("split"), nn.Conv2d(4, 4, 3, groups=2), torch.randn(1, 4, 6, 6), rewrites=1)
    assert measured == []


def test_the_fastest_form_is_taken_and_written_into_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _pretend(monkeypatch, {Form(merge=2): 0.5, Form(split=True): 0.8})
    model, elsewhere = nn.Conv2d(8, 8, 3, groups=4), [torch.randn(2, 8, 9, 7)]
    result = check_pass(Degroup(), model, torch.randn(1, 8, 6, 6), rewrites=1, elsewhere=elsewhere)
    assert result.replay == _choose("merge=2")
    assert len(measured) == 1
    (hint,) = result.hints
    assert hint.startswith(
        "conv2d (groups=4, 2 channels a group, input 1x8x6x6): no Tensor Cores on this device"
    )


def test_equal_convolutions_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _pretend(monkeypatch, {Form(merge=2): 0.5})
    layers = [nn.Conv2d(4, 4, 3, padding=1, groups=2) for _ in range(3)]
    other = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
    result = check_pass(Degroup(), nn.Sequential(*layers, other), torch.randn(1, 4, 6, 6), rewrites=4)
    assert len(measured) == 2
    assert len(result.hints) == 4


def test_measuring_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _pretend(monkeypatch, {Form(merge=2): 0.5})
    monkeypatch.setattr("ampopt.passes.degroup.MEASURING_S", -1.0)
    result = check_pass(Degroup(), nn.Conv2d(4, 4, 3, groups=2), torch.randn(1, 4, 6, 6), rewrites=0)
    assert measured == []
    assert [d.reason for d in result.declined] == ["the time for measurements was spent"]


@pytest.mark.parametrize("form", ["merge=4", "merge=12"])
def test_a_choice_that_does_not_divide_the_groups_is_left_alone(form: str) -> None:
    """As where a replay finds another convolution by the name."""
    model, x = nn.Conv2d(6, 6, 3, groups=6), torch.randn(1, 6, 6, 6)
    result = check_pass(_choose(form), model, x, rewrites=0)
    assert [d.reason for d in result.declined] == [f"{form} does not divide its 6 groups"]


def test_a_gain_below_the_least_is_no_reason_to_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, {Form(merge=2): 0.9})
    model, x = nn.Conv2d(4, 4, 3, groups=2), torch.randn(1, 4, 6, 6)
    check_pass(Degroup(least_gain=1.1), model, x, rewrites=1)
    result = check_pass(Degroup(least_gain=1.2), model, x, rewrites=0)
    assert [(d.node, d.reason) for d in result.declined] == [
        ("conv2d", "fastest form merge=2 900000.0 µs, as is 1000000.0 µs")
    ]


def test_where_the_form_that_is_there_is_the_fastest_it_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, {AS_IS: 0.5})
    for least_gain in (1.03, 1.0):
        step = Degroup(least_gain=least_gain)
        result = check_pass(step, nn.Conv2d(4, 4, 3, groups=2), torch.randn(1, 4, 6, 6), rewrites=0)
        assert [d.reason for d in result.declined] == ["fastest form merge=1 500000.0 µs, as is 500000.0 µs"]


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        pytest.param(
            Model(lambda m, x: F.conv2d(x, m.w.sigmoid(), groups=2), w=torch.randn(4, 2, 3, 3)),
            (1, 4, 6, 6),
            "its weight is computed",
            id="computed weight",
        ),
        pytest.param(
            Model(lambda m, x: F.conv2d(x, m.w, x.mean((0, 2, 3)), groups=2), w=torch.randn(4, 2, 3, 3)),
            (1, 4, 6, 6),
            "its bias is computed",
            id="computed bias",
        ),
        pytest.param(
            nn.Conv2d(4, 4, 3, groups=2), (4, 6, 6), "its input has no batch", id="input without a batch"
        ),
    ],
)
@pytest.mark.parametrize("step", [Degroup(), _choose("merge=2")], ids=["measured", "replayed"])
def test_it_declines(step: Degroup, model: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    result = check_pass(step, model, torch.randn(shape), rewrites=0)
    assert [(d.node, d.reason) for d in result.declined] == [("conv2d", reason)]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv2d(4, 4, 3), (1, 4, 6, 6)),
        (nn.Conv1d(4, 4, 3, groups=4), (1, 4, 6)),
        (nn.ConvTranspose2d(4, 4, 3, groups=2), (1, 4, 6, 6)),
    ],
    ids=["dense", "one-dimensional", "transposed"],
)
def test_other_layers_are_not_looked_at(model: nn.Module, shape: tuple[int, ...]) -> None:
    result = check_pass(Degroup(), model, torch.randn(shape), rewrites=0)
    assert (result.declined, result.hints) == ((), ())


def test_real_measurements_lead_to_a_right_program_and_a_hint() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=4), nn.ReLU())
    x, elsewhere = torch.randn(1, 8, 12, 12), torch.randn(2, 8, 9, 9)
    result = Degroup().apply(program_of(model, x))
    assert error_of(result.program, model, [x]) < 2e-6
    (hint,) = result.hints
    assert "fastest form" in hint
    assert result.rewrites + len(result.declined) == 1
    assert (result.replay is not None) == result.modified
    if isinstance(result.replay, Degroup):
        replayed = result.replay.apply(program_of(model, elsewhere))
        assert text_of(replayed.program) == text_of(result.program)
        assert error_of(replayed.program, model, [elsewhere]) < 2e-6


def _merge_into_the_next_block(weight: Tensor, groups: int, merge: int) -> Tensor:
    """A merge that puts each group's weights where its neighbour's belong."""
    return merge_groups(weight, groups, merge).roll(weight.shape[1], 1) if merge > 1 else weight


def test_the_check_catches_a_group_that_is_merged_into_the_wrong_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ampopt.passes.degroup.merge_groups", _merge_into_the_next_block)
    with pytest.raises(AssertionError, match="the error is"):
        check_pass(_choose("merge=2"), nn.Conv2d(4, 4, 3, groups=4), torch.randn(1, 4, 6, 6), rewrites=1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "form", ["merge=2", "merge=4", "split", "merge=1@other-layout", "split@other-layout"]
)
@pytest.mark.parametrize("layout", [[], [ChannelsLast()]], ids=["contiguous", "channels_last"])
def test_on_a_gpu_every_form_is_right_in_half_precision(form: str, layout: list[ChannelsLast]) -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3, groups=4), nn.ReLU()).cuda()
    x, elsewhere = torch.randn(2, 32, 16, 16, device="cuda"), [torch.randn(1, 32, 9, 11, device="cuda")]
    before = [BakeAutocast(), *layout]
    check_pass(_choose(form), model, x, rewrites=1, lane=FP16, on_top_of=before, elsewhere=elsewhere)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 32], ids=["grouped", "depthwise"])
def test_on_a_gpu_forms_are_measured_on_the_devices_clock(groups: int) -> None:
    model = nn.Conv2d(32, 32, 3, padding=1, groups=groups).cuda()
    x = torch.randn(1, 32, 32, 32, device="cuda")
    result = Degroup().apply(program_of(model, x, on_top_of=[BakeAutocast()], lane=FP16))
    assert result.rewrites + len(result.declined) == 1
    assert len(result.hints) == 1
    assert error_of(result.program, model, [x]) < 2.0**-9


class UnpoolingGroups(nn.Module):
    """A grouped convolution whose largest values are put where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as the input."""
        values, places = self.pool(self.conv(x))
        return self.unpool(values, places)  # type: ignore[no-any-return]


def test_where_values_decide_no_groups_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = UnpoolingGroups(), torch.randn(1, 8, 8, 8)
    result = Degroup(choices=(("conv2d", "merge=4"),)).apply(program_of(model, x))
    assert result.rewrites == 0
    assert "may take NaN of a merged group" in result.declined[0].reason
    _pretend(monkeypatch, {Form(merge=2): 0.1, Form(split=True): 0.5})
    split = Degroup().apply(program_of(model, x))
    assert [form for _, form in split.replay.choices] == ["split"]  # type: ignore[union-attr]
    x[0, [0, 2], [1, 2], [1, 3]] = float("nan")  # of two groups, in overlapping windows
    assert torch.equal(split.program.run(x)[0].isnan(), model(x).isnan())


def _warped(y: Tensor) -> Tensor:
    places = y[:, 4:6].permute(0, 2, 3, 1).tanh()
    image = torch.ones(1, 1, 4, 4).cumsum(3)
    return nn.functional.grid_sample(image, places, padding_mode="border", align_corners=False)


@pytest.mark.parametrize("function", [torch.nan_to_num, torch.sign, lambda y: y.nansum(1), _warped])
def test_where_nan_becomes_a_number_no_groups_are_merged(function: Callable[[Tensor], Tensor]) -> None:
    """On a large image the few numbers that would be wrong are too small a share for the verification."""
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=4)
    model, x = Model(lambda m, x: function(m.conv(x)), conv=conv), torch.randn(1, 8, 32, 32)
    x[0, 0, 16, 16] = float("nan")
    result = _choose("merge=4").apply(program_of(model, x))
    assert largest_error(result.program.run(x), [model(x)]) < 1e-5
    assert result.rewrites == 0
    assert "may take NaN of a merged group" in result.declined[0].reason
