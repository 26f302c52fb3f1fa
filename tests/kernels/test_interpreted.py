"""The kernels against PyTorch's operators in float64, in Triton's interpreter on the CPU.

Another process runs the cases of both kernels in the interpreter, see `tests.support.interpreted`.
"""

from __future__ import annotations

import pytest

from tests.kernels import test_image_conv, test_triton_kernels
from tests.support.interpreted import ANY, Found, Kernel, interpreted, print_all

pytestmark = pytest.mark.slow

KERNELS: dict[str, Kernel] = {
    "fused_conv": (test_triton_kernels.CASES, test_triton_kernels.any_case_is_right),
    "image_conv": (test_image_conv.CASES, test_image_conv.any_case_is_right),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """What the kernels made of all cases."""
    return interpreted("tests.kernels.test_interpreted")


@pytest.mark.parametrize(
    ("kernel", "name"), [(kernel, name) for kernel, (cases, _) in KERNELS.items() for name in cases]
)
def test_a_kernel_computes_what_pytorch_does(kernel: str, name: str, found: dict[str, Found]) -> None:
    error = found[kernel][name]
    assert isinstance(error, float), error
    assert error <= 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_right_for_any_geometry(kernel: str, found: dict[str, Found]) -> None:
    assert ANY not in found[kernel], found[kernel][ANY]


if __name__ == "__main__":
    print_all(KERNELS)
