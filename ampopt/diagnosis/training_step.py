"""A training step and the ways to run it: FP32, AMP, channels_last, other optimizers, one CUDA graph.

A step is `zero_grad`, forward and loss, backward, and the optimizer's step. In float16 the loss is scaled by
`GradScaler`; bfloat16, as on a CPU, needs none.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ampopt.diagnosis.named_objects import refuse_own
from ampopt.engines.graph_capture import capture_calls
from ampopt.errors import InputError, first_line
from ampopt.ir.deep_copy import deep_copy, shared_with
from ampopt.ir.model_copy import exact_copy
from ampopt.ir.numerics import is_rounded
from ampopt.ir.signature import flatten_call, map_tensors, tensors_of
from ampopt.measure.clocks import synchronize
from ampopt.system.interrupts import check_interrupted
from ampopt.system.wording import argument

Loss = Callable[[Any], Tensor]
"""The loss of a model's result."""

Step = Callable[[], object]

Optimizer = torch.optim.Optimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes an optimizer of parameters, as `torch.optim.AdamW` does."""

RATE = 1e-4
"""The learning rate where none is given: small, so that hundreds of steps on one batch stay finite."""

WARM_STEPS = 3
"""Steps before a capture: cuDNN and the optimizer have allocated what they need."""

PARTS = ("zero_grad", "forward", "backward", "optimizer")
"""The names of the parts of a step, in their order."""

LEAST_PARTS = 3
"""The least number of steps whose parts are timed apart."""


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer where none is given."""
    return torch.optim.SGD(parameters, RATE)


def mean_square(result: Any) -> Tensor:
    """The loss where none is given: the mean square of every floating-point output, added up."""
    found = [t.float().square().mean() for t in tensors_of(flatten_call((result,), {})[0]) if is_rounded(t)]
    if not found:
        raise InputError(
            f"the model returns no floating-point tensor: give {argument('loss=')}, a function of its result"
        )
    return torch.stack(found).sum()


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is trained. It is never called itself: every way trains a copy of all of it.

    `optimizer` is one over the model's parameters, or what makes one.
    """

    model: nn.Module
    args: tuple[Any, ...]
    loss: Loss
    optimizer: Optimizer | MakeOptimizer = sgd
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of the call's first tensor."""
        return tensors_of(flatten_call(self.args, self.kwargs)[0])[0].device

    def copied(self, memo: dict[int, Any] | None = None) -> Training:
        """A copy of all of it on the device of the call; `memo` is that of `copy.deepcopy`.

        Raises InputError if the loss or the copy would write to the user's model, or if no optimizer can be
        made.
        """
        memo = {} if memo is None else memo
        model = exact_copy(self.model, memo)
        if (shared := shared_with(self.model, model)) is not None:
            raise InputError(
                f"a copy of the model cannot be trained without yours: in it {shared}: let hooks and "
                "functions get at the model by their arguments, or by a closure"
            )
        with torch.no_grad():
            optimizer = self.optimizer
            if isinstance(optimizer, Optimizer):
                optimizer = deep_copy(optimizer, memo)
            loss = deep_copy(self.loss, memo)
            refuse_own("loss", loss, self.model, optimizer, _INSTEAD)
            args, kwargs = map_tensors(lambda t: t.detach().clone(), self.args, self.kwargs)
        moves = any(weight.device != self.device for weight in model.parameters())
        model.to(self.device)
        if isinstance(loss, nn.Module):
            loss.to(self.device)
        if not isinstance(optimizer, Optimizer):
            optimizer = _made_of(model, optimizer, memo)
        elif moves:
            optimizer.load_state_dict(optimizer.state_dict())  # its state goes where the weights are
        return Training(model, args, loss, optimizer, self.device, kwargs)


@dataclasses.dataclass
class Training:
    """A model in training with its batch, loss and optimizer; a call is one step.

    `dtype` is autocast's, None in FP32. `by_closure`: the optimizer computes the gradients itself, with a
    function that it is given, as LBFGS does several times in each step.
    """

    model: nn.Module
    args: tuple[Any, ...]
    loss: Loss
    optimizer: Optimizer
    device: torch.device
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    by_closure: bool = False

    def __call__(self) -> Tensor:
        """One step; its loss."""
        if self.by_closure:
            return torch.as_tensor(self.update()).detach()
        loss = self.evaluate()
        self.update()
        return loss.detach()

    def evaluate(self) -> Tensor:
        """The gradients anew; their loss."""
        self.zero_grad()
        loss = self.forward()
        self.backward(loss)
        return loss

    @property
    def parts(self) -> dict[str, Callable[[Any], Any]]:
        """The parts of a step in their order; each takes what the one before it gave."""
        calls: tuple[Callable[[Any], Any], ...] = (
            *(lambda _: self.zero_grad(), lambda _: self.forward()),
            *(self.backward, lambda _: self.update()),
        )
        return dict(zip(PARTS, calls, strict=True))

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad(set_to_none=True)

    def forward(self) -> Tensor:
        """The loss."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            return self.loss(self.model(*self.args, **self.kwargs))

    def backward(self, loss: Tensor) -> None:
        """The gradients."""
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def update(self) -> Any:
        """The optimizer's step; what it returns. One that fails without a closure has one from then on."""
        if self.scaler is not None:
            self.scaler.step(self.optimizer, *([self.evaluate] if self.by_closure else []))
            return self.scaler.update()
        if not self.by_closure:
            try:
                return self.optimizer.step()
            except Exception as error:
                check_interrupted(error)
                if "closure" not in inspect.signature(self.optimizer.step).parameters:
                    raise
                self.by_closure = True
        return self.optimizer.step(self.evaluate)  # type: ignore[arg-type]  # losses are tensors

    def with_optimizer(self, **flags: bool) -> Training:
        """The same with another implementation of its optimizer, such as `fused=True`.

        Raises what the optimizer raises where it has no such implementation.
        """
        self.optimizer = _remade(self.optimizer, flags)
        return self


def fp32(subject: Subject) -> Training:
    """In training mode, everything in FP32, with the process's setting of TF32."""
    training = subject.copied()
    if not training.model.training:  # else single modules may be frozen on purpose
        training.model.train()
    return training


def amp(subject: Subject, dtype: torch.dtype | None = None) -> Training:
    """Autocast, in float16 on a GPU with a `GradScaler`, in bfloat16 on a CPU; or in `dtype`."""
    training = fp32(subject)
    on_gpu = training.device.type == "cuda"
    training.dtype = dtype or (torch.float16 if on_gpu else torch.bfloat16)
    training.scaler = torch.amp.GradScaler("cuda") if training.dtype is torch.float16 and on_gpu else None
    return training


def in_channels_last(training: Training) -> Training:
    """The same with images and convolutions in channels_last."""
    training.model.to(memory_format=torch.channels_last)
    training.args, training.kwargs = map_tensors(
        lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
        training.args,
        training.kwargs,
    )
    return training


def graphed(training: Training) -> Step:
    """The whole step as one CUDA graph. Raises PassError if it cannot be captured.

    `GradScaler` needs an optimizer that looks at overflows itself, a fused one; others need `capturable`.
    """
    known = training.optimizer.defaults.keys()
    training.with_optimizer(**{flag: True for flag in ("fused", "capturable") if flag in known})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_STEPS):
            training()
    torch.cuda.current_stream().wait_stream(side)
    training.zero_grad()

    def step() -> tuple[Tensor, ...]:
        training()
        return ()

    graph, _ = capture_calls(step, warm_ups=0)

    def replay(_kept: Training = training) -> None:
        graph.replay()

    return replay


def made(make: Callable[[], Step], device: torch.device) -> tuple[Step, int | None]:
    """A step that was called, and on a GPU the peak of the bytes that it takes."""
    if device.type != "cuda":
        step = make()
        step()
        return step, None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step = make()
    for _ in range(2):
        step()
    synchronize(device)
    return step, torch.cuda.max_memory_allocated(device) - before


def parts_of(training: Training, seconds: float) -> dict[str, float]:
    """The median seconds of the parts of a step, each synchronised."""
    samples: dict[str, list[float]] = {name: [] for name in training.parts}
    end = time.perf_counter() + seconds
    while len(samples["forward"]) < LEAST_PARTS or time.perf_counter() < end:
        given: Any = None
        for name, part in training.parts.items():
            synchronize(training.device)
            start = time.perf_counter()
            given = part(given)
            synchronize(training.device)
            samples[name].append(time.perf_counter() - start)
    return {name: sorted(each)[len(each) // 2] for name, each in samples.items()}


_INSTEAD = "let a closure hold it, as functools.partial(loss, model) does, which is copied with the model"


def _made_of(model: nn.Module, make: MakeOptimizer, memo: dict[int, Any]) -> Optimizer:
    """An optimizer of a copy's weights; where `make` has taken the original's, theirs are in its place.

    By `memo` they are those of the copy: groups may be made of the layers of the user's model, others of the
    weights that `make` is given, which stay.
    """
    try:
        optimizer = make(model.parameters())
    except Exception as error:
        check_interrupted(error)
        raise InputError(
            f"the optimizer cannot be made of the model's parameters: {first_line(error)}"
        ) from error
    copied = {id(weight) for weight in model.parameters()}
    if not _weights_of(optimizer) <= copied:
        memo.update((id(weight), weight) for weight in model.parameters())
        optimizer = deep_copy(optimizer, memo)
    if not _weights_of(optimizer) & copied:
        raise InputError(
            "the optimizer that is made has none of the model's parameters: make it of those that the "
            "function is given, as in lambda parameters: torch.optim.AdamW(parameters)"
        )
    return optimizer


def _weights_of(optimizer: Optimizer) -> set[int]:
    return {id(weight) for group in optimizer.param_groups for weight in group["params"]}


def _remade(optimizer: Optimizer, flags: Mapping[str, bool]) -> Optimizer:
    kind: Any = type(optimizer)
    own = {**optimizer.defaults, **_exclusive(flags)}
    known = inspect.signature(kind).parameters
    groups = [{**group, **_exclusive(flags)} for group in optimizer.param_groups]
    made: Optimizer = kind(groups, **{name: value for name, value in own.items() if name in known})
    state = optimizer.state_dict()
    changed = [{**group, **_exclusive(flags)} for group in state["param_groups"]]
    made.load_state_dict({**state, "param_groups": changed})
    return made


def _exclusive(flags: Mapping[str, bool]) -> dict[str, bool | None]:
    """An optimizer is fused or runs over lists of weights: what is not asked for is not."""
    others = {"fused": {"foreach": None}, "foreach": {"fused": None}}
    found: dict[str, bool | None] = {}
    for flag in flags:
        found.update(others.get(flag, {}))
    return {**found, **flags}
