"""openvino: an engine that loses infinities is refused by its verification, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampopt.ir.lanes import FP32
from ampopt.measure.verify import Verifier
from ampopt.passes import Openvino, openvino
from tests.helpers import Model
from tests.support.planted import captured_of

pytest.importorskip("openvino")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def quick(exports_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sweep of the options finds does not matter here."""
    monkeypatch.setattr(openvino, "TUNING_S", 0.02)


REDUCED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "least": lambda m, x: m.a(x).amin((2, 3)) + x.amin((2, 3)).sum(),
    "least alone": lambda m, x: x.amin((2, 3)),
    "largest alone": lambda m, x: x.amax((2, 3)),
    "pooled": lambda m, x: F.max_pool2d(x, 2),
    "pooled to a size": lambda m, x: F.adaptive_max_pool2d(x, 2),
}


@pytest.mark.parametrize("name", REDUCED)
def test_an_engine_that_loses_negative_infinity_is_refused(name: str) -> None:
    model, x = Model(REDUCED[name], a=nn.Conv2d(3, 4, 1)).eval(), torch.randn(1, 3, 8, 8)
    original, captured = captured_of(model, x)
    run = Openvino().apply(captured.program).program.run
    verifier = Verifier(original, captured)
    lost = False
    for spoilt in (torch.full_like(x, -torch.inf), x.clone().index_fill_(2, torch.tensor([4]), -torch.inf)):
        found, expected = run(spoilt)[0], original(spoilt)
        lost = lost or bool((found.isfinite() & ~expected.isfinite()).any())
    check = verifier.check(run, FP32, everywhere=True)
    assert check.passed != lost, check.reason
