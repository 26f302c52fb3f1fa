"""Relative errors of tensors, their limits, and random inputs for verification."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampopt.ir.eager_mode import EagerMode
from ampopt.ir.order_of_sums import uncertainty


def is_rounded(tensor: Tensor) -> bool:
    """Whether a tensor has real or complex numbers with a fraction."""
    return tensor.is_floating_point() or tensor.is_complex()


def widened(tensor: Tensor) -> Tensor:
    """A tensor in float64, or complex128; integers and booleans as they are."""
    if not is_rounded(tensor):
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def finite_norm(tensor: Tensor) -> float:
    """The Euclidean norm of a tensor's finite elements; 0 for integers and booleans."""
    if not is_rounded(tensor):
        return 0.0
    return float(torch.linalg.vector_norm(widened(tensor[torch.isfinite(tensor)])))


def is_finite_in(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite, and those of a dtype that they are rounded to."""
    return bool(torch.isfinite(tensor.to(dtype)).all())


def least_error(dtype: torch.dtype) -> float:
    """The relative error that results in a dtype may always have; 0 for integers, booleans and float64.

    For the lower precisions it is one unit in the last place of a number near 1 (machine epsilon): the error
    of rounding the result. For float32 it is about a hundred roundings, the error of reordering a sum.
    """
    if dtype is torch.float32:
        return 1e-5
    return torch.finfo(dtype).eps if dtype in (torch.float16, torch.bfloat16) else 0.0


def relative_error(actual: Tensor, reference: Tensor, *, least_norm: float = 0.0) -> float:
    """‖actual - reference‖ / max(‖reference‖, `least_norm`) in float64.

    For integers and booleans, the share of elements that differ. Infinite if the shapes differ, or if NaN or
    infinity is in one tensor and not at the same position in the other.
    """
    if actual.shape != reference.shape:
        return float("inf")
    if not is_rounded(reference):
        return float((actual != reference).double().mean()) if reference.numel() else 0.0
    wide = torch.complex128 if reference.dtype.is_complex else torch.float64
    a, r = actual.detach().to(wide), reference.detach().to(wide)
    difference, norm = float(torch.linalg.vector_norm(a - r)), float(torch.linalg.vector_norm(r))
    if math.isfinite(difference) and math.isfinite(norm):  # so is every element
        return _ratio(difference, max(norm, least_norm))
    finite = torch.isfinite(r)
    if not torch.equal(finite, torch.isfinite(a)) or not _same(a[~finite], r[~finite]):
        return float("inf")
    difference = float(torch.linalg.vector_norm((a - r)[finite]))
    return _ratio(difference, max(float(torch.linalg.vector_norm(r[finite])), least_norm))


def _ratio(difference: float, norm: float) -> float:
    return difference / norm if norm > 0 else difference


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (torch.isnan(a) & torch.isnan(b))).all())


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of a verification.

    `error` is the largest relative error over outputs and draws, or the user's metric where one is given;
    `limit` is what was allowed for it; `reason` says what is wrong, and is None where the check passed.
    """

    error: float
    limit: float
    reason: str | None
    spread: str | None = None
    """Which NaN or infinity in one input element reaches more output elements than in eager."""
    note: str | None = None
    """Why what is far from the original in float64 is right: it makes other choices, that are as good."""

    @property
    def passed(self) -> bool:
        """Whether the outputs are within the limit."""
        return self.reason is None


_ALL = {torch.bool: 2, torch.uint8: 256}
"""How many values there are."""


def fresh_draw(example: Tensor, generator: torch.Generator) -> Tensor:
    """A new random tensor like an example: its shape, dtype, memory format, mean, deviation and range.

    These are of the example's finite elements, and so are all that are drawn: a sensor's NaN and infinities
    would spread, and nothing could be told of what they spoil. Integers and booleans are a permutation of the
    example's values, so that indices stay valid. Where these are all the same, booleans and bytes, which are
    pixels, are drawn from all that there are. The first column of what `may_be_regions` stays as it is. A
    sparse tensor keeps its places, and gets other values there.
    """
    if example.is_mkldnn:
        return fresh_draw(example.to_dense(), generator).to_mkldnn()
    if example.layout is not torch.strided:
        drawn = example.detach().clone()
        values = drawn._values() if drawn.layout is torch.sparse_coo else drawn.values()
        values.copy_(fresh_draw(values, generator))
        return drawn
    if example.is_complex():
        return torch.view_as_complex(fresh_draw(torch.view_as_real(example.resolve_conj()), generator))
    if not example.dtype.is_floating_point:
        if example.dtype in _ALL and example.numel() and bool((example == example.flatten()[0]).all()):
            drawn = torch.randint(_ALL[example.dtype], example.shape, generator=generator, device="cpu")
            return torch.empty_like(example).copy_(drawn)
        order = torch.randperm(example.numel(), generator=generator, device="cpu")
        return example.flatten()[order.to(example.device)].reshape(example.shape)
    noise = torch.randn(example.shape, generator=generator, dtype=torch.float64, device="cpu")
    noise = noise.to(example.device)
    values = example.double()
    values = values[torch.isfinite(values)]
    deviation = values.std() if values.numel() > 1 else torch.ones((), dtype=torch.float64, device="cpu")
    drawn = noise * (deviation if deviation > 0 else 1.0) + (values.mean() if values.numel() else 0.0)
    if deviation > 0 and values.numel() > 1:
        drawn = drawn.clamp(values.min(), values.max())
    if may_be_regions(example):
        drawn[:, 0] = example[:, 0]
    return torch.empty_like(example).copy_(drawn)  # it lies in memory as the example does


def may_be_regions(example: Tensor) -> bool:
    """Whether a tensor may be torchvision's regions [K, 5], whose first column tells the image of each.

    `roi_align` and its like read there without a look at how many images there are: with a random number
    in that column they read other memory, or end the process.
    """
    if not example.dtype.is_floating_point or example.dim() != 2 or example.shape[1] != 5:
        return False
    images = example[:, 0]
    return bool(((images >= 0) & (images == images.round()) & images.isfinite()).all())


SPAN = 65_521
"""The number of random changes for a longer tensor on a processor: a prime, which no size divides."""


def rounded_anew(
    tensor: Tensor, dtype: torch.dtype, generator: torch.Generator, roundings: float = 1.0
) -> Tensor:
    """A tensor with every real or imaginary part changed at random by up to `roundings` roundings to `dtype`.

    The result has the tensor's own dtype; one rounding is at most machine epsilon / 2 of the value. Integers
    and booleans stay. The random numbers are made on the generator's device; a processor makes `SPAN` of them
    for a tensor, and uses them again along its memory.
    """
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.resolve_conj())
        return torch.view_as_complex(rounded_anew(parts, dtype, generator, roundings))
    if not tensor.is_floating_point():
        return tensor
    half, where = roundings * torch.finfo(dtype).eps / 2, generator.device
    is_long = tensor.numel() > SPAN and tensor.device.type == "cpu" and tensor.layout is torch.strided
    shape = (SPAN,) if is_long else tensor.shape
    noise = (torch.rand(shape, generator=generator, dtype=torch.float64, device=where) * 2 - 1) * half
    factors = 1 + noise.to(tensor.device)
    if not is_long:
        return (tensor.double() * factors).to(tensor.dtype)
    found = tensor.detach().clone()  # dense in memory, in the tensor's order
    for part in found.as_strided((found.numel(),), (1,)).split(SPAN):
        part.copy_(part.double() * factors[: part.numel()])
    return found


def roundings_of_sums(dtype: torch.dtype, seed: int = 2) -> float:
    """The number of roundings for one of several tries to perturb results in `dtype`: 1, 4 or, the most, 16.

    Another order of 64 terms has changed a float32 sum by 12 (a 1x1 convolution of PyTorch 2.15 on an AMD
    EPYC). Sums of lower precisions are kept in float32 and rounded once.
    """
    return 4.0 ** (seed % 3) if dtype is torch.float32 else 1.0


class ResultsRoundedAnew(EagerMode):
    """A mode in which operators' results are changed at random by up to `roundings` roundings to `dtype`.

    The roundings are those of the result's own dtype if it is coarser, or complex: no lane lowers that. Sums
    of many numbers are as uncertain as their partial sums, which rounding their terms does not show, see
    `roundings_of_sums`; sums of known terms change as `order_of_sums` says, too. Results written in place, or
    sharing memory with an argument, are not changed. With no roundings, sums alone change, and not as those
    of terms that repeat themselves do.
    """

    def __init__(self, dtype: torch.dtype, generator: torch.Generator, roundings: float = 1.0) -> None:
        super().__init__()
        self.dtype, self.generator, self.roundings = dtype, generator, roundings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator and perturb its results."""
        result = func(*args, **(kwargs or {}))
        if any(each.alias_info is not None for each in func._schema.returns):
            return result
        moved = pytree.tree_map_only(Tensor, self._moved, result)
        uncertain = uncertainty(func, result, args, kwargs or {}, repeats=self.roundings > 0)
        if uncertain is None:
            return moved
        noise = torch.rand(result.shape, generator=self.generator, device=self.generator.device) * 2 - 1
        return moved + (noise.to(result.device) * uncertain).to(result.dtype)

    def _moved(self, tensor: Tensor) -> Tensor:
        if not is_rounded(tensor) or not self.roundings:
            return tensor
        own = tensor.dtype
        coarser = own if tensor.is_complex() else max(self.dtype, own, key=lambda d: torch.finfo(d).eps)
        return rounded_anew(tensor, coarser, self.generator, self.roundings)
