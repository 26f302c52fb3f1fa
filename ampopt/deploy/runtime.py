"""OptimizedModule: the module that `optimize` gives back. It serves every call, and each one rightly."""

from __future__ import annotations

import dataclasses
import logging
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ampopt.deploy.deployable import Deployable
from ampopt.deploy.health import Callback, Event, Health, Monitor
from ampopt.deploy.served_state import State
from ampopt.engines.cuda_graphs import Outputs
from ampopt.engines.executable import Executable, executable, quick
from ampopt.engines.quick_call import Answer, Quick, plain
from ampopt.errors import AmpoptError, InputError, StrictError, VerificationError, is_passing
from ampopt.ir.asked import Asked, noting_what_is_asked
from ampopt.ir.capture import Captured, capture
from ampopt.ir.graph import reads_strides
from ampopt.ir.model_copy import untouched_rng, working_copy
from ampopt.ir.narrow_convs import why_it_may_crash
from ampopt.ir.numerics import relative_error
from ampopt.ir.plain_tensors import (
    check_no_derivatives,
    check_plain,
    is_surrounded,
    keep_from_dynamo,
    without_derivatives,
)
from ampopt.ir.program import Program
from ampopt.ir.settings import Settings, autocast_now
from ampopt.ir.signature import (
    OutputLayout,
    call_key,
    check_same_call,
    describe,
    flatten_call,
    flatten_outputs,
    recognizer,
    tensor_key,
    tensors_of,
)
from ampopt.ir.transform import Pass, Recipe, is_slow, replay
from ampopt.measure.ledger import Ledger
from ampopt.measure.verify import Verifier
from ampopt.system.process_state import process_kept

logger = logging.getLogger("ampopt")

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)

_Restore = Callable[[Sequence[Tensor]], Any]

MOST_KEYS = 4
"""How many kinds of call (strides, calls that the original answers) are remembered for each program kept."""

MOST_COMPARED = 4
"""Other strides for which a program is compared with the original before it is taken to hold for all."""

MOST_RETRIES = 3
"""How often a call of one kind may fail for want of memory or the like before it is left to the original."""

AUTOCAST_ERROR = 0.1
"""Relative error up to which the original's results under autocast are those of a program, less exact."""


@dataclasses.dataclass
class _Served:
    """One kind of call and what answers it; without `layout` and `captured` the original, for a `reason`.

    `bare`: what `run` runs, with the model's state among its tensors. `casts`: by the dtype of an autocast
    that surrounds a call, the dtypes that its results have then; None: the original has to answer.
    `compared`: other strides that the program was compared for.
    """

    run: Callable[..., Any]
    layout: OutputLayout | None = None
    captured: Captured | None = None
    program: Program | None = None
    asked: Asked = dataclasses.field(default_factory=Asked)
    bare: Executable | None = None
    casts: dict[torch.dtype, tuple[torch.dtype, ...] | None] = dataclasses.field(default_factory=dict)
    compared: int = 0
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Why no program could be made for a call; `may_pass`: another attempt may succeed."""

    reason: str
    may_pass: bool


class OptimizedModule(Deployable):
    """A model optimized for inference: same call, same result structure, same dtypes, contiguous.

    A call is served by a program made for exactly its shapes, dtypes, device and other arguments. The
    first call with others makes a new program (same passes, but for those that take seconds to apply;
    verified again) and logs that it did; at most `max_shapes` are kept, the least recently used goes first,
    and after `max_captures` such first calls the original model answers instead, with a logged reason.
    `prepare` makes programs ahead of time. What the model keeps in buffers from call to call is the module's
    own, whichever program answers, see `reset_state`. Safe to call from several threads. `report` tells what
    was done and why, `health` how calls were answered; with `strict` a StrictError is raised where only the
    original could answer.

    Results are those of the original under `torch.no_grad()`, for inputs that need no gradients, whatever
    mode the caller is in. Where an input does require gradients, they raise InputError once those are asked
    for. Under an outer `torch.autocast` of the device results have the dtypes that the
    original gives there, and are more exact. Inputs may have any strides. A program brings them into order,
    so it holds for all strides alike, but for two cases: where the model's code asks how a tensor lies in
    memory (`x.stride()`, `x.is_contiguous()`, seen when it is called), or has operators that do, every
    layout gets a program of its own, because numbers of one input may happen to agree. For other models the
    first few other strides are compared with the original, which finds what no question tells: a
    `reshape` that is a view of some strides and a copy of others, and is then written into.
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
    ) -> None:
        """Take over a private copy of the original, its capture, and the program chosen for it.

        `outputs`: who owns the results where a CUDA graph runs, see `ampopt.optimize`. `ready` is the
        program's executable where one exists already. `serve_original`: nothing was faster, so the original
        answers every call. `strict`: where a single call has no program, raise StrictError in place of
        serving the original.
        """
        super().__init__()
        if outputs not in get_args(Outputs):
            raise InputError(f"outputs={outputs!r}: choose 'copy' or 'static'")
        self.report, self.program, self.strict = report, program, strict
        self._original = [original]  # in a list: not a submodule, so `.to()` leaves it alone; never called
        self._serving = [working_copy(original)]
        self._state = State(captured.state, captured.initial_state)
        self._captured, self._recipe, self._outputs = captured, recipe, outputs
        self._max_shapes, self._max_captures, self._captures = max_shapes, max_captures, 0
        self._lock = threading.RLock()
        self._served: OrderedDict[object, _Served] = OrderedDict()
        self._any_strides: dict[object, _Served] = {}
        self._by_layout: set[object] = set()
        self._has_layout_keys = False
        self._failures: dict[object, int] = {}
        self._monitor = Monitor(chose_original=serve_original)
        self._single: dict[object, tuple[Quick, _Restore, object]] = {}
        self._latest: Answer = _knows_nothing
        self._serve_original = serve_original
        if serve_original:
            self.forward = self._call_original  # type: ignore[method-assign]
        else:
            run = ready if ready is not None and outputs == "copy" else self._executable(program)
            self._admit(captured, program, run, self._asked(working_copy(self._original[0]), captured))
        self.training = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`nn.Module.__call__`, quicker where no hooks are registered; a call like the last one at once.

        What recognizes a tensor sees neither tangents nor dispatch modes (tracers are some), and a nested
        tensor makes it end the process.
        """
        if self._forward_pre_hooks or self._forward_hooks:
            return super().__call__(*args, **kwargs)
        if (
            len(args) == 1
            and not kwargs
            and forward_ad._current_level < 0
            and not _count_modes()
            and getattr(args[0], "is_nested", True) is False
        ):
            found = self._latest(args[0])
            if found is not NotImplemented:
                return found
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer one call; see the class.

        InputError for tensors of another dtype or device, or that no program can be right for: those of
        transforms (`torch.func`), tracers, and other kinds than plain tensors. StrictError, see `strict`.
        """
        if len(args) == 1 and not kwargs:
            tensor = args[0]
            if (
                tensor.__class__ is Tensor
                and not is_surrounded()
                and autocast_now(self.program.device) is None
            ):
                found = self._single.get(tensor_key(tensor)) if _is_simple(tensor) else None
                if found is not None:
                    make, restore, key = found
                    if len(self._served) > 1:
                        self._touch(key)
                    self._latest = answer = make(recognizer(tensor), restore)
                    result = answer(tensor)
                    if result is not NotImplemented:
                        return result
        return self._general(args, kwargs)

    @property
    def health(self) -> Health:
        """How calls were answered until now; see `ampopt.deploy.health.Health`."""
        return self._monitor.health()

    def on_health(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with an `ampopt.deploy.health.Event` when one happens; what is returned ends that.

        It is called in the thread of the call, after it was decided how to answer and outside of all locks.
        What it raises is logged.
        """
        return self._monitor.tell(callback)

    def reset_state(self) -> None:
        """Let what the model keeps from call to call be as it was when it was optimized."""
        with self._lock:
            self._serving = [working_copy(self._original[0])]
            self._state.reset()

    def _call_original(self, *args: Any, **kwargs: Any) -> Any:
        if is_surrounded():
            self._refusing(
                lambda: check_no_derivatives(flatten_call(args, kwargs)[0]), "a transformed tensor"
            )
        if not torch.is_grad_enabled():
            return self._state.call(self._serving[0], args, kwargs)
        with torch.no_grad():
            result = self._state.call(self._serving[0], args, kwargs)
        return without_derivatives(result, flatten_call(args, kwargs)[0])

    def _general(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        leaves, spec = flatten_call(args, kwargs)
        tensors = tensors_of(leaves)
        self._refusing(lambda: check_plain(tensors), "a tensor that is not plain")
        key = self._key(leaves, spec)
        served = self._served.get(key)
        if served is None:
            found = self._first(args, kwargs, leaves, spec)
            if isinstance(found, _Refusal):
                return self._without_program(found, args, kwargs, leaves, spec)
            served = found
        elif len(self._served) > 1:
            self._touch(key)
        if served.layout is None:
            return self._by_original(served.reason, args, kwargs, tensors)
        if self._captured.state and autocast_now(self.program.device) is not None:
            return self._by_original("it keeps a state, and is called under autocast", args, kwargs, tensors)
        outputs = served.run(*tensors)
        if (dtype := autocast_now(self.program.device)) is not None:
            casts = self._casts(served, dtype, outputs, args, kwargs)
            if casts is None:
                reason = f"the original gives something else under an autocast to {dtype}"
                return self._by_original(reason, args, kwargs, tensors)
            outputs = tuple(output.to(cast) for output, cast in zip(outputs, casts, strict=True))
        return without_derivatives(served.layout.restore(outputs), tensors)

    def _casts(
        self,
        served: _Served,
        dtype: torch.dtype,
        outputs: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[torch.dtype, ...] | None:
        """The dtypes of the original's results under an autocast to `dtype`; None where it has to answer.

        It is called once for it, in the caller's own autocast. Where its code asks for the state of autocast,
        or its results are others (no rounding explains `AUTOCAST_ERROR`), only it knows what to answer.
        """
        with self._lock:
            if dtype not in served.casts:
                try:
                    args, kwargs = _all_ordinary(args, kwargs)
                    with torch.no_grad(), untouched_rng(self.program.device):
                        result = working_copy(self._original[0])(*args, **kwargs)
                    theirs, layout = flatten_outputs(result)
                except Exception as error:
                    if not is_passing(error):
                        served.casts[dtype] = None
                    return None
                assert served.layout is not None
                same = not served.asked.autocast and layout == served.layout
                same = same and all(
                    relative_error(ours.to(its.dtype), its) <= AUTOCAST_ERROR
                    for ours, its in zip(outputs, theirs, strict=True)
                )
                served.casts[dtype] = tuple(output.dtype for output in theirs) if same else None
            return served.casts[dtype]

    def _by_original(
        self, reason: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        """The original's answer, which is counted; StrictError where that is not wanted."""
        shown = _shown(tensors)
        if self.strict:
            self._monitor.note(Event("refusal", reason, shown))
            raise StrictError(
                f"only the original model could answer a call with {shown}, because {reason}: call "
                "prepare for it ahead of time, or set strict to False"
            )
        result = without_derivatives(self._run_original(args, kwargs), tensors)
        self._monitor.note(Event("original", reason, shown))
        return result

    def _run_original(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = _detached(args, kwargs)
        with torch.no_grad():
            return self._state.call(self._serving[0], args, kwargs)

    def _refusing(self, check: Callable[[], None], shown: str) -> None:
        """Do a check; an InputError that it raises is counted."""
        try:
            check()
        except InputError as error:
            self._monitor.note(Event("refusal", str(error), shown))
            raise

    def _key(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> object:
        """What is known of calls is known by it: `call_key`, and where the tensors begin if that matters."""
        key = call_key(leaves, spec)
        if not self._has_layout_keys:
            return key
        return key, tuple([(t.storage_offset(), t._is_view()) for t in tensors_of(leaves)])

    def _touch(self, key: object) -> None:
        """Note that a kind of call was used just now."""
        with self._lock:
            if key in self._served:
                self._served.move_to_end(key)

    def _first(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> _Served | _Refusal:
        """Find or make what answers a call that was not seen before; tell of it once the lock is free."""
        tensors = tensors_of(leaves)
        self._refusing(lambda: self._check(leaves, spec), _shown(tensors))
        with self._lock:
            before = self._captures
            found = self._served.get(self._key(leaves, spec)) or self._serve(args, kwargs, leaves, spec)
            is_new = self._captures > before and isinstance(found, _Served)
        if is_new:
            shown = _shown(tensors)
            logger.warning("ampopt: captured and verified a program for a call not seen before: %s", shown)
            self._monitor.note(Event("capture", "no program was made for it ahead of time", shown))
        return found

    def _check(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        """Raise InputError where the tensors are on another device; or of other dtypes, if places agree."""
        own = self._captured
        check_same_call(
            tensors_of(own.leaves), tensors_of(leaves), self.program.device, dtypes=spec == own.spec
        )

    def _serve(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> _Served | _Refusal:
        """Find or make what answers a call that was not seen before."""
        any_strides = call_key(leaves, spec, strides=False)
        known = self._any_strides.get(any_strides)
        if known is not None:
            if self._holds(known, leaves):
                return self._remember(leaves, spec, known)
            del self._any_strides[any_strides]
            self._by_layout.add(any_strides)
        if self._captures >= self._max_captures:
            reason = (
                f"no program was made for them ahead of time, and {self._max_captures} later ones at most are"
            )
            return _Refusal(reason, may_pass=False)
        self._try_original(args, kwargs)
        try:
            served = self._make(args, kwargs, tuple(s for s in self._recipe.passes if not is_slow(s)))
        except Exception as error:  # whatever it is: the original answers, and the log says why
            reason = str(error) if isinstance(error, AmpoptError) else f"{type(error).__name__}: {error}"
            return _Refusal(textwrap.shorten(reason, 300), is_passing(error))
        self._captures += 1
        self._failures.pop(self._key(leaves, spec), None)
        return served

    def _try_original(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise the original's own error where it cannot take a call: nothing is made or remembered then."""
        args, kwargs = _detached(args, kwargs)
        with torch.no_grad(), untouched_rng(self.program.device):
            working_copy(self._original[0])(*args, **kwargs)

    def _holds(self, served: _Served, leaves: Sequence[Any]) -> bool:
        """Whether a program answers other strides as the original does; it is tried for the first few."""
        if served.compared >= MOST_COMPARED:
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
            holds = self._verify(working_copy(self._original[0]), there, served.bare, draws=0) is None
        except Exception as error:  # the original refuses these strides (a `view`); a program need not
            logger.debug("ampopt: a program could not be compared for other strides: %s", error)
            return True
        served.compared += holds
        return holds

    def _without_program(
        self,
        refusal: _Refusal,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
    ) -> Any:
        """Let the original answer a call for which no program could be made, from now on.

        What may pass is tried again at the next calls of its kind, for some times.
        """
        tensors, reason, then = tensors_of(leaves), refusal.reason, ""
        with self._lock:
            key = self._key(leaves, spec)
            failures = self._failures.pop(key, 0) + 1
            if refusal.may_pass and failures < MOST_RETRIES:
                self._failures[key], then = failures, " (it is tried again)"
            else:
                self._captures = min(self._captures + 1, self._max_captures)
                self._remember(leaves, spec, _Served(self._call_original, reason=reason))
            while len(self._failures) > MOST_KEYS * self._max_shapes:
                del self._failures[next(iter(self._failures))]
        shown = _shown(tensors)
        logger.warning("ampopt: the original model answers calls with %s, because %s%s", shown, reason, then)
        return self._by_original(reason, args, kwargs, tensors)

    @process_kept()
    def _make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], passes: tuple[Pass, ...]) -> _Served:
        """Capture, replay the passes, verify, remember."""
        original = working_copy(self._original[0])
        args, kwargs = _all_ordinary(args, kwargs)
        captured = capture(original, args, kwargs, self.program.device)
        if self._recipe.lane.is_mixed and (crash := why_it_may_crash(captured.program)):
            raise VerificationError(f"it cannot be verified below FP32: {crash}")
        program = replay(passes, self._recipe.lane.start(captured.program))
        run = self._executable(program)
        asked = self._asked(original, captured)
        draws = 0 if asked.layout else 1  # a draw lies in memory as it likes
        if reason := self._verify(original, captured, run, draws=draws):
            raise VerificationError(f"the optimized program is wrong for this call: {reason}")
        return self._admit(captured, program, run, asked)

    def _verify(self, original: nn.Module, captured: Captured, run: Executable, *, draws: int) -> str | None:
        """Why `run` does not answer the captured call as the original does; None where it does."""
        recipe = self._recipe
        verifier = Verifier(
            original,
            captured,
            tolerance=recipe.tolerance,
            metric=recipe.metric,
            draws=draws,
            faults=recipe.faults,
        )
        return verifier.check(run, recipe.lane).reason

    def _executable(self, program: Program) -> Executable:
        return executable(program, outputs=self._outputs)

    def _asked(self, model: nn.Module, captured: Captured) -> Asked:
        """What the model's code asks in the captured call; everything where that cannot be known."""
        args, kwargs = pytree.tree_unflatten(list(captured.leaves), captured.spec)
        device = self.program.device
        try:
            with Settings().scope(device), untouched_rng(device), noting_what_is_asked(model) as asked:
                model(*args, **kwargs)
        except Exception as error:
            logger.debug("ampopt: what a model asks is not known: %s", error)
            return Asked(layout=True, autocast=True)
        return asked

    def _admit(self, captured: Captured, program: Program, run: Executable, asked: Asked) -> _Served:
        bound = self._state.bound(run)
        leaves, served = captured.leaves, _Served(bound, captured.layout, captured, program, asked, run)
        any_strides = call_key(leaves, captured.spec, strides=False)
        if asked.layout and not self._has_layout_keys:
            self._key_by_layout()
        if asked.layout or reads_strides(captured.program.graph) is not None:
            self._by_layout.add(any_strides)
        elif any_strides not in self._by_layout:  # the border brings any strides into order
            self._any_strides[any_strides] = served
        return self._remember(leaves, captured.spec, served)

    def _key_by_layout(self) -> None:
        """From now on keys say where tensors begin, and short ways, which do not see it, are not taken."""
        known = {id(served): served for served in self._served.values()}
        self._has_layout_keys = True
        self._served.clear()
        self._single, self._latest = {}, _knows_nothing
        for served in known.values():
            if served.captured is not None:
                self._remember(served.captured.leaves, served.captured.spec, served)

    def _remember(self, leaves: Sequence[Any], spec: pytree.TreeSpec, served: _Served) -> _Served:
        """Let `served` answer every call like this one; the kinds of call used longest ago are forgotten."""
        key = self._key(leaves, spec)
        self._served[key] = served
        single = len(leaves) == 1 and isinstance(leaves[0], Tensor) and spec == _ONE_TENSOR
        if single and served.layout is not None and served.program is not None and not self._has_layout_keys:
            tensor = leaves[0]
            way = plain(served.run) if self._captured.state else quick(served.program, served.run, tensor)
            self._single[tensor_key(tensor)] = way, served.layout.restore, key
        programs = self._programs()
        while len(programs) > self._max_shapes:
            oldest = next(key for key, found in self._served.items() if found.layout is not None)
            self._forget(oldest)
            programs = self._programs()
        while len(self._served) > MOST_KEYS * self._max_shapes:
            self._forget(next(iter(self._served)))
        return served

    def _programs(self) -> set[int]:
        """The programs that answer some kind of call; the original is none of them."""
        return {id(served) for served in self._served.values() if served.layout is not None}

    def _forget(self, key: object) -> None:
        served = self._served.pop(key)
        self._latest = _knows_nothing
        self._single = {k: found for k, found in self._single.items() if found[2] != key}
        if all(other is not served for other in self._served.values()):
            self._any_strides = {k: s for k, s in self._any_strides.items() if s is not served}

    def prepare(self, *calls: Any) -> None:
        """Make the programs for further calls now, with all passes, so that nothing is captured later.

        Each call is a shape (a tuple of ints: one float tensor of the example's dtype is made for it), a
        tensor, or a tuple of positional arguments. Raises InputError or the reason why one cannot be served.
        Where the original answers every call there is nothing to prepare.
        """
        for call in calls:
            self.prepare_call(self._as_arguments(call), {})

    def prepare_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """`prepare` for one call with positional and keyword arguments."""
        leaves, spec = flatten_call(args, kwargs)
        check_plain(tensors_of(leaves))
        self._check(leaves, spec)
        if self._serve_original:
            return
        try:
            self._try_original(args, kwargs)
        except Exception as error:
            raise InputError(f"the model fails on the call to prepare: {error}") from error
        with self._lock:
            served = self._served.get(self._key(leaves, spec))
            if served is None or served.layout is None:
                self._max_shapes = max(self._max_shapes, len(self._programs()) + 1)
                self._make(args, kwargs, self._recipe.passes)

    def _as_arguments(self, call: Any) -> tuple[Any, ...]:
        if isinstance(call, Tensor):
            return (call,)
        if isinstance(call, tuple) and call and all(isinstance(size, int) for size in call):
            example = self.program.examples[0]
            generator = torch.Generator().manual_seed(0)
            return (torch.randn(call, generator=generator).to(example.device, example.dtype),)
        if isinstance(call, tuple):
            return call
        raise InputError(f"prepare takes shapes, tensors or tuples of arguments, not {type(call).__name__}")

    def train(self, mode: bool = True) -> OptimizedModule:
        """Refuse training mode: the weights are folded and shared between programs."""
        if mode:
            raise InputError(
                "an optimized module cannot be trained: train the original and optimize it again"
            )
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise InputError(
            "an optimized module stays where it was made: optimize the original again, "
            "with device= for another device"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        """A module of its own; programs never change, so the copy shares them and captures its own graphs."""
        duplicate = OptimizedModule(
            self._original[0],
            self._captured,
            self.program,
            self._recipe,
            self.report,
            outputs=self._outputs,
            serve_original=self._serve_original,
            strict=self.strict,
            max_shapes=self._max_shapes,
            max_captures=self._max_captures,
        )
        duplicate._serving = [working_copy(self._serving[0])]
        duplicate._state.take(self._state)
        for hooks in _HOOKS:
            getattr(duplicate, hooks).update(getattr(self, hooks))
        return duplicate

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "an optimized module cannot be pickled, as torch.save does: its programs live in this process; "
            'keep it with .save("robot.ampopt"), which ampopt.load reads (copy.deepcopy copies it here)'
        )


for _entrance in (OptimizedModule.__call__, OptimizedModule.forward, OptimizedModule._call_original):
    keep_from_dynamo(_entrance)


def _knows_nothing(_anything: object) -> Any:
    return NotImplemented


_count_modes = torch._C._len_torch_dispatch_stack
_ONE_TENSOR = flatten_call((torch.empty(0),), {})[1]


def _is_simple(tensor: Tensor) -> bool:
    """Whether a plain tensor is one of numbers in memory, as they are, that nobody derives by."""
    special = tensor.requires_grad or tensor.is_nested or tensor.is_neg() or tensor.is_conj()
    return not special and tensor.layout is torch.strided


def _shown(tensors: Sequence[Tensor]) -> str:
    return ", ".join(describe(t) for t in tensors) or "no tensors"


def _ordinary(tensor: Tensor) -> Tensor:
    """A tensor without gradients or lazy bits; one made in inference mode, which autocast's cache and
    captures cannot take, is copied."""
    tensor = tensor.detach()
    if tensor.is_inference():
        with torch.inference_mode(mode=False):
            tensor = tensor.clone()
    return tensor.resolve_conj().resolve_neg()


def _all_ordinary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def ordinary(leaf: Any) -> Any:
        return _ordinary(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(ordinary, args), pytree.tree_map(ordinary, dict(kwargs))


def _detached(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf

    return pytree.tree_map(detach, args), pytree.tree_map(detach, dict(kwargs))
