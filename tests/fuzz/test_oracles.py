"""The oracles let what is right pass, and see every kind of fault that is planted."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import InputError
from ampopt.ir.capture import capture
from ampopt.ir.numerics import Check
from ampopt.ir.program import Program
from ampopt.ir.transform import Result
from ampopt.measure.verify import Verifier
from ampopt.passes import PIPELINE
from ampopt.search import infer
from fuzz import interrupts, report, through_optimize, through_passes
from fuzz.calls import Call
from fuzz.judge import Answered, Judge, ask
from fuzz.network import Layer, Spec
from fuzz.outcome import Outcome
from fuzz.pick import Pick
from fuzz.shards import Run, Worker, header
from fuzz.shrink import describe, shrink
from tests.helpers import Model, several_kinds
from tests.support.planted import Planted, rewriting

SPEC = Spec(7, (2, 4, 6, 5), (Layer("conv_bn", 1), Layer("activation", 2), Layer("linear", 3)))
IMAGE = Call((torch.randn(2, 3, 8, 8),), {})


def checked(model: nn.Module, *passes: Any, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr(through_passes, "PIPELINE", rewriting(passes) if passes else PIPELINE)
    monkeypatch.setattr(Pick, "maybe", lambda self, chance=0.5: chance >= 0.5)
    return through_passes.check_model(model, [IMAGE, IMAGE.map(torch.randn_like)], Pick(0))


def test_right_passes_are_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(several_kinds(), monkeypatch=monkeypatch) == Outcome("ok")
    assert through_passes.check(SPEC) == Outcome("ok")


def accept_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Verifier, "check", lambda *_, **__: Check(0.0, 1.0, None))


def test_a_wrong_pass_is_wrong_where_verification_accepts_it_and_else_reverted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = checked(several_kinds(), Planted("off", plus=0.1), monkeypatch=monkeypatch)
    assert (outcome.kind, outcome.stage) == ("reverted", "off")
    assert "over" in outcome.details["why"]
    accept_everything(monkeypatch)
    outcome = checked(several_kinds(), Planted("off", plus=0.1), monkeypatch=monkeypatch)
    assert (outcome.kind, outcome.stage) == ("wrong", "off")


def test_what_comes_after_a_reverted_pass_is_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Planted("bad", error=KeyError("x")), Planted("off", plus=0.1), Miscounting("sly", plus=0.1)
    reverted = checked(several_kinds(), *passes[:2], monkeypatch=monkeypatch)
    assert (reverted.kind, reverted.stage) == ("reverted", "bad")
    assert any(other.startswith("off: ") for other in reverted.details["also"])
    fault = checked(several_kinds(), *passes, monkeypatch=monkeypatch)
    assert (fault.kind, fault.stage) == ("wrong", "sly")


def test_a_wrong_capture_is_reverted_and_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    right = capture

    def of_another(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            next(model.parameters()).mul_(1.1)
        return right(model, *args, **kwargs)

    monkeypatch.setattr(through_passes, "capture", of_another)
    outcome = checked(several_kinds(), monkeypatch=monkeypatch)
    assert (outcome.kind, outcome.stage) == ("reverted", "capture")
    accept_everything(monkeypatch)
    assert checked(several_kinds(), monkeypatch=monkeypatch).kind == "wrong"


def test_a_pass_that_raises_is_reverted(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = checked(several_kinds(), Planted("bad", error=KeyError("x")), monkeypatch=monkeypatch)
    assert (outcome.kind, outcome.stage) == ("reverted", "bad")
    refusing = checked(several_kinds(), Planted("shy", error=InputError("no")), monkeypatch=monkeypatch)
    assert refusing == Outcome("ok")


@dataclasses.dataclass(frozen=True)
class Miscounting(Planted):
    """One that says that it has changed nothing, and has."""

    def apply(self, program: Program) -> Result:
        return dataclasses.replace(super().apply(program), rewrites=0)


def test_a_dishonest_count_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = checked(several_kinds(), Miscounting("sly", plus=0.1), monkeypatch=monkeypatch)
    assert (outcome.kind, outcome.stage) == ("wrong", "sly")


def test_what_eager_cannot_do_is_skipped_and_what_ampopt_refuses_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = Model(lambda m, x: x.reshape(7))
    assert checked(broken, monkeypatch=monkeypatch).kind == "skipped"
    random = Model(lambda m, x: x + torch.rand_like(x))
    assert checked(random, monkeypatch=monkeypatch).kind == "skipped"
    depends = Model(lambda m, x: x * 2 if x.sum() > 0 else x)
    assert checked(depends, monkeypatch=monkeypatch).kind == "refused"


def verdict(model: nn.Module, wrong: Any, x: Tensor) -> str | None:
    judge = Judge(model, [Call((x,), {})])
    answers = ask(lambda call: wrong(*call.args), judge.calls)
    return judge.objection(answers, torch.float32)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda x: x.exp() * (1 + 1e-3), "error"),
        (lambda x: x.exp().half(), "instead of"),
        (lambda x: x.exp()[:1], "instead of"),
        (lambda x: (x.exp(), x), "2 tensors"),
        (lambda x: x.exp() / 0, "NaN or Inf"),
        (lambda x: x.exp_(), "argument 0"),
    ],
)
def test_the_judge_objects(wrong: Any, reason: str) -> None:
    assert reason in (verdict(Model(lambda m, x: x.exp()), wrong, torch.randn(3, 4)) or "")


def test_the_judge_wants_nan_where_it_was_and_minds_none_beside_it() -> None:
    x = torch.randn(3, 4)
    x[1, 1] = float("nan")
    model = Model(lambda m, x: x * 2)
    assert "finite where" in (verdict(model, lambda x: torch.nan_to_num(x * 2), x) or "")
    assert verdict(model, lambda x: x * 2 + x.sum(), x) is None


def test_a_size_that_depends_on_values_may_change_with_nan_and_never_without() -> None:
    x = torch.tensor([0.5, -1.0, 2.0])
    model = Model(lambda m, x: x[~(x < 0)])
    calls = [Call((t,), {}) for t in (x, x.abs(), x.clone().fill_(float("nan")))]
    judge = Judge(model, calls)
    right = ask(lambda call: model(*call.args), calls)
    shorter = [dataclasses.replace(a, outputs=[a.outputs[0][:1]]) for a in right]
    assert judge.objection([*right[:2], shorter[2]], torch.float32) is None
    assert "instead of" in (judge.objection([shorter[0], *right[1:]], torch.float32) or "")
    fixed = Judge(Model(lambda m, x: x), calls)
    assert "instead of" in (fixed.objection([*fixed.plain[:2], shorter[2]], torch.float32) or "")


def test_the_report_lists_what_was_reverted_and_counts_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUZZ_COMMIT", "0123456789")
    started = {"kind": "passes", **header(Run("passes", (1, 2), tmp_path))}
    entry = {"kind": "passes", "outcome": "reverted", "reason": "off", "details": {"why": "error"}}
    wrong = [{**entry, "seed": 1, "stage": "script"}, {**entry, "seed": 2, "stage": "capture"}]
    assert report.write([started, *wrong], None) == 0
    page = capsys.readouterr().out
    assert page.index("passes 2: in capture: off (not served: error)") < page.index("passes 1: in script")
    assert "Commit 0123456789, Python" in page
    assert report.write([started, *wrong, {**wrong[0], "seed": 3, "outcome": "wrong"}], None) == 1


def test_the_judge_knows_how_far_rounding_moves_a_jump() -> None:
    x = torch.tensor([0.3, 1.0])
    model = Model(lambda m, x: (x / 3 * 3).floor())
    assert verdict(model, lambda x: (x / 3 * 3 - 1e-7).floor(), x) is None
    assert verdict(model, lambda x: (x / 3 * 3 - 1e-2).floor(), torch.tensor([0.3, 1.001])) is not None


def test_a_sequence_of_calls_is_judged_with_its_state() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    call = Call((torch.ones(2),), {})
    judge = Judge(Counter(), [call, call])
    right = [Answered([torch.ones(2) * n], [torch.ones(2)]) for n in (1, 2)]
    assert judge.objection(right, torch.float32) is None
    assert "call 1" in (judge.objection([right[0], right[0]], torch.float32) or "")


def test_a_fault_shrinks_to_the_layer_that_has_it() -> None:
    def check(spec: Spec) -> Outcome:
        bad = any(layer.kind == "activation" for layer in spec.layers)
        return Outcome("wrong", "", "here") if bad else Outcome("ok")

    odd = dataclasses.replace(SPEC, values="nan", ending="dict", dtype="float64")
    small, outcome = shrink(odd, check(odd), check, seconds=60.0)
    assert [layer.kind for layer in small.layers] == ["activation"]
    assert (small.values, small.ending, small.dtype) == ("normal", "tensor", "float32")
    assert outcome.is_fault
    assert "ModuleList" in describe(small)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets `optimize` be something else."""

    def pretend(function: Any) -> None:
        monkeypatch.setattr(ampopt, "optimize", function)

    return pretend


def test_optimize_is_seen_to_raise_to_lose_and_to_change(pretended: Any) -> None:
    def fail(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("x")

    pretended(fail)
    assert through_optimize.check(SPEC).kind == "raw"

    def refuse(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise InputError("no")

    pretended(refuse)
    assert through_optimize.check(SPEC).kind == "refused"

    def spoil(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        next(model.parameters()).data.zero_()

    pretended(spoil)
    assert through_optimize.check(SPEC).kind == "changed"


def served(function: Any) -> Any:
    """What looks like an OptimizedModule and answers with a function."""
    from tests.helpers import several_kinds
    from tests.support.planted import module_of

    module = module_of(several_kinds(), torch.randn(1, 3, 8, 8))
    module.forward = function  # type: ignore[method-assign]
    module.report.chosen = "fp32"
    return module


def test_what_is_served_is_judged_call_by_call() -> None:
    model = Model(lambda m, x: x * 2)
    judge = Judge(model, [IMAGE, IMAGE])
    judged = [through_optimize.judge_served(served(f), judge, Pick(0), "fp32").kind
              for f in (lambda x: x * 2, lambda x: x * 3, lambda x: 1 / 0)]  # fmt: skip
    assert judged == ["ok", "wrong", "lost"]
    kept: list[Tensor] = []

    def same_memory_each_time(x: Tensor) -> Tensor:
        if not kept:
            kept.append(x * 2)
        return kept[0]

    outcome = through_optimize.judge_served(served(same_memory_each_time), judge, Pick(0), "fp32")
    assert outcome.kind == "wrong"
    assert "written to" in outcome.reason


def test_an_interrupt_that_comes_through_is_raw(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "COLD", 1.0)
    monkeypatch.setattr(interrupts, "BUDGET_S", 0.05)
    monkeypatch.setattr(Pick, "maybe", lambda self, chance=0.5: chance == 1.0)  # to this process alone

    def deaf(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        while True:
            infer.infer_inputs.__name__  # noqa: B018  an endless loop that a signal ends

    pretended(deaf)
    monkeypatch.setattr(interrupts, "_place", lambda trace: "here")
    assert interrupts.check(SPEC).kind == "raw"

    def polite(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            deaf(model)
        except KeyboardInterrupt:
            raise InputError("interrupted") from None

    pretended(polite)
    assert interrupts.check(SPEC).kind == "refused"


def test_a_process_that_crashes_leaves_its_last_words() -> None:
    worker = Worker("optimize", "cpu")
    crash = threading.Timer(1.0, os.kill, (worker._process.pid, signal.SIGSEGV))  # it takes longer to begin
    crash.start()
    entry = worker.judge(0)
    assert (entry["seed"], entry["outcome"], entry["reason"]) == (0, "crash", "signal SIGSEGV")
    assert "Segmentation fault" in entry["details"]["trace"]
    assert worker.is_over
