"""Programs that are sent to other processes name no modules of the user's."""

from __future__ import annotations

import pickle
import pickletools

import pytest
import torch
from torch import nn

from ampopt.ir.pickled import pickled
from tests.support.planted import captured_of


@pytest.mark.parametrize(
    "constant", [torch.contiguous_format, torch.channels_last, torch.preserve_format, torch.strided]
)
def test_a_constant_of_pytorch_comes_back_as_itself(constant: object) -> None:
    assert pickle.loads(pickled([constant]))[0] is constant


def test_no_module_is_named_that_has_only_imported_pytorch() -> None:
    """A plain pickle names `tests.conftest` here, which has `torch.contiguous_format`."""
    program = captured_of(nn.Linear(3, 2), torch.ones(1, 3))[1].program
    words = {word for _, word, _ in pickletools.genops(pickled(program)) if isinstance(word, str)}
    assert "contiguous_format" in words
    assert not [word for word in words if word.partition(".")[0] == "tests"]
