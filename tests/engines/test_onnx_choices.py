"""What ONNX Runtime chooses is told by its engine, so that a right one is judged by what it chose."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ampopt.engines import onnx_program
from ampopt.engines.onnx_choices import OnnxChoices
from ampopt.engines.onnx_engine import OnnxEngine
from ampopt.engines.onnx_graph import model_of
from ampopt.engines.onnx_program import for_onnx_runtime, plain_model, telling_model
from ampopt.ir.capture import capture
from ampopt.ir.choices import Choice, SeenChoices, seen_in
from ampopt.ir.choosers import Chooser, with_places
from ampopt.ir.lanes import FP32
from ampopt.ir.program import Program
from ampopt.ir.shapes import record_shapes
from ampopt.ort.knobs import start_options
from ampopt.ort.options import CPU
from ampopt.ort.session import OnnxRunner
from tests.helpers import Model
from tests.support.verifying import verifier_of

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))


def _engine(program: Program, *, tells: bool = True) -> OnnxEngine:
    """The engine of a program with default options."""
    model, options = for_onnx_runtime(plain_model(program.graph, program.examples)), start_options(CPU)
    engine = OnnxEngine(OnnxRunner(model, options))
    return engine.telling(OnnxChoices(program, options)) if tells else engine


def _twice(x: Tensor) -> Any:
    return x.topk(3).indices, x.topk(3).indices + 1


def _named_otherwise(x: Tensor) -> Tensor:
    """The export renames what is after `max`, as ONNX has no such operator."""
    best, second = x.max(-1).indices, x[..., :3].topk(2).indices
    return best[..., None] + second


def _the_same(x: Tensor) -> Any:
    places = x.topk(2, dim=1).indices
    return places, places, x.gather(1, places)


TOLD: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: x.topk(3),
    "topk of all": lambda x: x.topk(7, 2),
    "topk along the first": lambda x: x.gather(0, x.topk(2, dim=0).indices),
    "places alone": lambda x: x.topk(3).indices.to(torch.int32),
    "sort": lambda x: x.sort(1, descending=True),
    "argsort": lambda x: x.argsort(1),
    "stable argsort": lambda x: torch.argsort(x, dim=0, stable=True),
    "max": lambda x: x.max(1),
    "min, kept": lambda x: x.min(0, keepdim=True),
    "argmax": lambda x: x.argmax(-2),
    "argmax of all": lambda x: x.argmax(),
    "one after another": lambda x: x.sort(1).indices.float().argmax(-1),
    "twice": _twice,
    "the same": _the_same,
    "named otherwise": _named_otherwise,
}


@pytest.mark.parametrize("name", TOLD)
def test_what_is_told_is_what_the_session_chooses(name: str) -> None:
    """Without equal values these are eager's own choices."""
    program = capture(Model(lambda _, x: TOLD[name](x)), (X,), {}, torch.device("cpu")).program
    engine = _engine(program)
    outputs, told = seen_in(lambda: engine(X))
    expected, seen = seen_in(lambda: program.graph(X))
    assert all(map(torch.equal, outputs, expected))
    assert [choice.key for choice in told] == [choice.key for choice in seen]
    assert all(torch.equal(a.places, b.places) for a, b in zip(told, seen, strict=True))


@pytest.mark.parametrize(
    "function", [lambda x: x.topk(3).values * 2, lambda x: (x * 2, x.topk(0).indices), lambda x: x + 1]
)
def test_nothing_is_told_where_no_places_are_read(function: Callable[[Tensor], Any]) -> None:
    program = capture(Model(lambda _, x: function(x)), (X,), {}, torch.device("cpu")).program
    assert OnnxChoices(program, start_options(CPU))((X,)) == []


def test_only_a_call_that_is_watched_is_told_of() -> None:
    calls = list[Any]()

    def choices(tensors: Sequence[Tensor]) -> list[Choice]:
        calls.append(tensors)
        return []

    program = capture(Model(lambda _, x: x.topk(3)), (X,), {}, torch.device("cpu")).program
    engine = _engine(program, tells=False).telling(choices)
    engine(X)
    assert calls == []
    with SeenChoices() as outer:
        with SeenChoices() as inner:
            assert SeenChoices.watching() is inner
            engine(X)
        assert SeenChoices.watching() is outer
    assert SeenChoices.watching() is None
    assert len(calls) == 1


def test_nothing_is_held_but_the_program() -> None:
    """Neither the inputs of a call, nor a second session."""
    program = capture(Model(lambda _, x: x.topk(3)), (X,), {}, torch.device("cpu")).program
    engine, given = _engine(program), X.clone()
    seen_in(functools.partial(engine, given))
    alive = weakref.ref(given)
    del given
    gc.collect()
    assert alive() is None


def _of_equal_scores(model: Any, x: Tensor) -> Tensor:
    """The best by scores of which many are equal; what is computed from them tells which were taken."""
    scores = (x[..., 0] * 2).round()
    places = scores.topk(8, dim=1).indices
    return model.head(x.gather(1, places[..., None].expand(-1, -1, 16)))  # type: ignore[no-any-return]


def _after_another(model: Any, x: Tensor) -> Tensor:
    """The same after a choice that is asked the same, and whose places nothing reads."""
    best: Tensor = (x[..., 1] * 2).round().topk(8, dim=1).values
    return _of_equal_scores(model, x) + best[..., None]


@pytest.mark.parametrize("function", [_of_equal_scores, _after_another])
def test_a_right_engine_may_take_others_of_equal_scores_and_a_wrong_one_may_not(
    function: Callable[[Any, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 40, 16)
    verifier, _ = verifier_of(Model(function, head=torch.nn.Linear(16, 4)), x)
    program = verifier.captured.program
    told, untold = (program.replace(engine=_engine(program, tells=tells)) for tells in (True, False))
    check = verifier.check(told.run, FP32, everywhere=True)
    assert check.passed
    assert check.note is not None
    assert check.note.startswith(("topk (", "topk_1 ("))
    assert not verifier.check(untold.run, FP32, everywhere=True).passed

    def wrong(*tensors: Tensor) -> list[Tensor]:
        return [each * 1.01 for each in told.run(*tensors)]

    assert not verifier.check(wrong, FP32, everywhere=True).passed


def test_one_session_tells_of_a_whole_verification_and_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    verifier, _ = verifier_of(Model(_of_equal_scores, head=torch.nn.Linear(16, 4)), torch.randn(4, 40, 16))
    program = verifier.captured.program
    run = program.replace(engine=_engine(program, tells=True)).run
    made = list[weakref.ref[Any]]()

    class Counted(OnnxRunner):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(weakref.ref(self))

    monkeypatch.setattr("ampopt.engines.onnx_choices.OnnxRunner", Counted)
    assert verifier.check(run, FP32, everywhere=True).note is not None
    assert len(made) == 1
    gc.collect()
    assert made[0]() is None


def test_an_engine_that_cannot_tell_is_judged_by_what_it_gives() -> None:
    """A model may be too large for a session more: that is no fault of a right program."""
    torch.manual_seed(0)
    verifier, _ = verifier_of(Model(_of_equal_scores, head=torch.nn.Linear(16, 4)), torch.randn(4, 40, 16))
    program = verifier.captured.program

    def fails(_: Sequence[Tensor]) -> list[Choice]:
        raise MemoryError("a session more")

    engine = _engine(program, tells=False).telling(fails)
    run, untold = (program.replace(engine=each).run for each in (engine, _engine(program, tells=False)))
    assert verifier.check(run, FP32) == verifier.check(untold, FP32)
    assert verifier.check(run, FP32, everywhere=True) == verifier.check(untold, FP32, everywhere=True)


def test_the_engine_and_what_it_tells_are_of_one_export(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    exports = list[object]()

    def counted(*given: Any) -> Any:
        exports.append(given)
        return model_of(*given)

    monkeypatch.setattr(onnx_program, "model_of", counted)
    program = capture(Model(lambda _, x: x.topk(3)), (X,), {}, torch.device("cpu")).program
    _, told = seen_in(functools.partial(_engine(program), X))
    assert len(told) == len(exports) == 1


def test_an_engine_computes_no_places_that_only_tell() -> None:
    """`max` is asked twice, for its places and for its values alone."""
    function = Model(lambda _, x: (x.max(1).values, (x * 2).max(1).indices))
    program = capture(function, (X,), {}, torch.device("cpu")).program
    (kept,) = (each for each in Chooser.all_in(record_shapes(program)) if each.is_read)
    names = with_places(program.graph)[1]
    assert len(names) == 2
    assert kept.places in names
    plain, telling = (
        onnx.load_from_string(model)
        for model in (
            plain_model(program.graph, (X,)),
            telling_model(program.graph, (X,), [name for name in names if name != kept.places]),
        )
    )
    for model, results, places in ((plain, 2, 1), (telling, 3, 2)):
        assert len(model.graph.output) == results
        assert sum(node.op_type == "ArgMax" for node in model.graph.node) == places
