"""A training step: its ways and parts, and faults of the user's own step; nothing of theirs changes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt.diagnosis.finding import ranked
from ampopt.diagnosis.training import StepTimes, TrainingCase, measure_training
from ampopt.diagnosis.training_findings import find_in_training
from ampopt.diagnosis.training_step import PARTS, Subject, fp32, mean_square
from ampopt.diagnosis.watch import Watched
from ampopt.document.render import render
from ampopt.errors import InputError
from ampopt.ir.lanes import LANES
from ampopt.measure.sampling import Measurement
from ampopt.system.budget import Budget
from tests.support.cases import CPU, taking
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


def _varying(low: float, median: float, high: float) -> Measurement:
    """20 samples, in milliseconds."""
    return Measurement((1e-3 * low,) * 7 + (1e-3 * median,) * 6 + (1e-3 * high,) * 7)


def test_times_that_vary_and_are_all_longer_are_told() -> None:
    case = watched(clean)
    case.times["amp"] = StepTimes(_varying(20, 50, 90), case.times["fp32"].parts)
    found = {each.name: each for each in find_in_training(case)}
    assert found["amp-harmful"].says.startswith("AMP is 25.00x slower than FP32")
    assert found["amp-harmful"].share == pytest.approx(0.96)
    assert not any("vary too much" in note for note in case.notes)
    case.times["amp"] = StepTimes(_varying(0.1, 0.5, 1), case.times["fp32"].parts)
    assert {each.name: each for each in find_in_training(case)}["amp-pays"].share == pytest.approx(0.75)
    case.times["amp"] = StepTimes(_varying(1, 2, 9), case.times["fp32"].parts)
    assert not {"amp-harmful", "amp-pays"} & {each.name for each in find_in_training(case)}
    assert any("vary too much" in note for note in case.notes)


class Spare(nn.Module):
    """A network with weights that no call uses, and some that an optimizer may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = net(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few samples as there may be."""
    monkeypatch.setattr("ampopt.diagnosis.training.STEPS_S", 0.0)
    monkeypatch.setattr("ampopt.diagnosis.training.PARTS_S", 0.0)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("is_made", [False, True])
def test_only_weights_that_get_gradients_are_told_to_cost_time(is_made: bool) -> None:
    model = Spare().train()
    head = list(model.inner[4].parameters())  # type: ignore[index]
    optimizer: Any = torch.optim.SGD(head, 0.1)
    found = ampopt.diagnose(
        model, batch(), train=True, optimizer=(lambda _: optimizer) if is_made else optimizer, budget_s=2
    )
    told = [note for note in found.notes if "requires_grad_(False) saves their time" in note]
    assert [note.partition(",")[0] for note in told] == ["4 weights get gradients"]
    assert "unused" not in told[0]


@pytest.mark.usefixtures("brief")
def test_an_optimizer_for_matrices_alone_can_be_named() -> None:
    class OfMatrices(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float = 0.1) -> None:
            super().__init__(parameters, lr)
            if any(weight.dim() != 2 for group in self.param_groups for weight in group["params"]):
                raise ValueError("only matrices")

    case = case_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 4, bias=False)), optimizer=OfMatrices)
    measure_training(case, lambda *_: None)
    assert "fp32" in case.times
    with pytest.raises(
        InputError, match="cannot be made of the model's parameters: ValueError: only matrices"
    ):
        measure_training(case_of(optimizer=OfMatrices), lambda *_: None)


@pytest.mark.usefixtures("brief")
def test_every_way_is_timed_and_trains() -> None:
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


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("loss", [None, loss_of])
def test_times_of_another_loss_than_the_steps_are_told_apart(loss: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": loss, "step": clean, "budget_s": 60, "progress": False}
    found = ampopt.diagnose(net().train(), batch(), train=True, **options)
    losses = {way: times["loss"] for way, times in found.to_dict()["training"].items()}
    assert losses["fp32"] == ("mean square" if loss is None else "")
    assert losses["yours"] == ("its own" if loss is None else "")
    assert ("ms (its own), FP32 " in found.verdict) == (loss is None)
    assert any("your step, which they are not comparable with" in n for n in found.notes) == (loss is None)
    for text in (str(found), *(render(found.document(), tmp_path / f"r{s}") for s in (".md", ".html"))):
        assert ("mean square" in text) == (loss is None)


@pytest.mark.usefixtures("brief")
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
    assert all((times.peak or 0) > 0 for times in found.training.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.gpu
@pytest.mark.timing
def test_a_small_step_on_a_gpu_is_launch_bound() -> None:
    target = TARGET.cuda()
    found = ampopt.diagnose(
        net().cuda().train(),
        batch().cuda(),
        train=True,
        loss=lambda result: F.cross_entropy(result.float(), target),
        progress=False,
    )
    named = {each.name: each for each in found.findings}
    assert "gaps between launches" in named["launch-bound"].says
