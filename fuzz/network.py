"""Random networks: from a seed to a description, and from a description to a module and its inputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuzz import calls
from fuzz.calls import Call
from fuzz.layers.convolutions import CONVOLUTIONS
from fuzz.layers.effects import EFFECTS
from fuzz.layers.elementwise import ELEMENTWISE
from fuzz.layers.norms import NORMS
from fuzz.layers.shapes import SHAPES
from fuzz.layers.step import Builder, DoesNotFit, Step, World
from fuzz.pick import Pick

_ALL: dict[str, tuple[float, Builder]] = {**CONVOLUTIONS, **NORMS, **ELEMENTWISE, **SHAPES, **EFFECTS}
KINDS: dict[str, Builder] = {name: builder for name, (_, builder) in _ALL.items()}
"""What makes a layer, by the name of its kind."""
WEIGHTS = {name: weight for name, (weight, _) in _ALL.items()}
"""How often each kind of layer is drawn, in proportion."""

MOST_ELEMENTS = 6000
"""No tensor of a network is larger, so that one runs in microseconds."""

_SHAPES = {"images": 62.0, "rows": 12.0, "sequences": 13.0, "volumes": 8.0, "vector": 3.0, "number": 1.0}
_DTYPES = {"float32": 92.0, "float64": 3.0, "bfloat16": 3.0, "float16": 2.0}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's kind, and the seed of everything else about it; what that is depends on what it follows."""

    kind: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Spec:
    """All there is to know about a network and its call. A layer that does not fit its place is left out."""

    seed: int
    shape: tuple[int, ...]
    layers: tuple[Layer, ...]
    dtype: str = "float32"
    values: str = "normal"
    memory: str = "contiguous"
    call: str = "one"
    ending: str = "tensor"

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it; layers as `kind:seed`."""
        return {**dataclasses.asdict(self), "layers": [f"{layer.kind}:{layer.seed}" for layer in self.layers]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Spec:
        """The spec that `to_json` wrote."""
        layers = tuple(Layer(*_parts(text)) for text in data["layers"])
        return cls(**{**data, "shape": tuple(data["shape"]), "layers": layers})

    def __str__(self) -> str:
        return json.dumps(self.to_json())

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and inputs."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def _parts(text: str) -> tuple[str, int]:
    kind, _, seed = text.partition(":")
    return kind, int(seed)


class Network(nn.Module):
    """The layers one after the other, each with a view of all results before it."""

    def __init__(self, steps: Sequence[nn.Module], ending: str) -> None:
        super().__init__()
        self.steps, self.ending = nn.ModuleList(steps), ending
        self.table = nn.Parameter(torch.randn(5, 3))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, seen = calls.entrance(args, kwargs, self.table)
        for step in self.steps:
            y = step(x, seen) if isinstance(step, Step) else step(x)
            seen.append(y)
            x = y
        return calls.leave(self.ending, x, seen, self.table)

    def extra_repr(self) -> str:
        return f"result: {self.ending}"


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every accelerator, too
        yield


def make_call(
    spec: Spec,
    draw: int = 0,
    *,
    values: str | None = None,
    shape: Sequence[int] | None = None,
    memory: str | None = None,
) -> Call:
    """The example call, or another draw of it, with other values or of another shape."""
    generator = torch.Generator().manual_seed(spec.seed + 7919 * draw)
    drawn = calls.numbers(values or spec.values, spec.shape if shape is None else shape, generator).to(
        spec.torch_dtype
    )
    return calls.arguments(spec.call, calls.in_memory(memory or spec.memory, drawn), generator)


class Maker:
    """Puts a network together layer by layer, running it on the example as it goes."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self._world, self._steps = spec, World(), list[nn.Module]()
        with _seeded(spec.seed):
            self._root = Network([], spec.ending).to(spec.torch_dtype)
            call = make_call(spec).map(lambda tensor: tensor.detach().clone())
            self._x, self._seen = calls.entrance(call.args, call.kwargs, self._root.table)

    def add(self, layer: Layer) -> bool:
        """Append a layer; False, and nothing is changed, where it does not fit."""
        with _seeded(layer.seed):
            try:
                step = KINDS[layer.kind](Pick(layer.seed), self._x, self._world)
                step = step.to(self.spec.torch_dtype).eval()
                trial, x, seen = (
                    copy.deepcopy((step, self._x, self._seen))
                    if _copies(step)
                    else (step, self._x.clone(), [t.clone() for t in self._seen])
                )
                y = trial(x, seen) if isinstance(trial, Step) else trial(x)
            except (
                DoesNotFit,
                RuntimeError,
                ValueError,
                IndexError,
                TypeError,
                NotImplementedError,
                AssertionError,
            ):
                return False
        if not isinstance(y, Tensor) or not y.is_floating_point() or y.numel() > MOST_ELEMENTS or y.dim() > 6:
            return False
        self._x, self._seen = y, [*seen, y]
        self._steps.append(step)
        if not isinstance(step, Step):
            self._world.made.append(step)
        return True

    def network(self) -> Network:
        """The network as it stands."""
        self._root.steps = nn.ModuleList(self._steps)
        return self._root.eval()


def _copies(step: nn.Module) -> bool:
    """Whether a module can be deep-copied; one under the old weight normalization cannot."""
    return all(t.is_leaf for m in step.modules() for t in vars(m).values() if isinstance(t, Tensor))


def build(spec: Spec) -> Network:
    """The network of a spec, in evaluation mode."""
    maker = Maker(spec)
    for layer in spec.layers:
        maker.add(layer)
    return maker.network()


def draw(seed: int, *, stateful: bool = False) -> Spec:
    """A random network's spec: the same for the same seed, and every layer of it fits.

    With `stateful`, layers that keep a state are drawn more often.
    """
    pick, weights = Pick(seed), {**WEIGHTS, "state": 3.0} if stateful else WEIGHTS
    spec = Spec(
        seed=pick.seed(),
        shape=_shape(pick),
        layers=(),
        dtype=pick.weighted(_DTYPES),
        values=pick.weighted(calls.VALUES),
        memory=pick.weighted(calls.MEMORIES),
        call=pick.weighted(calls.CALLS),
        ending=pick.weighted(calls.ENDINGS),
    )
    maker, layers = Maker(spec), list[Layer]()
    for _ in range(pick.one(1, 2, 3, 4, 5, 6, 8, 10)):
        for _ in range(8):
            layer = Layer(pick.weighted(weights), pick.seed())
            if maker.add(layer):
                layers.append(layer)
                break
    return dataclasses.replace(spec, layers=tuple(layers))


def _shape(pick: Pick) -> tuple[int, ...]:
    batch = pick.one(1, 1, 2, 2, 3) if pick.maybe(0.96) else 0
    c = pick.one(1, 2, 3, 4, 4, 6, 8)
    sizes: dict[str, Callable[[], tuple[int, ...]]] = {
        "images": lambda: (batch, c, pick.number(1, 10), pick.number(1, 10)),
        "rows": lambda: (batch, pick.number(1, 16)),
        "sequences": lambda: (batch, c, pick.number(1, 12)),
        "volumes": lambda: (batch, min(c, 4), pick.number(1, 5), pick.number(1, 5), pick.number(1, 5)),
        "vector": lambda: (pick.number(1, 12),),
        "number": lambda: (),
    }
    return sizes[pick.weighted(_SHAPES)]()
