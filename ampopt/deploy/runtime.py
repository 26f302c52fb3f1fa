"""OptimizedModule: the module that `optimize` returns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _global_forward_hooks as _hooks_of_all
from torch.nn.modules.module import _global_forward_pre_hooks as _pre_hooks_of_all
from torch.utils import _pytree as pytree

from ampopt.deploy.deployable import DeployableGraph
from ampopt.deploy.failed_calls import FailedCalls
from ampopt.deploy.health import Callback, Event, Health, Monitor
from ampopt.deploy.inference_module import copy_hooks
from ampopt.deploy.known_calls import KnownCalls, Served
from ampopt.deploy.new_calls import NewCalls, Refusal, call_to_prepare, check_answered
from ampopt.deploy.optimized import Optimized
from ampopt.deploy.program_maker import ProgramMaker
from ampopt.deploy.served_state import State
from ampopt.deploy.sized_program import SizedProgram
from ampopt.engines.cuda_graphs import Outputs
from ampopt.engines.executable import Executable
from ampopt.errors import InputError, PassedOnError, StrictError
from ampopt.ir.aliases import Layout
from ampopt.ir.capture import Captured
from ampopt.ir.keywords import in_order
from ampopt.ir.normal_form import without_gradients
from ampopt.ir.plain_tensors import (
    check_caller,
    check_plain,
    check_untraced,
    is_simple,
    is_surrounded,
    keep_from_dynamo,
    without_derivatives,
)
from ampopt.ir.program import Program
from ampopt.ir.settings import autocast_now
from ampopt.ir.signature import CallKey, flatten_call, map_tensors, shown_all, tensors_of
from ampopt.ir.size_range import ranges_of
from ampopt.ir.transform import Recipe
from ampopt.measure.ledger import Ledger

logger = logging.getLogger("ampopt")

_AHEAD = "call prepare for it ahead of time, or "


class OptimizedModule(DeployableGraph):
    """A model optimized for inference: same call, same result structure, contiguous, and the model's dtypes.

    With `io="lane"` floating-point tensors have the lane's dtype instead, whoever answers: `original` is then
    a `LaneIO`.

    A call is answered by a program made for its shapes, dtypes, device and other arguments, and for their
    order where the model's code can see it (`**sensors`, a dict). A call that gives one tensor or list twice,
    or a tensor of a class of its own, is answered by the program for separate plain ones, if copies of the
    original give the same result for both; else by the original. The first call with other ones makes a new
    program (same passes, except those that take seconds to apply; verified again) and logs this.

    At most `max_shapes` programs are kept, or one more than were asked for: the example's and those of
    `prepare`, which makes programs ahead of time, stay. Of the others the least recently used is removed
    first. After `max_captures` such first calls the original model answers instead, and the reason is logged.
    A program for a range of sizes answers each call in the range that has no program of its own, see `sizes`.

    The model's state, tensors in buffers and attributes, is kept between calls by the module, for all
    programs together, see `reset_state`. Where the first calls make the state (it is None before), the
    original answers them, with `strict`, too. Thread-safe. `report` lists each decision with its reason,
    `health` counts how calls were answered; with `strict` a call that only the original could answer raises
    StrictError.

    Results are those of the original under `torch.no_grad()`, for inputs without gradients, in every grad
    mode of the caller. If an input requires gradients, computing the gradient of a result raises InputError.
    Under an outer `torch.autocast` of the device, results have the dtypes that the original returns there,
    and are more exact. Inputs may have any strides. A program makes them contiguous, so it is valid for all
    strides, with two exceptions. If the model's code reads a tensor's layout (`x.stride()`,
    `x.is_contiguous()`, detected when it is called), or has operators that do, each layout gets its own
    program: a comparison on one input could agree by chance. For other models the first few other strides are
    compared with the original. This detects a `reshape` that is a view for some strides and a copy for
    others, and is then written in place.
    """

    def __init__(
        self,
        original: nn.Module,
        captured: Captured,
        program: Program,
        recipe: Recipe,
        report: Ledger,
        *,
        outputs: Outputs = "copy",
        max_shapes: int = 8,
        max_captures: int = 16,
        serve_original: bool = False,
        ready: Executable | None = None,
        strict: bool = False,
        sized: SizedProgram | None = None,
    ) -> None:
        """Take over a private copy of the original, its capture, and the program chosen for it.

        `outputs`: who owns the results of a CUDA graph, see `ampopt.optimize`. `ready` is the program's
        executable, if one exists already. `serve_original`: nothing was faster, so the original answers every
        call. `strict`: raise StrictError for a call without a program, instead of running the original.
        `sized`: a verified program for a range of sizes.
        """
        super().__init__()
        self.layouts: Mapping[CallKey, Layout] | None = None
        """Set where it is a part of a model, see `ServedPart`: how results lie that are not all contiguous. A
        call that no program answers, such as one of another dtype, then raises PassedOnError."""
        if outputs not in get_args(Outputs):
            raise InputError(f"outputs={outputs!r}: choose 'copy' or 'static'")
        self.report, self.program, self.strict = report, program, strict
        self._sized = sized
        sizes = () if sized is None else sized.sizes
        self._optimized = Optimized(original, captured, program, recipe, report, sizes)
        self._outputs: Outputs = outputs
        self._state = State(original, one_at_a_time=captured.lifted is not None)
        self._calls = KnownCalls(max_shapes)
        self._maker = ProgramMaker(self._optimized, self._state, outputs)
        self._new = NewCalls(
            self._optimized,
            self._calls,
            self._maker,
            max_captures=max_captures,
            in_range=None if sized is None else self._maker.of_sizes(sized),
        )
        self._monitor = Monitor(chose_original=serve_original)
        self._failed = FailedCalls(program.device)
        self._dtype = _default_dtype()  # of the numbers that a model makes
        self._serve_original = serve_original
        if serve_original:
            self.forward = self._call_original  # type: ignore[method-assign]
        else:
            first = self._maker.first(ready)
            first.is_kept = True
            self._calls.admit(first)
        self._is_complete = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`nn.Module.__call__`, with a fast path for tensors like the last ones if no hooks are registered.

        Nor is it taken where `forward` was replaced. The fast path's tensor check does not see tangents or
        dispatch modes (some tracers are dispatch modes), and a nested tensor makes it crash the process.
        """
        if self._forward_pre_hooks or self._forward_hooks or _hooks_of_all or _pre_hooks_of_all:
            return super().__call__(*args, **kwargs)
        answer = None if kwargs or "forward" in self.__dict__ else self._calls.latest.get(len(args))
        is_usual = forward_ad._current_level < 0 and not _count_modes() and _default_dtype() is self._dtype
        if answer is not None and is_usual:
            for each in args:
                if getattr(each, "is_nested", True) is not False:
                    break
            else:
                failure = None
                try:
                    found = answer(*args)
                except Exception as error:
                    if (failure := self._failed.reason(error)) is None:
                        raise
                if failure is not None:
                    return self._by_original(failure, args, kwargs, args, failed=True)
                if found is not NotImplemented:
                    return found
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer one call; see the class. Where a program fails, the original is asked: its error is raised.

        Raises InputError for tensors of another dtype or device, and for those that no program can answer
        correctly: tensors of transforms (`torch.func`) and tracers, and tensors that are not plain. Raises
        StrictError, see `strict`.
        """
        if type(kwargs) is not dict:  # torch.fx traces this module itself
            check_untraced((kwargs,))
        is_usual = not kwargs and not is_surrounded() and _default_dtype() is self._dtype
        if is_usual and autocast_now(self.program.device) is None:
            answer = self._calls.short(args) if all(map(is_simple, args)) else None
            if answer is not None:
                failure = None
                try:
                    result = answer(*args)
                except Exception as error:
                    if (failure := self._failed.reason(error)) is None:
                        raise
                if failure is not None:
                    return self._by_original(failure, args, kwargs, args, failed=True)
                if result is not NotImplemented:
                    return result
        return self._general(args, kwargs)

    @property
    def health(self) -> Health:
        """Counts of how calls were answered so far; see `ampopt.deploy.health.Health`."""
        return self._monitor.health()

    def on_health(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with an `ampopt.deploy.health.Event` at each event; call what is returned to stop.

        The callback runs in the thread of the call, after the decision how to answer and outside of all
        locks. Exceptions from it are logged.
        """
        return self._monitor.tell(callback)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The ranges of sizes that one program answers, by their names; empty: each size has its own."""
        return {each.name: (each.low, each.high) for each in ranges_of(self._optimized.sizes)}

    def reset_state(self) -> None:
        """Reset the model's state to what it was when the model was optimized."""
        self._state.reset()

    def _call_original(self, *args: Any, **kwargs: Any) -> Any:
        if is_surrounded() or any(isinstance(each, fx.Proxy) for each in (*args, *kwargs.values())):
            leaves = flatten_call(args, kwargs)[0]
            self._monitor.refusing(lambda: check_caller(leaves), "a transformed tensor")
        if not torch.is_grad_enabled():
            return self._state.call(args, kwargs)
        with torch.no_grad():
            result = self._state.call(args, kwargs)
        return without_derivatives(result, flatten_call(args, kwargs)[0])

    def _general(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs:
            kwargs = in_order(kwargs, self._optimized.captured.by_name)
        leaves, spec = flatten_call(args, kwargs)
        tensors = tensors_of(leaves)
        self._monitor.refusing(lambda: check_plain(tensors), "a tensor that is not plain")
        if _default_dtype() is not self._dtype:
            return self._by_original("the default dtype is another now", args, kwargs, tensors)
        served = self._calls.find(leaves, spec)
        if served is None:
            found = self._first(args, kwargs, leaves, spec)
            if isinstance(found, Refusal):
                return self._without_program(found, args, kwargs, leaves, spec)
            served = found
        if served.layout is None:
            return self._by_original(served.reason, args, kwargs, tensors)
        if served.keeps_state and autocast_now(self.program.device) is not None:
            return self._by_original("it keeps a state, and is called under autocast", args, kwargs, tensors)
        failure = None
        try:
            outputs = served.run(*tensors)
        except Exception as error:
            if (failure := self._failed.reason(error)) is None:
                raise
        if failure is not None:
            return self._by_original(failure, args, kwargs, tensors, failed=True)
        if outputs is None:
            reason = "its state has no structure yet that a program takes"
            return self._by_original(reason, args, kwargs, tensors, allowed=True)
        if (dtype := autocast_now(self.program.device)) is not None:
            with self._calls.lock:
                casts = self._maker.casts(served, dtype, outputs, args, kwargs)
            if casts is None:
                reason = f"the original gives something else under an autocast to {dtype}"
                return self._by_original(reason, args, kwargs, tensors)
            outputs = tuple(output.to(cast) for output, cast in zip(outputs, casts, strict=True))
        return without_derivatives(served.layout.restore(outputs), tensors)

    def pass_on(self, reason: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count a call that others answer for a reason; raises StrictError with `strict`."""
        tensors = tensors_of(flatten_call(args, kwargs)[0])
        self._check_not_strict(reason, tensors)
        self._monitor.note(Event("original", reason, shown_all(tensors)))

    def _check_not_strict(self, reason: str, tensors: Sequence[Tensor], remedy: str = _AHEAD) -> None:
        if self.strict:
            shown = shown_all(tensors)
            self._monitor.note(Event("refusal", reason, shown))
            told = f"only the original model could answer a call with {shown}, because {reason}"
            raise StrictError(f"{told}: {remedy}set strict to False")

    def _by_original(
        self,
        reason: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        *,
        allowed: bool = False,
        failed: bool = False,
    ) -> Any:
        """The original's answer, which is counted, and logged where a program has `failed`; or its own error
        alone. Raises StrictError where that is not wanted, unless `allowed`."""
        if not allowed:
            self._check_not_strict(reason, tensors, "" if failed else _AHEAD)
        result = None
        if self.layouts is None:
            args, kwargs = map_tensors(without_gradients, args, kwargs)
            with torch.no_grad():
                result = self._state.call(args, kwargs)
            result = without_derivatives(result, tensors)
        shown = shown_all(tensors)
        self._monitor.note(Event("original", reason, shown))
        if failed:
            self._failed.tell(shown, reason)
        if self.layouts is not None:  # the code around it answers in the original's place
            raise PassedOnError(reason)
        return result

    def _first(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> Served | Refusal:
        """Find or make what answers a call that was not seen before; tell of it once the lock is free."""
        shown = shown_all(leaves)
        try:
            self._new.check(leaves, spec)
            found, is_new = self._new.answer(args, kwargs, leaves, spec)
        except InputError as error:
            if self.layouts is not None:
                return Refusal(str(error), may_pass=False)
            self._monitor.note(Event("refusal", str(error), shown))
            raise
        if is_new:
            logger.warning("ampopt: captured and verified a program for a call not seen before: %s", shown)
            self._monitor.note(Event("capture", "no program was made for it ahead of time", shown))
        return found

    def _without_program(
        self,
        refusal: Refusal,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
    ) -> Any:
        """Let the original answer a call for which no program could be made, and log the reason."""
        tensors, reason = tensors_of(leaves), refusal.reason
        is_final = self._new.give_up(refusal, leaves, spec, Served(self._call_original, reason=reason))
        then = "" if is_final else " (it is tried again)"
        logger.warning(
            "ampopt: the original model answers calls with %s, because %s%s", shown_all(tensors), reason, then
        )
        return self._by_original(reason, args, kwargs, tensors)

    def prepare(self, *calls: Any) -> None:
        """Make the programs for further calls now, with all passes, so that no capture is needed later.

        Each call is a shape (a tuple of ints: one float tensor of the example's dtype is made for it), a
        tensor, or a tuple of positional arguments. Raises InputError, or the error for which a call cannot be
        served. If the original answers every call, it is tried on these, and nothing is made.
        """
        for call in calls:
            self.prepare_call(call_to_prepare(call, self.program.examples[0]), {})

    def prepare_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """`prepare` for one call with positional and keyword arguments."""
        kwargs = in_order(kwargs, self._optimized.captured.by_name)
        leaves, spec = flatten_call(args, kwargs)
        check_plain(tensors_of(leaves))
        self._new.check(leaves, spec)
        if self._serve_original:
            check_answered(self._optimized.original, args, kwargs, self.program.device)
        else:
            self._new.prepare(args, kwargs, leaves, spec)

    def _private_original(self) -> nn.Module:
        return self._optimized.original

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        """A separate module. Programs are immutable: it shares the example's and those of `prepare`, but
        captures its own graphs."""
        own = self._optimized
        duplicate = OptimizedModule(
            own.original,
            own.captured,
            own.program,
            own.recipe,
            own.report,
            outputs=self._outputs,
            serve_original=self._serve_original,
            strict=self.strict,
            max_shapes=self._calls.max_programs,
            max_captures=self._new.max_captures,
            sized=self._sized,
        )
        duplicate._dtype = self._dtype
        duplicate._calls.take(self._calls, duplicate._maker.anew)
        duplicate._state.take(self._state)
        copy_hooks(self, duplicate)
        return duplicate

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "an optimized module cannot be pickled, as torch.save does: its programs live in this process; "
            'keep it with .save("robot.ampopt"), which ampopt.load reads (copy.deepcopy copies it here)'
        )


for _entrance in (OptimizedModule.__call__, OptimizedModule.forward, OptimizedModule._call_original):
    keep_from_dynamo(_entrance)

_count_modes = torch._C._len_torch_dispatch_stack
_default_dtype = torch.get_default_dtype
