"""Rehearsals: what goes wrong in another process is a reason here, and nothing more."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampopt
from ampopt.errors import PassError
from ampopt.ir.graph import aten
from ampopt.ir.lanes import lanes_for
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Pass, Rehearsed, Result
from ampopt.measure.entry import Verdict
from ampopt.search.rehearsal import Sandbox, TooLongError, how_many
from tests.support.planted import Bench, captured_of, rewritten

X = torch.ones(1, 3)
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Risky(Engine):
    """Negates the output twice; in any process but `home` it does what `elsewhere` says before that."""

    risky = True

    elsewhere: str = "nothing"
    home: int = 0
    note: str = ""

    def apply(self, program: Program) -> Result:
        """See the class."""
        if self.note:
            Path(self.note).write_text(f"{os.getpid()} {torch.get_num_threads()}")
        if os.getpid() != self.home:
            if self.elsewhere == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.elsewhere == "exit":
                os._exit(3)
            if self.elsewhere == "hang":
                time.sleep(600)
            if self.elsewhere == "raise":
                raise ValueError("no such kernel\nand much more")
        return Result(rewritten(rewritten(program, aten.neg.default), aten.neg.default), 1)


@dataclasses.dataclass(frozen=True)
class Waiting(Risky):
    """In another process it waits for the note, which it writes at home before it asks how that one does."""

    def apply(self, program: Program) -> Result:
        """See the class."""
        while not Path(self.note).exists():
            time.sleep(0.01)
        return super().apply(program)

    def apply_beside(self, program: Program, rehearsed: Callable[[], Rehearsed]) -> Result:
        """See the class."""
        Path(self.note).touch()
        return super().apply_beside(program, rehearsed)


def made(sandbox: Sandbox, step: Pass, program: Program) -> bool:
    """Whether a step that was begun ahead ends well within a minute."""
    deadline = time.perf_counter() + 60
    while not sandbox.has_made(step, program) and time.perf_counter() < deadline:
        time.sleep(0.05)
    return sandbox.has_made(step, program)


def rehearse(sandbox: Sandbox, step: Engine, program: Program, *, seconds: float) -> str | None:
    with sandbox.rehearsing(step, program, seconds=seconds) as rehearsed:
        return rehearsed().why_not


@pytest.fixture
def program() -> Program:
    return captured_of(nn.Linear(3, 2), X)[1].program


def test_a_pass_that_works_is_rehearsed_in_another_process(program: Program, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with Sandbox(CPU) as sandbox:
        rehearse(sandbox, Risky(note=str(note)), program, seconds=60)
        first = note.read_text()
        rehearse(sandbox, Risky(note=str(note)), program, seconds=60)
        assert note.read_text() == first  # the same process
    pid, threads = map(int, first.split())
    assert pid != os.getpid()
    assert threads == torch.get_num_threads()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@dataclasses.dataclass(frozen=True)
class RiskyOnCuda(Risky):
    """One whose kernels could leave a GPU unusable."""

    risky = False
    risky_on_cuda = True


def test_what_could_leave_a_gpu_unusable_is_rehearsed_there_alone(program: Program) -> None:
    step = RiskyOnCuda(elsewhere="crash", home=os.getpid())
    with Sandbox(CPU) as sandbox:
        assert sandbox.apply(step, program, seconds=60)[0].modified
        sandbox.begin(step, program)
        assert not sandbox.is_rehearsing(step, program)
        sandbox.device = torch.device("cuda")
        with pytest.raises(PassError):
            sandbox.apply(step, program, seconds=60)


def test_a_process_that_has_ended_while_it_was_idle_is_replaced(program: Program) -> None:
    with Sandbox(CPU) as sandbox:
        rehearse(sandbox, Risky(), program, seconds=60)
        first = sandbox.workers[0].process
        assert first is not None
        first.kill()
        first.wait()
        rehearse(sandbox, Risky(), program, seconds=60)
        assert sandbox.workers[0].process is not first


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_cpu_nothing_is_begun_beside_what_is_timed(device: str) -> None:
    with Sandbox(torch.device(device)) as sandbox:
        sandbox.prepare()
        assert (sandbox.workers[0].process is None) == (device == "cpu")


def test_a_failure_there_is_a_reason_here_and_the_next_one_has_a_new_process(program: Program) -> None:
    reasons = {
        "crash": r"brought down a process of its own \(signal SIGSEGV\)",
        "exit": r"brought down a process of its own \(exit status 3\)",
        "raise": r"failed in a process of its own: ValueError: no such kernel$",
    }
    with Sandbox(CPU) as sandbox:
        for elsewhere, reason in reasons.items():
            with pytest.raises(PassError, match=reason):
                rehearse(sandbox, Risky(elsewhere), program, seconds=60)
        rehearse(sandbox, Risky(), program, seconds=60)


def test_what_does_not_return_is_killed_when_the_time_is_over(program: Program) -> None:
    start = time.perf_counter()
    with Sandbox(CPU) as sandbox, pytest.raises(TooLongError, match="longer than the 5 s that were left"):
        rehearse(sandbox, Risky("hang"), program, seconds=5)
    assert time.perf_counter() - start < 30


def test_nothing_goes_on_there_during_a_pause(program: Program, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with Sandbox(CPU) as sandbox:
        with sandbox.paused():
            pass  # there is no process yet
        rehearse(sandbox, Risky(), program, seconds=60)  # the process is loaded now
        with sandbox.rehearsing(Waiting(note=str(note)), program, seconds=60) as rehearsed:
            time.sleep(0.5)
            with sandbox.paused():
                note.touch()
                time.sleep(0.5)
                assert not sandbox.has_answered()
            assert rehearsed().why_not is None


def test_an_answer_can_be_seen_without_waiting_for_it(program: Program) -> None:
    with Sandbox(CPU) as sandbox, sandbox.rehearsing(Risky(), program, seconds=60) as rehearsed:
        assert not sandbox.has_answered()
        while not sandbox.has_answered():
            time.sleep(0.01)
        assert rehearsed().why_not is None


def test_a_pass_may_begin_here_while_it_is_rehearsed(program: Program, tmp_path: Path) -> None:
    home = os.getpid()
    with Sandbox(CPU) as sandbox:
        result, unrehearsed = sandbox.apply(
            Waiting("nothing", home, str(tmp_path / "a")), program, seconds=60
        )
        assert (result.rewrites, unrehearsed) == (1, None)
        with pytest.raises(PassError, match="signal SIGSEGV"):
            sandbox.apply(Waiting("crash", home, str(tmp_path / "b")), program, seconds=60)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that works beside measurements on this device, too."""
    monkeypatch.setattr(Sandbox, "works_beside", True)


@pytest.mark.usefixtures("beside")
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


@pytest.mark.usefixtures("beside")
def test_a_failure_ahead_is_told_to_its_trial_alone(program: Program, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky("crash", note=str(note)), program)
        rehearse(sandbox, Risky(), program, seconds=60)  # it waits, and has a process of its own
        done = note.read_text()
        with pytest.raises(PassError, match="signal SIGSEGV"):
            rehearse(sandbox, Risky("crash", note=str(note)), program, seconds=60)
        assert note.read_text() == done  # it did not crash a second time


@pytest.mark.usefixtures("beside")
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


@pytest.mark.usefixtures("beside")
def test_what_is_begun_on_a_lane_stays_until_that_lane_is_given_up(program: Program) -> None:
    other = program.replace(lane=lanes_for("bf16", CPU)[0])
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky(), program)
        assert made(sandbox, Risky(), program)
        sandbox.begin(Risky(), other)
        sandbox.give_up(program)
        assert not sandbox.is_rehearsing(Risky(), program)
        assert made(sandbox, Risky(), other)


@pytest.mark.usefixtures("beside")
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


@pytest.mark.usefixtures("beside")
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


@pytest.mark.usefixtures("beside")
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


@dataclasses.dataclass(frozen=True)
class InHalves(Risky):
    """It is rehearsed as two programs, of which the second one has other examples."""

    def divided(self, program: Program, count: int) -> list[Program]:
        """See the class."""
        return [program, program.replace(examples=(2 * X,))] if count > 1 else [program]

    def send(self, program: Program) -> dict[str, object] | None:
        """See the class."""
        return {"example": program.examples[0]}


@pytest.mark.usefixtures("beside")
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
        assert sandbox.begun(InHalves(), program) == []
    assert [torch.equal(each["example"], x) for each, x in zip(sent, expected, strict=True) if each] == [
        True
    ] * count


@pytest.mark.usefixtures("beside")
def test_where_one_piece_fails_the_whole_does(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.search.rehearsal.how_many", lambda _: 2)
    with Sandbox(CPU) as sandbox:
        sandbox.begin(InHalves("raise"), program)
        with pytest.raises(PassError, match="no such kernel"):
            rehearse(sandbox, InHalves("raise"), program, seconds=60)
        assert not sandbox.has_made(InHalves("raise"), program)
        assert rehearse(sandbox, InHalves(), program, seconds=60) is None


@pytest.mark.parametrize(
    ("device", "cpus", "free", "expected"),
    [("cpu", 64, 80, 1), ("cuda", 4, 80, 1), ("cuda", 16, 2, 1), ("cuda", 8, 80, 2), ("cuda", 64, 80, 4)],
)
def test_more_processes_need_cores_and_memory(
    device: str, cpus: int, free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampopt.search.rehearsal.usable_cpus", lambda: range(cpus))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (free << 30, 80 << 30))
    assert how_many(torch.device(device)) == expected


@dataclasses.dataclass(frozen=True)
class Sending(Risky):
    """Sends a tensor back."""

    def send(self, program: Program) -> dict[str, object] | None:
        """See the class."""
        return {"weight": torch.ones(2)}


def test_what_is_sent_back_is_loaded_once_and_told_as_often_as_asked_for(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    load = torch.load

    def noted(file: object, **options: object) -> object:
        loaded.append(file)
        return load(file, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("torch.load", noted)
    with Sandbox(CPU) as sandbox:
        with sandbox.rehearsing(Sending(), program, seconds=60) as rehearsed:
            first = rehearsed()
        assert rehearsed() is first  # its folder is gone by now
    (sent,) = first.sent
    assert sent is not None
    assert torch.equal(sent["weight"], torch.ones(2))
    assert len(loaded) == 1


@pytest.mark.usefixtures("beside")
def test_what_waits_in_the_queue_was_not_begun(program: Program) -> None:
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky("hang"), program)
        sandbox.begin(Risky(), program)
        time.sleep(0.01)
        assert sandbox.ahead_s(Risky("hang"), program) > 0
        assert sandbox.ahead_s(Risky(), program) == 0.0


@pytest.mark.usefixtures("beside")
def test_a_failure_ahead_has_made_nothing(program: Program) -> None:
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky("raise"), program)
        sandbox.begin(Risky(), program)
        with pytest.raises(PassError):
            rehearse(sandbox, Risky("raise"), program, seconds=60)
        sandbox.begin(Risky("raise"), program)
        rehearse(sandbox, Risky(), program, seconds=60)
        assert not sandbox.has_made(Risky("raise"), program)


@pytest.mark.usefixtures("beside")
def test_a_full_disk_costs_the_rehearsal_alone(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with Sandbox(CPU) as sandbox:
        monkeypatch.setattr("ampopt.search.worker.pickle.dump", full)
        sandbox.begin(Risky(), program)
        assert not sandbox.is_rehearsing(Risky(), program)
        said = rehearse(sandbox, Risky(), program, seconds=60)
        assert said is not None
        assert "No space left on device" in said


@pytest.mark.usefixtures("beside")
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


@pytest.mark.usefixtures("beside")
def test_what_was_begun_ahead_and_hangs_ends_with_the_sandbox(program: Program) -> None:
    began = time.perf_counter()
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky("hang"), program)
        assert not sandbox.has_made(Risky("hang"), program)
        process = sandbox.workers[0].process
    assert process is not None
    assert process.poll() is not None
    assert time.perf_counter() - began < 30


def test_on_a_cpu_nothing_is_begun_ahead(program: Program) -> None:
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky(), program)
        assert not sandbox.is_rehearsing(Risky(), program)


def test_a_failure_is_told_as_often_as_it_is_asked_for(program: Program) -> None:
    with Sandbox(CPU) as sandbox, sandbox.rehearsing(Risky("raise"), program, seconds=60) as rehearsed:
        for _ in range(2):
            with pytest.raises(PassError, match="no such kernel"):
                rehearsed()


def test_what_goes_on_there_ends_where_it_goes_wrong_here(program: Program, tmp_path: Path) -> None:
    note = tmp_path / "note"
    start = time.perf_counter()

    def fail() -> None:
        while not note.exists() or not note.read_text():
            time.sleep(0.01)
        raise ZeroDivisionError

    with Sandbox(CPU) as sandbox:
        hanging = sandbox.rehearsing(Risky("hang", note=str(note)), program, seconds=500)
        with pytest.raises(ZeroDivisionError), hanging:
            fail()
        with pytest.raises(ProcessLookupError):
            os.kill(int(note.read_text().split()[0]), 0)
        assert rehearse(sandbox, Risky(), program, seconds=60) is None
    assert time.perf_counter() - start < 100


def test_what_another_process_cannot_load_is_not_rehearsed(program: Program) -> None:
    @dataclasses.dataclass(frozen=True)
    class Local(Risky):
        """Known to this process only."""

    with Sandbox(CPU) as sandbox:
        said = rehearse(sandbox, Local("crash"), program, seconds=60)
        assert said is not None
        assert "cannot be sent to another process" in said
        engine = program.replace(engine=lambda *tensors: tensors)
        assert rehearse(sandbox, Risky(), engine, seconds=60) is not None
        assert rehearse(sandbox, Risky(), program, seconds=60) is None


def test_what_was_not_rehearsed_is_told_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.search.rehearsal._possible", lambda: False)
    with Sandbox(CPU) as sandbox:
        bench = Bench(monkeypatch, nn.Linear(3, 2), X, cost={"risky": 0.5})
        bench.manager.sandbox = sandbox
        (entry,) = bench.rewrite(Risky("nothing", os.getpid()))
    assert entry.verdict is Verdict.KEPT
    assert entry.hints == ("not rehearsed: this system has no POSIX processes to rehearse in",)


def test_a_pass_that_crashes_its_rehearsal_is_a_failed_row_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = os.getpid()
    with Sandbox(CPU) as sandbox:
        bench = Bench(monkeypatch, nn.Linear(3, 2), X, cost={"risky": 0.5})
        bench.manager.sandbox = sandbox
        entries = bench.rewrite(Risky("crash", home), Risky("nothing", home))
    assert [entry.verdict for entry in entries] == [Verdict.FAILED, Verdict.KEPT]
    assert "signal SIGSEGV" in entries[0].reason


@pytest.mark.slow
def test_the_compiler_passes_its_rehearsal() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    report = ampopt.optimize(network, torch.randn(1, 3, 8, 8), budget_s=90, progress=False).report
    entries = [e for e in report.entries if e.name.startswith("compile")]
    assert entries
    assert all(e.verdict in (Verdict.KEPT, Verdict.REVERTED) for e in entries), report
