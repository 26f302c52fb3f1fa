"""A program captured as a CUDA graph that reads the caller's tensors and writes to fresh tensors."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]
from torch.nn import Parameter

from ampopt.engines.graph_capture import INSTANCES, REFUSALS, by_speed, capture_program
from ampopt.engines.graph_pointers import Operands, ReadyGraph
from ampopt.engines.quick_call import MOST_OUTPUTS, Answer, Quick, bind, plain
from ampopt.errors import first_line
from ampopt.ir.device_asserts import asserts_raised, may_assert
from ampopt.ir.model_copy import same_tensor
from ampopt.ir.numerics import relative_error
from ampopt.ir.program import Program
from ampopt.ir.signature import tensor_key
from ampopt.system.interrupts import check_interrupted

logger = logging.getLogger("ampopt")

Outputs = Literal["copy", "static"]
"""Who owns the results of a captured program, see `CapturedGraph`."""

ALIGNED = 256
"""Alignment in bytes of tensors that are read in place; the captured kernels were selected for it."""

SAME = 1e-2
"""Relative error within which two runs of one graph are equal: some operators add in any order."""

FORMS = 3
"""Number of instances of a captured graph kept for different input addresses: a loop uses few."""


class _Form:
    """An instance of a graph for inputs at some addresses, and the results of its next call.

    It writes into their memory; None: it has to be prepared first. `inference`: they are of that mode.
    `table`: where that of the instance lies, if C++ is to read it, which is for models of one input.
    """

    def __init__(self, ready: ReadyGraph, sources: tuple[int, ...]) -> None:
        self.ready, self.sources = ready, sources
        self.table = ctypes.addressof(ready.table) if len(sources) == 1 and bind() is not None else 0
        self.outputs: tuple[Tensor, ...] | None = None
        self.inference = False


class CapturedGraph:
    """A program captured for the shapes of its example inputs, conversions at its border included.

    A call reads the caller's tensors in place. With `outputs="copy"` it writes into fresh tensors, with
    "static" into buffers that the next call overwrites. For this the addresses in the graph's nodes are
    changed (`graph_pointers`); one test after the capture checks that the results stay the same. While the
    GPU works on a call, memory for the next results is allocated, and its addresses are set: so a loop
    launches one instance of the graph, and only the launch is between a call and its kernels. (Alternating
    instances evict each other's parameters from the GPU's cache: up to 25 us.) Inputs at new addresses get
    their own instance, up to `FORMS` of the fastest of `INSTANCES`; after that, the oldest instance is set to
    them. Inputs with another layout than the examples, or an unaligned address, are copied into a buffer
    first. If addresses cannot be changed, all inputs and outputs are copied. Safe for several threads and
    streams: one call at a time, and a call from another stream waits for the work of the previous one.
    """

    def __init__(self, program: Program, *, outputs: Outputs = "copy") -> None:
        """Warm up on a side stream, then capture. Raises PassError if the capture fails."""
        self._program, self._is_static, self._lock = program, outputs == "static", threading.Lock()
        with torch.cuda.device(program.device):
            self._stream: torch.cuda.Stream = torch.cuda.current_stream()
            self.raw_stream = self._stream.cuda_stream
            self._inputs = [tensor.detach().to(program.device, copy=True) for tensor in program.examples]
            self._graph, self._outputs = capture_program(program, self._body)
            self._spare: list[ReadyGraph] = []
            self._forms: dict[tuple[int, ...], _Form] = {}
            self._moves = self._can_move()
        self._fresh = [_maker(output) for output in self._outputs]
        self._strides = [tensor.stride() for tensor in self._inputs]
        self._index = program.device.index or 0

    def _body(self) -> tuple[Tensor, ...]:
        """The outputs as the caller is promised."""
        return self._program.run(*self._inputs)

    @property
    def by_operators(self) -> Callable[..., tuple[Tensor, ...]]:
        """The program without a graph: its operators are called one by one."""
        return self._program.run

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Flat tensors in, flat tensors out."""
        with self._lock:
            return self._call(tensors)

    def quick(self, example: Tensor) -> Quick:
        """A fast path for a program's only input, a tensor that is like `example`.

        It handles the calls of a loop: an address seen before, on the same stream. All others, and without a
        compiler all calls, take the full path.
        """
        if (
            bind() is None
            or not self._moves
            or len(self._inputs) > 1
            or len(self._outputs) > MOST_OUTPUTS
            or tensor_key(example) != tensor_key(self._inputs[0])
        ):
            return plain(self)
        return self._quick

    def _quick(self, same: Callable[[object], bool], restore: Callable[[tuple[Tensor, ...]], Any]) -> Answer:
        """Answers by C++; see `Part` in `cpp/quick_call.cpp` for the order."""
        make = bind()
        assert make is not None
        return make(
            (
                *(same, restore, self._lock.acquire, self._lock.release, self, self._forms),
                None if self._is_static else tuple(self._fresh),
                *(torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice, self._index),
                torch.is_inference_mode_enabled,
            )
        )

    def bare_launch(self, *tensors: Tensor) -> Callable[[], None]:
        """A launch of a call's kernels alone, for measurements; the caller keeps its tensors alive."""
        self(*tensors)
        if not self._moves:
            return self._graph.replay
        return functools.partial(self._forms[self._sources(tensors)].ready.launch, self.raw_stream)

    def _call(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                return self._call(tensors)
        if torch._C._cuda_getCurrentRawStream(self._index) != self.raw_stream:
            self._follow_stream()
        if not self._moves:
            for tensor, buffer in zip(tensors, self._inputs, strict=True):
                _copied(tensor, buffer)
            torch._C._CUDAGraph.replay(self._graph)
            return self._outputs if self._is_static else tuple([output.clone() for output in self._outputs])
        sources = self._sources(tensors)
        form = self._forms.get(sources) or self._form_for(sources)
        if form.outputs is None:
            with form.ready.context:
                self._prepare(form)
        form.ready.launch(self.raw_stream)
        return self._launched(form)

    def _launched(self, form: _Form) -> tuple[Tensor, ...]:
        """The results of a launch; where they are the caller's, those of the next call get their memory now.

        They are of the mode of the call before, and copied where this one is of another.
        """
        outputs, inference = form.outputs, form.inference
        assert outputs is not None
        if self._is_static:
            return outputs
        try:
            self._prepare(form)
        except RuntimeError as error:  # the next call tries again, and raises it
            logger.debug("ampopt: the results of the next call have no memory yet: %s", first_line(error))
        if inference != torch.is_inference_mode_enabled():
            return tuple([output.clone() for output in outputs])
        return outputs

    def _sources(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Where the graph finds a call's tensors: in their own memory, or copied into its inputs.

        In their own where the kernels, which were captured for these strides, can read them.
        """
        sources = []
        for tensor, strides, buffer in zip(tensors, self._strides, self._inputs, strict=True):
            address = tensor.data_ptr() if tensor.__class__ in _PLAIN else 1
            if address % ALIGNED or tensor.stride() != strides or tensor.is_neg() or tensor.is_conj():
                address = _copied(tensor, buffer)
            sources.append(address)
        return tuple(sources)

    def _prepare(self, form: _Form) -> None:
        """Take memory for the results of the form's next call, and let it write there."""
        form.outputs = None  # until all of it is done
        outputs, addresses = self._outputs, form.sources
        if not self._is_static:
            outputs = tuple([fresh() for fresh in self._fresh])
            addresses += tuple([output.data_ptr() for output in outputs])
        form.ready.move(addresses)
        form.outputs, form.inference = outputs, torch.is_inference_mode_enabled()

    def _form_for(self, sources: tuple[int, ...]) -> _Form:
        """A form for inputs at these addresses: one more, or the one that has been there for longest."""
        ready = self._spare.pop(0) if self._spare else self._forms.pop(next(iter(self._forms))).ready
        self._forms[sources] = form = _Form(ready, sources)
        return form

    def _follow_stream(self) -> None:
        """Let the work of the call before, on another stream, end before this one touches the buffers."""
        self._stream.synchronize()
        self._stream = torch.cuda.current_stream(self._program.device)
        self.raw_stream = self._stream.cuda_stream
        for form in self._forms.values():
            form.outputs = None  # their memory belongs to the stream before

    def _can_move(self) -> bool:
        """Whether inputs and outputs can be at other addresses than those captured; it is tried.

        Where outputs cannot be, as they are the inputs' memory or read again, copies of them can.
        """
        self._graph.replay()
        expected = [output.clone() for output in self._outputs]
        examples = [tensor.clone() for tensor in self._inputs]
        try:
            for tensor, other in zip(self._inputs, self._other_values(), strict=True):
                tensor.copy_(other)
            reason = self._why_outputs_stay(expected) or self._why_not_moved(expected, examples)
            if reason is not None:
                self._capture_into_buffers()
                reason = self._why_not_moved(expected, examples)
        except REFUSALS as error:
            reason = first_line(error)
        for tensor, example in zip(self._inputs, examples, strict=True):
            tensor.copy_(example)
        if reason is None:
            return True
        logger.info("ampopt: inputs and outputs of a CUDA graph are copied in every call: %s", reason)
        self._graph, self._outputs = capture_program(self._program, self._body, warm_ups=0)
        return False

    def _other_values(self) -> list[Tensor]:
        """Values for the inputs that are not the examples': NaN, or 0 in dtypes that have none.

        Where they may lead to an index out of range, which would end the CUDA context, the first that do not.
        Raises RuntimeError, which says what came of each, if there are none.
        """
        if not may_assert(self._program):
            return [_spoilt(tensor) for tensor in self._inputs]
        plain, reasons = self._program.replace(engine=None), list[str]()
        for way in (_spoilt, torch.zeros_like, lambda tensor: tensor.flip([*range(tensor.dim())])):
            others = [way(tensor) for tensor in self._inputs]
            pairs = zip(others, self._inputs, strict=True)
            if any(_has_nan(mine) and mine.numel() and same_tensor(mine, its) for mine, its in pairs):
                continue
            try:
                with asserts_raised(self._program.device):
                    plain.run(*map(torch.clone, others))
            except Exception as error:
                check_interrupted(error)
                reasons.append(first_line(error))
            else:
                return others
        raise RuntimeError(f"no other values are known that it can be called with: {'; '.join(reasons)}")

    def _why_not_moved(self, expected: Sequence[Tensor], examples: Sequence[Tensor]) -> str | None:
        """Launch on other memory, while the graph's own inputs are spoiled; why that is not right, if so.

        The results have to be what they were before, in memory that was full of something else, and the
        inputs have to be as they were.
        """
        others = [tensor.clone() for tensor in examples]
        fresh = [] if self._is_static else [_unlike(tensor) for tensor in expected]
        operands = Operands(self._graph, self._inputs, () if self._is_static else self._outputs)
        instances = [ReadyGraph(self._graph, operands) for _ in range(INSTANCES)]
        for ready in instances:
            ready.move(tuple([tensor.data_ptr() for tensor in (*others, *fresh)]))
        instances[0].launch(self.raw_stream)
        found = self._outputs if self._is_static else fresh
        same = all(relative_error(a, b) <= SAME for a, b in zip(found, expected, strict=True))
        same &= all(relative_error(a, b) == 0.0 for a, b in zip(others, examples, strict=True))
        if not same:
            return "a launch on other memory gives something else"
        self._spare = by_speed(instances, self._program.device)[:FORMS]
        return None

    def _why_outputs_stay(self, expected: Sequence[Tensor]) -> str | None:
        """Why an output has to stay where it is, if so: a view, an input's memory, or no result at all.

        What is the same although the inputs are spoiled now may be a weight. Static outputs stay anyway.
        """
        places = [tensor.untyped_storage().data_ptr() for tensor in (*self._outputs, *self._inputs)]
        count = len(self._outputs)
        if self._is_static:
            return None if set(places[:count]).isdisjoint(places[count:]) else "an output is an input"
        self._graph.replay()
        can = len(set(places)) == len(places) and all(
            output.is_contiguous()
            and output.untyped_storage().nbytes() == output.numel() * output.element_size()
            and not same_tensor(output, before)
            for output, before in zip(self._outputs, expected, strict=True)
        )
        return None if can else "an output is not a tensor of its own"

    def _capture_into_buffers(self) -> None:
        """Capture anew, with outputs written into memory that nothing else is written into."""
        buffers = tuple([torch.empty_like(output) for output in self._outputs])

        def body() -> tuple[Tensor, ...]:
            for buffer, output in zip(buffers, self._body(), strict=True):
                buffer.copy_(output)
            return buffers

        self._graph, self._outputs = capture_program(self._program, body, warm_ups=0)


def _maker(output: Tensor) -> Callable[[], Tensor]:
    """Makes empty tensors like an output on the current device, in a third of `torch.empty_like`'s time."""
    return functools.partial(_empty_strided_cuda, tuple(output.shape), output.stride(), output.dtype)


_PLAIN = (Tensor, Parameter)
"""Other classes of tensors may keep their numbers elsewhere."""


def _copied(tensor: Tensor, buffer: Tensor) -> int:
    """Copy a tensor into a buffer; the buffer's address."""
    buffer.copy_(tensor.detach() if tensor.requires_grad else tensor)
    return buffer.data_ptr()


def _spoilt(tensor: Tensor) -> Tensor:
    """A tensor that is full of NaN, or of 0 where its dtype has none, which is a valid index."""
    return torch.full_like(tensor, float("nan") if _has_nan(tensor) else 0)


def _unlike(tensor: Tensor) -> Tensor:
    """A tensor that is full of NaN, or of another number at every place where its dtype has none."""
    return torch.full_like(tensor, float("nan")) if _has_nan(tensor) else tensor.bitwise_not()


def _has_nan(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
