"""In the cold process: what is called and timed there, in which order, and what a failure leaves."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampopt
from benchmarks import cold_process, regimes
from benchmarks.cold_networks import UnknownNetworkError
from benchmarks.regimes import REGIMES

CPU = torch.device("cpu")


@dataclasses.dataclass
class Report:
    """In place of ampopt's report."""

    chosen: str = "amp"

    def to_dict(self) -> dict[str, Any]:
        lanes = {"amp": {"passes": ["fold-conv-bn"], "error": 1e-3}}
        return {"chosen": self.chosen, "lanes": lanes, "notes": ["a note"], "best_so_far": [[1.0, 2.0]]}


class Fast(nn.Module):
    """In place of what `optimize` returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.report = model, Report()

    def forward(self, x: Tensor) -> object:
        return self.model(x)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PERIOD_S", 1e-3), ("BLOCK_S", 1e-3), ("WARM_S", 0.0), ("FRAMES", 2)):
        monkeypatch.setattr(regimes, name, value)
    monkeypatch.setattr(cold_process, "PAUSE_S", 0.0)


def test_optimize_is_called_as_the_readme_does_before_all_others(
    monkeypatch: pytest.MonkeyPatch, short_blocks: None
) -> None:
    order: list[str] = []

    def optimize(*arguments: Any, **options: Any) -> Fast:
        assert options == {}
        assert len(arguments) == 2
        assert isinstance(arguments[1], Tensor)
        order.append("optimize")
        return Fast(arguments[0])

    def broken(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        order.append("peers")
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ampopt, "optimize", optimize)
    given = cold_process.peers(CPU, False)
    monkeypatch.setattr(cold_process, "peers", lambda *_: {"broken": (broken,), **given})
    facts = json.loads(json.dumps(cold_process.measure("linear5x128", CPU)))
    assert order == ["optimize", "peers"]
    assert (facts["chosen"], facts["judged"], facts["notes"]) == ("amp", ["amp"], ["a note"])
    assert facts["report"]["best_so_far"] == [[1.0, 2.0]], "the report is kept whole"
    assert facts["prepare_s"] >= 0
    assert facts["peak_host_bytes"] > 2**20
    found = facts["contestants"]
    assert found["broken"] == {"error": "RuntimeError: no such kernel"}
    assert set(found) == {"broken", "ampopt", "eager fp32", "eager amp", "recipe by hand"}
    for name in set(found) - {"broken"}:
        for regime in REGIMES:
            assert len(found[name][regime]["blocks_ms"]) == regimes.ROUNDS
    assert found["ampopt"]["relative_error"] < 1e-5
    assert 1e-5 < found["eager amp"]["relative_error"] < 1e-1


def test_a_peer_is_made_in_the_first_of_its_ways_that_works_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch, short_blocks: None
) -> None:
    def once_only(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        calls: list[Tensor] = []

        def call(x: Tensor) -> Any:
            calls.append(x)
            if len(calls) > 1:
                raise RuntimeError("overwritten by a subsequent run")
            return model(x)

        return call

    def eager(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        return model

    monkeypatch.setattr(ampopt, "optimize", lambda model, given: Fast(copy.deepcopy(model)))
    monkeypatch.setattr(cold_process, "peers", lambda *_: {"two": (once_only, eager), "one": (eager,)})
    found = cold_process.measure("linear5x128", CPU)["contestants"]
    assert found["two"]["other_ways"] == ["RuntimeError: overwritten by a subsequent run"]
    assert found["one"]["other_ways"] == []
    assert set(REGIMES) <= set(found["two"])


def test_on_a_gpu_peers_have_a_thread_of_their_own() -> None:
    pool = cold_process.peers_thread(torch.device("cuda"))
    assert cold_process.of_peers(pool, threading.get_ident) != threading.get_ident()


def test_on_a_cpu_peers_search_in_the_thread_of_ampopt_which_has_the_users_switch(
    monkeypatch: pytest.MonkeyPatch, short_blocks: None
) -> None:
    seen: dict[str, set[tuple[bool, int, bool]]] = {}

    def noting(name: str, x: Tensor) -> Tensor:
        facts = torch.backends.cudnn.benchmark, threading.get_ident(), torch.is_grad_enabled()
        seen.setdefault(name, set()).add(facts)
        return torch.ones(20, 128)

    fast = Fast(nn.Identity())
    monkeypatch.setattr(fast, "forward", functools.partial(noting, "ours"))
    monkeypatch.setattr(ampopt, "optimize", lambda *_: fast)
    peer = functools.partial(noting, "peer")
    monkeypatch.setattr(cold_process, "peers", lambda *_: {"peer": (lambda *__: peer,)})
    assert not torch.backends.cudnn.benchmark
    cold_process.measure("linear5x128", CPU)
    assert not torch.backends.cudnn.benchmark
    assert seen["ours"] == {(False, threading.get_ident(), False)}
    ((search, thread, grad),) = seen["peer"]
    assert (search, thread, grad) == (True, threading.get_ident(), False)


class Remembering(nn.Module):
    """Each call adds what it is given, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor | None = None

    def forward(self, given: list[Tensor]) -> Tensor:
        """The sum of all so far."""
        self.total = given[0] + (0 if self.total is None else self.total)
        given[0].zero_()
        return self.total


def test_errors_are_those_of_a_first_call_on_inputs_that_nobody_wrote_to(
    monkeypatch: pytest.MonkeyPatch, short_blocks: None
) -> None:
    x = torch.randn(3, 4)
    monkeypatch.setattr(cold_process, "anybody", lambda _: (Remembering(), ([x],)))
    monkeypatch.setattr(ampopt, "optimize", lambda model, given: Fast(copy.deepcopy(model)))
    given = cold_process.peers(CPU, False)
    monkeypatch.setattr(cold_process, "peers", lambda *_: given)
    found = cold_process.measure("any", CPU)["contestants"]
    assert {name: each["relative_error"] for name, each in found.items()} == dict.fromkeys(found, 0.0)
    assert len(found) == 4


def test_a_call_that_does_not_write_to_its_inputs_as_the_model_does_is_wrong() -> None:
    def halves(x: Tensor) -> Tensor:
        return x.mul_(0.5)

    inputs = (torch.randn(3, 4),)
    expected = cold_process.effect(halves, inputs)
    on_copies = cold_process.effect(lambda x: halves(x.clone()), inputs)
    assert cold_process.error_of(cold_process.effect(halves, inputs), expected) == 0
    assert cold_process.error_of(on_copies, expected) == pytest.approx(1.0)


def test_without_a_reference_in_float64_the_row_says_why_and_has_times(
    monkeypatch: pytest.MonkeyPatch, short_blocks: None
) -> None:
    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.float64:
                raise TypeError("no double here")
            return x @ torch.ones(4, 4)

    model = Fast(Single())
    monkeypatch.setattr(cold_process, "anybody", lambda _: (model, (torch.randn(3, 4),)))
    monkeypatch.setattr(ampopt, "optimize", lambda model, _: model)
    monkeypatch.setattr(cold_process, "peers", lambda *_: {})
    facts = cold_process.measure("any", CPU)
    assert "double" in facts["no_reference"].lower()
    assert facts["contestants"]["ampopt"]["relative_error"] is None
    assert set(REGIMES) <= set(facts["contestants"]["ampopt"])


def test_what_a_model_makes_in_float32_is_widened_in_the_reference() -> None:
    class Makes32(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(x) * math.sqrt(1 + self.norm.eps)
            return y @ torch.full((4, 4), 0.5)

    found = cold_process.reference(Makes32().eval(), (torch.ones(1, 4),))
    wanted = [torch.full((1, 4), 2.0).double(), torch.ones(1, 4).double()]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, wanted, strict=True))


def test_outputs_of_another_number_or_shape_have_no_error() -> None:
    ones = torch.ones(3)
    assert cold_process.error_of([ones], [ones]) == 0
    assert cold_process.error_of([ones, ones], [ones]) is None
    assert cold_process.error_of([torch.ones(4)], [ones]) is None


def test_what_the_first_call_gave_is_kept_if_peers_take_the_process_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ampopt, "optimize", lambda model, x: Fast(model))
    kept: list[dict[str, Any]] = []

    def gone(*_: object) -> Any:
        raise SystemExit

    monkeypatch.setattr(cold_process, "peers", lambda *_: {"one": (gone,)})
    with pytest.raises(SystemExit):
        cold_process.measure("linear5x128", CPU, known=kept.append)
    before, row = kept
    assert before["chosen"] == row["chosen"] == "amp"
    assert before["error"] == "its process ended before peers were made"
    assert row["error"] == "its process ended while one was made"


def test_a_peer_that_fails_when_it_is_called_again_has_its_error_in_the_row(
    monkeypatch: pytest.MonkeyPatch, short_blocks: None
) -> None:
    def once(model: nn.Module, _: Any) -> Callable[..., Any]:
        answers = iter([model])
        return lambda *given: next(answers)(*given)

    monkeypatch.setattr(ampopt, "optimize", lambda model, x: Fast(model))
    monkeypatch.setattr(cold_process, "peers", lambda *_: {"once": (once,)})
    found = cold_process.measure("linear5x128", CPU)["contestants"]
    assert found["once"].keys() == {"error"}
    assert "StopIteration" in found["once"]["error"]
    assert set(REGIMES) <= set(found["ampopt"])


@pytest.mark.parametrize("failure", [None, RuntimeError("out of memory"), UnknownNetworkError("no such")])
def test_the_process_writes_figures_or_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Exception | None
) -> None:
    def measured(*_: object, known: Callable[[dict[str, Any]], object], **__: object) -> dict[str, Any]:
        if not isinstance(failure, UnknownNetworkError):
            known({"chosen": "amp", "error": "while it was timed"})
        if failure is not None:
            raise failure
        return {"chosen": "amp", "contestants": {}}

    monkeypatch.setattr(cold_process, "measure", measured)
    monkeypatch.setattr("sys.argv", ["cold_process", "lcnet_050", "cpu", str(tmp_path / "row.json")])
    cold_process.main(2.5)
    expected: dict[type, dict[str, Any]] = {
        type(None): {"chosen": "amp", "contestants": {}},
        RuntimeError: {"chosen": "amp", "error": "RuntimeError: out of memory"},
        UnknownNetworkError: {"skipped": "no such"},
    }
    found = json.loads((tmp_path / "row.json").read_text())
    assert found == {"import_s": 2.5, **expected[type(failure)]}
