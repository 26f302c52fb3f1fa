"""Pipelines are changed by name, hold a name once, and keep each family in its place."""

from __future__ import annotations

import dataclasses

import pytest

import ampopt
from ampopt.errors import InputError
from ampopt.ir.transform import Family
from ampopt.passes import Compile, CudaGraph, Degroup, FoldConvBn
from tests.support.planted import Planted

PIPELINE = ampopt.PIPELINE


@dataclasses.dataclass(frozen=True)
class PlantedRunner(Planted):
    """Says that it is an engine and does not have what engines have."""

    family = Family.ENGINE


def names(pipeline: ampopt.Pipeline) -> list[str]:
    return [step.name for step in pipeline]


def test_iteration_gives_rewrites_then_engines_then_launches() -> None:
    assert list(PIPELINE) == [*PIPELINE.rewrites, *PIPELINE.engines, *PIPELINE.launches]
    assert ampopt.Pipeline.of(PIPELINE) == PIPELINE
    assert ampopt.Pipeline.of(reversed(list(PIPELINE))).rewrites == PIPELINE.rewrites[::-1]


def test_without_leaves_the_others_in_order() -> None:
    left = PIPELINE.without("degroup", "compile", "cuda-graph")
    gone = {"degroup", "compile", "cuda-graph"}
    assert names(left) == [name for name in names(PIPELINE) if name not in gone]
    assert left.launches == ()
    assert len(names(PIPELINE)) == len(names(left)) + 3


def test_before_and_after_put_passes_beside_the_one_that_is_named() -> None:
    one, two = Planted("one"), Planted("two")
    found = names(PIPELINE.before("channels-last", one, two))
    assert found[found.index("channels-last") - 2 : found.index("channels-last")] == ["one", "two"]
    found = names(PIPELINE.after("fuse-linear-act", one))
    assert found[found.index("fuse-linear-act") + 1] == "one"
    assert names(PIPELINE) == [step.name for step in ampopt.PIPELINE]  # it is not changed itself


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: PIPELINE.without("degrup"),
            "there is no pass degrup in this pipeline: it has allow-tf32, .*; near it is degroup$",
        ),
        (lambda: PIPELINE.before("nothing", Planted("x")), "there is no pass nothing"),
        (lambda: PIPELINE.after("degroup", Degroup()), "two passes named degroup"),
        (lambda: PIPELINE.after("degroup", PIPELINE["script"]), "script belongs to the pipeline's engines"),
        (lambda: ampopt.Pipeline(rewrites=(CudaGraph(),)), "cuda-graph belongs to the pipeline's launches"),
        (
            lambda: ampopt.Pipeline(engines=(FoldConvBn(),)),  # type: ignore[arg-type]
            "fold-conv-bn belongs to the pipeline's rewrites",
        ),
        (lambda: ampopt.Pipeline.of([PlantedRunner("mine")]), "mine is an engine: let its class be one of"),
        (lambda: ampopt.Pipeline.of([Compile(), Compile()]), "two passes named compile"),
        (lambda: ampopt.Pipeline.of([FoldConvBn]), "is no pass: give an instance"),  # type: ignore[list-item]
        (lambda: PIPELINE.before("degroup", "script"), "is no pass: give an instance"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_pipeline_is_refused(change: object, message: str) -> None:
    assert callable(change)
    with pytest.raises(InputError, match=message):
        change()
