"""Calls that fail only when they are made again, or in one lane."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampopt
from ampopt.errors import InputError
from tests.helpers import WearsOut

X = torch.randn(2, 3, 12, 12)


@pytest.mark.parametrize("calls", [1, 20])
def test_a_model_that_fails_when_it_is_called_again_is_refused(calls: int) -> None:
    with pytest.raises(InputError, match="fails when it is called again with the same inputs: ValueE"):
        ampopt.diagnose(WearsOut(calls).eval(), X, budget_s=3, progress=False)


def test_a_model_that_fails_when_it_is_called_again_slowly_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ampopt.diagnosis.examine.SLOW_CALL_S", 0.0)  # another look at a long call fails, too
    with pytest.raises(InputError, match="fails when it is called again with the same inputs: ValueE"):
        ampopt.diagnose(WearsOut(1).eval(), X, budget_s=3, progress=False)


def test_a_model_that_fails_in_amp_only_where_nothing_watches_its_call_is_diagnosed_in_fp32() -> None:
    """Then PyTorch takes its fused layer, which has no autocast."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    padding = torch.arange(5) > torch.tensor([[4], [2]])
    found = ampopt.diagnose(
        nn.TransformerEncoder(layer, 2).eval(),
        torch.randn(2, 5, 16),
        example_kwargs={"src_key_padding_mask": padding},
        device="cpu",
        budget_s=2,
        progress=False,
    )
    assert list(found.latency) == ["fp32"]
    assert any(note.startswith("the amp lane was not tried: the model fails in it") for note in found.notes)
