"""What the tests of graphs' nodes share: a tensor, and a made-up driver in CUDA's place."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.fake_driver import KEPT, FakeDriver


@pytest.fixture
def tensor() -> Tensor:
    return torch.zeros(16)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver([])
    monkeypatch.setattr("ampopt.system.cuda_driver.driver", lambda: fake)
    monkeypatch.setattr("ampopt.engines.graph_pointers.driver", lambda: fake)
    yield fake
    gc.collect()  # while there still is a driver to destroy graphs with
    KEPT.clear()
