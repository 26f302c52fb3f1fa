"""What changed between two comparisons: intervals decide, and what cannot be compared is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampopt.document.html import to_html
from ampopt.document.markdown import to_markdown
from ampopt.document.text import to_text
from ampopt.errors import InputError
from ampopt.measure.architecture import Architecture
from ampopt.measure.baseline import read_baseline
from ampopt.measure.changes import INTERRUPTED, Change, Changes, changes, check_lanes
from ampopt.measure.compared import ComparedPass, Comparison
from ampopt.measure.sampling import Gain, Measurement

SAMPLES = tuple(0.001 * (1 + 0.01 * (k % 5)) for k in range(20))


def run(factor: float = 1.0, *, reason: str = "", environment: dict[str, str] | None = None) -> Comparison:
    """A comparison whose second row takes `factor` times as long, or has only a reason."""
    timed = Measurement(tuple(factor * sample for sample in SAMPLES))
    gain = Gain(1.2, 1.15, 1.25)
    second = ComparedPass("fp32", "alone", "degroup", timed, gain, 1e-7)
    if reason:
        second = ComparedPass("fp32", "alone", "degroup", None, None, None, reason)
    first = ComparedPass("fp32", "alone", "fold-conv-bn", Measurement(SAMPLES), gain, 1e-7)
    idle = ComparedPass("fp32", "alone", "idle", None, None, None, "nothing to do: no such node")
    facts = environment or {"device": "a CPU", "torch": "2.10"}
    return Comparison("Net", facts, ("float32[1, 3, 8, 8] on cpu",), (first, second, idle), 1.0)


def with_reason(reason: str, *, mode: str = "alone") -> Comparison:
    """A comparison whose second row was timed, and has a reason."""
    found = run()
    row = dataclasses.replace(found.rows[1], reason=reason, mode=mode)
    return dataclasses.replace(found, rows=(found.rows[0], row, found.rows[2]))


def between(then: Comparison, now: Comparison, threshold: float = 1.05) -> dict[str, str]:
    """The outcomes by pass."""
    found = changes(json.loads(json.dumps(then.to_dict())), now.to_dict(), threshold)
    return {row.name: row.outcome for row in found.rows}


@pytest.mark.parametrize(
    ("factor", "threshold", "outcome"),
    [
        (1.0, 1.05, "no difference"),
        (1.5, 1.05, "slower"),
        (0.5, 1.05, "faster"),
        (1.5, 2.0, "no difference"),
        (0.7, 2.0, "no difference"),
        (1.06, 1.05, "no difference"),  # the median is beyond the threshold, and its interval is not
    ],
)
def test_a_row_is_slower_or_faster_where_its_whole_interval_is(
    factor: float, threshold: float, outcome: str
) -> None:
    assert between(run(), run(factor), threshold) == {"fold-conv-bn": "no difference", "degroup": outcome}


def test_an_interrupted_run_does_not_pass() -> None:
    then, now = json.loads(json.dumps(run().to_dict())), run(reason=INTERRUPTED)
    found = changes(then, now.to_dict(), 1.05)
    assert not found.regressions
    assert found.compared
    assert found.to_dict()["passed"] is False
    document = now.document(found)
    assert document.verdict == "NOT PASSED: interrupted before 1 row of the baseline."
    assert document.tone == "bad"


def test_a_row_that_the_baseline_does_not_have_either_was_not_interrupted() -> None:
    then = json.loads(json.dumps(run(reason="not tried: no time left").to_dict()))
    assert changes(then, run(reason=INTERRUPTED).to_dict(), 1.05).passed


def test_noise_within_the_interval_is_no_regression() -> None:
    quiet, noisy = run(), run()
    rows = list(noisy.rows)
    spread = Measurement(
        tuple(0.001 * (0.5 + 0.1 * k) for k in range(20))
    )  # its median is 1.45 times as long
    rows[1] = ComparedPass("fp32", "alone", "degroup", spread, Gain(1.2, 1.15, 1.25), 1e-7)
    loud = Comparison(noisy.model, noisy.environment, noisy.inputs, tuple(rows), 1.0)
    found = changes(quiet.to_dict(), loud.to_dict(), 1.05)
    assert not found.regressions
    assert {row.name: row.outcome for row in found.rows}["degroup"] == "no difference"


@given(
    st.lists(st.floats(0.5, 2.0), min_size=6, max_size=60),
    st.lists(st.floats(0.5, 2.0), min_size=6, max_size=60),
)
def test_both_directions_are_mirror_images(then: list[float], now: list[float]) -> None:
    def single(values: list[float]) -> dict[str, Any]:
        timed = Measurement(tuple(values))
        row = ComparedPass("fp32", "alone", "p", timed, Gain(1.0, 1.0, 1.0), 0.0)
        return Comparison("Net", {"device": "a CPU"}, (), (row,), 1.0).to_dict()

    (there,) = changes(single(then), single(now), 1.05).rows
    (back,) = changes(single(now), single(then), 1.05).rows
    mirror = {"slower": "faster", "faster": "slower", "no difference": "no difference"}
    assert back.outcome == mirror[there.outcome]
    assert there.low is not None
    assert there.high is not None
    assert there.ratio is not None
    assert there.low <= there.ratio <= there.high


@pytest.mark.parametrize(
    ("reason", "outcome", "closes"),
    [("failed: ValueError: no", "fails now", True), ("not tried: no time left", "only then", False)],
)
def test_a_pass_that_fails_now_closes_the_gate_and_one_without_time_does_not(
    reason: str, outcome: str, closes: bool
) -> None:
    found = changes(run().to_dict(), run(reason=reason).to_dict(), 1.05)
    assert {row.name: row.outcome for row in found.rows}["degroup"] == outcome
    assert bool(found.regressions) is closes
    assert between(run(reason=reason), run())["degroup"] == "only now"


WRONG = "(output 0: error 1 is over 1e-05)"
FAILED = "failed: ValueError: no"


@pytest.mark.parametrize(
    ("then", "now", "outcome", "why"),
    [
        (run(), with_reason(WRONG), "fails now", WRONG),
        (with_reason(WRONG), run(), "only now", WRONG),
        (with_reason(WRONG), with_reason(WRONG), "fails in both", WRONG),
        (with_reason(WRONG), run(reason=FAILED), "fails in both", FAILED),
        (run(reason=FAILED), with_reason(WRONG), "fails in both", WRONG),
        (with_reason(WRONG), run(reason="not tried"), "only then", "not tried"),
        (run(reason="not tried"), with_reason(WRONG), "only now", WRONG),
    ],
)
def test_a_program_that_is_wrong_is_compared_with_nothing_and_closes_the_gate_where_it_was_right(
    then: Comparison, now: Comparison, outcome: str, why: str
) -> None:
    found = changes(json.loads(json.dumps(then.to_dict())), now.to_dict(), 1.05)
    row = {row.name: row for row in found.rows}["degroup"]
    assert (row.outcome, row.ratio) == (outcome, None)
    assert row.reason == why
    assert bool(found.regressions) is (outcome == "fails now")
    assert now.document(found).tone == ("bad" if outcome == "fails now" else "good")
    assert found.rows[0].outcome == "no difference"


def test_a_pass_that_is_wrong_in_one_mode_fails_in_that_alone() -> None:
    then, now = run(), run()
    more = dataclasses.replace(then.rows[1], mode="cumulative")
    then = dataclasses.replace(then, rows=(*then.rows, more))
    now = dataclasses.replace(now, rows=(*now.rows, dataclasses.replace(more, reason=WRONG)))
    found = changes(then.to_dict(), now.to_dict(), 1.05)
    assert [(row.mode, row.name) for row in found.regressions] == [("cumulative", "degroup")]


def test_a_right_program_beside_a_wrong_one_without_the_pass_is_compared() -> None:
    beside = with_reason(f"(without it: {WRONG[1:]}")
    assert between(run(), beside)["degroup"] == "no difference"
    assert between(beside, run())["degroup"] == "no difference"


def test_where_every_program_is_wrong_no_gate_has_passed(tmp_path: Path) -> None:
    then, now = run(), run()
    wrong = dataclasses.replace(now, rows=tuple(dataclasses.replace(r, reason=WRONG) for r in now.rows[:2]))
    assert changes(wrong.to_dict(), wrong.to_dict(), 1.05).compared == ()
    assert len(changes(then.to_dict(), wrong.to_dict(), 1.05).regressions) == 2
    (tmp_path / "b.json").write_text(json.dumps(wrong.to_dict()))
    with pytest.raises(InputError, match="has no row whose program was right"):
        read_baseline(tmp_path / "b.json")


def test_what_was_measured_in_neither_run_has_no_row() -> None:
    assert "idle" not in between(run(), run())


def test_another_machine_is_told() -> None:
    now = run(environment={"device": "a GPU", "torch": "2.10", "cuda": "13"})
    found = changes(run().to_dict(), now.to_dict(), 1.05)
    assert found.environment == (("device", "a CPU", "a GPU"), ("cuda", "–", "13"))


def test_the_report_has_what_changed_first() -> None:
    now = run(1.5)
    found = changes(run().to_dict(), now.to_dict(), 1.05)
    document = now.document(found)
    text = to_markdown(document)
    assert "**FAILED: 1 row is slower than the baseline by more than 1.05x, or failing.**" in text
    assert "| fp32 | alone | degroup | slower | 1.020 | 1.530 | 1.50x |" in text
    assert text.index("What changed since the baseline") < text.index("What each pass brings: fp32 lane")
    assert "<svg" in to_html(document)
    assert document.data["changes"]["passed"] is False
    passed = run().document(changes(run().to_dict(), run().to_dict(), 1.05))
    assert passed.verdict == "passed: of 2 rows none is slower than the baseline by more than 1.05x."
    assert passed.data["changes"]["passed"] is True


def test_where_nothing_was_measured_twice_no_gate_has_passed() -> None:
    then, now = run(), run()
    rows = tuple(ComparedPass("fp32", "alone", row.name, None, None, None, "not tried") for row in now.rows)
    nothing = Comparison(now.model, now.environment, now.inputs, rows, 1.0)
    found = changes(then.to_dict(), nothing.to_dict(), 1.05)
    assert not found.compared
    assert found.to_dict()["passed"] is False
    assert nothing.document(found).verdict.startswith("Nothing was measured in both runs")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "Other"}, "of the model Other, and this is Net"),
        (
            {"inputs": ["float32[2, 3, 8, 8] on cpu"]},
            r"float32\[2, 3, 8, 8\], and these are float32\[1, 3, 8, 8\]",
        ),
        ({"rows": [{"lane": "amp", "mode": "alone", "name": "p"}]}, "lanes .* amp and fp32, differ"),
    ],
)
def test_a_baseline_of_something_else_is_refused_with_the_difference(change: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        changes({**run().to_dict(), **change}, run().to_dict(), 1.05)


SMALL, LARGE = Architecture(8, 3, "a"), Architecture(128, 3, "b")


@pytest.mark.parametrize(
    ("then", "now", "reason"),
    [
        (SMALL, LARGE, "another Net: it has 8 parameters in 3 modules, and this one 128 parameters in 3"),
        (SMALL, Architecture(8, 3, "c"), "another Net: the classes of its modules, or the names or shapes"),
    ],
)
def test_a_baseline_of_another_architecture_is_refused(
    then: Architecture, now: Architecture, reason: str
) -> None:
    old, new = (dataclasses.replace(run(), architecture=each).to_dict() for each in (then, now))
    with pytest.raises(InputError, match=reason):
        changes(old, new, 1.05)


@pytest.mark.parametrize(("then", "now"), [(None, SMALL), (SMALL, None), (SMALL, SMALL)])
def test_a_baseline_of_an_earlier_version_is_compared_by_its_class(
    then: Architecture | None, now: Architecture | None
) -> None:
    old, new = (dataclasses.replace(run(), architecture=each).to_dict() for each in (then, now))
    if then is None:
        del old["architecture"]
    assert not changes(old, new, 1.05).regressions
    with pytest.raises(InputError, match="of the model Other"):
        changes({**old, "model": "Other"}, new, 1.05)


def test_another_device_of_the_inputs_is_none_and_lanes_may_be_asked_for_that_cannot_be_tried() -> None:
    then = {**run().to_dict(), "inputs": ["float32[1, 3, 8, 8] on cuda:0"]}
    assert not changes(then, run().to_dict(), 1.05).regressions
    check_lanes(then, {"fp32", "amp"})
    with pytest.raises(InputError, match="fp32 and amp, differ"):
        check_lanes(then, {"amp"})


def test_a_further_lane_is_only_now() -> None:
    now = run()
    more = tuple(dataclasses.replace(row, lane="amp") for row in now.rows)
    found = changes(run().to_dict(), dataclasses.replace(now, rows=(*now.rows, *more)).to_dict(), 1.05)
    assert {row.outcome for row in found.rows if row.lane == "amp"} == {"only now"}
    assert len(found.compared) == 2
    assert not found.regressions


def test_rows_that_there_was_no_time_for_are_told_and_counted_by_the_verdict() -> None:
    then, now = json.loads(json.dumps(run().to_dict())), run(reason="not tried: no time left")
    found = changes(then, now.to_dict(), 1.05)
    document = now.document(found)
    assert found.passed
    assert document.verdict == (
        "passed: of 1 rows none is slower than the baseline by more than 1.05x; "
        "1 row of the baseline is not compared."
    )
    told = "1 row of the baseline was not measured in this run, and nothing is known of them"
    assert all(told in text for text in (to_text(document), to_markdown(document), to_html(document)))
    data = found.to_dict()
    assert (data["compared"], data["not_compared"], data["baseline_interrupted"]) == (1, 1, False)


def test_every_verdict_counts_what_is_not_compared() -> None:
    then, later = run(), run(2.0)
    more = [dataclasses.replace(then.rows[1], name=name) for name in ("a", "b", "c")]
    then = dataclasses.replace(then, rows=(*then.rows, *more))
    late = [dataclasses.replace(row, latency=None, reason="not tried: no time left") for row in more]
    slower = dataclasses.replace(later, rows=(*later.rows, *late))
    verdict = slower.document(changes(then.to_dict(), slower.to_dict(), 1.05)).verdict
    assert verdict.endswith("or failing; 3 rows of the baseline are not compared.")
    late[0] = dataclasses.replace(late[0], reason=INTERRUPTED)
    ended = dataclasses.replace(run(), rows=(*run().rows, *late))
    verdict = ended.document(changes(then.to_dict(), ended.to_dict(), 1.05)).verdict
    assert verdict == (
        "NOT PASSED: interrupted before 1 row of the baseline; 2 rows more of the baseline are not compared."
    )


@pytest.mark.parametrize("says_so", [True, False])
def test_a_baseline_of_an_interrupted_run_is_told_to_be_one(says_so: bool) -> None:
    then = run(reason="" if says_so else INTERRUPTED)
    data = dataclasses.replace(then, interrupted=says_so).to_dict()
    if not says_so:
        del data["interrupted"]  # as earlier versions wrote it
    found = changes(data, run().to_dict(), 1.05)
    assert found.passed
    assert found.to_dict()["baseline_interrupted"] is True
    document = run().document(found)
    told = "the baseline is of a run that was interrupted"
    assert all(told in text for text in (to_text(document), to_markdown(document), to_html(document)))
    assert told not in to_text(run().document(changes(run().to_dict(), run().to_dict(), 1.05)))


def test_intervals_are_rounded_outwards() -> None:
    row = Change("fp32", "alone", "p", "no difference", 1.0, 1.02, 1.024, 1.0099, 1.0501)
    cells = to_markdown(run().document(Changes((row,), 1.05, ())))
    assert "| 1.02x | 1.00 to 1.06 |" in cells
