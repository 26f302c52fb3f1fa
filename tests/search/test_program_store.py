"""Each distinct program is built once and verified once; what fails or takes too long says so."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from ampopt.ir.lanes import FP32
from ampopt.ir.transform import Pass
from ampopt.search.choices import REPEATING, Choices
from ampopt.search.program_store import Built, NoTimeError, ProgramStore
from tests.support.comparing import Machine, Toy, ToyCompiler
from tests.support.planted import captured_of

FOLD, LAYOUT = Toy("fold"), Toy("layout")


class Stored:
    """A store over a made-up machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = Machine(monkeypatch, lambda names: 0.01, 0.0)
        program = captured_of(nn.ReLU(), torch.ones(2))[1].program
        choices = Choices({}, 15.0)
        self.store = ProgramStore(
            program, self.machine, self.machine, choices, calls_to_check=10, now=self.machine.now
        )
        self.start = self.store.start(FP32, 0.01)

    def built(self, *steps: Pass) -> Built:
        """The program after some passes."""
        built = self.start
        for step in steps:
            outcome = self.store.apply(built, step, 100.0)
            assert outcome.built is not None
            built = outcome.built
        return built


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Stored:
    return Stored(monkeypatch)


def test_sequences_share_what_they_begin_with(stored: Stored) -> None:
    first, second = stored.built(FOLD, LAYOUT), stored.built(FOLD, LAYOUT)
    assert first is second
    assert stored.built(LAYOUT, FOLD) is not first
    assert stored.machine.applied == [" > fold", "fold > layout", " > layout", "layout > fold"]
    assert (first.key, first.names) == ("fp32: fold + layout", ("fold", "layout"))
    assert [step.name for step in first.program.recipe] == ["fold", "layout"]


def test_a_program_is_verified_once(stored: Stored) -> None:
    built = stored.built(FOLD)
    assert stored.store.check(built) is stored.store.check(built)
    assert stored.machine.checked == {"fp32: fold": 1}


def test_the_time_of_a_verification_is_expected_again(stored: Stored) -> None:
    one, two = stored.built(FOLD), stored.built(LAYOUT)
    assert stored.store.check_s(one) == pytest.approx(0.1)
    stored.machine.check_s = 3.0
    stored.store.check(one)
    assert [stored.store.check_s(built) for built in (one, two)] == [0.0, 3.0]
    assert stored.store.next_check_s(one) == 3.0


@pytest.mark.parametrize(
    ("step", "reason", "failed"),
    [
        (Toy("none", works=False), "", False),
        (Toy("declines", declines="there is no GPU"), "there is no GPU", False),
        (Toy("fails", fails="oops"), "failed: ValueError: oops", True),
    ],
)
def test_why_there_is_no_program(stored: Stored, step: Toy, reason: str, failed: bool) -> None:
    for _ in range(2):
        outcome = stored.store.apply(stored.start, step, 100.0)
        assert (outcome.built, outcome.reason, outcome.failed) == (None, reason, failed)
    assert len(stored.machine.applied) == (0 if step.declines else 1)


def test_what_cannot_end_in_time_is_not_begun_and_may_be_later(stored: Stored) -> None:
    slow = Toy("slow", said=5.0, seconds=5.0)
    with pytest.raises(NoTimeError) as caught:
        stored.store.apply(stored.start, slow, 4.0)
    assert caught.value.needed_s == 5.0
    assert stored.machine.applied == []
    assert stored.store.apply(stored.start, slow, 6.0).built is not None


def test_a_rehearsal_is_stopped_early_enough_to_be_repeated(stored: Stored) -> None:
    compiler = ToyCompiler("compiler", said=4.0, seconds=100.0)
    with pytest.raises(NoTimeError) as caught:
        stored.store.apply(stored.start, compiler, 20.0)
    assert caught.value.needed_s == 40.0
    assert stored.machine.time == pytest.approx(20.0 / (1 + REPEATING))


def test_a_risky_pass_is_begun_where_it_may_end(stored: Stored) -> None:
    compiler = ToyCompiler("compiler", said=4.0, seconds=4.0)
    assert stored.store.expected_s(stored.start, compiler) == 5.0
    assert stored.store.apply(stored.start, dataclasses.replace(compiler, seconds=3.0), 4.5).built is not None


def test_what_was_stopped_is_not_begun_again_in_less_time(stored: Stored) -> None:
    compiler = ToyCompiler("compiler", said=4.0, seconds=10.0)
    for seconds in (8.0, 7.0, 8.0):
        with pytest.raises(NoTimeError):
            stored.store.apply(stored.start, compiler, seconds)
    assert len(stored.machine.applied) == 1
    assert stored.store.apply(stored.start, compiler, 20.0).built is not None


def test_only_a_risky_pass_that_may_end_is_rehearsed_ahead(stored: Stored) -> None:
    compiler = ToyCompiler("compiler", said=4.0)
    for step, seconds in [
        (compiler, 5.0),
        (compiler, 3.0),
        (Toy("rewrite"), 5.0),
        (ToyCompiler("declines", declines="no"), 5.0),
    ]:
        stored.store.rehearse(stored.start, step, seconds)
    assert stored.machine.rehearsed == [("fp32:  > compiler", 5.0 / (1 + REPEATING))]


def test_no_time_is_expected_for_what_is_done_or_declined(stored: Stored) -> None:
    slow = Toy("slow", said=5.0)
    assert stored.store.expected_s(stored.start, slow) == 5.0
    stored.built(slow)
    assert stored.store.expected_s(stored.start, slow) == 0.0
    assert stored.store.expected_s(stored.start, Toy("no", said=5.0, declines="no")) == 0.0


def test_ctrl_c_is_no_failure_of_a_pass(stored: Stored) -> None:
    stored.machine.interrupt_at = 1.0
    with pytest.raises(KeyboardInterrupt):
        stored.store.apply(stored.start, Toy("slow", seconds=2.0), 100.0)
    assert stored.store.apply(stored.start, Toy("slow", seconds=2.0), 100.0).built is not None
