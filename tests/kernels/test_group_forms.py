"""The forms of a grouped convolution: which there are, what their weights are, and how they are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.ir.program import Program
from ampopt.kernels import group_forms
from ampopt.kernels.group_forms import AS_IS, Form, GroupedConv, forms_for, measure_forms, merge_groups
from ampopt.measure.sampling import Measurement, Sampler
from tests.helpers import program_of


def _grouped(groups: int, per_group: int = 8) -> GroupedConv:
    width = groups * per_group
    pair = (1, 1)
    return GroupedConv(
        (1, width, 8, 8), (width, per_group, 3, 3), pair, pair, pair, groups, False, torch.float32, False
    )


def test_merged_weights_are_block_diagonal_within_each_merged_group() -> None:
    weight = torch.arange(1.0, 9.0).reshape(4, 2, 1, 1)  # 4 groups of 1 output and 2 inputs
    assert merge_groups(weight, 4, 2).squeeze().tolist() == [
        [1, 2, 0, 0],
        [0, 0, 3, 4],
        [5, 6, 0, 0],
        [0, 0, 7, 8],
    ]
    assert torch.equal(merge_groups(weight, 4, 4).squeeze(), torch.block_diag(*weight.squeeze().unsqueeze(1)))
    assert torch.equal(merge_groups(weight, 4, 1), weight)


def test_merged_weights_keep_several_outputs_of_a_group_together() -> None:
    weight = torch.arange(1.0, 9.0).reshape(4, 1, 2, 1)  # 2 groups of 2 outputs and 1 input, kernel 2 x 1
    merged = merge_groups(weight, 2, 2)
    assert torch.equal(merged[:2, 0], weight[:2, 0])
    assert torch.equal(merged[2:, 1], weight[2:, 0])
    assert merged[:2, 1].abs().sum() == merged[2:, 0].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_merged_weights_keep_dtype_and_bits(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 2, 3, 3).to(dtype)
    merged = merge_groups(weight, 3, 3)
    assert merged.dtype is dtype
    assert torch.equal(merged[merged != 0].sort().values, weight.flatten().sort().values)


@pytest.mark.parametrize(
    "text", ["merge=1", "merge=16", "split", "merge=4@other-layout", "split@other-layout"]
)
def test_a_form_is_what_its_text_says(text: str) -> None:
    assert str(Form.parse(text)) == text


def _merges(forms: Sequence[Form]) -> list[int]:
    return [form.merge for form in forms if not form.split and not form.other_layout]


def test_merges_stop_at_64_channels_a_group_or_where_they_no_longer_divide() -> None:
    assert _merges(forms_for(_grouped(8, per_group=8))) == [1, 2, 4, 8]
    assert _merges(forms_for(_grouped(32, per_group=32))) == [1, 2, 32]
    assert _merges(forms_for(_grouped(6, per_group=1))) == [1, 2, 6]


def test_the_dense_form_is_left_out_where_it_needs_over_64_times_the_arithmetic() -> None:
    assert 64 in _merges(forms_for(_grouped(64, per_group=1)))
    assert 128 not in _merges(forms_for(_grouped(128, per_group=1)))


def test_only_few_groups_are_split_and_every_form_comes_in_both_layouts() -> None:
    assert Form(split=True) in forms_for(_grouped(8))
    assert Form(split=True) not in forms_for(_grouped(16))
    forms = forms_for(_grouped(8))
    assert {form for form in forms if form.other_layout} == {
        Form(form.merge, form.split, other_layout=True) for form in forms if not form.other_layout
    }


def _tensor_core_hint(conv: GroupedConv, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return conv.tensor_core_hint(torch.device("cuda"))


@pytest.mark.parametrize(
    ("per_group", "dtype", "capability", "hint"),
    [
        (8, torch.float16, (6, 1), "this GPU has no Tensor Cores"),
        (8, torch.float32, (8, 0), "misses Tensor Cores: float32 (16 bits would be needed)"),
        (4, torch.float16, (8, 0), "misses Tensor Cores: 4 in and 4 out a group, no multiples of 8"),
        (8, torch.bfloat16, (9, 0), "can use Tensor Cores"),
    ],
)
def test_the_hint_says_whether_tensor_cores_can_be_used(
    per_group: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conv = dataclasses.replace(_grouped(4, per_group), dtype=dtype)
    assert _tensor_core_hint(conv, capability, monkeypatch) == hint


def test_without_a_gpu_there_are_no_tensor_cores() -> None:
    assert _grouped(4).tensor_core_hint(torch.device("cpu")) == "no Tensor Cores on this device"


def test_a_convolution_is_told_by_what_decides_its_speed() -> None:
    assert str(_grouped(4)) == "groups=4, 8 channels a group, input 1x32x8x8"
    assert str(_grouped(4, per_group=1)) == "depthwise, 1 channel a group, input 1x4x8x8"
    formats = (torch.contiguous_format, torch.channels_last)
    conv = _grouped(4)
    assert (conv.format, conv.other_format) == formats
    conv = dataclasses.replace(conv, channels_last=True)
    assert (conv.other_format, conv.format) == formats


@pytest.fixture
def program() -> Program:
    return program_of(nn.ReLU(), torch.ones(1))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What each form that is timed computes."""
    found: list[Tensor] = []

    def once(samplers: Mapping[str, Sampler], **_: object) -> dict[str, Measurement]:
        return {name: Measurement((sampler(),)) for name, sampler in samplers.items()}

    def sampler(run: Any, device: torch.device) -> Sampler:
        found.append(run())
        return lambda: float(len(found))

    monkeypatch.setattr(group_forms, "interleave", once)
    monkeypatch.setattr(group_forms, "latency", sampler)
    return found


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_all_that_is_timed_computes_the_same_convolution_in_the_programs_format(
    channels_last: bool, has_bias: bool, timed: list[Tensor], program: Program
) -> None:
    conv = dataclasses.replace(
        _grouped(4), stride=(2, 1), padding=(1, 2), channels_last=channels_last, has_bias=has_bias
    )
    forms = forms_for(conv)
    assert [form for form, _ in measure_forms(conv, forms, program)] == forms
    assert len(timed) == len(forms)
    for output in timed:
        assert torch.allclose(output, timed[0], atol=1e-4)
        assert output.is_contiguous(memory_format=conv.format)


def test_each_form_is_given_with_its_median(program: Program) -> None:
    times = dict(measure_forms(_grouped(2, per_group=2), [AS_IS, Form(merge=2)], program, seconds=0.0))
    assert times.keys() == {AS_IS, Form(merge=2)}
    assert min(times.values()) > 0


def test_a_form_that_a_library_refuses_is_left_out(
    program: Program, timed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = group_forms._runner

    def refusing(conv: GroupedConv, form: Form, device: torch.device) -> Any:
        def fail() -> Tensor:
            raise RuntimeError("no kernel for that")

        return fail if form.split else runner(conv, form, device)

    monkeypatch.setattr(group_forms, "_runner", refusing)
    forms = [AS_IS, Form(split=True), Form(merge=4)]
    assert [form for form, _ in measure_forms(_grouped(4), forms, program)] == [AS_IS, Form(merge=4)]


def test_one_that_cannot_run_as_it_is_is_an_error(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Tensor:
        raise RuntimeError("no kernel for that")

    monkeypatch.setattr(group_forms, "_runner", lambda *_: fail)
    with pytest.raises(RuntimeError, match="no kernel for that"):
        measure_forms(_grouped(4), [AS_IS], program)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_on_a_gpu_every_form_is_timed(channels_last: bool) -> None:
    program = program_of(nn.ReLU().cuda(), torch.ones(1, device="cuda"))
    conv = dataclasses.replace(_grouped(4), dtype=torch.float16, channels_last=channels_last)
    times = dict(measure_forms(conv, forms_for(conv), program, seconds=0.02))
    assert AS_IS in times
    assert all(0 < seconds < 1 for seconds in times.values())
