"""What may be claimed of the race: best peers, means, the worst network, the less favourable regime."""

from __future__ import annotations

import pytest

from benchmarks.regimes import AT_30_HZ, BACK_TO_BACK
from benchmarks.standing import best_peer, cpu_times, eager_error, lead, name_of, standings
from tests.benchmarks.rows import contestant, race_row


def test_the_best_peer_is_the_fastest_that_is_not_ours_in_each_regime() -> None:
    row = race_row("net", eager=4.0, script=contestant(2.0, 5.0), ours=1.0, ort="no such library")
    row["contestants"]["ampopt fp32, copied"] = contestant(0.5)
    assert best_peer(row, BACK_TO_BACK) == ("script", 2.0)
    assert best_peer(row, AT_30_HZ) == ("eager", 4.0)


@pytest.mark.parametrize(
    ("error", "best"), [(None, "eager fp16"), (0.03, "eager fp16"), (0.019, "wrong"), (0.01, "wrong")]
)
def test_a_peer_that_is_wrong_is_no_best_peer(error: float | None, best: str) -> None:
    row = race_row("net", "amp", ours=1.0, wrong=contestant(0.5, relative_error=error))
    row["contestants"]["eager fp16 autocast"] = contestant(9.0, relative_error=0.0095)
    row["contestants"]["eager fp16"] = contestant(3.0)
    assert eager_error(row) == 0.0095
    found = best_peer(row, BACK_TO_BACK)
    assert found is not None
    assert found[0] == best


def test_a_network_without_ours_or_without_peers_has_no_lead() -> None:
    assert lead(race_row("net", eager=4.0, ours="out of memory"), BACK_TO_BACK) is None
    assert lead(race_row("net", ours=1.0), BACK_TO_BACK) is None
    assert standings([race_row("net", ours=1.0)]) == []


def test_what_is_claimed_is_of_the_less_favourable_regime() -> None:
    rows = [
        race_row("a", eager=contestant(4.0, 8.0), ours=contestant(2.0, 1.0)),
        race_row("b", eager=contestant(8.0, 3.0), ours=contestant(1.0, 2.0)),
        race_row("c", io="lane", eager=3.0, ours=1.0),
    ]
    fp32, lane = standings(rows)
    assert fp32.mean(BACK_TO_BACK) == pytest.approx(4.0)
    assert fp32.mean(AT_30_HZ) == pytest.approx((8 * 1.5) ** 0.5)
    assert fp32.less_favourable == AT_30_HZ
    assert fp32.worst(BACK_TO_BACK).network == "a"
    assert fp32.worst(AT_30_HZ).network == "b"
    assert "3.46 times ampopt's time in geometric mean (30 Hz, the less favourable" in fp32.claim()
    assert "at least 1.50 times (b, 30 Hz), over 2 networks" in fp32.claim()
    assert lane.claim().startswith("fp32 lane, the lane's dtype in and out:")


def test_cpu_times_have_a_best_peer_of_their_own() -> None:
    row = race_row("net", eager=4.0, ours=1.0, ort=2.0, wrong=contestant(0.1, relative_error=None))
    for name, ms in (("eager", 3.0), ("ampopt fp32", 2.0), ("ort", 5.0), ("wrong", 0.1)):
        row["contestants"][name][BACK_TO_BACK]["cpu_ms"] = ms
    assert cpu_times([row, race_row("other", eager=1.0, ours=1.0)]) == {"net": 1.5}


def test_tables_of_threads_are_told_apart() -> None:
    assert name_of(("fp32", "fp32", 1)) == "fp32 lane, FP32 in and out, 1 thread"
    assert name_of(("amp", "lane", 2)) == "amp lane, the lane's dtype in and out, 2 threads"
