"""What a compiler has made is tried in its turn: after kernels that are likelier to win."""

from __future__ import annotations

import pytest
from torch import nn

from ampopt.ir.pipeline import Pipeline
from ampopt.search.openings import Opening
from tests.search.test_lane_engines import Ahead, Compiler
from tests.search.test_lane_search import Launch, X, net, rows, search
from tests.support.planted import Bench, Planted, PlantedKernel

__all__ = ["net"]


@pytest.mark.parametrize(
    ("gain", "order"),
    [
        (1.1, ["kernel", "bad", "launch", "compiler (unfused) + launch"]),
        (1.02, ["kernel", "compiler (unfused) + launch", "bad", "launch"]),
    ],
)
def test_kernels_that_were_not_launched_come_before_what_is_made_without_them(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, gain: float, order: list[str]
) -> None:
    """ResNeXt-50's fused graph won, 1.5 s later than it could: code without kernels came first."""
    bench = Bench(monkeypatch, net, X, cost={"kernel": 1 / gain, "bad": 1.1, "launch": 0.5})
    pipeline = Pipeline((PlantedKernel("kernel"), Planted("bad")), (Compiler(),), (Launch(),))
    lane = search(monkeypatch, bench, pipeline, Opening(()))
    base = lane.state.graph.program
    sandbox = Ahead(base)
    bench.manager.sandbox = sandbox  # type: ignore[assignment]
    monkeypatch.setattr(lane.engines, "begin", lambda: sandbox.ended.append(base.recipe))  # after the kernel
    lane.rewrite(bench.deadline)
    lane.launch(bench.deadline)
    lane.engines.take_made()
    assert [name for name, _ in rows(bench)] == order
