"""What an older PyTorch gets wrong in exports is right within a capture; then PyTorch is as it was."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import _meta_registrations as shapes
from torch._decomp import decompositions
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import transformer

from ampopt.ir.capturing import capturing
from ampopt.ir.export_repairs import averages_of_all_batches, masks_as_given, right_sizes
from ampopt.ir.graph import aten, calls
from ampopt.ir.stable_forms import with_stable_forms
from tests.helpers import Model, program_of
from tests.support.planted import captured_of

NAMES: list[tuple[Any, str]] = [
    (shapes, "div_rtn"),
    (decompositions, "one_layer_lstm"),
]


def _functions() -> list[object]:
    return [getattr(module, name) for module, name in NAMES]


def test_pytorch_is_as_it_was_after_it() -> None:
    before = _functions()
    with capturing():
        within = _functions()
    assert _functions() == before
    assert not {*map(id, within)} & {*map(id, before)}
    with pytest.raises(ValueError, match="half-way"), capturing():
        raise ValueError("half-way")
    assert _functions() == before


@pytest.mark.parametrize("divided", [-7, -6, -1, 0, 5, 6, 7])
def test_sizes_are_rounded_down(divided: int) -> None:
    with right_sizes():
        assert shapes.div_rtn(divided, 3) == divided // 3


def test_a_symbolic_size_is_rounded_down_without_a_guard() -> None:
    environment = ShapeEnv()
    size = environment.create_unbacked_symint()
    with right_sizes():
        shapes.div_rtn(size - 3, 2)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_states_of_an_lstms_layer_are_of_two_dimensions(batch: int) -> None:
    lstm = nn.LSTM(4, 5)
    x, state = torch.randn(6, batch, 4), (torch.zeros(batch, 5), torch.zeros(batch, 5))
    with torch.no_grad(), right_sizes():
        found, states = decompositions.one_layer_lstm(x, state, lstm._flat_weights, has_biases=True)
        expected, wanted = lstm(x)
    assert torch.allclose(found, expected, atol=1e-6)
    assert [tuple(each.shape) for each in states] == [(batch, 5), (batch, 5)]
    assert all(torch.allclose(mine, its[0], atol=1e-6) for mine, its in zip(states, wanted, strict=True))


@pytest.mark.parametrize(("size", "in_tiles"), [((6, 9), True), ((7, 9), False), ((2, 3), True)])
def test_adaptive_max_pooling_is_of_tiles_where_pytorch_has_no_form_of_it(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], in_tiles: bool
) -> None:
    monkeypatch.setattr("torch._decomp.decomposition_table", {})
    x = torch.randn(2, 4, *size)
    program = program_of(Model(lambda m, x: F.adaptive_max_pool2d(x, (2, 3))), x)
    formed = with_stable_forms(program.graph, (x,))
    assert any(calls(formed, [aten.max_pool2d_with_indices.default])) is in_tiles
    assert not any(calls(formed, [aten.adaptive_max_pool2d.default]))  # else it is of windows that differ
    assert torch.equal(formed(x)[0], F.adaptive_max_pool2d(x, (2, 3)))


CAUSAL = nn.Transformer.generate_square_subsequent_mask(4)
OTHER = torch.zeros(4, 4).index_fill(0, torch.tensor(0), -1.5)


def _masked(make_mask: Any) -> nn.Module:
    """An encoder that makes its own mask."""
    return Model(lambda m, x: m.encoder(x, mask=make_mask(x.shape[1])), encoder=encoder()).eval()


@pytest.mark.parametrize("mask", [CAUSAL, OTHER], ids=["causal", "other"])
def test_a_transformer_with_any_mask_is_one_graph(mask: torch.Tensor) -> None:
    model, given = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval(), CAUSAL
    x, y = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    program = captured_of(model, x, y, None, given)[1].program
    with torch.no_grad():
        for tgt_mask in (given, mask):
            [found] = program.run(x, y, tgt_mask)
            torch.testing.assert_close(found, model(x, y, None, tgt_mask))


def test_a_mask_that_a_model_makes_is_part_of_its_graph() -> None:
    model, x = _masked(nn.Transformer.generate_square_subsequent_mask), torch.randn(2, 4, 8)
    with torch.no_grad():
        torch.testing.assert_close(captured_of(model, x)[1].program.run(x)[0], model(x))


class Hinted(nn.TransformerEncoderLayer):
    """Takes the hint for the mask."""

    def _sa_block(self, x: Tensor, *_: Any, is_causal: bool = False, **__: Any) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=is_causal)


def encoder(kind: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(kind(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)


def with_own_attention() -> nn.Module:
    model = encoder()
    vars(model.layers[1])["_sa_block"] = lambda x, *_: x
    return model


@pytest.mark.parametrize("model", [encoder(Hinted), with_own_attention(), nn.Linear(2, 2)], ids=repr)
def test_layers_that_are_not_pytorchs_own_are_told_what_they_are_told(model: nn.Module) -> None:
    before = transformer._detect_is_causal_mask
    with masks_as_given(model):
        assert transformer._detect_is_causal_mask is before


@pytest.mark.parametrize("hint", [True, False, None, 1])
def test_the_callers_hint_is_kept_and_other_threads_are_told_what_pytorch_tells_them(hint: Any) -> None:
    found = list[bool]()

    def ask() -> None:
        found.append(transformer._detect_is_causal_mask(mask=CAUSAL, is_causal=hint, size=4))

    before = transformer._detect_is_causal_mask
    with masks_as_given(encoder()):
        ask()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    ask()
    told = hint is True or hint is None  # PyTorch looks at the mask where there is no hint
    assert found == [hint is True, told, told]
    assert transformer._detect_is_causal_mask is before
    with pytest.raises(ValueError, match="half-way"), masks_as_given(encoder()):
        raise ValueError("half-way")
    assert transformer._detect_is_causal_mask is before


def test_what_dynamo_traces_within_a_capture_runs_outside() -> None:
    model, made = encoder().eval(), list[object]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        made.append(graph)
        return graph.forward

    x = torch.randn(2, 4, 8)
    with torch.no_grad(), capturing():
        traced = torch.compile(lambda x: model(x, mask=CAUSAL, is_causal=True).sin(), backend=backend)
        expected = traced(x)
    count = len(made)
    with torch.no_grad():
        torch.testing.assert_close(torch._dynamo.run(traced)(x), expected)
        traced(x)
    assert len(made) == count  # no guard has failed


def test_batch_norms_average_as_they_did_after_it_and_in_other_threads() -> None:
    before, seen = _forwards(), list[Tensor]()

    def averaged() -> Tensor:
        norm = nn.BatchNorm1d(3, momentum=None)
        for n in range(3):
            norm(torch.arange(6.0).view(2, 3) * (n + 1))
        own: Any = norm
        return torch.cat([own.running_mean, own.running_var, own.num_batches_tracked.view(1)])

    expected, model = averaged(), nn.Sequential(nn.BatchNorm2d(3, momentum=None))
    with capturing(), averages_of_all_batches(model):
        assert _forwards() != before
        torch.testing.assert_close(averaged(), expected)
        other = threading.Thread(target=lambda: seen.append(averaged()))
        other.start()
        other.join()
    assert torch.equal(seen[0], expected)
    assert _forwards() == before
    with pytest.raises(ValueError, match="half-way"), averages_of_all_batches(model):
        raise ValueError("half-way")
    assert _forwards() == before


def _forwards() -> list[object]:
    return [nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward]


def test_a_batch_norm_that_averages_all_batches_refuses_what_it_refused() -> None:
    with averages_of_all_batches(nn.BatchNorm1d(3, momentum=None)):
        for x in (torch.zeros(2, 3), torch.zeros(1, 3, 1, 1)):
            with pytest.raises(ValueError, match=r"expected 4D|more than 1 value"):
                nn.BatchNorm2d(3, momentum=None)(x)


def _without_a_count(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """A norm as models have it that were pickled before it counted."""
    del norm._buffers["num_batches_tracked"]
    return norm


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(3, momentum=None).eval(),
        _without_a_count(nn.BatchNorm2d(3).eval()),
        _without_a_count(nn.BatchNorm2d(3, momentum=None).eval()),
        nn.BatchNorm2d(3),
        nn.BatchNorm2d(3, momentum=None, track_running_stats=False),
    ],
    ids=["in evaluation", "no count", "no count, all batches", "of a momentum", "nothing tracked"],
)
def test_pytorch_stays_as_it_is_where_no_norm_averages_all_batches(norm: nn.Module) -> None:
    before = _forwards()
    with averages_of_all_batches(nn.Sequential(norm)):
        assert _forwards() == before


def test_norms_that_do_not_average_are_themselves_beside_one_that_does() -> None:
    others = [_without_a_count(nn.BatchNorm2d(3).eval()), nn.BatchNorm2d(3)]
    x = torch.randn(2, 3, 4, 4)
    expected = [copy.deepcopy(norm)(x) for norm in others]
    with averages_of_all_batches(nn.BatchNorm2d(3, momentum=None)):
        assert all(map(torch.equal, [norm(x) for norm in others], expected))


def test_a_region_that_dynamo_traces_may_hold_a_batch_norm() -> None:
    body = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
    region = torch.compiler.nested_compile_region(body)
    model, x = Model(lambda m, x: region(region(x)), body=body).eval(), torch.randn(1, 3, 6, 6)
    program = captured_of(model, x)[1].program
    torch.testing.assert_close(program.run(x)[0], model(x))
