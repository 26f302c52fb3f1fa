"""Field tests on a clock that only they and the call under test move, and one on the real one."""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable

import pytest

from ampopt.errors import InputError
from ampopt.measure import field_test as module
from ampopt.measure.field_test import FieldReport, Latencies, field_test

MS = 1_000_000


class Clock:
    """Time that passes where someone sleeps, works, or looks at it (a microsecond a look)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.slept: list[int] = []
        monkeypatch.setattr("ampopt.measure.field_test.time.perf_counter_ns", self.look)
        monkeypatch.setattr("ampopt.measure.field_test.time.sleep", self.sleep)

    def look(self) -> int:
        self.now += 1000
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds * 1e9))
        self.now += round(seconds * 1e9) + 50_000  # sleeps end late

    def works(self, *milliseconds: float) -> Callable[[], None]:
        """A call that takes these milliseconds, one after another, and the last of them from then on."""
        rest = list(milliseconds)

        def call() -> None:
            self.now += round((rest.pop(0) if len(rest) > 1 else rest[0]) * MS)

        return call


def report(**fields: object) -> FieldReport:
    known = {
        "hz": 30.0,
        "deadline_ms": 33.0,
        "first_ms": 9.0,
        "paced": Latencies((5.0,) * 300),
        "back_to_back": Latencies((4.0,) * 300),
        "missed": 0,
        "dropped": 0,
        "start_jitter_ms": 0.1,
        "memory_bytes": 1000,
    }
    return FieldReport(**{**known, **fields})  # type: ignore[arg-type]


def test_frames_begin_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, begun = Clock(monkeypatch), list[int]()
    work = clock.works(3)

    def call() -> None:
        begun.append(clock.now)
        work()

    found = field_test(call, hz=100, seconds=1)
    paced = begun[1:101]
    gaps = [(b - a) / MS for a, b in itertools.pairwise(paced)]
    assert gaps == pytest.approx([10.0] * 99, abs=0.01)
    assert len(begun) == 1 + 100 + 100
    assert (found.missed, found.dropped) == (0, 0)
    assert found.start_jitter_ms < 0.01
    assert found.paced.quantile(0.5) == pytest.approx(3, abs=0.01)
    assert found.paced.to_dict()["jitter_ms"] < 0.01


def test_the_processor_is_idle_between_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    field_test(clock.works(3), hz=100, seconds=1)
    assert sum(clock.slept) > 0.9 * 100 * 7 * MS


def test_the_first_frame_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = field_test(Clock(monkeypatch).works(500, 2), hz=50, seconds=1)
    assert found.first_ms == pytest.approx(500, abs=0.1)
    assert max(found.paced.samples) < 2.1
    assert len(found.paced.samples) == len(found.back_to_back.samples) == 50


def test_a_frame_that_is_not_done_when_the_next_is_due_has_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = field_test(Clock(monkeypatch).works(1, 1, 12, 1), hz=100, seconds=0.1)
    assert (found.missed, found.dropped) == (1, 0)
    assert len(found.paced.samples) == 10
    assert found.start_jitter_ms == pytest.approx(0.6, abs=0.05)  # one of ten begins 2 ms late


def test_frames_that_a_newer_one_replaced_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    found = field_test(Clock(monkeypatch).works(1, 1, 35, 1), hz=100, seconds=0.1)
    assert found.dropped == 2  # those due 10 and 20 ms after the long one; that due after 30 ms is late
    assert found.missed == 1
    assert len(found.paced.samples) == 8


def test_a_call_that_never_keeps_up_drops_what_it_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    found = field_test(Clock(monkeypatch).works(25), hz=100, seconds=1)
    assert len(found.paced.samples) == pytest.approx(40, abs=1)
    assert found.dropped == 100 - len(found.paced.samples)
    assert found.missed == len(found.paced.samples)


def test_a_deadline_may_be_shorter_than_the_time_between_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Clock(monkeypatch).works(1, 1, 6, 1)
    assert field_test(call, hz=100, seconds=0.1, deadline_ms=5).missed == 1


@pytest.mark.parametrize(
    ("frames", "known"),
    [(1, []), (9, ["p50"]), (10, ["p50", "p90"]), (100, ["p50", "p90", "p99"]), (999, ["p50", "p90", "p99"])],
)
def test_a_percentile_needs_a_frame_beyond_it(frames: int, known: list[str]) -> None:
    told = Latencies(tuple(map(float, range(frames)))).to_dict()
    assert [name for name in ("p50", "p90", "p99", "p99.9") if told[f"{name}_ms"] is not None] == known


def test_percentiles_are_samples() -> None:
    told = Latencies(tuple(float(i) for i in range(1000, 0, -1))).to_dict()
    assert [told[name] for name in module.QUANTILES] == [500, 900, 990, 999]
    assert told["jitter_ms"] == pytest.approx(288.675, abs=0.01)


def test_a_report_is_json_for_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    found = field_test(Clock(monkeypatch).works(3), hz=20, seconds=1, gpu_memory=lambda: 77)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["paced"]["frames"] == 20
    assert told["paced"]["p99_ms"] is None
    assert told["deadline_ms"] == 50
    assert told["gpu_memory_bytes"] == 77
    assert told["memory_bytes"] > 1_000_000
    assert set(told) == {
        "hz",
        "deadline_ms",
        "first_frame_ms",
        "paced",
        "back_to_back",
        "missed_deadlines",
        "dropped_frames",
        "start_jitter_ms",
        "memory_bytes",
        "gpu_memory_bytes",
    }


def test_what_is_as_fast_as_expected_passes() -> None:
    judgment = report().judge({"p50_ms": 3.5, "p99_ms": 3.5, "device": "a GPU"})
    assert judgment.passed
    assert judgment.reasons == ()
    assert report().judge(None).passed


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"missed": 1}, "1 of 300 frames at 30 Hz missed the deadline of 33 ms, and 0 were dropped"),
        ({"dropped": 2}, "0 of 302 frames"),
    ],
)
def test_a_missed_deadline_fails_with_its_reason(fields: dict[str, object], reason: str) -> None:
    judgment = report(**fields).judge({"p50_ms": 4.0, "p99_ms": 5.0})
    assert not judgment.passed
    assert len(judgment.reasons) == 1
    assert reason in judgment.reasons[0]
    assert judgment.findings[0].line == f"FAILED: {judgment.reasons[0]}"


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (
            (5.1,) * 300,
            "p50 back to back is 5.100 ms where 4.000 ms was expected, more than the 5.000 ms of 25% slack",
        ),
        (
            (4.0,) * 290 + (8.0,) * 10,
            "p99 back to back is 8.000 ms where 5.000 ms was expected, more than the 6.250 ms of 25% slack",
        ),
    ],
)
def test_slower_than_promised_is_said_and_fails_only_a_strict_test(
    samples: tuple[float, ...], reason: str
) -> None:
    expected, found = {"p50_ms": 4.0, "p99_ms": 5.0}, report(back_to_back=Latencies(samples))
    judgment = found.judge(expected)
    assert judgment.passed, "every frame met its deadline"
    assert (judgment.reasons, judgment.warnings) == ((), (reason,))
    assert [f"SLOWER THAN PROMISED: {reason}"] == [f.line for f in judgment.findings if not f.passed]
    strict = found.judge(expected, strict=True)
    assert not strict.passed
    assert (strict.reasons, strict.warnings) == ((reason,), ())


def test_what_is_within_the_slack_is_said_to_need_it() -> None:
    found = report(back_to_back=Latencies((4.5,) * 300)).judge({"p50_ms": 4.0, "p99_ms": 5.0}, strict=True)
    assert found.passed
    assert [finding.line for finding in found.findings] == [
        "passed: all 300 frames at 30 Hz met the deadline of 33 ms",
        "passed: p50 back to back is 4.500 ms where 4.000 ms was expected, within the 5.000 ms of 25% slack",
        "passed: p99 back to back is 4.500 ms where 5.000 ms was expected",
    ]


@pytest.mark.parametrize(("took", "passes"), [(0.02, True), (0.03, False)])
def test_a_network_of_microseconds_may_take_what_the_call_around_it_takes(took: float, passes: bool) -> None:
    found = report(back_to_back=Latencies((took,) * 90)).judge({"p50_ms": 0.005}, strict=True)
    place = "within" if passes else "more than"
    assert found.passed == passes
    assert found.findings[1].line.endswith(f"was expected, {place} the 0.025 ms of 0.02 ms for the call")


def test_a_judgment_is_json_with_every_test_and_its_limits() -> None:
    told = json.loads(json.dumps(report(missed=1).judge({"p50_ms": 2.0}).to_dict()))
    assert (told["passed"], len(told["reasons"]), len(told["warnings"])) == (False, 1, 1)
    deadlines, median = told["tests"]
    assert deadlines == {
        "test": "deadlines", "measured": 1, "promised": 0, "limit": 0, "decides": True, "passed": False
    }  # fmt: skip
    assert median == {
        "test": "p50 back to back", "measured": 4.0, "promised": 2.0, "limit": 2.5, "decides": False,
        "passed": False,
    }  # fmt: skip


def test_a_judgment_knows_slack_and_a_share_of_misses() -> None:
    slow = report(back_to_back=Latencies((5.1,) * 300), missed=3)
    assert slow.judge({"p50_ms": 4.0}, slack=0.3, missed_share=0.01).passed
    strict = slow.judge({"p50_ms": 4.0}, slack=0.2, missed_share=0.009, strict=True)
    assert len(strict.reasons) == 2


@pytest.mark.parametrize("slack", [-0.1, float("nan"), float("inf")])
def test_a_slack_that_is_no_share_is_refused(slack: float) -> None:
    with pytest.raises(InputError, match="give a share"):
        report().judge({"p50_ms": 4.0}, slack=slack)


def test_percentiles_that_are_not_known_are_not_judged() -> None:
    few = report(back_to_back=Latencies((4.0,) * 50))
    assert few.judge({"p50_ms": 4.0, "p99_ms": 0.1}, strict=True).passed


@pytest.mark.parametrize(
    ("hz", "seconds", "deadline_ms"),
    [
        (0, 1, None),
        (-5, 1, None),
        (float("nan"), 1, None),
        (float("inf"), 1, 5),
        (30, 0.01, None),
        (30, float("inf"), None),
        (30, 1, 0),
        (30, 1, float("nan")),
    ],
)
def test_what_makes_no_test_is_refused(hz: float, seconds: float, deadline_ms: float | None) -> None:
    with pytest.raises(InputError, match="field test"):
        field_test(lambda: None, hz=hz, seconds=seconds, deadline_ms=deadline_ms)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_in_the_test_and_is_then_as_before(enabled: bool) -> None:
    states = set()
    (gc.enable if enabled else gc.disable)()
    try:
        field_test(lambda: states.add(gc.isenabled()), hz=100, seconds=0.05)
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError):
            field_test(lambda: 1 / 0, hz=100, seconds=0.05)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert states == {False}


@pytest.mark.timing
def test_on_the_real_clock_frames_begin_on_time() -> None:
    start = time.perf_counter()
    found = field_test(lambda: time.sleep(0.001), hz=50, seconds=2)
    assert 1.9 < time.perf_counter() - start < 4
    assert len(found.paced.samples) + found.dropped == 100
    assert 1 <= (found.paced.quantile(0.5) or 0) < 5
    assert found.start_jitter_ms < 5
