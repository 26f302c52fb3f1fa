"""Our depthwise kernels beside cuDNN's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.depthwise import measure_site, to_markdown, write_row
from tests.support.conv_sites import DEPTHWISE


def row(network: str, **lanes: Any) -> dict[str, Any]:
    return {"network": network, "commit": "c0ffee", "environment": {"device": "a GPU"}, "lanes": lanes}


def site(cudnn_us: float, triton_us: float) -> dict[str, Any]:
    return {"cudnn_us": cudnn_us, "triton_us": triton_us, "first_s": 0.25}


def test_the_table_has_least_median_and_most_and_says_what_failed() -> None:
    sites = [site(6.0, 4.0), site(9.0, 3.0), site(5.0, 4.0)]
    rows = [
        row("one", amp={"sites": sites}, fp32={"error": "RuntimeError: no"}),
        row("two", amp={"sites": []}),
    ]
    lines = to_markdown(rows).splitlines()
    assert "| one | amp | 3 | 1.25 | 1.50 | 3.00 | 0.8 | c0ffee |" in lines
    assert "| one | fp32 | RuntimeError: no | – | – | – | – | c0ffee |" in lines
    assert "| two | amp | 0 | – | – | – | – | c0ffee |" in lines


def test_a_row_takes_the_place_of_the_networks_earlier_one(tmp_path: Path) -> None:
    for found in (row("ghostnet_100", amp={"sites": []}), row("ghostnet_100", amp={"error": "no"})):
        write_row(tmp_path, found)
    (kept,) = json.loads((tmp_path / "depthwise.json").read_text())
    assert kept["lanes"] == {"amp": {"error": "no"}}
    assert "| ghostnet_100 | amp | no |" in (tmp_path / "depthwise.md").read_text()


@pytest.mark.gpu
def test_both_kernels_of_a_place_are_timed() -> None:
    found = measure_site(DEPTHWISE, torch.device("cuda"))
    assert 0 < found["triton_us"] < 1e4
    assert 0 < found["cudnn_us"] < 1e4
    assert found["first_s"] > 0
