"""Calls in which a program raises an error: the original's answer, or its error, is the caller's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampopt
from ampopt import robot
from ampopt.deploy.runtime import OptimizedModule
from ampopt.engines.quick_call import plain
from ampopt.errors import BundleError, InputError, StrictError
from ampopt.ir.program import Program
from ampopt.ir.transform import Engine, Result
from ampopt.measure.ledger import Ledger
from ampopt.ort.session import SessionError
from ampopt.passes import OnnxRuntime, Script
from ampopt.search.partly_optimized import PartlyOptimizedModule
from tests.helpers import Model
from tests.support.planted import module_of

TABLE = torch.arange(20.0).reshape(5, 4)
PLACES = torch.tensor([[0, 1, 2], [3, 4, 0]])
RUNTIME = (OnnxRuntime(session=()),)

INDEXING: dict[str, Callable[..., Any]] = {
    "embedding": lambda m, i: F.embedding(i, m.table) * 2,
    "gather": lambda m, i: m.table.gather(0, i) * 2,
    "take": lambda m, i: torch.take(m.table, i) * 2,
    "index_select": lambda m, i: m.table.index_select(0, i.flatten()) * 2,
    "index": lambda m, i: m.table[i] * 2,
    "index_put": lambda m, i: m.table.index_put((i,), torch.ones(2, 3, 4)) * 2,
    "scatter_add": lambda m, i: m.table.scatter_add(0, i, torch.ones(2, 3)) * 2,
    "one_hot": lambda m, i: F.one_hot(i, 5).float() @ m.table,
}


def indexing(name: str = "embedding") -> nn.Module:
    return Model(INDEXING[name], table=TABLE.clone()).eval()


def with_place(place: int) -> Tensor:
    changed = PLACES.clone()
    changed[1, 1] = place
    return changed


def error_of(call: Callable[..., Any], *args: Any) -> BaseException:
    with pytest.raises((IndexError, RuntimeError)) as raised:
        call(*args)
    return raised.value


@pytest.mark.parametrize("step", [OnnxRuntime(session=()), Script()], ids=["onnx-runtime", "script"])
@pytest.mark.parametrize("name", INDEXING)
def test_the_error_of_a_place_out_of_range_is_the_originals(name: str, step: Any) -> None:
    model = indexing(name)
    fast = module_of(model, PLACES, passes=(step,))
    assert fast.program.engine is not None
    for _ in range(2):  # by the long way, and by the short ones
        for place in (25, -26):
            own, its = error_of(model, with_place(place)), error_of(fast, with_place(place))
            assert (type(its), str(its)) == (type(own), str(own))
            assert its.__context__ is None
        assert torch.allclose(fast(PLACES), model(PLACES))
    assert fast.health.is_good


@dataclasses.dataclass(frozen=True)
class Failing(Engine):
    """Runs the graph until `errors` has one for a call, which it then raises before or after the work."""

    errors: list[BaseException] = dataclasses.field(default_factory=list)
    is_after: bool = False

    def apply(self, program: Program) -> Result:
        def run(*tensors: Tensor) -> Sequence[Tensor]:
            if self.errors and not self.is_after:
                raise self.errors.pop()
            outputs: Sequence[Tensor] = program.graph(*tensors)
            if self.errors:
                raise self.errors.pop()
            return outputs

        return Result(program.replace(engine=run), 1)


X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


def double() -> nn.Module:
    return Model(lambda m, x: x * 2).eval()


def long_way(fast: OptimizedModule, x: Tensor) -> Any:
    return fast.forward(x)


def by_name(fast: OptimizedModule, x: Tensor) -> Any:
    return fast._general((x,), {})


@pytest.mark.parametrize("way", [OptimizedModule.__call__, long_way, by_name])
def test_the_originals_answer_is_counted_and_logged_once(way: Any, caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    fast = module_of(double(), X, passes=(failing,))
    fast(X)
    caplog.set_level(logging.WARNING, "ampopt")
    events: list[Any] = []
    fast.on_health(events.append)
    for _ in range(2):
        failing.errors.append(SessionError("no such kernel\nin C++"))
        assert torch.equal(way(fast, X), X * 2)
        assert torch.equal(way(fast, X), X * 2)
    reason = "its program failed: SessionError: no such kernel"
    assert fast.health.reasons == {reason: 2}
    assert [(event.kind, event.reason) for event in events] == [("original", reason)] * 2
    [record] = caplog.records
    assert reason in record.getMessage()
    assert "float32[2, 3] on cpu" in record.getMessage()


def test_with_strict_the_original_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing()
    fast = module_of(double(), X, passes=(failing,), strict=True)
    fast(X)
    failing.errors.append(SessionError("no such kernel"))
    with monkeypatch.context() as asked:
        asked.setattr("ampopt.deploy.served_state.State.call", lambda *_: pytest.fail("it was asked"))
        with pytest.raises(StrictError, match="its program failed: SessionError: no such kernel"):
            fast(X)
    assert fast.health.refusals == 1
    assert torch.equal(fast(X), X * 2)


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        SessionError("Failed to allocate memory for requested buffer of size 9"),
    ],
    ids=repr,
)
def test_what_the_original_would_meet_is_raised(error: BaseException) -> None:
    failing = Failing()
    fast = module_of(double(), X, passes=(failing,))
    for way in (OptimizedModule.__call__, long_way, by_name):
        failing.errors.append(error)
        with pytest.raises(type(error)) as raised:
            way(fast, X)
        assert raised.value is error
    assert fast.health.is_good


def test_an_error_that_is_raised_keeps_no_tensor_of_the_call() -> None:
    made: list[weakref.ref[Tensor]] = []
    failing = Failing()

    def lacking(*tensors: Tensor) -> Sequence[Tensor]:
        large = tensors[0] + 1
        made.append(weakref.ref(large))
        raise MemoryError("for the next tensor")

    fast = module_of(double(), X, passes=(failing,))
    for way in (OptimizedModule.__call__, long_way, by_name):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.fx.GraphModule, "__call__", lambda _, *tensors: lacking(*tensors))
            gc.disable()
            try:
                with contextlib.suppress(MemoryError):
                    way(fast, X)
                assert made[-1]() is None
            finally:
                gc.enable()
    assert len(made) == 3


def test_on_a_device_that_is_left_unusable_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable(device: torch.device) -> None:
        raise RuntimeError(f"{device} does not answer")

    failing = Failing()
    fast = module_of(double(), X, passes=(failing,))
    monkeypatch.setattr("ampopt.deploy.failed_calls.synchronize", unusable)
    failing.errors.append(RuntimeError("device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        fast(X)
    assert fast.health.is_good


class Counts(nn.Module):
    """A sum over calls, of rows at places."""

    table: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", TABLE.clone())
        self.register_buffer("total", torch.zeros(4))

    def forward(self, places: Tensor) -> Tensor:
        """The sum of all rows so far."""
        self.total = self.total + 1
        self.total = self.total + F.embedding(places, self.table).sum((0, 1))
        return self.total * 1


@pytest.mark.parametrize("is_after", [False, True])
def test_a_state_advances_once_whoever_answers(is_after: bool) -> None:
    model = Counts().eval()
    failing = Failing(is_after=is_after)
    fast = module_of(copy.deepcopy(model), PLACES, passes=(failing,))
    for number in range(6):
        if number in (0, 2, 3):
            failing.errors.append(SessionError("half-way"))
        assert torch.equal(fast(PLACES), model(PLACES))
    assert fast.health.served_by_original == 3


def test_a_call_that_both_refuse_leaves_the_state() -> None:
    fast = module_of(Counts().eval(), PLACES, passes=RUNTIME)
    expected = Counts().eval()
    for places in (PLACES, with_place(9), PLACES, with_place(-9), PLACES):
        if int(places.abs().max()) > 4:
            assert isinstance(error_of(fast, places), IndexError)
        else:
            assert torch.equal(fast(places), expected(places))


def test_under_autocast_and_in_inference_mode_it_is_the_originals() -> None:
    fast, model = module_of(indexing(), PLACES, passes=RUNTIME), indexing()
    for scope in (torch.inference_mode, lambda: torch.autocast("cpu"), torch.no_grad):
        with scope():
            assert isinstance(error_of(fast, with_place(9)), IndexError)
            assert torch.allclose(fast(PLACES), model(PLACES))


class Loop(nn.Module):
    """A part that looks rows up, in code that is not one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.part = indexing()

    def forward(self, places: Tensor) -> Tensor:
        """The rows, doubled until they are large."""
        rows: Tensor = self.part(places)
        while rows.sum() < 1000:
            rows = rows * 2
        return rows


def test_a_part_of_a_model_raises_what_its_own_code_raises() -> None:
    model = Loop().eval()
    part = module_of(model.part, PLACES, passes=RUNTIME, max_captures=0)
    report = Ledger("Loop", {}, ())
    report.chosen = "fp32"
    fast = PartlyOptimizedModule(model, {"part": part}, None, report, torch.device("cpu"))
    for _ in range(2):
        assert torch.allclose(fast(PLACES), model(PLACES))
        own, its = error_of(model, with_place(9)), error_of(fast, with_place(9))
        assert (type(its), str(its)) == (type(own), str(own))
    fast.strict = True
    with pytest.raises(StrictError, match=r"its program failed: SessionError[^:]*:.*: set strict to False$"):
        fast(with_place(9))


@pytest.mark.parametrize("backend", ["ampopt", "onnxruntime", "original"])
@pytest.mark.parametrize("kind", [indexing, Counts])
def test_a_loaded_model_raises_what_the_captured_one_raises(
    kind: Callable[[], nn.Module], backend: str, tmp_path: Path
) -> None:
    module_of(kind().eval(), PLACES, passes=RUNTIME).save(tmp_path / "robot.ampopt", tune_s=0.1)
    loaded, model = ampopt.load(tmp_path / "robot.ampopt", backend=backend, device="cpu"), kind().eval()
    for _ in range(2):
        assert torch.allclose(loaded(PLACES), model(PLACES))
        its = error_of(loaded, with_place(9))
        assert (type(its), str(its)) == (IndexError, "index out of range in self")
        assert its.__context__ is None
    assert loaded.health.is_good
    with pytest.raises(InputError, match="it takes"):
        loaded(PLACES.int())


def test_a_loaded_models_captured_one_answers_where_its_backend_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module_of(Counts().eval(), PLACES, passes=RUNTIME).save(tmp_path / "robot.ampopt", tune_s=0.1)
    loaded = ampopt.load(tmp_path / "robot.ampopt", backend="onnxruntime", device="cpu")
    model = Counts().eval()
    assert torch.allclose(loaded(PLACES), model(PLACES))
    events: list[Any] = []
    loaded.on_health(events.append)

    def fails(*_: object) -> None:
        raise SessionError("no such kernel")

    with monkeypatch.context() as broken:
        broken.setattr("ampopt.bundle.robot_model.RobotModel._run", fails)
        for _ in range(2):
            assert torch.allclose(loaded(PLACES), model(PLACES))
    assert torch.allclose(loaded(PLACES), model(PLACES))
    assert loaded.health.reasons == {"its program failed: SessionError: no such kernel": 2}
    assert [event.call for event in events] == ["int64[2, 3] on cpu"] * 2
    assert len([r for r in caplog.records if "no such kernel" in r.getMessage()]) == 1


def test_a_bundle_whose_program_cannot_run_is_not_loaded_as_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original would pass the self-test in the program's place."""
    module_of(double(), X).save(tmp_path / "robot.ampopt", onnx=None)

    def broken(program: Program) -> Callable[..., Any]:
        def run(*tensors: Tensor) -> Sequence[Tensor]:
            raise RuntimeError("kernel is broken")

        return run

    monkeypatch.setattr("ampopt.bundle_load.executable", broken)
    monkeypatch.setattr("ampopt.deploy.known_calls.quick", lambda _, run, example: plain(run))
    with pytest.raises(BundleError, match="kernel is broken"):
        ampopt.load(tmp_path / "robot.ampopt", backend="ampopt", device="cpu")


def test_a_robot_without_the_original_says_which_operator_has_failed(tmp_path: Path) -> None:
    module_of(indexing(), PLACES, passes=RUNTIME).save(tmp_path / "robot.ampopt", tune_s=0.1)
    model = robot.load(tmp_path / "robot.ampopt")
    with pytest.raises(SessionError, match=r"Gather.*idx=9 must be within the inclusive range \[-5,4\]"):
        model(with_place(9).numpy())
