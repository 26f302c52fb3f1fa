"""Faults of the user's own training step: each is named with its line, and a step without one has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt.diagnosis.finding import Finding
from ampopt.diagnosis.step_seen import WatchedSteps
from ampopt.diagnosis.step_watch import watch_steps
from ampopt.diagnosis.training import TrainingCase
from ampopt.diagnosis.training_findings import find_in_training, verdict_of
from ampopt.diagnosis.watch import watch
from tests.support.cases import CPU
from tests.support.training import (
    SCALER,
    TARGET,
    Optimizer,
    again_after_scaler,
    batch,
    case_of,
    clean,
    line_of,
    loss_of,
    net,
    watched,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.0)
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)


def accumulating(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    for half in x.chunk(2):
        F.cross_entropy(model(half), TARGET[: len(half)]).backward()
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
        "optimizer 15%): training.py:"
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
        (evaluated, "evaluation-mode-in-training", "model.eval()"),
    ],
)
def test_a_fault_is_named_with_its_line(step: Any, name: str, text: str) -> None:
    found = faults(watched(step))
    assert found.keys() == {name}
    assert line_of(step, text) in found[name].places[0]


def test_gradients_that_add_up_move_the_weights_further_each_time() -> None:
    says = faults(watched(never_reset))["stale-gradients"].says
    assert "update 3 moves the weights 3." in says or "update 3 moves the weights 2." in says


def test_the_update_that_is_told_is_the_one_with_gradients_of_two_batches() -> None:
    calls = [0]

    def reset_every_second_time(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        if calls[0] % 2 == 0:
            optimizer.zero_grad()
        calls[0] += 1
        never_reset(model, optimizer, x)

    says = faults(watched(reset_every_second_time))["stale-gradients"].says
    assert "update 2 moves the weights" in says


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


@pytest.mark.parametrize("momentum", [0.99, 0.0])
def test_a_frozen_batch_norm_learns_nothing_on_purpose(momentum: float) -> None:
    model = net().train()
    model[1].eval().momentum = momentum  # type: ignore[index]
    assert not faults(watched(clean, model))
    assert faults(watched(None, model.eval())).keys() == {"batch-norm-momentum"}  # all of it is trained


def test_nothing_is_left_on_what_was_watched() -> None:
    training = case_of().subject.copied()
    seen = watch_steps(clean, training.model, training.optimizer, training.args, {})
    assert isinstance(seen, WatchedSteps)
    assert (len(seen.updates), seen.forwards, seen.evaluated) == (3, 3, 0)
    assert all(update.by_scaler and update.moved > 0 for update in seen.updates)
    assert not training.model._forward_pre_hooks
    assert "train" not in vars(training.model)
    assert not any(weight._backward_hooks for weight in training.model.parameters())


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        assert found.isfinite().all()
        return found  # type: ignore[no-any-return]


def reading(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss = loss_of(model(x))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(loss)
    for _ in range(2):
        float(loss)


def reads_of(case: TrainingCase) -> dict[str, Finding]:
    return {each.says: each for each in find_in_training(case) if each.name == "host-read"}


def test_host_reads_in_a_step_are_named_with_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    found = reads_of(watched(reading, Watching()))
    for text, what in (("print(loss)", "printing a tensor, once"), ("float(loss)", ".item(), 2 times")):
        (says,) = (each for each in found if line_of(reading, text) in each)
        assert f"waits for a value on the host ({what}) in every step" in says
    (of_model,) = (each for each in found if line_of(Watching.forward, "isfinite") in each)
    assert "is_nonzero" in of_model or ".item()" in of_model
    assert len(found) == 3  # not what updates read, and what watches them
    assert all(each.lane == "yours" and "every hundredth step" in each.advice for each in found.values())
    assert "tensor(" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_what_an_optimizer_reads_on_the_host_is_none(kind: Any) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        clean(model, optimizer, x)

    case = case_of(net(), step, kind)
    training = case.subject.copied()
    seen = watch_steps(step, training.model, training.optimizer, training.args, {})
    assert seen.updates
    assert seen.reads == ()


def test_without_a_step_of_ones_own_the_models_reads_are_named() -> None:
    model = Watching()
    case = watched(None, model)
    case.called = watch(model, (batch(),), {}, CPU)
    (found,) = reads_of(case).values()
    assert line_of(Watching.forward, "isfinite") in found.says
    assert found.lane == "fp32"


class Keeping(Watching):
    """Reads a scale in its first call, and keeps it."""

    scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale or x.abs().max().item()
        return self.inner(x) / self.scale  # type: ignore[no-any-return]


def test_what_the_model_reads_in_its_first_call_is_a_note_where_there_is_no_step() -> None:
    case = watched(None, Keeping())
    case.called = watch(Keeping(), (batch(),), {}, CPU)
    assert not reads_of(case)
    (note,) = (each for each in case.notes if each.startswith("in the first call and not in the second, "))
    assert line_of(Keeping.forward, ".item()") in note


@pytest.mark.gpu
def test_host_reads_in_a_step_on_a_gpu() -> None:
    scaler = torch.amp.GradScaler("cuda")

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen = loss.detach().cpu()
        assert seen.isfinite()

    found = ampopt.diagnose(
        net().cuda().train(), batch().cuda(), train=True, step=step, budget_s=30, progress=False
    )
    says = {each.name: each for each in found.findings if each.name.startswith("host-")}
    assert line_of(step, "loss.detach().cpu()") in says["host-copy"].says
    assert "copy from cuda:0 to cpu" in says["host-copy"].says
    own = [e for e in found.findings if e.name == "host-read" and line_of(step, "scaler.step(") in e.says]
    assert "of PyTorch's own" in own[0].says
    assert "fused=True" in own[0].advice
