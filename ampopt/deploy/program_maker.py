"""Makes programs for new calls: capture, replay of the recipe, verification."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ampopt.deploy.kinds_of_calls import KindsOfCalls
from ampopt.deploy.known_calls import Served
from ampopt.deploy.optimized import Optimized
from ampopt.deploy.served_state import State
from ampopt.deploy.sized_program import SizedProgram
from ampopt.engines.cuda_graphs import Outputs
from ampopt.engines.executable import Executable, executable
from ampopt.errors import AmpoptError, KindError, VerificationError, is_passing
from ampopt.ir.asked import Asked, what_is_asked
from ampopt.ir.capture import Captured, capture
from ampopt.ir.graph import forget_unrounded
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.ir.narrow_convs import why_it_may_crash
from ampopt.ir.normal_form import true_copy, why_not_normal
from ampopt.ir.numerics import relative_error
from ampopt.ir.outside import variables_kept
from ampopt.ir.program import Program
from ampopt.ir.signature import flatten_outputs, map_tensors, tensors_of
from ampopt.ir.transform import Pass, replay
from ampopt.measure.verify import Verifier
from ampopt.system.process_state import process_kept

logger = logging.getLogger("ampopt")

MOST_COMPARED = 4
"""Number of other strides that are compared with the original before a program is used for all strides."""

AUTOCAST_ERROR = 0.1
"""Largest relative error of the original's results under autocast against those of a program."""


class ProgramMaker:
    """Makes programs for calls, and decides for which other calls they are valid."""

    def __init__(self, optimized: Optimized, state: State, outputs: Outputs) -> None:
        """`state` is the state that the programs keep between calls; `outputs`: see `ampopt.optimize`."""
        self._optimized, self._state, self._outputs = optimized, state, outputs
        self._device = optimized.program.device
        self._kinds = KindsOfCalls(optimized.original, self._device)

    def first(self, ready: Executable | None) -> Served:
        """The entry for the call that the model was optimized for; `ready`: its executable, if one exists."""
        optimized = self._optimized
        run = ready if ready is not None and self._outputs == "copy" else self.executable(optimized.program)
        asked = self._asked(optimized.captured)
        self._kinds.add(optimized.captured)
        return self._served(optimized.captured, optimized.program, run, asked)

    @process_kept()
    def make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], passes: tuple[Pass, ...]) -> Served:
        """Capture a call, replay the passes, verify.

        Raises VerificationError and the errors of capture where the original has to answer, and KindError
        where it would be wrong, too.
        """
        with torch.inference_mode(mode=False), torch.no_grad():  # what is made in that mode stays so
            args, kwargs = _all_ordinary(args, kwargs)
            return self._make_or_refuse(args, kwargs, passes)

    def _make_or_refuse(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], passes: tuple[Pass, ...]
    ) -> Served:
        self._kinds.check_call(args, kwargs)
        try:
            with variables_kept(self._optimized.original):  # calls of copies verify the program
                return self._make(args, kwargs, passes)
        except KindError:
            raise
        except AmpoptError:
            self._kinds.check_refused(args, kwargs)
            raise

    def check_without_program(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise KindError where the original cannot answer a call beside the programs that there are."""
        self._kinds.check_call(args, kwargs)
        self._kinds.check_refused(args, kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], passes: tuple[Pass, ...]) -> Served:
        original, lane = self.original(), self._optimized.recipe.lane
        captured = capture(original, args, kwargs, self._device, also=self._kinds.state)
        if lane.is_mixed and (crash := why_it_may_crash(captured.program)):
            raise VerificationError(f"it cannot be verified below FP32: {crash}")
        program = replay(passes, lane.start(captured.program))
        run = self.executable(program)
        asked = self._asked(captured)
        draws = 0 if asked.layout else 1  # a draw lies in memory as it likes
        if reason := self.why_wrong(original, captured, run, draws=draws):
            raise VerificationError(f"the optimized program is wrong for this call: {reason}")
        self._kinds.add(captured)
        return self._served(captured, program, run, asked)

    def original(self) -> nn.Module:
        """A copy of the original that may be called."""
        return working_copy(self._optimized.original)

    def try_original(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise the original's own error if the original cannot run a call.

        Raises KindError if it can run it after a call for which there is a program.
        """
        try:
            try_call(self._optimized.original, args, kwargs, self._device)
        except Exception as error:
            if not is_passing(error):
                self._kinds.check_failed(args, kwargs)
            raise

    def why_not_normal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Why a program cannot answer a call that is not in normal form; see `ampopt.ir.normal_form`."""
        return why_not_normal(self._optimized.original, args, kwargs, self._device)

    def executable(self, program: Program) -> Executable:
        """The program's executable on this machine."""
        return executable(program, outputs=self._outputs)

    def _served(self, captured: Captured, program: Program, run: Executable, asked: Asked) -> Served:
        forget_unrounded(program.graph)  # it is finished
        return Served(self._state.bound(captured.lifted, run), captured.layout, captured, program, asked, run)

    def why_wrong(
        self, original: nn.Module, captured: Captured, run: Executable, *, draws: int
    ) -> str | None:
        """Why `run` does not answer the captured call as the original does; None if it does."""
        recipe = self._optimized.recipe
        verifier = Verifier(
            original,
            captured,
            tolerance=recipe.tolerance,
            metric=recipe.metric,
            draws=draws,
            faults=recipe.faults,
        )
        return verifier.check(run, recipe.lane, static=self._outputs == "static").reason

    def _asked(self, captured: Captured) -> Asked:
        """What the model's code asks in the captured call; everything where that cannot be known."""
        args, kwargs = pytree.tree_unflatten(list(captured.leaves), captured.spec)
        lifted = captured.lifted
        model = self.original() if lifted is None else working_copy(lifted.model)
        return what_is_asked(model, args, kwargs, self._device)

    def of_sizes(self, sized: SizedProgram) -> Served:
        """The entry for calls whose sizes are in the ranges of a program."""
        forget_unrounded(sized.program.graph)
        captured, run = sized.captured, sized.run
        return Served(run, captured.layout, captured, sized.program, sized.asked, run)

    def anew(self, served: Served) -> Served:
        """The entry for a program that another module of the same original has, with this one's state."""
        assert served.captured is not None
        assert served.program is not None
        self._kinds.add(served.captured)
        run = self.executable(served.program)
        made = self._served(served.captured, served.program, run, served.asked)
        return dataclasses.replace(made, compared=served.compared, is_kept=served.is_kept)

    def holds(self, served: Served, leaves: Sequence[Any]) -> bool:
        """Whether a program answers other strides as the original does; tested for the first few.

        A program for a range of sizes was verified on contiguous tensors.
        """
        assert served.program is not None
        if served.compared >= MOST_COMPARED:
            return True
        if served.program.sizes and all(tensor.is_contiguous() for tensor in tensors_of(leaves)):
            return True
        captured = served.captured
        assert captured is not None
        assert served.bare is not None
        tensors = tuple(_ordinary(tensor) for tensor in tensors_of(leaves))
        remaining = iter(tensors)
        laid = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        program = captured.program.replace(examples=(*tensors, *captured.initial_state))
        there = dataclasses.replace(captured, program=program, leaves=tuple(laid))
        try:
            holds = self.why_wrong(self.original(), there, served.bare, draws=0) is None
        except Exception as error:  # the original refuses these strides (a `view`); a program need not
            logger.debug("ampopt: a program could not be compared for other strides: %s", error)
            return True
        served.compared += holds
        return holds

    def casts(
        self,
        served: Served,
        dtype: torch.dtype,
        outputs: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[torch.dtype, ...] | None:
        """The dtypes of the original's results under an autocast to `dtype`; None if it has to answer itself.

        The original is called once for this, in the caller's own autocast. If its code reads the autocast
        state, or its results differ by more than `AUTOCAST_ERROR`, which rounding does not explain, it has to
        answer itself.
        """
        if dtype not in served.casts:
            try:
                args, kwargs = _all_ordinary(args, kwargs)
                with torch.no_grad(), untouched_rng(self._device):
                    result = self.original()(*args, **kwargs)
                theirs, layout = flatten_outputs(result)
            except Exception as error:
                if not is_passing(error):
                    served.casts[dtype] = None
                return None
            same = not served.asked.autocast and layout == served.layout
            same = same and all(
                relative_error(ours.to(its.dtype), its) <= AUTOCAST_ERROR
                for ours, its in zip(outputs, theirs, strict=True)
            )
            served.casts[dtype] = tuple(output.dtype for output in theirs) if same else None
        return served.casts[dtype]


def _ordinary(tensor: Tensor) -> Tensor:
    """A tensor without gradients or lazy bits; one made in inference mode, which autocast's cache and
    captures cannot take, is copied."""
    tensor = tensor.detach()
    if tensor.is_inference():
        with torch.inference_mode(mode=False):
            tensor = tensor.clone()
    return tensor.resolve_conj().resolve_neg()


def try_call(
    original: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> None:
    """Raise a model's own error if a copy of it cannot run a call."""
    args, kwargs = map_tensors(true_copy, args, kwargs)  # it may write to them
    with torch.no_grad(), untouched_rng(device), variables_kept(original):
        working_copy(original)(*args, **kwargs)


def _all_ordinary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return map_tensors(_ordinary, args, kwargs)
