"""Whatever eager runs, `optimize` answers for it; a lane that eager fails in is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.errors import CaptureError
from ampopt.ir.lanes import Lane
from ampopt.measure.entry import ORIGINAL
from ampopt.measure.verify import Verifier
from ampopt.search.pass_manager import PassManager
from tests.helpers import Model, WearsOut
from tests.support.planted import captured_of, optimize

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
L = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))


def model_of(function: Callable[..., Any], **members: Any) -> nn.Module:
    return Model(function, **members).eval()


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 4, 3)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


WITHOUT_BFLOAT16: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "antialias": (
        lambda: model_of(
            lambda m, x: F.interpolate(m.conv(x), scale_factor=2, mode="bilinear", antialias=True),
            conv=conv(),
        ),
        X,
    ),
    "det": (lambda: model_of(lambda m, x: torch.linalg.det(m.linear(x)), linear=linear()), L),
    "lu": (lambda: model_of(lambda m, x: torch.linalg.lu(m.linear(x))[2], linear=linear()), L),
    "half": (lambda: nn.Sequential(conv(), nn.BatchNorm2d(4)).eval().half(), X.half()),
}


@pytest.mark.parametrize("name", WITHOUT_BFLOAT16)
def test_a_lane_that_eager_fails_in_is_left_out(name: str) -> None:
    make, x = WITHOUT_BFLOAT16[name]
    model = make()
    fast = optimize(model, x, cache=False)
    assert set(fast.report.lanes) == {"fp32"}
    (note,) = [note for note in fast.report.notes if "amp lane" in note]
    assert note.startswith("the amp lane was not tried: the original fails in it (")
    with torch.no_grad():
        assert torch.allclose(fast(x).float(), model(x).float(), atol=1e-3)


def test_a_lane_that_the_graph_alone_fails_in_is_left_out() -> None:
    """Under autocast the model casts to bfloat16 where its graph, captured without, says float16."""
    model = model_of(
        lambda m, x: torch.cat([y := m.conv(x), x[..., :6, :6].to(y.dtype)], 1), conv=conv()
    ).half()
    fast = optimize(model, X.half(), cache=False)
    assert set(fast.report.lanes) == {"fp32"}
    (note,) = [note for note in fast.report.notes if "amp lane" in note]
    assert note.startswith("the amp lane was not tried: the graph fails in it, where the original does not (")


@pytest.mark.parametrize("name", ["det", "half"])
def test_where_the_lower_precision_has_no_kernel_fp32_or_the_original_answers(name: str) -> None:
    make, x = WITHOUT_BFLOAT16[name]
    model = make()
    fast = optimize(model, x, precision="amp", cache=False)
    assert set(fast.report.lanes) == {"fp32"}
    assert fast.report.chosen in ("fp32", ORIGINAL)
    assert any("the original fails in it" in note for note in fast.report.notes)
    with torch.no_grad():
        assert torch.allclose(fast(x).float(), model(x).float(), atol=1e-3)


@pytest.mark.parametrize("lane", [torch.float32, torch.bfloat16])
def test_a_lane_that_fails_on_a_random_input_only_is_left_out(
    lane: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Verifier.own_error

    def own_error(self: Verifier, of: Lane) -> float:
        if of.dtype is lane:
            raise IndexError("index 7 is out of bounds")
        return whole(self, of)

    monkeypatch.setattr(Verifier, "own_error", own_error)
    report = optimize(nn.Sequential(linear(), nn.ReLU()).eval(), L, cache=False).report
    assert set(report.lanes) == {"amp" if lane is torch.float32 else "fp32"}
    assert any("(IndexError: index 7 is out of bounds)" in note for note in report.notes)


@pytest.mark.parametrize("step", ["_summarize", "_module"])
def test_what_fails_at_the_end_leaves_the_call_to_the_original(
    step: str, all_kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ampopt.search.optimizer import Optimizer

    whole = getattr(Optimizer, step)

    def failing(self: Optimizer, *args: Any) -> Any:
        if args and args[0] is None:
            return whole(self, *args)
        raise RuntimeError("out of memory")

    model = nn.Sequential(conv(), nn.BatchNorm2d(4)).eval()
    with all_kept:
        monkeypatch.setattr(Optimizer, step, failing)
        fast = optimize(model, X, precision="fp32", cache=False)
    assert fast.report.chosen == ORIGINAL
    assert any("RuntimeError: out of memory" in note for note in fast.report.notes)
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))


def _mixed(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.second(m.first(x).double())
    return out


ODD: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "double": (lambda: linear().double(), L.double()),
    "bfloat16": (lambda: linear().bfloat16(), L.bfloat16()),
    "mixed": (lambda: model_of(_mixed, first=linear(), second=linear().double()), L),
    "complex": (lambda: nn.Linear(4, 4, dtype=torch.complex64), L.to(torch.complex64)),
    "integers": (lambda: model_of(lambda m, x: x * 2 + 1), torch.arange(6)),
    "booleans": (lambda: model_of(lambda m, x: x & ~x), torch.tensor([True, False])),
    "no parameters": (lambda: nn.ReLU(), L),
    "identity": (lambda: nn.Identity(), L),
    "nothing": (lambda: model_of(lambda m, x: None, linear=linear()), L),
    "a number": (lambda: model_of(lambda m, x: 3, linear=linear()), L),
    "an item": (lambda: model_of(lambda m, x: m.linear(x).sum().item(), linear=linear()), L),
    "an empty tuple": (lambda: model_of(lambda m, x: (), linear=linear()), L),
    "no elements": (lambda: model_of(lambda m, x: m.linear(x)[:0], linear=linear()), L),
    "no rows": (linear, torch.randn(0, 4)),
    "no input": (lambda: model_of(lambda m: m.linear(torch.ones(1, 4)), linear=linear()), ()),
    "words": (lambda: model_of(lambda m, x: {"a": m.linear(x), "b": "word", "c": None}, linear=linear()), L),
    "objects": (lambda: model_of(lambda m, x: [{1, 2}, m.linear(x)], linear=linear()), L),
    "sparse example": (
        lambda: model_of(lambda m, x: torch.sparse.mm(x, m.eye), eye=torch.eye(4)),
        torch.eye(4).to_sparse(),
    ),
    "nested result": (
        lambda: model_of(lambda m, x: torch.nested.nested_tensor([m.linear(x)]), linear=linear()),
        L,
    ),
    "float8": (
        lambda: model_of(lambda m, x: m.linear(x.to(torch.float8_e4m3fn).float()), linear=linear()),
        L,
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_models_are_answered_for(name: str) -> None:
    make, x = ODD[name]
    model = make().eval()
    args = x if isinstance(x, tuple) else (x,)
    fast = optimize(model, x, cache=False)
    with torch.no_grad():
        _alike(fast(*args), model(*args))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(
    ("name", "laid"),
    [("sparse_coo", Tensor.to_sparse), ("sparse_csr", Tensor.to_sparse_csr), ("_mkldnn", Tensor.to_mkldnn)],
)
def test_a_model_with_parts_is_called_with_what_is_not_dense(
    name: str, laid: Callable[[Tensor], Tensor]
) -> None:
    def given() -> Tensor:
        return laid(torch.diag(torch.rand(4)))

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        hidden = m.after(m.first(y).relu())
        product: Tensor = x.to_dense() @ hidden if x.is_mkldnn else torch.sparse.mm(x, hidden)
        return product

    model = model_of(forward, first=linear(), after=linear())
    fast: Any = optimize(model, (given(), L[0]), cache=False)
    reason = f"called with a tensor that is {name}: convert it with .to_dense()"
    assert reason in fast.report.notes[0]
    with torch.no_grad():
        for x in (given(), given()):
            torch.testing.assert_close(fast(x, L[1]), model(x, L[1]))
    if fast.report.chosen == ORIGINAL:
        fast.prepare((given(), L[1]))


def _alike(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor) and not expected.is_nested:
        assert torch.allclose(found.to(torch.complex128), expected.to(torch.complex128), atol=3e-2, rtol=3e-2)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            _alike(found[key], value)
    elif not isinstance(expected, (Tensor, list)):
        assert found == expected


def test_what_cannot_be_lowered_is_no_raw_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlapping(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        y.unfold(2, 3, 1).mul_(2)
        out: Tensor = y
        return out

    with pytest.raises(CaptureError, match="writes in place to a tensor whose elements share memory"):
        captured_of(model_of(overlapping, conv=conv()), X)
    for check in ("overlapping_write", "write_between_gaps"):
        monkeypatch.setattr(f"ampopt.ir.lowering.{check}", lambda nodes: None)
    with pytest.raises(CaptureError, match=r"cannot be lowered \(it writes in place, first by mul_.*unfold"):
        captured_of(model_of(overlapping, conv=conv()), X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("given", [True, False], ids=["mask given", "mask of values"])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_an_encoder_leaves_padding_out_though_the_example_has_none(given: bool, checked: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = model_of(
        lambda m, x, mask: m.after(m.encoder(x, src_key_padding_mask=mask if given else (x == 0).all(-1))),
        encoder=nn.TransformerEncoder(layer, 2, mask_check=checked),
        after=nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
    )
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    fast = optimize(model, (x, padding), precision="fp32")
    padding, x = padding.clone(), x.clone()
    padding[0, 3:], x[0, 3:] = True, 0.0
    for mask in (torch.zeros_like(padding), padding):
        with torch.no_grad():
            assert torch.allclose(fast(x, mask), model(x, mask), atol=1e-5)
    assert "enable_nested_tensor=False" in fast.report.notes[0]
    assert any("may make nested tensors" in note for note in fast.report.notes)


@pytest.mark.parametrize("calls", [1, 2, 3, 20])
def test_a_model_that_fails_after_some_calls_answers_them(calls: int) -> None:
    model = WearsOut(calls).eval()
    fast = optimize(model, X, precision="fp32")
    for _ in range(calls):
        assert torch.allclose(fast(X), model.conv(X), atol=1e-5)
    with pytest.raises(ValueError, match="worn out"):
        fast(X)
    assert model.left == calls


def test_a_best_program_that_cannot_be_recalled_is_tuned_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from ampopt.search.optimizer import Optimizer

    monkeypatch.setenv("AMPOPT_CACHE", str(tmp_path))
    model = nn.Sequential(linear(), nn.ReLU()).eval()
    optimize(model, L, precision="fp32")
    whole, calls = Optimizer._summarize, []

    def failing_once(self: Optimizer) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise RuntimeError("no kernel image")
        whole(self)

    monkeypatch.setattr(Optimizer, "_summarize", failing_once)
    monkeypatch.setattr(PassManager, "recall", lambda *_: True)
    report = optimize(model, L, precision="fp32").report
    assert any("does not run any more (RuntimeError: no kernel image): tuned anew" in n for n in report.notes)
    assert report.verified
