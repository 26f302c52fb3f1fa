"""What is in the way of one graph is named, with its line in the model; scripted parts are captured."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from ampopt.errors import CaptureError
from ampopt.ir.capture import capture
from ampopt.ir.model_copy import private_copy
from ampopt.measure.entry import ORIGINAL
from ampopt.search.partly_optimized import PartlyOptimizedModule
from tests.helpers import Model
from tests.support.planted import captured_of, optimize

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([5, 3, 2])
PACKED = r"it computes on packed sequences \(torch\.nn\.utils\.rnn\)"


def script(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.jit.script(module.eval())


def _packs(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.linear(x), lengths, batch_first=True, enforce_sorted=False)
    result: Tensor = pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0]
    return result


def _takes_packed(m: Any, x: PackedSequence) -> Tensor:
    result: Tensor = m.rnn(x)[1]
    return result


def _gives_packed(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.rnn(pack_sequence(list(x)))[0]
    return result


def _cond(m: Any, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.sum() > 0, lambda y: m.linear(y), lambda y: -y, (x,))
    return result


def _while(m: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    start = torch.tensor(0), x
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, m.linear(y)), start)[1]  # type: ignore[no-any-return]


def _inside(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.inside(x) + 1
    return result


class Bright(nn.Module):
    """A scripted branch that values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            x = self.linear(x)
        return x


class Doubling(nn.Module):
    """A scripted loop whose end values decide."""

    def forward(self, x: Tensor) -> Tensor:
        while x.abs().sum() < 100:
            x = 2 * x
        return x


class Counting(nn.Module):
    """A number made of a tensor decides, and is added."""

    def forward(self, x: Tensor) -> Tensor:
        n = int(x.sum().item())
        if n > 3:
            return x
        return x + n


class Straight(nn.Module):
    """Scripted code of one path, with a size in a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 100:
            x = x + 1
        y = torch.relu(self.one(x))
        for _ in range(2):
            y = self.two(y) * self.scale
        return y


class Remembering(nn.Module):
    """Scripted code with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.sum(0)  # type: ignore[has-type]
        return self.linear(x) + self.total  # type: ignore[no-any-return]


def rnn() -> nn.Module:
    return nn.GRU(6, 6, batch_first=True)


IN_THE_WAY: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], str]] = {
    "a packed sequence": (
        lambda: Model(_packs, rnn=nn.LSTM(6, 6, batch_first=True), linear=nn.Linear(6, 6)),
        (ROWS, LENGTHS),
        rf'because of test_obstacles\.py:\d+, "(packed = pack_|result: Tensor = pad_packed).*": {PACKED}',
    ),
    "a packed argument": (
        lambda: Model(_takes_packed, rnn=rnn()),
        (pack_padded_sequence(ROWS, LENGTHS, batch_first=True),),
        rf'because of test_obstacles\.py:\d+, "result: Tensor = m\.rnn\(x\)\[1\]": {PACKED}',
    ),
    "a packed result": (
        lambda: Model(_gives_packed, rnn=rnn()),
        (ROWS,),
        rf'because of test_obstacles\.py:\d+, "result: Tensor = m\.rnn\(pack_sequence.*": {PACKED}',
    ),
    "a conditional": (
        lambda: Model(_cond, linear=nn.Linear(6, 6)),
        (X,),
        r'of test_obstacles\.py:\d+, "result: Tensor = torch\.cond.*": torch\.cond decides which',
    ),
    "a loop": (
        lambda: Model(_while, linear=nn.Linear(6, 6)),
        (X,),
        r'because of test_obstacles\.py:\d+, "return while_loop.*": torch\.while_loop decides',
    ),
    "a scripted branch inside": (
        lambda: Model(_inside, inside=script(Bright())),
        (X,),
        r'its TorchScript code decides by values at test_obstacles\.py:\d+, "if bool\(x\.sum\(\) > 0\):"',
    ),
    "a scripted branch": (
        lambda: script(Bright()),
        (X,),
        r'its TorchScript code decides by values at test_obstacles\.py:\d+, "if bool\(x\.sum\(\) > 0\):"',
    ),
    "a scripted loop": (
        lambda: script(Doubling()),
        (X,),
        r'TorchScript code decides by values at test_obstacles\.py:\d+, "while x\.abs\(\)\.sum\(\) < 100:"',
    ),
    "a scripted number": (
        lambda: script(Counting()),
        (X.abs(),),
        r'its TorchScript code decides by values at test_obstacles\.py:\d+, "if n > 3:"',
    ),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_is_in_the_way_is_named_with_its_line(name: str) -> None:
    make, args, reason = IN_THE_WAY[name]
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(private_copy(make().eval()), args, {}, torch.device("cpu"))
    assert " object at 0x" not in str(caught.value)


def _places(m: Any, x: Tensor) -> Tensor:
    return m.linear(x)[:, x[0].argmax()]  # type: ignore[no-any-return]


def _quantiles(m: Any, x: Tensor) -> Tensor:
    return torch.quantile(m.linear(x), torch.tensor([0.1, 0.9]), dim=1)


OF_VALUES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a place": (
        _places,
        r"a place or a size is computed of values of tensors, which are not known when PyTorch ",
    ),
    "quantiles": (
        _quantiles,
        r'of test_obstacles\.py:\d+, "return torch\.quantile\(.*": aten\.equal\.default asks',
    ),
}


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="it is captured")
@pytest.mark.parametrize("name", OF_VALUES)
def test_what_earlier_versions_cannot_capture_is_named_and_answered_for(name: str) -> None:
    function, reason = OF_VALUES[name]
    model = Model(function, linear=nn.Linear(6, 6)).eval()
    with pytest.raises(CaptureError, match=reason):
        capture(private_copy(model), (X,), {}, torch.device("cpu"))
    fast = optimize(model, (X,), precision="fp32", budget_s=1.0, cache=False)
    with torch.no_grad():
        for x in (X, -X):
            assert torch.allclose(fast(x), model(x), atol=1e-5)


ANSWERED = ["a packed sequence", "a conditional", "a scripted branch", "a scripted number"]


@pytest.mark.parametrize("name", ANSWERED)
def test_the_first_note_says_so_and_the_model_is_answered_for(name: str) -> None:
    make, args, reason = IN_THE_WAY[name]
    model = make().eval()
    fast = optimize(model, args, precision="fp32", budget_s=1.0, cache=False)
    assert isinstance(fast, PartlyOptimizedModule)
    assert fast.report.chosen == ORIGINAL or fast.report.regions
    assert fast.report.notes[0].startswith("not one graph: torch.export cannot capture")
    assert re.search(reason, fast.report.notes[0])
    with torch.no_grad():
        for given in (args, (-args[0], *args[1:])) if isinstance(args[0], Tensor) else (args,):
            assert torch.allclose(fast(*given), model(*given), atol=1e-5)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": script,
    "traced": lambda module: torch.jit.trace(module.eval(), X),
    "frozen": lambda module: torch.jit.freeze(script(module)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("form", FORMS)
def test_a_scripted_submodule_of_one_path_is_captured_with_the_rest(form: str) -> None:
    torch.manual_seed(0)
    model = Model(_inside, inside=nn.Sequential(nn.Linear(6, 6), FORMS[form](Straight()))).eval()
    captured = captured_of(model, X)[1]
    for x in (X, -X, 3 * X + 1):
        (found,) = captured.program.run(x)
        with torch.no_grad():
            assert torch.allclose(found, model(x), atol=1e-6)
    inside = model.get_submodule("inside.1")
    assert isinstance(inside, torch.jit.ScriptModule)  # the user's own is as it was
    if form != "frozen":
        assert len(list(inside.parameters())) == 4


def test_a_scripted_submodule_whose_weights_the_model_reads_is_no_raw_error() -> None:
    def reads(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.inside(x) * m.inside.scale
        return result

    model = Model(reads, inside=script(Straight())).eval()
    with pytest.raises(CaptureError, match="cannot capture Model"):
        captured_of(model, X)


@pytest.mark.parametrize(("wrap", "place"), [(True, r"inside\.total"), (False, "total")])
def test_a_state_in_torchscript_is_named(wrap: bool, place: str) -> None:
    model = Model(_inside, inside=script(Remembering())).eval() if wrap else script(Remembering())
    with pytest.raises(CaptureError, match=f"it changes {place}, which its TorchScript holds"):
        captured_of(model, X)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [False, True])
def test_frozen_torchscript_has_no_mode_and_is_answered_for(wrap: bool) -> None:
    frozen = torch.jit.freeze(script(Straight()))
    model = nn.Sequential(frozen, nn.ReLU()) if wrap else frozen
    fast = optimize(model, (X,), precision="fp32", budget_s=1.0, cache=False)
    with torch.no_grad():
        for x in (X, -X):
            assert torch.allclose(fast(x), model(x), atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_torchscript_in_onednns_own_tensors_is_refused_before_it_ends_the_process() -> None:
    model = torch.jit.optimize_for_inference(script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())))
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(CaptureError, match=r"as torch\.jit\.optimize_for_inference makes them: give the"):
        captured_of(model, x)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_torchscript_that_merely_names_onednn_is_captured(tmp_path: Path) -> None:
    folder = tmp_path / "mkldnn_zoo"
    folder.mkdir()
    (folder / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def forward(self, x): return x.relu() * 2\n"
    )
    spec = importlib.util.spec_from_file_location("mkldnn_net", folder / "net.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(made := importlib.util.module_from_spec(spec))
    model = script(made.Net())
    assert "mkldnn" in str(model.inlined_graph)
    (found,) = captured_of(model, X)[1].program.run(X)
    assert torch.equal(found, model(X))


class Averaging(nn.BatchNorm1d):
    """A batch norm whose own code averages over all batches, always."""

    def __init__(self) -> None:
        super().__init__(6, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked)
        return F.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=share)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), Averaging())), "1.1"),
        (Averaging(), "it"),
    ],
)
def test_a_batch_norm_that_needs_its_count_as_a_number_is_named(model: nn.Module, name: str) -> None:
    said = (
        rf"{name} \(Averaging\) averages over all batches, momentum=None, .*: give it a momentum, or let eval"
    )
    with pytest.raises(CaptureError, match=said):
        captured_of(model.eval(), X)
    fast = optimize(model, X, precision="fp32", budget_s=1.0)
    assert any(re.search(said, note) for note in fast.report.notes)
    twin = private_copy(model)
    for x in (X, X + 1, X * 2):
        torch.testing.assert_close(fast(x), twin(x))
