"""Programs that make other choices: right ones of a lower lane pass, and wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt.ir.graph import aten
from ampopt.ir.lanes import FP32, LANES
from ampopt.ir.transform import Pass, replay
from ampopt.measure.followed import FOLLOWED_FROM
from ampopt.measure.original import Run
from ampopt.measure.verify import Verifier
from ampopt.passes import BakeAutocast, Compile, CudaGraph, Script
from ampopt.search.subject import Subject
from tests.helpers import BF16, Model
from tests.support.verifying import verifier_of

K = 8


class Queries(nn.Module):
    """The best of many, by scores, and what is computed from these."""

    def __init__(
        self, k: int = K, mask: float | None = None, scale: float = 1.0, *, narrowest: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.score, self.head = nn.Linear(16, 32), nn.Linear(32, 1), nn.Linear(32, 4)
        self.k, self.mask, self.narrowest = k, mask, narrowest
        self.register_buffer("is_padding", torch.arange(40) >= K - 2)
        self.register_buffer("scales", torch.tensor([scale, 1.0, 1.0, 1.0])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        """The best by their scores."""
        features = torch.tanh(self.features(x))
        scores = self.score(features).squeeze(-1) * self.scales
        mask = torch.finfo(scores.dtype).min if self.narrowest else self.mask
        if mask is not None:
            scores = scores.masked_fill(self.is_padding, mask)
        places = scores.topk(self.k, dim=1).indices
        return self.head(features.gather(1, places[..., None].expand(-1, -1, 32)))  # type: ignore[no-any-return]


class Changed(TorchDispatchMode):
    """A mode in which `topk` takes the best of changed scores, and tells their own values."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._change = change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator."""
        if func is not aten.topk.default:
            return func(*args, **(kwargs or {}))
        _, places = func(self._change(args[0]), *args[1:], **(kwargs or {}))
        return args[0].gather(args[2] if len(args) > 2 else -1, places), places


def changed(run: Run, change: Callable[[Tensor], Tensor]) -> Run:
    """A program that chooses otherwise."""

    def program(*tensors: Tensor) -> Any:
        with Changed(change):
            return run(*tensors)

    return program


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def many() -> tuple[Verifier, nn.Module]:
    """Scores of which many are nearly alike: eager itself takes others in bfloat16."""
    return verifier_of(Queries(100), drawn(4, 600, 16))


def wobble(size: float) -> Callable[[Tensor], Tensor]:
    def change(scores: Tensor) -> Tensor:
        noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(2)) - 0.5
        return scores + 2 * size * noise

    return change


def test_a_program_that_chooses_as_the_lane_rounds_passes_and_that_is_told() -> None:
    verifier, _ = many()
    eager = verifier.eager(BF16)
    plain = verifier.own_errors(BF16, verifier.draws[0])[0]
    assert plain > BF16.limits.largest
    assert verifier.own_error(BF16) < FOLLOWED_FROM
    check = verifier.check(changed(eager, wobble(2e-3)), BF16)
    assert check.passed
    assert check.error < FOLLOWED_FROM
    assert check.note is not None
    assert check.note.startswith("topk (test_followed.py:")
    assert check.note.endswith("errors are against the original that takes the same")
    (error, own), *_ = verifier.output_errors(eager, BF16, verifier.draws[0])
    assert error == own < FOLLOWED_FROM


@pytest.mark.parametrize(("lane", "size"), [(FP32, 2e-3), (BF16, 3e-2), (BF16, 0.3)])
def test_scores_with_more_noise_than_the_lane_has_are_refused(lane: Any, size: float) -> None:
    verifier, _ = many()
    check = verifier.check_errors(changed(verifier.eager(lane), wobble(size)), lane)
    assert not check.passed
    assert check.note is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda scores: -scores,
        lambda scores: scores.abs(),
        lambda scores: scores.roll(1, 0),
        lambda scores: scores.scatter(1, scores.argmax(1, keepdim=True), -1e3),
    ],
    ids=["the worst", "by magnitude", "of another row", "without the best"],
)
@pytest.mark.parametrize("lane", [FP32, BF16])
def test_other_choices_are_refused(wrong: Callable[[Tensor], Tensor], lane: Any) -> None:
    verifier, _ = verifier_of(Queries(), drawn(4, 40, 16))
    assert verifier.check(verifier.eager(lane), lane).passed
    assert not verifier.check_errors(changed(verifier.eager(lane), wrong), lane).passed


def unmasked(wrong: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda scores: torch.where(scores < -1e6, scores, wrong(scores))


@pytest.mark.parametrize("mask", [-1e9, -1e30, -float("inf"), "the dtype's least"])
@pytest.mark.parametrize("lane", [FP32, BF16])
def test_what_is_masked_is_no_licence_for_the_others(mask: Any, lane: Any) -> None:
    model = Queries(narrowest=True) if isinstance(mask, str) else Queries(mask=mask)
    verifier, _ = verifier_of(model, drawn(4, 40, 16))
    eager = verifier.eager(lane)
    assert verifier.check(eager, lane).passed
    assert not verifier.check_errors(changed(eager, unmasked(torch.neg)), lane).passed


def test_one_image_with_large_scores_is_no_licence_for_the_others() -> None:
    verifier, _ = verifier_of(Queries(scale=1e4), drawn(4, 40, 16))

    def wrong(scores: Tensor) -> Tensor:
        return torch.cat([scores[:3], -scores[3:]])

    check = verifier.check_errors(changed(verifier.eager(BF16), wrong), BF16)
    assert not check.passed


def test_right_choices_with_wrong_numbers_are_refused() -> None:
    verifier, _ = many()
    eager = verifier.eager(BF16)
    check = verifier.check_errors(lambda *x: [1.05 * each for each in eager(*x)], BF16)
    assert not check.passed
    seen = list[int]()

    def spoilt_when_unwatched(*x: Tensor) -> list[Tensor]:
        """As compiled code may be: what runs in a mode is something else."""
        seen.append(torch._C._len_torch_dispatch_stack())
        return [each * (1.0 if seen[-1] else 1.5) for each in eager(*x)]

    assert not verifier.check_errors(spoilt_when_unwatched, BF16).passed
    assert set(seen) == {0, 1}


@pytest.mark.parametrize("options", [{"tolerance": 0.05}, {"metric": lambda a, b: 0.0}])
def test_with_a_tolerance_or_a_metric_nothing_is_followed(options: dict[str, Any]) -> None:
    verifier, _ = verifier_of(Queries(100), drawn(4, 600, 16), **options)
    eager = verifier.eager(BF16)
    plain = max(max(verifier.own_errors(BF16, draw)) for draw in verifier.draws)
    assert verifier.own_error(BF16) == plain > BF16.limits.largest
    assert verifier.judged(eager, BF16, verifier.draws[0]).note is None
    assert verifier.output_errors(eager, BF16, verifier.draws[0])[0][0] > BF16.limits.largest
    check = verifier.check(eager, BF16)
    assert check.note is None
    assert check.passed == ("metric" in options)


def test_a_model_that_refuses_other_places_is_told_its_plain_error(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, _ = many()
    plain = max(verifier.own_errors(BF16, draw)[0] for draw in verifier.draws)

    def refuses(*_: Any) -> Any:
        raise ValueError("other places")

    monkeypatch.setattr(verifier, "reference_within", refuses)
    assert verifier.own_error(BF16) == plain
    assert not verifier.check_errors(changed(verifier.eager(BF16), wobble(2e-3)), BF16).passed


def classes(m: Any, x: Tensor) -> Tensor:
    return m.head(m.features(x).relu()).argmax(1)  # type: ignore[no-any-return]


def test_a_map_of_classes_may_differ_where_the_lane_decides() -> None:
    torch.manual_seed(0)
    parts = {"features": nn.Conv2d(3, 8, 3), "head": nn.Conv2d(8, 200, 1)}
    original: Any
    verifier, original = verifier_of(Model(classes, **parts), drawn(1, 3, 32, 32))
    eager = verifier.eager(BF16)
    assert verifier.own_error(BF16) < FOLLOWED_FROM < verifier.own_errors(BF16, verifier.draws[0])[0]
    check = verifier.check_errors(eager, BF16)
    assert check.passed
    assert check.note is not None
    assert check.note.startswith("argmax")

    def second(x: Tensor) -> list[Tensor]:
        return [original.head(original.features(x).relu()).topk(2, dim=1).indices[:, 1]]

    for lane in (FP32, BF16):
        assert not verifier.check_errors(second, lane).passed


class Keeps(nn.Module):
    """A memory of the best of each call."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.register_buffer("memory", torch.zeros(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Remember."""
        y: Tensor = self.linear(x)
        best = y[(y + self.memory.mean(0)).abs().sum(-1).topk(16).indices]
        self.memory.copy_(0.5 * self.memory + best)
        return self.memory.sum(0)


def test_the_choices_of_every_call_in_a_row_are_followed() -> None:
    verifier, _ = verifier_of(Keeps(), drawn(600, 16))
    eager = verifier.eager(BF16)
    assert max(verifier.own_errors(BF16, verifier.draws[0])) > FOLLOWED_FROM > verifier.own_error(BF16)
    check = verifier.check(eager, BF16, everywhere=True)
    assert check.passed
    assert check.note is not None
    assert check.note.startswith("topk (test_followed.py:")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [None, "script", "compile"])
def test_a_captured_graph_is_compared_with_its_own_choices(engine: str | None) -> None:
    """Its operators cannot be seen in a replay, so that the program runs once more without the graph."""
    device, lane = torch.device("cuda"), LANES["amp"]["cuda"]
    verifier, _ = verifier_of(Queries(100).to(device), drawn(4, 600, 16).to(device))
    engines: dict[str | None, tuple[Pass, ...]] = {None: (), "script": (Script(),), "compile": (Compile(),)}
    program = replay((BakeAutocast(), *engines[engine], CudaGraph()), lane.start(verifier.captured.program))
    subject = Subject(program)
    assert program.cuda_graph
    assert verifier.own_errors(lane, verifier.draws[0])[0] > FOLLOWED_FROM
    check = verifier.check(subject.run, lane, everywhere=True)
    assert check.passed, check.reason
    assert check.error < FOLLOWED_FROM
    assert check.note is not None
