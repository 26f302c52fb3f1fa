"""A program under trial: called as its user would, replayed where it can be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import PassError
from ampopt.ir.program import Program
from ampopt.search import subject as subjects
from ampopt.search.subject import Subject
from tests.helpers import Model, program_of
from tests.support.small_net import image, net

X = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def outputs_of(subject: Subject) -> list[Tensor]:
    """The outputs of one call."""
    found: Any = subject.call()
    return list(found)


def test_a_call_runs_the_program_on_its_examples() -> None:
    program = program_of(nn.Conv2d(3, 2, 3), X)
    found = outputs_of(Subject(program))[0]
    assert torch.equal(found, program.run(X)[0])
    assert Subject(program).device == torch.device("cpu")


def test_a_program_of_several_inputs_is_called_with_all_of_them() -> None:
    a, b = torch.ones(2), torch.full((2,), 3.0)
    found = outputs_of(Subject(program_of(Model(lambda m, a, b: a - b), a, b)))[0]
    assert torch.equal(found, a - b)


def test_one_input_goes_the_short_way_that_its_user_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Program, Tensor]] = []

    def quick(program: Program, run: Any, example: Tensor) -> Any:
        asked.append((program, example))
        return lambda same, restore: lambda x: restore((x, same(x)))

    monkeypatch.setattr(subjects, "quick", quick)
    program = program_of(nn.ReLU(), X)
    assert Subject(program).call() == (program.examples[0], True)
    assert [(p is program, x is program.examples[0]) for p, x in asked] == [(True, True)]
    Subject(program_of(Model(lambda m, a, b: a + b), X, X))
    assert len(asked) == 1


def test_on_a_cpu_there_is_nothing_to_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "ReplayedProgram", lambda program: pytest.fail("a CPU has no CUDA graphs"))
    assert Subject(program_of(nn.ReLU(), X)).replayed() is None


def on_a_gpu(program: Program) -> Subject:
    """A subject that believes that its program is on a GPU."""
    subject = Subject(program)
    subject._replays = True
    return subject


def test_a_program_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[object] = []

    def capture(program: Program) -> object:
        captured.append(program)
        return object()

    monkeypatch.setattr(subjects, "ReplayedProgram", capture)
    program = program_of(nn.ReLU(), X)
    subject = on_a_gpu(program)
    assert captured == []  # not before somebody asks
    assert subject.replayed() is subject.replayed() is not None
    assert captured == [program]


def test_one_that_cannot_be_captured_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def fail(program: Program) -> object:
        tried.append(program)
        raise PassError("the CUDA graph could not be captured: no")

    monkeypatch.setattr(subjects, "ReplayedProgram", fail)
    subject = on_a_gpu(program_of(nn.ReLU(), X))
    assert subject.replayed() is None
    assert subject.replayed() is None
    assert len(tried) == 1


def test_an_error_of_another_kind_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(program: Program) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(subjects, "ReplayedProgram", fail)
    with pytest.raises(ZeroDivisionError):
        on_a_gpu(program_of(nn.ReLU(), X)).replayed()


@pytest.mark.gpu
def test_on_a_gpu_the_replay_gives_what_a_call_gives() -> None:
    subject = Subject(program_of(net(), image()))
    replayed = subject.replayed()
    assert replayed is not None
    replayed.replay()
    torch.cuda.synchronize()
    found = outputs_of(subject)[0]
    assert torch.allclose(replayed._outputs[0], found, atol=1e-5)
