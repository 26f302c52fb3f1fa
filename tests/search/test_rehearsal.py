"""Rehearsals: what goes wrong in another process is a reason here, and nothing more."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ampopt
from ampopt.errors import PassError
from ampopt.ir.program import Program
from ampopt.measure.entry import Verdict
from ampopt.passes.compile import Compile
from ampopt.search.rehearsal import Sandbox, TooLongError, how_many
from tests.support.fresh import forked_workers  # noqa: F401 - a fixture
from tests.support.planted import Bench, captured_of
from tests.support.risky import CPU, Risky, RiskyOnCuda, Sending, Waiting, X, rehearse

FORKED = pytest.mark.usefixtures("forked_workers")


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


def test_what_could_leave_a_gpu_unusable_is_rehearsed_there_alone(program: Program) -> None:
    step = RiskyOnCuda(elsewhere="crash", home=os.getpid())
    with Sandbox(CPU) as sandbox:
        assert sandbox.apply(step, program, seconds=60)[0].modified
        sandbox.begin(step, program)
        assert not sandbox.is_rehearsing(step, program)
        sandbox.device = torch.device("cuda")
        with pytest.raises(PassError):
            sandbox.apply(step, program, seconds=60)


@FORKED
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


@FORKED
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


@FORKED
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


@FORKED
def test_a_pass_may_begin_here_while_it_is_rehearsed(program: Program, tmp_path: Path) -> None:
    home = os.getpid()
    with Sandbox(CPU) as sandbox:
        result, unrehearsed = sandbox.apply(
            Waiting("nothing", home, str(tmp_path / "a")), program, seconds=60
        )
        assert (result.rewrites, unrehearsed) == (1, None)
        with pytest.raises(PassError, match="signal SIGSEGV"):
            sandbox.apply(Waiting("crash", home, str(tmp_path / "b")), program, seconds=60)


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


@FORKED
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


def test_on_a_cpu_nothing_is_begun_ahead(program: Program) -> None:
    with Sandbox(CPU) as sandbox:
        sandbox.begin(Risky(), program)
        assert not sandbox.is_rehearsing(Risky(), program)


@FORKED
def test_a_failure_is_told_as_often_as_it_is_asked_for(program: Program) -> None:
    with Sandbox(CPU) as sandbox, sandbox.rehearsing(Risky("raise"), program, seconds=60) as rehearsed:
        for _ in range(2):
            with pytest.raises(PassError, match="no such kernel"):
                rehearsed()


@FORKED
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


@FORKED
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


@FORKED
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
    x = torch.randn(1, 3, 8, 8)
    report = ampopt.optimize(network, x, passes=[Compile()], budget_s=90, progress=False).report
    assert report.entries
    ends = [(entry.name, entry.verdict, entry.reason) for entry in report.entries]
    assert all(verdict in (Verdict.KEPT, Verdict.REVERTED) for _, verdict, _ in ends), ends
