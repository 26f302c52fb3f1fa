"""Rehearsals begun ahead of their trials: they wait for each other, and a trial takes up what was made."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import PassError
from ampopt.ir.lanes import lanes_for
from ampopt.ir.program import Program
from ampopt.passes import FoldConvBn
from ampopt.search.rehearsal import Sandbox, TooLongError
from ampopt.search.worker import Worker
from tests.support.fresh import forked_workers  # noqa: F401 - a fixture
from tests.support.planted import captured_of
from tests.support.risky import CPU, InHalves, Risky, Uneven, Waiting, X, made, rehearse

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def program() -> Program:
    return captured_of(nn.Linear(3, 2), X)[1].program


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that works beside measurements on this device, too."""
    monkeypatch.setattr(Sandbox, "works_beside", True)


def test_a_rehearsal_that_was_begun_ahead_is_taken_up_by_its_trial(program: Program, tmp_path: Path) -> None:
    step = Risky("nothing", os.getpid(), str(tmp_path / "note"))
    with Sandbox(CPU) as sandbox:
        sandbox.begin(step, program)
        assert sandbox.is_rehearsing(step, program)
        assert not sandbox.is_rehearsing(Risky("raise"), program)
        assert sandbox.ahead_s(Risky("raise"), program) == 0.0 < sandbox.ahead_s(step, program)
        assert made(sandbox, step, program)
        done = (tmp_path / "note").read_text()
        with sandbox.rehearsing(step, program, seconds=60) as rehearsed:
            assert rehearsed().why_not is None
        assert (tmp_path / "note").read_text() == done  # it was not done again
        assert not sandbox.is_rehearsing(step, program)


def test_a_failure_ahead_is_told_to_its_trial_alone(program: Program, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky("crash", note=str(note)), program)
        rehearse(sandbox, Risky(), program, seconds=60)  # it waits, and has a process of its own
        done = note.read_text()
        with pytest.raises(PassError, match="signal SIGSEGV"):
            rehearse(sandbox, Risky("crash", note=str(note)), program, seconds=60)
        assert note.read_text() == done  # it did not crash a second time


def test_what_is_begun_on_one_lane_follows_each_other_in_one_process(
    program: Program, tmp_path: Path
) -> None:
    notes = [str(tmp_path / name) for name in ("a", "b")]
    steps = [Risky("nothing", os.getpid(), note) for note in notes]
    with Sandbox(CPU) as sandbox:
        for step in (*steps, steps[0]):  # what was begun is not begun again
            sandbox.begin(step, program)
        assert all(sandbox.is_rehearsing(step, program) for step in steps)
        assert sandbox.begun(steps[0], program) == [program]
        rehearse(sandbox, steps[1], program, seconds=60)
        assert sandbox.has_made(steps[0], program)  # it was before that one
        assert not sandbox.has_made(steps[1], program)
        rehearse(sandbox, steps[0], program, seconds=60)
        assert not sandbox.has_made(steps[0], program)
    (first, _), (second, _) = (Path(note).read_text().split() for note in notes)
    assert first == second


def test_what_is_begun_on_a_lane_stays_until_that_lane_is_given_up(program: Program) -> None:
    other = program.replace(lane=lanes_for("bf16", CPU)[0])
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky(), program)
        assert made(sandbox, Risky(), program)
        sandbox.begin(Risky(), other)
        sandbox.give_up(program)
        assert not sandbox.is_rehearsing(Risky(), program)
        assert made(sandbox, Risky(), other)


def test_what_is_begun_on_another_capture_takes_the_place_of_the_first(
    program: Program, tmp_path: Path
) -> None:
    other = captured_of(nn.Linear(3, 2), X)[1].program
    note = tmp_path / "note"
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky("hang", note=str(note)), program)
        sandbox.begin(Risky(), program)
        while not note.exists() or not note.read_text():
            time.sleep(0.05)
        process = sandbox.workers[0].process
        sandbox.begin(Risky(), other)
        assert sandbox.begun(Risky(), program) == []
        assert process is not None
        assert process.poll() is not None  # it worked on what is not wanted any more
        assert made(sandbox, Risky(), other)


def test_what_is_given_up_before_its_turn_is_passed_by(program: Program, tmp_path: Path) -> None:
    other = program.replace(lane=lanes_for("bf16", CPU)[0])
    first, note = str(tmp_path / "first"), tmp_path / "note"
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Waiting("nothing", os.getpid(), first), program)
        sandbox.begin(Risky(note=str(note)), other)
        sandbox.begin(Risky(), program)
        process = sandbox.workers[0].process
        sandbox.give_up(other)
        Path(first).touch()
        assert made(sandbox, Risky(), program)
        assert sandbox.workers[0].process is process
    assert not note.exists()


def test_two_processes_work_at_once_where_the_machine_is_large(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins although the first does not end before that."""
    monkeypatch.setattr("ampopt.search.rehearsal.how_many", lambda _: 2)
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    waiting, step = Waiting("nothing", os.getpid(), first), Risky("nothing", os.getpid(), second)
    with Sandbox(CPU) as sandbox:
        sandbox.prepare()
        processes = [worker.process for worker in sandbox.workers]
        sandbox.begin(waiting, program)
        sandbox.begin(step, program)
        assert made(sandbox, step, program)
        assert not sandbox.has_made(waiting, program)
        assert not sandbox.has_answered()
        Path(first).touch()
        assert made(sandbox, waiting, program)
        assert sandbox.has_answered()
        assert Path(first).read_text().split()[0] != Path(second).read_text().split()[0]
    assert len(processes) == 2
    assert all(process is not None and process.poll() is not None for process in processes)


@pytest.mark.parametrize("is_begun", [True, False])
@pytest.mark.parametrize(("count", "expected"), [(1, [X]), (2, [X, 2 * X])])
def test_the_pieces_of_a_program_are_rehearsed_at_once_and_told_together(
    program: Program, count: int, expected: list[Tensor], is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.search.rehearsal.how_many", lambda _: count)
    with Sandbox(CPU) as sandbox:
        if is_begun:
            sandbox.begin(InHalves(), program)
            assert made(sandbox, InHalves(), program)
        with sandbox.rehearsing(InHalves(), program, seconds=60) as rehearsed:
            sent = rehearsed().sent
            assert rehearsed().count == count
        assert sandbox.begun(InHalves(), program) == []
    assert [torch.equal(each["example"], x) for each, x in zip(sent, expected, strict=True) if each] == [
        True
    ] * count


@pytest.mark.parametrize(("count", "expected"), [(1, 3.0), (2, 7.0)])
def test_pieces_are_expected_to_take_as_long_as_the_longest(
    program: Program, count: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.search.rehearsal.how_many", lambda _: count)
    with Sandbox(CPU) as sandbox:
        assert sandbox.expected_s(Uneven(), program) == 3.0  # nothing is divided to tell that
        sandbox.begin(Uneven(), program)
        assert sandbox.expected_s(Uneven(), program) == expected
        assert sandbox.expected_s(FoldConvBn(), program) == FoldConvBn().expected_seconds(program)


def test_where_one_piece_fails_the_whole_does(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.search.rehearsal.how_many", lambda _: 2)
    with Sandbox(CPU) as sandbox:
        sandbox.begin(InHalves("raise"), program)
        with pytest.raises(PassError, match="no such kernel"):
            rehearse(sandbox, InHalves("raise"), program, seconds=60)
        assert not sandbox.has_made(InHalves("raise"), program)
        assert rehearse(sandbox, InHalves(), program, seconds=60) is None


def test_what_waits_in_the_queue_was_not_begun(program: Program) -> None:
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky("hang"), program)
        sandbox.begin(Risky(), program)
        time.sleep(0.01)
        assert sandbox.ahead_s(Risky("hang"), program) > 0
        assert sandbox.ahead_s(Risky(), program) == 0.0


def test_a_failure_ahead_has_made_nothing(program: Program) -> None:
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky("raise"), program)
        sandbox.begin(Risky(), program)
        with pytest.raises(PassError):
            rehearse(sandbox, Risky("raise"), program, seconds=60)
        sandbox.begin(Risky("raise"), program)
        rehearse(sandbox, Risky(), program, seconds=60)
        while sandbox.is_working(Risky("raise"), program):
            time.sleep(0.01)
        assert not sandbox.has_made(Risky("raise"), program)


def test_a_full_disk_costs_the_rehearsal_alone(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with Sandbox(CPU) as sandbox:
        monkeypatch.setattr("ampopt.search.worker.write_pickle", full)
        sandbox.begin(Risky(), program)
        assert not sandbox.is_rehearsing(Risky(), program)
        said = rehearse(sandbox, Risky(), program, seconds=60)
        assert said is not None
        assert "No space left on device" in said


@pytest.mark.parametrize(("elsewhere", "is_kept"), [("hang", False), ("crash", False), ("raise", True)])
def test_what_waits_behind_one_that_fails_has_its_turn_all_the_same(
    program: Program, elsewhere: str, is_kept: bool
) -> None:
    """The process goes on where nothing in it is broken, else another one takes its place."""
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky(elsewhere), program)
        sandbox.begin(Risky(), program)
        process = sandbox.workers[0].process
        if elsewhere == "hang":
            with pytest.raises(TooLongError):
                rehearse(sandbox, Risky(elsewhere), program, seconds=1)
        assert made(sandbox, Risky(), program)
        assert (sandbox.workers[0].process is process) == is_kept


def test_what_was_begun_ahead_and_hangs_ends_with_the_sandbox(program: Program) -> None:
    began = time.perf_counter()
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky("hang"), program)
        assert not sandbox.has_made(Risky("hang"), program)
        assert sandbox.is_working(Risky("hang"), program)
        assert not sandbox.is_working(Risky(), program)
        process = sandbox.workers[0].process
    assert process is not None
    assert process.poll() is not None
    assert time.perf_counter() - began < 30


def test_what_is_sent_back_stays_on_the_cpu_where_it_was_there(tmp_path: Path) -> None:
    """A number on the CPU is an argument of a kernel on a GPU, and not a tensor of it."""
    file, worker = tmp_path / "sent.pt", Worker(torch.device("meta"), 1)
    torch.save({"number": torch.ones(()), "weight": torch.ones(2, device="meta")}, file)
    sent = torch.load(file, map_location=worker.restored)
    assert [sent[name].device.type for name in ("number", "weight")] == ["cpu", "meta"]
