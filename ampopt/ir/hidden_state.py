"""What calls of a model leave where no attribute of it is: in closures, in classes, in global variables.

A graph leaves it out, and the results of a few calls need not show it: every tenth frame is another.
"""

from __future__ import annotations

from collections.abc import Collection
from types import FunctionType

from torch import nn

from ampopt.ir.lifted_state import Attribute, value_at
from ampopt.ir.model_differences import differences, hidden_difference
from ampopt.ir.moments import Moment
from ampopt.ir.parts import is_foreign, variables_of_class, variables_of_function, walk

_COUNTED = (int, str, bytes)
"""Values that tell of earlier calls if they differ after equal ones; a time differs anyway."""


class Outside:
    """The class attributes and global variables that a model's code names, at one moment.

    With them is what functions keep that are not copied with the model: attributes, and lists as defaults.
    """

    def __init__(self, model: nn.Module) -> None:
        reached = [each for _, each in walk(model, classes=False) if isinstance(each, FunctionType)]
        self._functions = [function for function in reached if not is_foreign(function)]
        every = (kind for module in model.modules() for kind in type(module).__mro__)
        kinds = [kind for kind in dict.fromkeys(every) if not is_foreign(kind)]
        named = [*map(variables_of_function, self._functions), *map(variables_of_class, kinds)]
        self._variables = {label: (own, name) for found in named for label, own, name in found}
        self._before = self._now()

    def change(self) -> str | None:
        """The first that is another now, or holds something else."""
        changed = self._before.change_until(self._now(), by_value=True)
        return None if changed is None else changed.removeprefix("['").replace("']", "", 1)

    def _now(self) -> Moment:
        now = {label: own.get(name) for label, (own, name) in self._variables.items()}
        now |= {
            f"what {function.__module__}.{function.__qualname__} keeps: ": function
            for function in self._functions
        }
        return Moment(now, lambda part: isinstance(part, nn.Module), code=False)


def why_hidden(
    one: nn.Module, other: nn.Module, ignored: Collection[Attribute], outside: Outside
) -> str | None:
    """That calls leave something where no attribute of the model is, or in one that they do not seem to read.

    The copies were called in different ways, and last with the same inputs: what only tells of the last call,
    such as the features that a hook notes, is the same in both. `ignored` are attributes that calls are seen
    to set before they read them; `outside` was taken after the first calls.
    """
    for place in differences(one, other) if ignored else ():
        attribute = place.module, place.attribute
        if attribute in ignored and isinstance(value_at(one, *attribute), _COUNTED):
            return f"it keeps a state from call to call in its attribute {place}"
    if (hidden := hidden_difference(one, other)) is not None:
        return f"it keeps a state from call to call in its {hidden}"
    changed = outside.change()
    return None if changed is None else f"it changes {changed} when it is called"
