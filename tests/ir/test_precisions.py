"""What a precision is called: names, several with commas, and the error for others; without PyTorch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from ampopt.errors import InputError
from ampopt.ir.precisions import AUTO, LANE_NAMES, names_of


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("auto", AUTO),
        ("amp", ("amp",)),
        ("bf16,fp32", ("bf16", "fp32")),
        (" fp32 , amp ", ("fp32", "amp")),
        *((name, (name,)) for name in LANE_NAMES),
    ],
)
def test_a_text_names_lanes(precision: str, names: tuple[str, ...]) -> None:
    assert names_of(precision) == names


@pytest.mark.parametrize("precision", ["", ",", "fp8", "fp32,", "auto,fp32", "AMP", None, ("fp32",), 16])
def test_other_words_are_refused_with_those_there_are(precision: Any) -> None:
    with pytest.raises(InputError, match="choose from auto, fp32, amp, bf16, or several, 'fp32,bf16'"):
        names_of(precision)


def test_they_are_known_without_pytorch() -> None:
    code = "import sys; from ampopt.ir.precisions import names_of; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
