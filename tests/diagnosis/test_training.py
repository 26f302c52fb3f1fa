"""A training step: its ways and parts, and faults of the user's own step; nothing of theirs changes."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt.diagnosis.finding import Finding, ranked
from ampopt.diagnosis.step_watch import WatchedSteps, watch_steps
from ampopt.diagnosis.training import YOURS, StepTimes, TrainingCase, measure_training, ways_of
from ampopt.diagnosis.training_findings import find_in_training, verdict_of
from ampopt.diagnosis.training_step import PARTS, Subject, fp32, mean_square, sgd
from ampopt.diagnosis.watch import Watched
from ampopt.document.render import render
from ampopt.errors import InputError
from ampopt.ir.lanes import LANES
from ampopt.system.budget import Budget
from tests.support.cases import CPU, taking

TARGET = torch.arange(4)
Optimizer = torch.optim.Optimizer


def loss_of(result: Tensor) -> Tensor:
    return F.cross_entropy(result.float(), TARGET.to(result.device))


def net() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def batch() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


SCALER = torch.amp.GradScaler("cpu")


def clean(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    SCALER.scale(loss_of(model(x))).backward()
    SCALER.step(optimizer)
    SCALER.update()


def accumulating(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    for half in x.chunk(2):
        F.cross_entropy(model(half), TARGET[: len(half)]).backward()
    optimizer.step()


def again_after_scaler(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    clean(model, optimizer, x)
    optimizer.step()


def again_after_refusal(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    SCALER.scale(loss_of(model(x)) * torch.inf).backward()
    SCALER.step(optimizer)
    SCALER.update()
    optimizer.step()


def twice(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()
    optimizer.step()


def scaled(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    SCALER.scale(loss_of(model(x))).backward()
    optimizer.step()


def never_reset(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    loss_of(model(x)).backward()
    optimizer.step()


def never_updated(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(x)).backward()


def evaluated(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model.eval()
    optimizer.zero_grad()
    loss_of(model(x)).backward()
    optimizer.step()


def line_of(step: Callable[..., object], text: str, *, last: bool = False) -> str:
    """`test_training.py:27`, the line of a step that holds the text."""
    lines, first = inspect.getsourcelines(step)
    found = [first + at for at, line in enumerate(lines) if text in line]
    return f"test_training.py:{found[-1 if last else 0]}"


def case_of(
    model: nn.Module | None = None, step: Any = None, optimizer: Any = sgd, seconds: float = 1e6
) -> TrainingCase:
    subject = Subject(net() if model is None else model, (batch(),), loss_of, optimizer)
    called = Watched((), {"1": 'net.py:3, "norm"'})
    budget = Budget(time.perf_counter(), seconds)
    return TrainingCase(subject, CPU, LANES["amp"]["cpu"], budget, called, step)


def watched(step: Any, model: nn.Module | None = None) -> TrainingCase:
    """A case whose step was watched, with times that are made up: what is new takes 1 ms, the rest 2."""
    case = case_of(model, step)
    with_parts = dict(zip(PARTS, (0.1e-3, 0.6e-3, 1.0e-3, 0.3e-3), strict=True))
    training = case.subject.copied()
    case.steps = watch_steps(step, training.model, training.optimizer, training.args, {})
    for name in ways_of(case):
        parts = {} if name.startswith("yours") else with_parts
        case.times[name] = StepTimes(taking(2 if name in ("fp32", YOURS) else 1), parts)
    return case


def faults(case: TrainingCase) -> dict[str, Finding]:
    return {each.name: each for each in find_in_training(case) if each.is_fault}


@pytest.mark.parametrize("step", [clean, accumulating])
def test_a_step_without_a_fault_has_none(step: Any) -> None:
    assert not faults(watched(step))


def test_an_update_after_scaler_step_is_named_with_both_lines() -> None:
    case = watched(again_after_scaler)
    found = faults(case)["repeated-update"]
    assert line_of(again_after_scaler, "optimizer.step()") in found.places[0]
    assert line_of(clean, "SCALER.step(optimizer)") in found.places[1]
    assert "moves the weights 100% as far again" in found.says  # SGD without momentum
    assert "scaler.step(optimizer) calls optimizer.step()" in found.advice
    assert str(found.counterfactual) == (
        "with one update for each backward pass, a step takes 1 ms instead of 2 (2.00x, 2.00 to 2.00)"
    )
    assert verdict_of(case, (found,)).startswith(
        "YOURS 2 ms, FP32 2 ms, AMP 1 ms a training step (zero_grad 5%, forward 30%, backward 50%, "
        "optimizer 15%): test_training.py:"
    )


def test_an_update_that_the_scaler_refused_is_named() -> None:
    found = faults(watched(again_after_refusal))["repeated-update"]
    assert line_of(again_after_refusal, "optimizer.step()") in found.places[0]
    assert line_of(again_after_refusal, "SCALER.step") in found.places[1]
    assert "has refused because they overflow" in found.says


def test_two_updates_without_a_scaler() -> None:
    found = faults(watched(twice))["repeated-update"]
    assert line_of(twice, "optimizer.step()", last=True) in found.places[0]
    assert found.advice == "remove one of them"


@pytest.mark.parametrize(
    ("step", "name", "text"),
    [
        (scaled, "scaled-gradients", "optimizer.step()"),
        (never_reset, "stale-gradients", "optimizer.step()"),
        (evaluated, "evaluation-mode-in-training", "loss_of(model(x))"),
    ],
)
def test_a_fault_is_named_with_its_line(step: Any, name: str, text: str) -> None:
    found = faults(watched(step))
    assert found.keys() == {name}
    assert line_of(step, text) in found[name].places[0]


def test_gradients_that_add_up_move_the_weights_further_each_time() -> None:
    says = faults(watched(never_reset))["stale-gradients"].says
    assert "update 3 moves the weights 3." in says or "update 3 moves the weights 2." in says


def test_a_step_that_never_updates() -> None:
    assert faults(watched(never_updated)).keys() == {"no-update"}


@pytest.mark.parametrize(("momentum", "says"), [(0.99, "99% those of the last"), (0.0, "never change")])
def test_a_momentum_of_another_framework(momentum: float, says: str) -> None:
    model = net()
    model[1].momentum = momentum  # type: ignore[index]
    found = faults(watched(clean, model))["batch-norm-momentum"]
    assert says in found.says
    assert found.places == ('1, net.py:3, "norm"',)


@pytest.mark.parametrize("momentum", [0.1, 0.01, None])
def test_a_usual_momentum_is_none(momentum: float | None) -> None:
    model = net()
    model[1].momentum = momentum  # type: ignore[index]
    assert not faults(watched(clean, model))


def test_what_helps_is_ranked_by_what_it_brought() -> None:
    case = watched(clean)
    case.times["fp32 + fused"] = StepTimes(taking(1.5), {})
    found = {each.name: each for each in ranked(find_in_training(case))}
    assert list(found) == ["amp-pays", "optimizer"] or list(found) == ["optimizer", "amp-pays"]
    assert found["amp-pays"].share == pytest.approx(0.5)
    assert "the optimizer's step takes 15% of the time" in found["optimizer"].says
    case.times["amp"] = StepTimes(taking(4), {**case.times["fp32"].parts, "forward": 2e-3})
    harmful = {each.name: each for each in find_in_training(case)}["amp-harmful"]
    assert harmful.says == "AMP is 2.00x slower than FP32: its forward takes 2 ms for 0.6"
    assert {each.name for each in find_in_training(case)} >= {"memory-layout"}  # 1 ms for 4


def test_every_way_is_timed_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.0)
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)
    case = case_of(step=again_after_scaler)
    measure_training(case, lambda *_: None)
    ways = {"fp32", "amp", "amp + channels_last", "yours", "yours, updating once"}
    assert case.times.keys() == ways | {"fp32 + fused", "fp32 + foreach"}
    assert case.times["amp"].parts.keys() == set(PARTS)
    assert not case.times["yours"].parts
    assert not case.notes


def test_no_time_is_a_note_and_fp32_is_always_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)
    case = case_of(seconds=-9.0)
    measure_training(case, lambda *_: None)
    assert case.times.keys() == {"fp32"}
    assert case.untried[0] == "a step in amp"


@pytest.mark.parametrize("flag", ["fused", "foreach"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_other_implementations_of_an_optimizer_train_as_it_does(kind: Any, flag: str) -> None:
    model = net()
    optimizer = kind([{"params": model[0].parameters(), "lr": 0.02}, {"params": model[4].parameters()}], 0.01)  # type: ignore[index]
    subject = Subject(model, (batch(),), loss_of, optimizer)
    fp32(subject)()
    trained = fp32(Subject(model, (batch(),), loss_of, optimizer))
    other = fp32(Subject(model, (batch(),), loss_of, optimizer))
    trained()
    other()
    other.with_optimizer(**{flag: True})  # with the state of a step
    assert [group[flag] for group in other.optimizer.param_groups] == [True, True]
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.02, 0.01]
    for _ in range(3):
        assert float(trained()) == pytest.approx(float(other()), rel=1e-4)


def test_a_copy_trains_by_the_optimizers_state_and_leaves_it() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    training = fp32(Subject(model, (batch(),), loss_of, optimizer))
    first = float(training())
    for _ in range(20):
        training()
    assert float(training()) < 0.5 * first
    assert not optimizer.state
    state = training.optimizer.state_dict()["state"]
    assert len(state) == len(list(model.parameters()))


def test_a_loss_that_reaches_the_model_reaches_the_copy() -> None:
    model = net()

    def penalized(result: Tensor) -> Tensor:
        return loss_of(result) + sum(weight.square().sum() for weight in model.parameters())

    fp32(Subject(model, (batch(),), penalized))()
    assert all(weight.grad is None for weight in model.parameters())


def test_the_loss_where_none_is_given_needs_numbers() -> None:
    assert float(mean_square({"a": torch.tensor([3.0]), "b": torch.tensor([1, 2])})) == 9.0
    with pytest.raises(InputError, match="no floating-point tensor: give loss="):
        mean_square(torch.tensor([1]))


@pytest.mark.slow
def test_a_whole_diagnosis_leaves_everything_as_it_was(tmp_path: Path) -> None:
    model = net().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss_of(model(batch())).backward()
    optimizer.step()
    calls: list[int] = []

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        calls.append(1)
        again_after_scaler(model, optimizer, x)

    def everything() -> list[Any]:
        state = [*model.state_dict().values(), *(weight.grad for weight in model.parameters())]
        moments = [each["momentum_buffer"] for each in optimizer.state.values()]
        scaler = SCALER.state_dict()
        return [*(t.clone() for t in (*state, *moments) if t is not None), torch.get_rng_state(), scaler]

    before = everything()
    options: dict[str, Any] = {"loss": loss_of, "optimizer": optimizer, "step": step, "budget_s": 60}
    found = ampopt.diagnose(model, batch(), train=True, progress=False, **options)
    for mine, then in zip(everything(), before, strict=True):
        assert torch.equal(mine, then) if isinstance(mine, Tensor) else mine == then
    assert not calls
    assert found.findings[0].name == "repeated-update"
    assert str(found).startswith("verdict: YOURS ")
    assert "a training step, ms" in str(found)
    told = json.loads(json.dumps(found.to_dict()))["training"]
    assert told["fp32"]["parts"].keys() == {f"{name}_ms" for name in PARTS}
    for suffix in (".html", ".md", ".txt"):
        assert "amp + channels_last" in render(found.document(), tmp_path / f"r{suffix}")


def test_a_step_that_trains_the_users_own_model_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def given() -> None:
        loss_of(model(batch())).backward()
        optimizer.step()

    globals()["MINE"] = model
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(InputError, match=r"called as step\(model, optimizer, \*example_inputs\)"):
        measure_training(case_of(model, given, optimizer), lambda *_: None)
    try:
        with pytest.raises(InputError, match=r"reaches your own Sequential by .*MINE"):
            measure_training(case_of(model, lambda m, o, x: MINE(x)), lambda *_: None)  # type: ignore[name-defined] # noqa: F821
    finally:
        del globals()["MINE"]
    with pytest.raises(InputError, match="does not call the model that it is given"):
        measure_training(case_of(model, lambda m, o, x: None), lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_input_that_does_not_fit() -> None:
    model, x = net(), batch()
    other = torch.optim.SGD(net().parameters(), 0.1)
    for options, said in (
        ({"loss": loss_of}, "loss= is of a training step: give train=True, too"),
        ({"train": True, "batches": (1,)}, "batches= is of a call, not of a training step"),
        ({"train": True, "optimizer": other}, "the optimizer has none of the model's parameters"),
    ):
        with pytest.raises(InputError, match=said):
            ampopt.diagnose(model, x, **options)
    with pytest.raises(InputError, match="there is nothing to train"):
        ampopt.diagnose(nn.ReLU(), x, train=True)
    with pytest.raises(InputError, match=r"a training step fails: .*batch_size"):
        measure_training(
            TrainingCase(
                Subject(model, (x[:2],), loss_of),
                CPU,
                LANES["amp"]["cpu"],
                Budget(time.perf_counter(), 1e6),
                Watched((), {}),
            ),
            lambda *_: None,
        )


def test_nothing_is_left_on_what_was_watched() -> None:
    training = case_of().subject.copied()
    seen = watch_steps(clean, training.model, training.optimizer, training.args, {})
    assert isinstance(seen, WatchedSteps)
    assert (len(seen.updates), seen.forwards, seen.evaluated) == (3, 3, 0)
    assert all(update.by_scaler and update.moved > 0 for update in seen.updates)
    assert not training.model._forward_pre_hooks
    assert not any(weight._backward_hooks for weight in training.model.parameters())


@pytest.mark.gpu
def test_a_whole_step_on_a_gpu_is_one_graph_and_the_scalers_fault_is_named() -> None:
    scaler, target = torch.amp.GradScaler("cuda"), TARGET.cuda()

    def loss_of(result: Tensor) -> Tensor:
        return F.cross_entropy(result.float(), target)  # a copy from the host cannot be captured

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.step()

    model = net().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    before = [weight.clone() for weight in model.parameters()]
    found = ampopt.diagnose(
        model, batch().cuda(), train=True, loss=loss_of, optimizer=optimizer, step=step, progress=False
    )
    assert not [note for note in found.notes if "was not timed" in note], found.notes
    graphs = {name for name in found.training if "CUDA graph" in name}
    assert graphs == {f"{name} + CUDA graph" for name in ("fp32", "amp", "amp + channels_last")}
    named = {each.name: each for each in found.findings}
    assert line_of(step, "optimizer.step()") in named["repeated-update"].places[0]
    assert "gaps between launches" in named["launch-bound"].says
    assert all((times.peak or 0) > 0 for times in found.training.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
