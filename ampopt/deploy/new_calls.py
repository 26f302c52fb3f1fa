"""Calls that an optimized module has not seen before: finds or makes what answers them, within its limits."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.deploy.known_calls import KnownCalls, Served
from ampopt.deploy.optimized import Optimized
from ampopt.deploy.program_maker import ProgramMaker, try_call
from ampopt.errors import AmpoptError, InputError, KindError, is_passing, says
from ampopt.ir.asked import has_attributes
from ampopt.ir.normal_form import is_normal, normal_form
from ampopt.ir.plain_tensors import check_untraced
from ampopt.ir.signature import check_same_call, tensors_of
from ampopt.ir.size_ranges import hold
from ampopt.ir.transform import is_slow

MOST_RETRIES = 3
"""Retries for calls of one signature that fail for lack of memory or the like; then the original answers."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why no program could be made for a call; `may_pass`: another attempt may succeed."""

    reason: str
    may_pass: bool


class NewCalls:
    """Finds or makes what answers a call of a new signature, and adds it to the known ones.

    A call is answered by a known program, where that holds for it: one for other strides, or for a range of
    sizes (`in_range`), or the one for its normal form. Otherwise a program is made for it, up to
    `max_captures` programs; `captures` counts them, and those that could not be made.
    """

    def __init__(
        self,
        optimized: Optimized,
        known: KnownCalls,
        maker: ProgramMaker,
        *,
        max_captures: int,
        in_range: Served | None,
    ) -> None:
        self._optimized, self._known, self._maker = optimized, known, maker
        self.max_captures, self.captures, self.in_range = max_captures, 0, in_range

    def check(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        """Raise InputError where tensors are on another device, or of other dtypes at the same places.

        Nor may anything trace the call, which would record the original's copy.
        """
        check_untraced(leaves)
        own = self._optimized.captured
        is_alike = spec == own.spec or normal_form(leaves, spec)[1] == own.spec
        check_same_call(own.leaves if is_alike else (), leaves, self._optimized.program.device)

    def answer(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> tuple[Served | Refusal, bool]:
        """What answers a call from now on, or why no program does; and whether a program was made for it.

        Raises the original's own error where it fails on the call, and KindError where it would be wrong.
        """
        with self._known.lock:
            before = self.captures
            found = self._known.find(leaves, spec) or self._find_or_make(args, kwargs, leaves, spec)
            return found, self.captures > before and isinstance(found, Served)

    def _find_or_make(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> Served | Refusal:
        """A program answers a call as it answers its normal form, where the original does so, too."""
        if reason := self._why_attributes(leaves):
            self._maker.try_original(args, kwargs)  # its own error is raised
            self._check_without_program(args, kwargs)
            return Refusal(reason, may_pass=False)
        if not is_normal(leaves, spec):
            self._maker.try_original(args, kwargs)  # its own error is raised
            if reason := self._maker.why_not_normal(args, kwargs):
                self._check_without_program(args, kwargs)
                return Refusal(reason, may_pass=False)
            plain = normal_form(leaves, spec)
            args, kwargs = pytree.tree_unflatten(*plain)
            found = self._known.find(*plain) or self._find_or_make(args, kwargs, *plain)
            return found if isinstance(found, Refusal) else self._known.remember(leaves, spec, found)
        known = self._known.of_any_strides(leaves, spec) or self._of_sizes(leaves, spec)
        if known is not None:
            if self._maker.holds(known, leaves):
                return self._known.remember(leaves, spec, known)
            self._known.distinguish_strides(leaves, spec)
        if self.captures >= self.max_captures:
            self._check_without_program(args, kwargs)
            reason = (
                f"no program was made for them ahead of time, and {self.max_captures} later ones at most are"
            )
            return Refusal(reason, may_pass=False)
        self._maker.try_original(args, kwargs)  # its own error is raised, and nothing made or remembered
        quick_passes = tuple(step for step in self._optimized.recipe.passes if not is_slow(step))
        try:
            served = self._maker.make(args, kwargs, quick_passes)
        except KindError:
            raise  # the original would not have what a program leaves out
        except Exception as error:  # whatever it is: the original answers, and the log says why
            reason = str(error) if isinstance(error, AmpoptError) else f"{type(error).__name__}: {error}"
            return Refusal(textwrap.shorten(reason, 300), is_passing(error))
        self.captures += 1
        return self._known.admit(served)

    def _why_attributes(self, leaves: Sequence[Any]) -> str | None:
        """Why no program answers a call whose tensors have attributes; None where they do not matter."""
        if has_attributes in self._known.looks and any(map(has_attributes, tensors_of(leaves))):
            return "the model's code asks its arguments for attributes, and they have some"
        return None

    def _of_sizes(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Served | None:
        """The program for a range of sizes, where this call is in it."""
        own = self._optimized.captured
        if self.in_range is None or not hold(self._optimized.sizes, own.leaves, own.spec, leaves, spec):
            return None
        return self.in_range

    def _check_without_program(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise KindError where the original cannot answer a call beside the programs that there are."""
        if self.max_captures:  # a submodule with a program of its own has no state
            self._maker.check_without_program(args, kwargs)

    def give_up(
        self, refusal: Refusal, leaves: Sequence[Any], spec: pytree.TreeSpec, original: Served
    ) -> bool:
        """Let `original` answer calls of this signature, from now on; returns whether it is for good.

        What may pass is tried again at the next calls of the signature, for some times.
        """
        with self._known.lock:
            if self._known.count_failure(leaves, spec, most=MOST_RETRIES if refusal.may_pass else 1):
                return False
            self.captures = min(self.captures + 1, self.max_captures)
            self._known.remember(leaves, spec, original)
            return True

    def prepare(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> None:
        """Make the program for a call now, with all passes, beyond the limits of new ones.

        Raises InputError where only the original can answer it, or where that fails on it; KindError where it
        answers it only after another; and the error for which no program can be made.
        """
        with _preparing():
            self._maker.try_original(args, kwargs)
        known = self._known
        with known.lock:
            served = known.find(leaves, spec)
            if served is not None and served.layout is not None and served is not self.in_range:
                served.is_kept = True
                return
            reason = self._why_attributes(leaves)
            if reason is None and is_normal(leaves, spec):
                made = self._maker.make(args, kwargs, self._optimized.recipe.passes)
                known.max_programs = max(known.max_programs, known.programs + 1)
                made.is_kept = True
                known.admit(made)
                return
            if reason := reason or self._maker.why_not_normal(args, kwargs):
                raise InputError(f"only the original can answer the call to prepare: {reason}")
            plain = normal_form(leaves, spec)
            args, kwargs = pytree.tree_unflatten(*plain)
            self.prepare(args, kwargs, *plain)
            found = known.find(*plain)
            assert found is not None
            known.remember(leaves, spec, found)


def check_answered(
    original: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> None:
    """Raise InputError where the model fails on a call to prepare."""
    with _preparing():
        try_call(original, args, kwargs, device)


@contextlib.contextmanager
def _preparing() -> Iterator[None]:
    try:
        yield
    except KindError:
        raise  # it does not fail on the call, but on it alone
    except (Exception, SystemExit) as error:
        raise InputError(f"the model fails on the call to prepare: {says(error)}") from error


def call_to_prepare(call: Any, example: Tensor) -> tuple[Any, ...]:
    """The positional arguments that a call to prepare stands for: a shape, one of `example`'s dtype."""
    if isinstance(call, Tensor):
        return (call,)
    if isinstance(call, tuple) and call and all(isinstance(size, int) for size in call):
        if min(call) < 0:
            raise InputError(f"prepare: {call} is no shape: sizes are 0 or more")
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(call, generator=generator, device="cpu").to(example.device, example.dtype),)
    if isinstance(call, tuple):
        return call
    raise InputError(f"prepare takes shapes, tensors or tuples of arguments, not {type(call).__name__}")
