"""First and second calls of `optimize`, side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.second_optimize import measure, to_markdown


def row(**facts: Any) -> dict[str, Any]:
    return {"network": "resnet18", "lane": "amp", "commit": "abc", "environment": {"device": "a"}, **facts}


def test_the_table_shows_shares_and_failures() -> None:
    first, second = {"seconds": 50.0, "passes": ["a"]}, {"seconds": 8.0, "passes": ["a"]}
    table = to_markdown([row(first=first, second=second), row(first=first, error="ValueError: no")])
    assert "| resnet18 | amp | 50.0 | 8.0 | 16% | yes | abc |" in table
    assert "| resnet18 | amp | ValueError: no | – | – | – | abc |" in table


@pytest.mark.slow
def test_a_network_is_optimized_twice_in_processes_of_their_own() -> None:
    found = measure("linear5x128", "fp32", torch.device("cpu"), budget_s=20.0)
    assert "error" not in found
    assert found["first"]["passes"] == found["second"]["passes"]
    assert [found[call]["tuned"] for call in ("first", "second")] == [False, True]
    assert all(found[call]["seconds"] > 0 for call in ("first", "second"))
