"""Reads baselines: what is something else, or damaged, is refused, with the row and the field."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampopt.errors import InputError
from ampopt.measure.baseline import read_baseline
from ampopt.measure.changes import SURE_MS
from ampopt.measure.compared import ComparedPass, Comparison
from ampopt.measure.sampling import Gain, Measurement
from tests.measure.test_changes import run


@pytest.mark.parametrize("kept", [[], [2]], ids=["no rows", "none measured"])
def test_a_baseline_without_a_measured_row_is_refused(kept: list[int], tmp_path: Path) -> None:
    data = run().to_dict()
    (tmp_path / "b.json").write_text(json.dumps({**data, "rows": [data["rows"][at] for at in kept]}))
    with pytest.raises(InputError, match=r"b\.json has no row that was measured: make it anew"):
        read_baseline(tmp_path / "b.json")


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(run().to_dict()))
    assert read_baseline(tmp_path / "b.json") == run().to_dict()


def broken(path: tuple[Any, ...], value: Any) -> str:
    """A baseline in which one value is another."""
    data: Any = copy.deepcopy(run().to_dict())
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no comparison"),
        ('{"model": "Net", "passes": []}', "is no comparison"),
        (broken(("rows", 0, "latency", SURE_MS), None), "is no comparison"),
        (broken(("rows", 0, "latency", SURE_MS), [1.0]), "is no comparison"),
        (
            broken(
                (
                    "rows",
                    0,
                    "latency",
                ),
                [1.0],
            ),
            "is no comparison",
        ),
        (broken(("interrupted",), "no"), "is no comparison"),
        (broken(("rows", 0, "lane"), 3), "is no comparison"),
        (broken(("rows", 0, "reason"), None), "is no comparison"),
        (broken(("rows", 0, "reason"), 5), "is no comparison"),
        (broken(("inputs",), [3]), "is no comparison"),
        (broken(("architecture",), "ResNet"), "is no comparison"),
        (broken(("architecture",), {"parameters": 3}), "is no comparison"),
        (broken(("environment", "torch"), 3), "is no comparison"),
    ],
)
def test_what_is_no_comparison_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(content)
    with pytest.raises(InputError, match=reason):
        read_baseline(tmp_path / "b.json")


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read_baseline(tmp_path / "b.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is no JSON"):
        read_baseline(tmp_path / "b.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_baseline(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("p50_ms", 5.0, r"p50_ms is 5\.0, outside its interval sure_ms, 1\.01 to 1\.03"),
        ("p50_ms", 0.5, r"p50_ms is 0\.5, outside its interval sure_ms"),
        ("p50_ms", 0, "p50_ms has 0, which is no time"),
        ("p50_ms", None, "p50_ms has None, which is no time"),
        ("p50_ms", -1.0, r"p50_ms has -1\.0, which is no time"),
        ("p50_ms", float("nan"), "p50_ms has nan, which is no time"),
        ("p50_ms", "1", "p50_ms has '1', which is no time"),
        ("p50_ms", True, "p50_ms has True, which is no time"),
        ("p50_ms", 10**400, "p50_ms has 1000.*, which is no time"),
        (SURE_MS, [2.0, 1.0], r"the ends of sure_ms, 2\.0 and 1\.0, are in the wrong order"),
        (SURE_MS, [1.0, 10**400], "sure_ms has 1000.*, which is no time"),
        (SURE_MS, [0.0, 2.0], r"sure_ms has 0\.0, which is no time"),
        (SURE_MS, [1.0, float("inf")], "sure_ms has inf, which is no time"),
        ("p90_ms", 0.9, "p50_ms, p90_ms are .*, which fall"),
        ("p90_ms", float("nan"), "p90_ms has nan, which is no time"),
        ("p99_ms", "late", "p99_ms has 'late', which is no time"),
        ("samples", 0, "samples is 0, which is no number of samples"),
        ("samples", -3, "samples is -3"),
        ("samples", 2.5, r"samples is 2\.5"),
        ("spread", -0.1, r"spread is -0\.1"),
        ("spread", float("nan"), "spread is nan"),
    ],
)
def test_numbers_that_cannot_be_true_are_refused_with_the_row_and_the_field(
    field: str, value: Any, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "b.json").write_text(broken(("rows", 1, "latency", field), value))
    with pytest.raises(InputError, match=rf"is damaged: in the row of degroup \(fp32, alone\) {reason}"):
        read_baseline(tmp_path / "b.json")


def test_a_row_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    data = run().to_dict()
    (tmp_path / "b.json").write_text(json.dumps({**data, "rows": [*data["rows"], data["rows"][1]]}))
    with pytest.raises(InputError, match=r"the row of degroup \(fp32, alone\) is there twice"):
        read_baseline(tmp_path / "b.json")


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=120))
def test_what_compare_writes_is_never_damaged(samples: list[float]) -> None:
    row = ComparedPass("fp32", "alone", "p", Measurement(tuple(samples)), Gain(1.0, 1.0, 1.0), 0.0)
    found = Comparison("Net", {"device": "a CPU"}, (), (row,), 1.0).to_dict()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "b.json").write_text(json.dumps(found))
        assert read_baseline(Path(folder) / "b.json") == found
