"""OptimizedModule: every call is served rightly, within its bounds, and what it cannot do it refuses."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampopt.errors import InputError
from ampopt.passes import FoldConvBn
from tests.helpers import Model, with_statistics
from tests.support.planted import Planted, module_of

pytestmark = pytest.mark.usefixtures("quick")

CAPTURED = "captured and verified a program for a call not seen before"


def net() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))


def image(height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(seed))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What ampopt has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "ampopt"]


@pytest.fixture
def model() -> nn.Module:
    return net()


def close(actual: Any, expected: Any) -> bool:
    return bool(torch.allclose(actual, expected, atol=1e-5, rtol=1e-4)) and actual.shape == expected.shape


def test_a_fresh_input_of_the_examples_shape_makes_no_program(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    fast = module_of(model, image(), passes=(FoldConvBn(),))
    assert close(fast(image(seed=1)), model(image(seed=1)))
    assert not said(caplog)


def test_an_unseen_shape_gets_its_own_program_once_and_the_log_says_so(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    fast = module_of(model, image(), passes=(FoldConvBn(),))
    for seed in range(3):
        assert close(fast(image(9, 7, seed)), model(image(9, 7, seed)))
        assert close(fast(image(7, 9, seed)), model(image(7, 9, seed)))
    found = [text for text in said(caplog) if CAPTURED in text]
    assert [text.rpartition(": ")[2] for text in found] == [
        "float32[1, 3, 9, 7] on cpu",
        "float32[1, 3, 7, 9] on cpu",
    ]


def test_sizes_that_the_graph_has_as_constants_are_never_served_for_another_shape() -> None:
    model = Model(
        lambda m, x: m.conv(x).view(x.shape[0], 4, x.shape[2] * x.shape[3]) * x.shape[2],
        conv=nn.Conv2d(3, 4, 1),
    )
    fast = module_of(model, image(4, 4))
    for height, width in ((4, 4), (2, 8), (8, 2), (4, 4)):
        x = image(height, width)
        assert close(fast(x), model(x))
    assert fast(torch.empty(0, 3, 4, 4)).shape == (0, 4, 16)


@pytest.mark.parametrize(
    "as_laid",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
        lambda x: x[:, :1].expand(-1, 3, -1, -1),
        lambda x: x.flip(3).flip(3).as_strided(x.shape, x.stride()),
    ],
)
def test_other_strides_of_a_known_shape_are_right_and_need_no_capture(
    model: nn.Module, as_laid: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fast = module_of(model, image(), passes=(FoldConvBn(),))
    x = as_laid(image(seed=3))
    assert close(fast(x), model(x))
    assert fast(x).is_contiguous()
    assert not said(caplog)


def test_a_graph_that_reads_strides_gets_a_program_for_each() -> None:
    model = Model(lambda m, x: torch.view_as_real(x) * m.scale, scale=torch.tensor(2.0))
    x = torch.randn(3, 5, dtype=torch.complex64)
    fast = module_of(model, x)
    for tensor in (x, x.t().contiguous().t(), torch.stack([x, x], 2)[..., 0]):
        assert torch.equal(fast(tensor), model(tensor))


def test_a_program_that_is_wrong_for_another_shape_is_not_used(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    fast = module_of(model, image(), passes=(Planted("wrong", factor=1.5),))
    assert close(fast(image(9)), model(image(9)))
    assert "is wrong for this call: output 0: error 0.5" in said(caplog)[-1]


def test_a_pass_that_breaks_on_another_shape_leaves_it_to_the_original(
    model: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = module_of(model, image(), passes=(FoldConvBn(),))
    monkeypatch.setattr(FoldConvBn, "apply", lambda self, program: 1 / 0)
    assert close(fast(image(9)), model(image(9)))
    assert "because ZeroDivisionError: division by zero" in said(caplog)[-1]


def test_a_call_that_the_model_cannot_take_raises_the_models_own_error(model: nn.Module) -> None:
    fast = module_of(model, image())
    with pytest.raises(RuntimeError, match="channels"):
        fast(torch.zeros(1, 5, 8, 8))
    with pytest.raises(TypeError):
        fast()
    assert close(fast(image()), model(image()))


@pytest.mark.parametrize("bad", [image().double(), image().half(), image().to("meta"), image().long()])
def test_another_dtype_or_device_is_refused_with_what_was_expected(model: nn.Module, bad: Tensor) -> None:
    with pytest.raises(InputError, match=r"this program was made for float32 on cpu: convert it with"):
        module_of(model, image())(bad)


def test_another_value_of_a_flag_is_another_program() -> None:
    model = Model(
        lambda m, x, scale, mode: m.conv(x) * (scale if mode == "mul" else 1), conv=nn.Conv2d(3, 4, 1)
    )
    fast = module_of(model, image(), 2.0, "mul")
    for scale, mode in ((2.0, "mul"), (3.0, "mul"), (2.0, "no"), (True, "mul"), (1, "mul"), (2.0, "mul")):
        assert close(fast(image(), scale, mode), model(image(), scale, mode))


def test_the_log_tells_the_number_that_makes_a_call_a_new_one(caplog: pytest.LogCaptureFixture) -> None:
    gained = Model(lambda m, x, gain, way: m.conv(x) * gain, conv=nn.Conv2d(3, 4, 3)).eval()
    fast = module_of(gained, image(), 1.0, "up")
    for gain in (2.0, -1.5):
        assert close(fast(image(), gain, "down"), gained(image(), gain, "down"))
    assert said(caplog) == [
        f"ampopt: {CAPTURED}: float32[1, 3, 8, 8] on cpu, {gain}, 'down'" for gain in (2.0, -1.5)
    ]


def test_an_export_of_an_optimized_module_is_refused_with_what_to_do(model: nn.Module) -> None:
    fast = module_of(model, image())
    with pytest.raises(Exception, match="compile or export the original model"):
        torch.export.export(fast, (image(),), strict=True)


def test_eight_threads_with_mixed_shapes_get_what_one_gets(model: nn.Module) -> None:
    calls = [image(8 + seed % 5, 8, seed) for seed in range(200)]
    alone = module_of(model, image(), passes=(FoldConvBn(),))
    expected = [alone(x) for x in calls]
    fast = module_of(model, image(), passes=(FoldConvBn(),), max_shapes=3, max_captures=50)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(fast, calls))
    assert all(close(a, b) for a, b in zip(got, expected, strict=True))
    assert fast._calls.programs <= 3


def test_a_deep_copy_serves_for_itself(model: nn.Module) -> None:
    fast = module_of(model, image(), passes=(FoldConvBn(),), max_shapes=3)
    twin = copy.deepcopy(fast)
    twin(image(9))
    assert len(fast._calls.answers) == 1
    for x in (image(), image(9)):
        assert torch.equal(twin(x), fast(x))
    holder = copy.deepcopy(nn.Sequential(fast, nn.ReLU()))
    assert torch.equal(holder(image()), fast(image()).relu())


def test_a_deep_copy_has_what_was_prepared_for_all_its_calls(model: nn.Module) -> None:
    fast = module_of(model, image(), passes=(FoldConvBn(),), max_shapes=1, strict=True)
    fast.prepare(image(9), (1, 3, 10, 8))
    others = [image(9).to(memory_format=torch.channels_last), image(11)]
    for x in others:
        fast(x)
    for twin in (copy.deepcopy(fast), copy.deepcopy(copy.deepcopy(fast))):
        for x in (image(), image(9), image(10), others[0]):
            assert torch.equal(twin(x), fast(x))
        assert twin.health.is_good
        twin(others[1])
        assert twin.health.late_captures == 1


def test_a_deep_copy_of_a_model_that_asks_for_strides_has_what_was_prepared() -> None:
    model = Model(lambda m, x: m.conv(x) * (2 if x.is_contiguous() else 1), conv=nn.Conv2d(3, 4, 1)).eval()
    fast = module_of(model, image(), passes=(FoldConvBn(),))
    for x in (image(9), image(9).to(memory_format=torch.channels_last)):
        fast.prepare(x)
    twin = copy.deepcopy(fast)
    for x in (image(9), image(9).to(memory_format=torch.channels_last)):
        assert torch.equal(twin(x), fast(x))
    assert twin.health.late_captures == 0


def test_training_moving_and_pickling_are_refused(model: nn.Module) -> None:
    fast = module_of(model, image())
    for refused in (
        lambda: fast.train(),
        lambda: nn.Sequential(fast).train(),
        lambda: fast.to("meta"),
        lambda: fast.half(),
        lambda: fast.to(torch.float64),
        lambda: nn.Sequential(fast).double(),
        lambda: pickle.dumps(fast),
        lambda: torch.save(fast, "/dev/null"),
    ):
        with pytest.raises(InputError, match="an optimized module"):
            refused()
    for stored in (pickle.dumps, copy.copy, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(InputError, match=r"keep it with \.save\(\"robot\.ampopt\"\)"):
            stored(fast)
    assert fast.eval() is fast
    assert close(fast(image()), model(image()))


def test_the_users_hooks_run(model: nn.Module) -> None:
    fast = module_of(model, image())
    plain, seen = fast(image()), list[str]()
    handles = [
        fast.register_forward_pre_hook(lambda module, args: seen.append("before")),
        fast.register_forward_hook(lambda module, args, output: output + 1),
    ]
    assert torch.equal(fast(image()), plain + 1)
    assert seen == ["before"]
    for handle in handles:
        handle.remove()
    assert torch.equal(fast(image()), plain)


@pytest.mark.parametrize("height", [8, 9])
def test_inference_mode_and_inputs_with_gradients_are_served(model: nn.Module, height: int) -> None:
    fast, expected = module_of(model, image(), passes=(FoldConvBn(),)), model(image(height))
    with torch.inference_mode():
        assert close(fast(image(height)), expected)
        inside = image(height)
    assert close(fast(inside), expected)
    wanting = image(height).requires_grad_()
    assert close(fast(wanting), expected)
    with pytest.raises(InputError, match="has no derivatives: differentiate the original"):
        fast(wanting).sum().backward()
    assert close(fast(nn.Parameter(image(height))), expected)


@pytest.mark.parametrize("passes", [(), (FoldConvBn(),)])
def test_outputs_belong_to_the_caller(passes: tuple[Any, ...]) -> None:
    model = Model(lambda m, x: (m.conv(x), x, m.conv.weight), conv=nn.Conv2d(3, 4, 1)).eval()
    x = image()
    fast = module_of(model, x, passes=passes)
    first = fast(x)
    kept = [t.clone() for t in first]
    for tensor in first:
        tensor.fill_(7)
    assert torch.equal(x, image())
    assert all(torch.equal(a, b) for a, b in zip(fast(x), kept, strict=True))


def test_where_nothing_was_faster_the_original_answers(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ampopt")
    fast = module_of(model, image(), serve_original=True)
    for x in (image(), image(9)):
        assert torch.equal(fast(x), model(x))
        assert not fast(x).requires_grad
    assert torch.equal(copy.deepcopy(fast)(image()), model(image()))
    assert not said(caplog)


def test_a_deep_copy_keeps_the_users_hooks(model: nn.Module) -> None:
    fast = module_of(model, image())
    handle = fast.register_forward_hook(lambda module, args, output: output + 1)
    x = image()
    try:
        twin = copy.deepcopy(fast)
        expected = fast(x)
    finally:
        handle.remove()
    assert torch.equal(twin(x), expected)
    assert not torch.equal(fast(x), expected)
