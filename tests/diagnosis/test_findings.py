"""Findings about AMP, overflows, cold calls; their ranking, the verdict, and how they are told."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.diagnosis.case import Case
from ampopt.diagnosis.ceilings import Ceilings
from ampopt.diagnosis.finding import Counterfactual, Finding, milliseconds, ranked
from ampopt.diagnosis.findings import FINDINGS, cold_calls, cpu_threads, mixed_precision, overflow, redundant
from ampopt.diagnosis.findings.input_device import moved_along
from ampopt.diagnosis.findings.memory_layout import is_permute
from ampopt.diagnosis.operators import Kernel, Spent
from ampopt.diagnosis.verdict import verdict, where_time_goes
from ampopt.errors import InputError
from ampopt.measure.sampling import Measurement, gain
from tests.helpers import FP16, Model, several_kinds
from tests.support.cases import case_of, every_remedy_helps, fp32_only, taking
from tests.support.lanes import Remembering

X = torch.randn(2, 3, 12, 12)


def test_amp_that_pays_is_the_remedy_of_fp32() -> None:
    (found,) = mixed_precision.find(case_of(several_kinds(), X, latency_ms={"fp32": 10, "amp": 5}))
    assert (found.name, found.lane) == ("amp-pays", "fp32")
    assert found.share == pytest.approx(0.5)
    assert found.says.startswith("AMP is 2.00x faster: ")
    assert str(found.counterfactual) == "in AMP, a call takes 5 ms instead of 10 (2.00x, 2.00 to 2.00)"


def test_amp_that_harms_has_the_reasons_that_were_measured() -> None:
    case = case_of(several_kinds(), X, latency_ms={"fp32": 5, "amp": 10})
    case.ceilings = Ceilings(1e10, {"fp32": 1e11, "bfloat16": 1e10}, 1e-6)
    (found,) = mixed_precision.find(case)
    assert found.name == "amp-harmful"
    assert "AMP is 2.00x slower than FP32: this device reaches 0.01 TFLOP/s in bfloat16" in found.says
    assert found.counterfactual is not None
    assert found.counterfactual.change == "in FP32"


def test_operators_that_are_slower_themselves_are_told_and_plain_convolutions_are_not_depthwise() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    case = case_of(model, X, latency_ms={"fp32": 5, "amp": 10})
    slow = Spent(3e-3, (Kernel("implicit_convolve_sgemm", 2e-3),), 1, 1e-3)
    case.layers = tuple(
        dataclasses.replace(layer, spent={**layer.spent, "amp": slow}) if layer.name == "conv2d" else layer
        for layer in case.layers
    )
    says = "; ".join(mixed_precision.why_amp_gains_little(case, case.lanes["amp"]))
    assert "without casts its operators take 3 ms for 2, the worst conv2d (0)" in says
    assert "2 for 1, by implicit_convolve_sgemm" in says
    assert "depthwise" not in says
    deep = case_of(nn.Sequential(nn.Conv2d(3, 3, 3, groups=3)), X)
    assert "100% of the time is in depthwise" in "; ".join(
        mixed_precision.why_amp_gains_little(deep, deep.lanes["amp"])
    )


def test_inputs_move_along_with_the_model_and_only_those_that_were_left_stay() -> None:
    model, meta = nn.Linear(4, 4), torch.device("meta")
    (moved, left), named = moved_along(
        model, (torch.ones(2, 4), torch.ones(3, device=meta)), {"x": torch.ones(1)}, meta
    )
    assert moved.device == left.device == named["x"].device == meta
    (stays,), _ = moved_along(model.to(meta), (torch.ones(2, 4),), {}, meta)
    assert stays.device.type == "cpu"


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.63e-4, "0.263"), (0.0439, "43.9"), (0.99951, "1000"), (1.32, "1320")]
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_amp_that_is_too_slow_to_sample() -> None:
    case = fp32_only(case_of(several_kinds(), X))
    case.lanes["amp"], case.too_slow["amp"] = FP16, 0.2
    (found,) = mixed_precision.find(case)
    assert found.says.startswith("AMP takes over 20 times as long as FP32")


def test_the_layer_that_overflows_is_named() -> None:
    model = Model(lambda m, x: m.second(m.first(x) * 1e5), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    case = case_of(model.eval(), torch.ones(2, 4))
    case.lanes["amp"] = FP16
    (found,) = overflow.find(case)
    assert found.is_fault
    assert found.lane == "amp"
    assert "float16 holds 65,504" in found.says
    assert case.accuracy.keys() == {"fp32", "amp"}


def test_no_time_for_errors_is_a_note() -> None:
    case = case_of(several_kinds(), X)
    case.budget = dataclasses.replace(case.budget, seconds=-9.0)
    assert not list(overflow.find(case))
    assert case.untried == [f"errors by layer in the {lane} lane" for lane in ("amp", "fp32")]


class Untried(nn.Module):
    """Has something for every finding that is executed on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 9, 3), nn.BatchNorm2d(9), nn.Dropout(0.5)
        self.groups, self.scale = nn.Conv2d(9, 9, 3, groups=9), nn.Parameter(torch.ones(9, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.groups(self.drop(self.norm(self.conv(x)))) * (self.scale * 2)  # type: ignore[no-any-return]


NOTHING_TO_EXECUTE = {
    *("graph_break", "host_reads", "mixed_precision", "no_numbers", "launch_bound", "tf32", "page_faults"),
}
"""Findings without a remedy that is executed here: a graph on a CPU, that was measured before."""


@pytest.mark.parametrize("find", FINDINGS, ids=lambda find: find.__module__.rpartition(".")[2])
def test_whatever_a_finding_has_no_time_for_is_noted_and_not_run(
    find: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("it was executed")

    monkeypatch.setattr(Case, "counterfactual", refuse)
    monkeypatch.setattr(cold_calls, "latency", refuse)
    monkeypatch.setattr(cpu_threads, "usable_cpus", lambda: set(range(4 * torch.get_num_threads())))
    case = case_of(Untried().eval(), X, spent=lambda name: Spent(1e-3, casts=1))
    elsewhere: Any = ((torch.empty(1, device="meta"),), {})
    budget = dataclasses.replace(case.budget, seconds=-9.0)
    case = dataclasses.replace(case, model=Untried().train(), given=elsewhere, budget=budget)
    for _ in find(case):
        pass
    name = find.__module__.rpartition(".")[2]
    assert bool(case.untried) is (name not in NOTHING_TO_EXECUTE)
    assert len(set(case.untried)) == len(case.untried)


def test_a_first_call_that_was_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(several_kinds(), X)
    case.first_call_s, case.budget = 1.0, dataclasses.replace(case.budget, seconds=-9.0)
    (found,) = cold_calls.find(case)
    assert "the first call took 1000 ms, 100 times a later one" in found.says


def test_a_first_call_of_less_than_a_millisecond_has_its_time() -> None:
    case = case_of(several_kinds(), X, latency_ms={"fp32": 0.02})
    case.first_call_s, case.budget = 1.6e-4, dataclasses.replace(case.budget, seconds=-9.0)
    (found,) = cold_calls.find(case)
    assert "the first call took 0.16 ms, 8 times a later one" in found.says


def idling(
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    *,
    one_thread_ms: float,
    close_ms: float = 6.0,
    pause_costs: bool = True,
) -> tuple[list[Finding], list[int]]:
    """The findings where a call takes 5 ms, 10 after a pause, in one thread `close_ms`, `one_thread_ms`."""
    rested, seen = [False], []

    def sampler(*_: Any, **__: Any) -> Callable[[], float]:
        def sample() -> float:
            was_rested, rested[0] = rested[0] and pause_costs, False
            seen.append(torch.get_num_threads())
            is_alone = threads > 1 and torch.get_num_threads() == 1
            rested_ms, warm_ms = (one_thread_ms, close_ms) if is_alone else (10.0, 5.0)
            return 1e-3 * (rested_ms if was_rested else warm_ms)

        return sample

    def sleep(_: float) -> None:
        rested[0] = True

    monkeypatch.setattr(cold_calls, "latency", sampler)
    monkeypatch.setattr(time, "sleep", sleep)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = list(cold_calls.find(case_of(nn.ReLU(), X, latency_ms={"fp32": 5})))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    return found, seen


def test_after_a_pause_one_thread_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,), seen = idling(monkeypatch, 2, one_thread_ms=6.8)
    assert set(seen) == {1, 2}
    assert found.says.startswith("a call after 0.3 s without one takes 10 ms, and 5 right after another: ")
    assert str(found.counterfactual).startswith(
        "in one thread after the same pause, a call takes 6.8 ms instead of 10 (1.47x"
    )
    assert found.advice.startswith("torch.set_num_threads(1) where calls are rare; measure at the rate")


@pytest.mark.parametrize(
    ("threads", "one_thread_ms", "close_ms"),
    [(2, 9.0, 6.0), (2, 12.0, 6.0), (1, 6.8, 6.0), (2, 6.8, 4.0)],  # the last: faster without a pause, too
)
def test_where_one_thread_is_not_faster_because_of_it_a_pause_is_compared_with_none(
    threads: int, one_thread_ms: float, close_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,), seen = idling(monkeypatch, threads, one_thread_ms=one_thread_ms, close_ms=close_ms)
    assert set(seen) == {1, threads}
    assert str(found.counterfactual).startswith("right after another call, a call takes 5 ms instead of 10")
    assert found.says.endswith("caches, clocks or threads have gone to rest")
    assert "set_num_threads" not in found.advice


def test_where_a_pause_costs_nothing_no_other_threads_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert idling(monkeypatch, 2, one_thread_ms=1.0, pause_costs=False)[0] == []


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * 2).t()


def test_what_is_the_same_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    found = {each.name: each for each in redundant.find(case_of(Doubled(), torch.ones(2, 4)))}
    assert "compute the same in every call" in found["fold-constants"].says


@pytest.mark.gpu
def test_tf32_and_cudnns_search_are_executed_on_calls_of_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    x = torch.randn(8, 64, 56, 56, device="cuda")
    found = ampopt.diagnose(model.cuda().eval(), x, budget_s=25, progress=False)
    told = [*found.notes, *(str(finding.counterfactual) for finding in found.findings)]
    for change in ("in TF32", "with searched algorithms"):
        assert any(change in text and "a call takes" in text for text in told), (change, told)
    assert not torch.backends.cudnn.benchmark


def test_permutes_by_their_kernels_names() -> None:
    assert is_permute("void cudnn::ops::nchwToNhwcKernel<__half, __half, float>")
    assert not is_permute("sm90_xmma_fprop_implicit_gemm_f16f16_nhwc_nhwc")


def test_faults_come_first_then_what_costs_most() -> None:
    findings = [Finding("a", "", share=0.1), Finding("b", "", share=0.5), Finding("c", "", is_fault=True)]
    assert [finding.name for finding in ranked(findings)] == ["c", "b", "a"]


def test_the_verdict_is_the_first_finding_with_its_remedy() -> None:
    case = case_of(several_kinds(), X)
    ran = Counterfactual("folded", taking(10), taking(5), gain(taking(10), taking(5)))
    first = Finding("batch-norm", "1 batch norm could be folded", share=0.5, counterfactual=ran)
    assert verdict(case, (first,)) == (
        "FP32 10 ms, AMP 10 ms a call: 1 batch norm could be folded [fp32]; folded, a call takes 5 ms "
        "instead of 10 (2.00x, 2.00 to 2.00)."
    )
    assert verdict(case, ()).endswith(f"{where_time_goes(case)}.")
    quick = case_of(several_kinds(), X, spent=lambda name: Spent(1e-6))
    assert "of the operators' time is bound by " in where_time_goes(quick)


def test_every_finding_has_a_file_with_one_function() -> None:
    assert len({find.__module__ for find in FINDINGS}) == len(FINDINGS)
    assert {find.__name__ for find in FINDINGS} == {"find"}


def test_times_that_vary_too_much_are_a_note() -> None:
    case = case_of(several_kinds(), X)
    noisy = Measurement((1e-3, 2e-3, 9e-3) * 8)
    case.latency = {"fp32": noisy, "amp": Measurement(noisy.samples[::-1])}
    assert not list(mixed_precision.find(case))
    assert case.notes[0].startswith("the times vary too much to tell whether AMP is faster")


@pytest.mark.slow
def test_a_whole_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.diagnosis.examine.EAGER_S", 0.3)
    monkeypatch.setattr(cold_calls, "IDLE_S", 0.01)
    model = several_kinds()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = ampopt.diagnose(model, X, batches=(1, 2), budget_s=90, progress=False)
    assert found.latency.keys() == {"fp32", "amp"}
    assert [row.batch for row in found.sweep] == [1, 2]
    assert found.accuracy["amp"]
    assert len(found.layers) == 8
    assert all(set(layer.spent) == {"fp32", "amp"} for layer in found.layers)
    assert max(map(len, str(found).splitlines())) <= 80
    told = json.loads(json.dumps(found.to_dict()))
    assert told["verdict"] == found.verdict
    assert told["layers"][0]["lanes"]["fp32"]["bound_by"] in ("compute", "memory", "launch")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batches": (0,)}, r"batches=\(0,\): give whole numbers from 1 on"),
        ({"batches": 3}, "batches=3: give whole numbers"),
        ({"batches": (1, True)}, "give whole numbers"),
        ({"budget_s": -1}, "budget_s=-1: give a positive, finite number of seconds"),
        ({"budget_s": "long"}, "budget_s='long': give a positive, finite number"),
        ({"budget_s": math.inf}, "budget_s=inf: give"),
        ({"precision": None}, "precision=None: choose from fp32, amp, bf16"),
        ({"precision": "fp17"}, "precision='fp17': choose"),
        ({"example_kwargs": 3}, "example_kwargs takes a dict"),
        ({"trace": 3}, "3 is no name of a file"),
        ({"trace": "/no/such/folder/trace.json"}, "trace: .*create that folder first"),
        ({"progress": "often"}, "progress='often': give True or False"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_called(options: Any, said: str) -> None:
    model = Model(lambda m, x: pytest.fail("it was called"))
    with pytest.raises(InputError, match=said):
        ampopt.diagnose(model, X, **options)


def test_what_imports_change_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def importing(*_: object) -> tuple[Finding, ...]:
        monkeypatch.setitem(sys.modules, "made_up", sys)
        warnings.simplefilter("always", ResourceWarning, append=True)
        return ()

    monkeypatch.setattr("ampopt.diagnosing.find_all", importing)
    before = list(warnings.filters)
    ampopt.diagnose(several_kinds(), X, budget_s=1, progress=False)
    assert list(warnings.filters) == before


def test_input_that_does_not_fit() -> None:
    with pytest.raises(InputError, match="fails on the example inputs"):
        ampopt.diagnose(several_kinds(), torch.ones(1, 4, 8, 8))


def test_other_threads_are_tried_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    every_remedy_helps(monkeypatch)
    monkeypatch.setattr(cpu_threads, "usable_cpus", lambda: {0, 1})
    seen: list[int] = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return x

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        case = case_of(nn.ReLU(), X, latency_ms={"fp32": 1e3})
        case.original = Noting()
        (found,) = cpu_threads.find(case)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert found.advice == "torch.set_num_threads(2)"
    assert seen == [2, 1, 2]  # once, before and after


@pytest.mark.slow
def test_what_a_model_keeps_in_one_lane_is_not_given_to_its_calls_in_another() -> None:
    found = ampopt.diagnose(Remembering().eval(), torch.randn(2, 8), batches=(1, 4), progress=False)
    assert set(found.latency) == {"fp32", "amp"}
    assert [row.batch for row in found.sweep] == [1, 4]
    assert not [note for note in found.notes if "fails" in note]
