"""The cosine similarity and distances in ONNX Runtime are PyTorch's, also of infinities and large numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampopt.engines.executable import executable
from ampopt.ir.graph import calls
from ampopt.ir.similarity_forms import FORMS
from ampopt.ir.stable_forms import with_stable_forms
from ampopt.passes import OnnxRuntime
from tests.helpers import Model, program_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

X = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "of channels": lambda x: F.cosine_similarity(x, x.flip(1), dim=1),
    "of rows": lambda x: F.cosine_similarity(x, x.flip(1), dim=-1),
    "of a row and all others": lambda x: F.cosine_similarity(x, x[0, 0], dim=2),
    "of all and all others": lambda x: F.cosine_similarity(x[:, :, None], x[:, None], dim=-1),
    "distances": lambda x: torch.cdist(x, x.flip(1) + 1),
    "distances to one set": lambda x: torch.cdist(x, x[0, :3]),
    "distances of one row": lambda x: torch.cdist(x[0, :1], x[1]),
    "sums of differences": lambda x: torch.cdist(x, x.flip(1), p=1.0),
    "other distances": lambda x: torch.cdist(x, x.flip(1) + 1, p=3.0),
    "largest differences": lambda x: torch.cdist(x, x.flip(1) + 1, p=math.inf),
    "numbers of differences": lambda x: torch.cdist(x, x.flip(1) * (x > 0), p=0.0),
    "distances of pairs": lambda x: F.pdist(x[0]),
    "other distances of pairs": lambda x: F.pdist(x[0], p=1.0) + F.pdist(x[1], p=3.0),
    "largest differences of pairs": lambda x: F.pdist(x[0], p=math.inf),
    "numbers of differences of pairs": lambda x: F.pdist(x[0] * (x[0] > 0), p=0.0),
    "distances of one row to nothing": lambda x: F.pdist(x[0, :1]).sum() + x,
    "of short vectors": lambda x: F.cosine_similarity(x, x.flip(1), dim=1, eps=3.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_onnx_runtime_computes_what_eager_does(name: str) -> None:
    function = FUNCTIONS[name]
    run = executable(OnnxRuntime(session=()).apply(program_of(Model(lambda m, x: function(x)), X)).program)
    faulty = X.clone()
    faulty[0, 2], faulty[1, 3, 0] = -math.inf, math.inf
    unknown = X.clone()
    unknown[0, 0, 1] = math.nan
    for x in (X, X * 1e15, X * 1e25, X * 1e-3, torch.zeros_like(X), faulty, unknown):
        torch.testing.assert_close(run(x)[0], function(x), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_vector_that_is_repeated_along_its_length_is_left_alone() -> None:
    graph = program_of(Model(lambda m, x: F.cosine_similarity(x, x[:, :1], dim=1)), X).graph
    assert any(calls(with_stable_forms(graph, (X,)), FORMS))
    whole = program_of(Model(lambda m, x: FUNCTIONS["of channels"](x)), X).graph
    assert not any(calls(with_stable_forms(whole, (X,)), FORMS))


@pytest.mark.parametrize(("rows", "mode", "is_left"), [
    (25, "use_mm_for_euclid_dist_if_necessary", False), (26, "use_mm_for_euclid_dist_if_necessary", True),
    (26, "donot_use_mm_for_euclid_dist", False), (3, "use_mm_for_euclid_dist", True),
])  # fmt: skip
def test_distances_of_many_rows_stay_those_of_a_product(rows: int, mode: str, is_left: bool) -> None:
    x = torch.randn(rows, 3)
    graph = program_of(Model(lambda m, x: torch.cdist(x, x + 1, compute_mode=mode)), x).graph
    assert any(calls(with_stable_forms(graph, (x,)), FORMS)) is is_left
