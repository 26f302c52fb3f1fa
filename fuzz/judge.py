"""The judge: whether answers are the original model's, as exactly as eager PyTorch would have given them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampopt.ir.lanes import lane_of
from ampopt.ir.model_copy import device_of, private_copy
from ampopt.ir.numerics import ResultsRoundedAnew, least_error, rounded_anew, roundings_of_sums
from ampopt.ir.signature import flatten_outputs
from fuzz.calls import Call, same_memory

MULTIPLE = 6.0
"""How many times eager's own error an answer may have.

ampopt allows itself four (`ampopt.ir.lanes.Limits`) on the draws that it verifies; other draws of the
same model have other errors, of which the half is about as large again.
"""

SLACK = 3.0
"""How many times the error that always passes in a lane (`numerics.least_error`) an answer may have.

Rounding within a layer, which `Judge.jumps` does not see because it moves only weights and inputs, has been
seen to cost twice that behind a normalization that subtracts nearly all of what it is given.
"""

ROUNDINGS = 12
"""How often eager is rounded anew to learn how far rounding alone can move an answer."""

REPEATS = 8
"""How often eager is asked again where an answer is objected to: PyTorch's own kernels may read memory that
nobody has written, and what answers differently each time is no yardstick."""

NARROW = (torch.float16, torch.bfloat16)

Answer = list[Tensor]
"""The flat output tensors of one call."""


@dataclasses.dataclass(frozen=True)
class Answered:
    """What a call gave, and what it left in its arguments."""

    outputs: Answer
    arguments: list[Tensor]


def ask(run: Callable[[Call], object], calls: Sequence[Call]) -> list[Answered]:
    """The answers to a sequence of calls; each gets tensors of its own that lie in memory as they should."""
    answers = []
    for call in calls:
        own = call.map(same_memory)
        outputs = flatten_outputs(run(own))[0]
        kept = [t.detach().clone() for t in outputs]
        answers.append(Answered(kept, [t.detach().clone() for t in own.tensors]))
    return answers


class _Watch(TorchDispatchMode):
    """Notes whether any result is not finite while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not self.found:
                self.found = not bool(torch.isfinite(leaf).all())
        return result


class _Flips(TorchDispatchMode):
    """Rounds one element of what the model itself computes below FP32 the other way, as errors before may."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_own = all(each.alias_info is None for each in func._schema.returns)
        if is_own and isinstance(result, Tensor) and result.dtype in NARROW and result.numel():
            place = int(torch.randint(result.numel(), (), generator=self.generator))
            one = torch.arange(result.numel(), device=result.device).view(result.shape) == place
            return torch.where(one, result * (1 + torch.finfo(result.dtype).eps), result)
        return result


class Judge:
    """Knows the right answers to a sequence of calls: in float64, and in each precision as eager does."""

    def __init__(self, model: nn.Module, calls: Sequence[Call]) -> None:
        """`model` is not changed. Raises what it raises on the calls itself."""
        self.model, self.calls = model, list(calls)
        self.device = device_of(model, self.calls[0].tensors)
        self._eager: dict[torch.dtype, list[Answered]] = {}
        self.plain = self.eager(torch.float32)
        self.exact = self._in_float64()
        self._jumps: dict[torch.dtype, list[list[float]]] = {}

    def eager(self, dtype: torch.dtype) -> list[Answered]:
        """The model's own answers in strict FP32, or under autocast to a lower `dtype`."""
        if dtype not in self._eager:
            self._eager[dtype] = self._ask(private_copy(self.model), dtype, self.calls)
        return self._eager[dtype]

    def knows(self, dtype: torch.dtype) -> bool:
        """Whether eager itself answers in that precision; not every operator does under autocast."""
        try:
            self.eager(dtype)
        except Exception:  # whatever it is: it comes from PyTorch
            return False
        return True

    def repeats(self, dtype: torch.dtype = torch.float32, times: int = 1) -> bool:
        """Whether the model gives the same answers to the same calls when it begins anew.

        Between them other numbers are written to memory that is free.
        """
        for number in range(times):
            for size in (1 << exponent for exponent in range(5, 22)):
                torch.full((size,), (math.nan, 3e4)[number % 2])
            again = self._ask(private_copy(self.model), dtype, self.calls)
            pairs = zip(again, self.eager(dtype), strict=True)
            if not all(
                torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
                for one, two in pairs
                for a, b in zip(one.outputs, two.outputs, strict=True)
            ):
                return False
        return True

    def _ask(self, model: nn.Module, dtype: torch.dtype, calls: Sequence[Call]) -> list[Answered]:
        with lane_of(dtype, self.device).scope(self.device):
            return ask(lambda call: model(*call.args, **call.kwargs), calls)

    def _in_float64(self) -> list[Answered]:
        """As eager in float64; as it is where the model insists on another dtype."""
        try:
            calls = [call.map(lambda t: t.double() if t.is_floating_point() else t) for call in self.calls]
            return self._ask(private_copy(self.model).double(), torch.float32, calls)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return self.plain

    def objection(self, answers: Sequence[Answered], dtype: torch.dtype) -> str | None:
        """What is wrong with answers given in the precision of `dtype`; None where nothing is.

        Where NaN or Inf goes in or comes out, only that has to be there still: a kernel may spread it to
        numbers beside it (zero times NaN in a merged group, or in a padded channel), never hide it.
        """
        for number, answer in enumerate(answers):
            reason = self.objection_to(number, answer, dtype)
            if reason and not self._overflows(number, dtype):
                return f"call {number}: {reason}"
        return None

    def _overflows(self, number: int, dtype: torch.dtype) -> bool:
        """Whether eager leaves the range of a lower precision on the way, and hides that in its answers.

        What another order of operations makes of it is then another number: neither is the right one.
        """
        if dtype is torch.float32:
            return False
        with _Watch() as low:
            self._ask(private_copy(self.model), dtype, self.calls[number : number + 1])
        with _Watch() as full:
            self._ask(private_copy(self.model), torch.float32, self.calls[number : number + 1])
        return low.found and not full.found

    def _is_finite(self, number: int, dtype: torch.dtype) -> bool:
        answers = self.exact[number], self.eager(dtype)[number]
        tensors = [*self.calls[number].tensors, *(t for a in answers for t in a.outputs)]
        return all(bool(torch.isfinite(t).all()) for t in tensors)

    def _may_have_another_size(self, number: int, place: int, dtype: torch.dtype) -> bool:
        """Whether an output's size depends on values that rounding, or NaN that spreads, may change."""
        if dtype is torch.float32 and self._is_finite(number, dtype):
            return False
        shapes = [[t.shape for t in call.tensors] for call in self.calls]
        alike = [a for a, shape in zip(self.plain, shapes, strict=True) if shape == shapes[number]]
        return len({answer.outputs[place].shape for answer in alike}) > 1

    def objection_to(self, number: int, answer: Answered, dtype: torch.dtype) -> str | None:
        """The same for one answer, to the call of this number."""
        plain, exact, eager = self.plain[number], self.exact[number], self.eager(dtype)[number]
        if len(answer.outputs) != len(plain.outputs):
            return f"{len(answer.outputs)} tensors instead of {len(plain.outputs)}"
        for place, (out, promised) in enumerate(zip(answer.outputs, plain.outputs, strict=True)):
            if out.shape != promised.shape and self._may_have_another_size(number, place, dtype):
                continue
            if (out.shape, out.dtype) != (promised.shape, promised.dtype):
                kinds = f"{out.dtype} {list(out.shape)} instead of {promised.dtype} {list(promised.shape)}"
                return f"output {place}: {kinds}"
            own, reference = eager.outputs[place], exact.outputs[place]
            if own.shape != out.shape or reference.shape != out.shape:
                continue  # a shape that depends on rounding
            if reason := self._compare(number, place, out, own, reference, dtype):
                return f"output {place}: {reason}"
        for place, (left, should) in enumerate(zip(answer.arguments, plain.arguments, strict=True)):
            if not torch.allclose(left, should, 1e-3, 1e-3, equal_nan=True):
                return f"argument {place} is left with other values in it"
        return None

    def _compare(
        self, number: int, place: int, out: Tensor, own: Tensor, exact: Tensor, dtype: torch.dtype
    ) -> str | None:
        if out.is_floating_point():
            lost = ~torch.isfinite(exact) & ~torch.isfinite(own) & torch.isfinite(out)
            if bool(lost.any()):
                lost &= self._stays_lost(number, place, lost, dtype)
            if bool(lost.any()):
                return f"{int(lost.sum())} numbers are finite where the original has NaN or Inf"
        if not self._is_finite(number, dtype):
            return None
        if out.is_floating_point() and not bool(torch.isfinite(out).all()):
            return (
                f"{int((~torch.isfinite(out)).sum())} numbers are NaN or Inf, and the original's are finite"
            )
        error, limit = distance(out, own, exact), MULTIPLE * distance(own, own, exact)
        limit = max(limit, SLACK * least_error(dtype), SLACK * least_error(out.dtype))
        if error <= limit:
            return None
        jump = MULTIPLE * self.jumps(dtype)[number][place]
        return None if error <= jump else f"error {error:.2g} is over {max(limit, jump):.2g}"

    def _stays_lost(self, number: int, place: int, lost: Tensor, dtype: torch.dtype) -> Tensor:
        """Where eager, rounded anew, has NaN or Inf each time; rounding may decide where an index points."""
        found = lost.clone()
        for seed in range(ROUNDINGS):
            within = functools.partial(ResultsRoundedAnew, dtype, roundings=roundings_of_sums(dtype, seed))
            with contextlib.suppress(Exception):  # a composite kernel may not bear to be taken apart
                other = self._rounded_anew(dtype, seed, within)[number].outputs[place]
                if other.shape == lost.shape:
                    found &= ~torch.isfinite(other)
        return found

    def jumps(self, dtype: torch.dtype) -> list[list[float]]:
        """How far rounding alone moves eager's answers: by call, by output."""
        if dtype not in self._jumps:
            worst = [[0.0] * len(answer.outputs) for answer in self.exact]
            for seed in range(ROUNDINGS):
                with contextlib.suppress(Exception):  # a composite kernel may not bear to be taken apart
                    for number, errors in enumerate(self._moved(dtype, seed)):
                        worst[number] = [max(pair) for pair in zip(worst[number], errors, strict=True)]
            self._jumps[dtype] = worst
        return self._jumps[dtype]

    def _moved(self, dtype: torch.dtype, seed: int) -> list[list[float]]:
        within: Callable[[torch.Generator], AbstractContextManager[Any]]
        if seed % 2:
            within = functools.partial(ResultsRoundedAnew, dtype)
        else:
            within = _Flips if dtype is torch.float32 else contextlib.nullcontext
        return [
            [
                distance(a, own, e) if a.shape == e.shape else math.inf
                for a, own, e in zip(answer.outputs, eager.outputs, exact.outputs, strict=True)
            ]
            for answer, eager, exact in zip(
                self._rounded_anew(dtype, seed, within), self.eager(dtype), self.exact, strict=True
            )
        ]

    def _rounded_anew(
        self, dtype: torch.dtype, seed: int, within: Callable[[torch.Generator], AbstractContextManager[Any]]
    ) -> list[Answered]:
        """Eager's answers where its weights, its inputs, and `within` what it computes are rounded anew."""
        generator = torch.Generator().manual_seed(seed)
        model = private_copy(self.model)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(rounded_anew(tensor, dtype, generator))
        calls = [call.map(lambda t: rounded_anew(t, dtype, generator)) for call in self.calls]
        with within(generator):
            return self._ask(model, dtype, calls)


def distance(out: Tensor, own: Tensor, exact: Tensor) -> float:
    """‖out - exact‖ / ‖exact‖ over what is finite in all three; of integers the share that differs."""
    if not out.is_floating_point():
        return float((out != exact.to(out.dtype)).double().mean()) if out.numel() else 0.0
    a, e = out.double(), exact.double()
    finite = torch.isfinite(a) & torch.isfinite(e) & torch.isfinite(own)
    difference, norm = torch.linalg.vector_norm((a - e)[finite]), torch.linalg.vector_norm(e[finite])
    return float(difference / norm) if norm > 0 else float(difference)
