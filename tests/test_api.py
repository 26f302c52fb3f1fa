"""optimize: the user's model and PyTorch stay as they were, and the result answers as the model does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ampopt
from ampopt.deploy.runtime import OptimizedModule
from ampopt.errors import InputError
from ampopt.ir.numerics import relative_error
from tests.helpers import Model, with_statistics
from tests.support import snapshot
from tests.support.planted import NO_ENGINES, optimize

pytestmark = pytest.mark.usefixtures("quick")
X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def block() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.5))


def in_train_mode() -> nn.Module:
    model = block().train()
    model[1].eval()
    return model


def shared_module() -> nn.Module:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(3), nn.ReLU(), conv, nn.BatchNorm2d(3))


def tied_weights() -> nn.Module:
    first, second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
    second.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm2d(3), second)


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        conv = torch.nn.utils.weight_norm(nn.Conv2d(3, 4, 3))
    return nn.Sequential(conv, nn.BatchNorm2d(4))


def new_weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4))


def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), nn.ReLU())


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.flip(-1)) / 2


def own_parametrization() -> nn.Module:
    conv = nn.Conv2d(3, 4, 3)
    nn.utils.parametrize.register_parametrization(conv, "weight", _Symmetric())
    return conv


def with_gradients() -> nn.Module:
    model = block()
    model(X).sum().backward()
    model[0].bias.requires_grad_(False)
    return model


def with_hooks() -> nn.Module:
    model = block().eval()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, output: output - 1)
    return model


def with_buffers() -> nn.Module:
    model = Model(
        lambda m, x: m.conv((x - m.mean) / m.scale) * m.plain,
        conv=nn.Conv2d(3, 4, 3),
        mean=torch.ones(3, 1, 1),
    )
    model.register_buffer("scale", torch.full((3, 1, 1), 0.5), persistent=False)
    model.plain = torch.full((4, 1, 1), 3.0)
    return model


def channels_last() -> nn.Module:
    model: nn.Module = block().to(memory_format=torch.channels_last)
    return model


def frozen_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return block()


MODELS = (
    in_train_mode,
    shared_module,
    tied_weights,
    old_weight_norm,
    new_weight_norm,
    spectral_norm,
    own_parametrization,
    with_gradients,
    with_hooks,
    with_buffers,
    channels_last,
    frozen_in_inference_mode,
)


def expected(model: nn.Module, *args: Any) -> Tensor:
    """What the model answers in evaluation mode; its flags are put back."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        output: Tensor = model(*args)
    for module, flag in flags.items():
        module.training = flag
    return output


@pytest.mark.parametrize("make", MODELS)
def test_the_model_and_pytorch_are_untouched_and_the_result_is_right(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    x = X.clone()
    before = snapshot.of_model(model), snapshot.of_torch(), snapshot.bits(x)
    fast = optimize(model, x)
    assert snapshot.differences(before[0], snapshot.of_model(model)) == []
    assert snapshot.differences(before[1], snapshot.of_torch()) == []
    assert before[2] == snapshot.bits(x)
    fresh = torch.randn_like(X)
    assert relative_error(fast(fresh), expected(model, fresh)) < 1e-2
    assert isinstance(fast, ampopt.OptimizedModule)


def test_compare_leaves_the_model_and_pytorch_untouched() -> None:
    model = in_train_mode()
    before = snapshot.of_model(model), snapshot.of_torch()
    ampopt.compare(model, X, exclude=NO_ENGINES, precision="fp32", progress=False)
    assert snapshot.differences(before[0], snapshot.of_model(model)) == []
    assert snapshot.differences(before[1], snapshot.of_torch()) == []


EVALUATION = "what was measured and optimized is evaluation mode"


@pytest.mark.parametrize(
    ("training", "note"),
    [
        (["", "0", "1", "2", "3"], f"the model is in training mode: {EVALUATION}"),
        (["", "0", "2", "3"], f"4 of the model's 5 modules are in training mode: {EVALUATION}"),
        (["3"], f"1 of the model's 5 modules is in training mode: {EVALUATION}"),
        ([], None),
    ],
)
def test_a_model_in_training_mode_is_told_that_evaluation_was_measured(
    training: list[str], note: str | None
) -> None:
    model = block().eval()
    for name in training:
        model.get_submodule(name).training = True
    told = optimize(model, X, budget_s=1e-6).report.notes
    compared = ampopt.compare(model, X, exclude=NO_ENGINES, budget_s=1e-6, progress=False)
    for notes in (told, compared.notes, compared.to_dict()["notes"]):
        assert [each for each in notes if "training mode" in each] == ([] if note is None else [note])
    assert ("training mode" in str(compared)) == (note is not None)


def test_a_model_in_training_mode_that_is_no_graph_is_told_so_too() -> None:
    model = Model(lambda m, x: m.conv(x) if x.sum() > 0 else x, conv=nn.Conv2d(3, 3, 1)).train()
    notes = optimize(model, X).report.notes
    assert notes[0] == f"the model is in training mode: {EVALUATION}"


@pytest.mark.parametrize("as_module", [True, False])
def test_an_exported_program_is_optimized_in_the_mode_that_it_was_exported_in(as_module: bool) -> None:
    model = block().eval()
    exported = torch.export.export(model, (X,))
    given: Any = exported.module() if as_module else exported
    fast = optimize(given, X)
    assert not any("training mode" in note for note in fast.report.notes)
    with torch.no_grad():
        assert torch.allclose(fast(X), model(X), atol=1e-5)


def test_a_later_change_of_the_users_weights_does_not_reach_the_result() -> None:
    model = with_statistics(block())
    fast = optimize(model, X)
    before = fast(X)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert torch.equal(fast(X), before)


def test_random_numbers_are_drawn_as_if_nothing_had_happened() -> None:
    model = Model(lambda m, x: F.dropout(m.conv(x), 0.5, training=True), conv=nn.Conv2d(3, 4, 3)).eval()
    before = torch.get_rng_state()
    optimize(model, X)
    assert torch.equal(before, torch.get_rng_state())


def test_inferring_inputs_draws_no_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(7, 3), nn.ReLU())
    before = torch.get_rng_state()
    optimize(model)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_is_left_as_it_was(enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        optimize(block(), X)
        assert torch.is_grad_enabled() is enabled


def test_the_default_dtype_is_left_as_it_was_and_respected() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = block().eval()
        fast = optimize(model, X.double())
        assert torch.get_default_dtype() is torch.float64
        assert relative_error(fast(X.double()), expected(model, X.double())) < 1e-2
    finally:
        torch.set_default_dtype(torch.float32)


def test_optimizing_under_inference_mode_works() -> None:
    model = with_statistics(block())
    with torch.inference_mode():
        fast = optimize(model, X.clone())
        inside = fast(X.clone())
    assert relative_error(inside, expected(model, X)) < 1e-2
    assert relative_error(fast(X), expected(model, X)) < 1e-2


def test_optimizing_under_autocast_optimizes_the_model_and_not_autocast() -> None:
    model = with_statistics(block())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = optimize(model, X, precision="fp32")
    assert fast(X).dtype is torch.float32
    assert relative_error(fast(X), expected(model, X)) < 1e-5


class _Signature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(
        self, images: list[Tensor], /, scale: float = 1.0, *extra: Tensor, mode: str = "sum", **named: Tensor
    ) -> Tensor:
        out: Tensor = self.conv(torch.cat(images)) * scale
        for tensor in (*extra, *(named[key] for key in sorted(named))):
            out = out + tensor if mode == "sum" else out * tensor
        return out


def test_a_complex_signature_is_served() -> None:
    model, b, a = _Signature(), torch.tensor(5.0), torch.tensor(2.0)
    args, kwargs = ([X, X], 2.0, torch.tensor(3.0)), {"mode": "product", "b": b, "a": a}
    fast = optimize(model, args, example_kwargs=kwargs)
    for call in (args, ([X + 1, X], 2.0, torch.tensor(-3.0))):
        assert relative_error(fast(*call, **kwargs), expected_call(model, call, kwargs)) < 1e-2
    other = kwargs | {"mode": "sum"}
    assert relative_error(fast(*args, **other), expected_call(model, args, other)) < 1e-2


def expected_call(model: nn.Module, args: Any, kwargs: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(*args, **kwargs)
    return output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"exclude": ["fold"]}, "there is no pass fold"),
        ({"budget_s": 0}, "budget_s=0"),
        ({"tolerance": -1.0}, "tolerance=-1.0"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"precision": "int3"}, "choose from auto, fp32, amp"),
        ({"amp_dtype": torch.float64}, "choose torch.float16 or torch.bfloat16"),
        ({"device": "tpu-9"}, "is no device"),
        ({"outputs": "mine"}, "choose 'copy' or 'static'"),
        ({"example_inputs": torch.ones(2, 7, 3, 3)}, "fails on the example inputs"),
    ],
)
def test_arguments_that_do_not_serve_are_refused(arguments: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {"example_inputs": X, "budget_s": 1.0, "progress": False} | arguments
    with pytest.raises(InputError, match=reason):
        ampopt.optimize(block(), **given)


def test_a_wrong_way_to_give_outputs_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampopt.api.capture", lambda *args: pytest.fail("the long work began"))
    with pytest.raises(InputError, match="choose 'copy' or 'static'"):
        optimize(block(), X, outputs="mine")


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"takes a torch\.nn\.Module, not function"):
        ampopt.optimize(expected, X)  # type: ignore[arg-type]


def test_a_model_that_cannot_be_copied_is_served_itself() -> None:
    model = nn.Linear(4, 4)
    vars(model)["lock"] = threading.Lock()
    with pytest.raises(InputError, match=r"cannot be copied .*lock.*after model.eval\(\) it is served"):
        ampopt.optimize(model, torch.randn(1, 4), budget_s=2.0)
    model.eval()
    served = ampopt.optimize(model, torch.randn(1, 4), budget_s=2.0)
    assert served.report.chosen == "original"
    assert "cannot be copied" in served.report.notes[0]
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.equal(served(x), model(x))
        model.weight.mul_(2.0)
        assert torch.equal(served(x), model(x))
    assert not served(x).requires_grad
    with pytest.raises(InputError, match="its state is yours"):
        served.reset_state()
    with pytest.raises(InputError, match="cannot be copied"):
        ampopt.optimize(model, torch.randn(1, 4), precision="amp", io="lane")


class Adapting(nn.Module):
    """It takes a step down the gradient of its own weights before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            weight = self.linear.weight
            (slope,) = torch.autograd.grad(F.linear(x, weight, self.linear.bias).square().sum(), weight)
        return F.linear(x, weight - 0.1 * slope, self.linear.bias)


def test_a_model_that_derives_by_its_weights_answers_itself() -> None:
    model, x = Adapting().eval(), torch.randn(5, 8)
    fast = ampopt.optimize(model, x, budget_s=3, progress=False)
    assert fast.report.chosen == "original"
    assert "derives by its own weights" in fast.report.notes[0]
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert all(weight.grad is None for weight in model.parameters())
    with pytest.raises(InputError, match="fails on the example inputs"):
        ampopt.optimize(model, torch.randn(5, 7), budget_s=3, progress=False)


@pytest.mark.parametrize("kind", ["one graph", "parts"])
def test_a_default_device_of_the_users_is_for_their_tensors_alone(kind: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 5))
    table = nn.Embedding(5, 4)

    def answer(m: Any, x: Tensor, place: Tensor, mask: Tensor) -> Tensor:
        scale = float(x.sum()) if kind == "parts" else 1.0
        return m.net(x) + scale * m.table(place).sum() * mask.sum()  # type: ignore[no-any-return]

    model = Model(answer, net=net, table=table).eval()
    call = X, torch.tensor([1, 4]), torch.tensor([True, False])
    with torch.device("meta"):  # as torch.set_default_device does
        fast = optimize(model, call, precision="fp32")
        if isinstance(fast, OptimizedModule):
            fast.prepare((X[:1], *call[1:]))
        ampopt.diagnose(model, call, budget_s=1, progress=False)
        if kind == "one graph":
            ampopt.compare(model, call, exclude=NO_ENGINES, budget_s=5, precision="fp32", progress=False)
    assert not [note for note in fast.report.notes if "meta" in note]
    with torch.no_grad():
        assert torch.allclose(fast(*call), model(*call), rtol=1e-4, atol=1e-4)
