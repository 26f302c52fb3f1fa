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
from torch.utils import _pytree as pytree

from ampopt.capture import Captured, capture
from ampopt.cuda_graphs import Outputs
from ampopt.deployable import Deployable
from ampopt.errors import AmpoptError, InputError, VerificationError
from ampopt.executable import Executable, executable, quick
from ampopt.graph import reads_strides
from ampopt.ledger import Ledger
from ampopt.model_copy import working_copy
from ampopt.process_state import process_kept
from ampopt.program import Program
from ampopt.quick_call import Answer, Quick, plain
from ampopt.served_state import State
from ampopt.signature import (
    OutputLayout,
    call_key,
    check_same_call,
    describe,
    flatten_call,
    recognizer,
    tensor_key,
    tensors_of,
)
from ampopt.transform import Pass, Recipe, replay
from ampopt.verify import Verifier

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


@dataclasses.dataclass(frozen=True)
class _Served:
    """One kind of call and what answers it; without `layout` and `program` the original, as it is."""

    run: Callable[..., Any]
    layout: OutputLayout | None = None
    program: Program | None = None


class OptimizedModule(Deployable):
    """A model optimized for inference: same call, same result structure, same dtypes, contiguous.

    A call is served by a program made for exactly its shapes, dtypes, device and other arguments. The
    first call with others makes a new program (same passes, but for those that take seconds to apply;
    verified again) and logs that it did; at most `max_shapes` are kept, the least recently used goes first,
    and after `max_captures` such first calls the original model answers instead, with a logged reason.
    `prepare` makes programs ahead of time. What the model keeps in buffers from call to call is the module's
    own, whichever program answers, see `reset_state`. Safe to call from several threads. `report` tells what
    was done and why.
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
    ) -> None:
        """Take over a private copy of the original, its capture, and the program chosen for it.

        `outputs`: who owns the results where a CUDA graph runs, see `ampopt.optimize`. `ready` is the
        program's executable where one exists already. `serve_original`: nothing was faster, so the original
        answers every call.
        """
        super().__init__()
        if outputs not in get_args(Outputs):
            raise InputError(f"outputs={outputs!r}: choose 'copy' or 'static'")
        self.report, self.program = report, program
        self._original = [original]  # in a list: not a submodule, so `.to()` leaves it alone; never called
        self._serving = [working_copy(original)]
        self._state = State(captured.state, captured.initial_state)
        self._captured, self._recipe, self._outputs = captured, recipe, outputs
        self._max_shapes, self._max_captures, self._captures = max_shapes, max_captures, 0
        self._lock = threading.RLock()
        self._served: OrderedDict[object, _Served] = OrderedDict()
        self._any_strides: dict[object, _Served] = {}
        self._single: dict[object, tuple[Quick, _Restore, object]] = {}
        self._latest: Answer = _knows_nothing
        self._serve_original = serve_original
        if serve_original:
            self.forward = self._call_original  # type: ignore[method-assign]
        else:
            run = ready if ready is not None and outputs == "copy" else self._executable(program)
            self._admit(captured, program, run)
        self.training = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`nn.Module.__call__`, quicker where no hooks are registered; a call like the last one at once."""
        if self._forward_pre_hooks or self._forward_hooks:
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs:
            found = self._latest(args[0])
            if found is not NotImplemented:
                return found
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer one call; see the class. InputError for tensors of another dtype or device."""
        if len(args) == 1 and not kwargs:
            tensor = args[0]
            if tensor.__class__ is Tensor and not (tensor.is_neg() or tensor.is_conj()):
                found = self._single.get(tensor_key(tensor))
                if found is not None:
                    make, restore, key = found
                    if len(self._served) > 1:
                        self._touch(key)
                    self._latest = answer = make(recognizer(tensor), restore)
                    result = answer(tensor)
                    if result is not NotImplemented:
                        return result
        return self._general(args, kwargs)

    def reset_state(self) -> None:
        """Let what the model keeps from call to call be as it was when it was optimized."""
        with self._lock:
            self._serving = [working_copy(self._original[0])]
            self._state.reset()

    def _call_original(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._state.call(self._serving[0], args, kwargs)
        with torch.no_grad():
            return self._state.call(self._serving[0], args, kwargs)

    def _general(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        leaves, spec = flatten_call(args, kwargs)
        key = call_key(leaves, spec)
        served = self._served.get(key)
        if served is None:
            with self._lock:
                served = self._served.get(key) or self._serve(args, kwargs, leaves)
        elif len(self._served) > 1:
            self._touch(key)
        if served.layout is None:
            with torch.no_grad():
                return served.run(*args, **kwargs)
        return served.layout.restore(served.run(*tensors_of(leaves)))

    def _touch(self, key: object) -> None:
        """Note that a kind of call was used just now."""
        with self._lock:
            if key in self._served:
                self._served.move_to_end(key)

    def _serve(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> _Served:
        """Find or make what answers a call that was not seen before."""
        spec = flatten_call(args, kwargs)[1]
        known = self._any_strides.get(call_key(leaves, spec, strides=False))
        if known is not None:
            return self._remember(leaves, spec, known)
        check_same_call(tensors_of(self._captured.leaves), tensors_of(leaves), self.program.device)
        shown = ", ".join(describe(t) for t in tensors_of(leaves))
        if self._captures >= self._max_captures:
            reason = (
                f"no program was made for them ahead of time, and {self._max_captures} later ones at most are"
            )
            return self._fall_back(args, kwargs, reason, shown)
        self._captures += 1
        try:
            served = self._make(args, kwargs, tuple(s for s in self._recipe.passes if not s.slow_to_apply))
        except Exception as error:  # whatever it is: the original answers, and the log says why
            reason = str(error) if isinstance(error, AmpoptError) else f"{type(error).__name__}: {error}"
            return self._fall_back(args, kwargs, textwrap.shorten(reason, 300), shown)
        logger.warning("ampopt: captured and verified a program for a call not seen before: %s", shown)
        return served

    @process_kept()
    def _make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], passes: tuple[Pass, ...]) -> _Served:
        """Capture, replay the passes, verify, remember."""
        original = self._original[0]
        args, kwargs = _detached(args, kwargs)
        captured = capture(original, args, kwargs, self.program.device)
        program = replay(passes, self._recipe.start(captured.program))
        run = self._executable(program)
        recipe = self._recipe
        verifier = Verifier(original, captured, tolerance=recipe.tolerance, metric=recipe.metric, draws=1)
        check = verifier.check(run, recipe.lane_dtype)
        if not check.passed:
            raise VerificationError(f"the optimized program is wrong for this call: {check.reason}")
        return self._admit(captured, program, run)

    def _executable(self, program: Program) -> Executable:
        return executable(program, outputs=self._outputs)

    def _admit(self, captured: Captured, program: Program, run: Executable) -> _Served:
        leaves, served = captured.leaves, _Served(self._state.bound(run), captured.layout, program)
        if reads_strides(captured.program.graph) is None:  # the border brings any strides into order
            self._any_strides[call_key(leaves, captured.spec, strides=False)] = served
        return self._remember(leaves, captured.spec, served)

    def _fall_back(self, args: Any, kwargs: Any, reason: str, shown: str) -> _Served:
        logger.warning("ampopt: the original model answers calls with %s, because %s", shown, reason)
        return self._remember(*flatten_call(args, kwargs), _Served(self._call_original))

    def _remember(self, leaves: Sequence[Any], spec: pytree.TreeSpec, served: _Served) -> _Served:
        """Let `served` answer every call like this one; the kinds of call used longest ago are forgotten."""
        key = call_key(leaves, spec)
        self._served[key] = served
        single = len(leaves) == 1 and isinstance(leaves[0], Tensor) and spec == _ONE_TENSOR
        if single and served.layout is not None and served.program is not None:
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
        """
        for call in calls:
            self.prepare_call(self._as_arguments(call), {})

    def prepare_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """`prepare` for one call with positional and keyword arguments."""
        leaves, spec = flatten_call(args, kwargs)
        check_same_call(tensors_of(self._captured.leaves), tensors_of(leaves), self.program.device)
        with self._lock:
            if call_key(leaves, spec) not in self._served:
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


def _knows_nothing(_anything: object) -> Any:
    return NotImplemented


_ONE_TENSOR = flatten_call((torch.empty(0),), {})[1]


def _detached(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(detach, args), pytree.tree_map(detach, dict(kwargs))
