"""Random choices that depend on a seed alone, on every machine and in every version of Python."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class Pick:
    """Choices by short verbs. Two of the same seed, asked the same, choose the same."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(str(seed))

    def one(self, *options: T) -> T:
        """One of the options, each as likely as any other."""
        return options[self._random.randrange(len(options))]

    def maybe(self, chance: float = 0.5) -> bool:
        """True with this probability."""
        return self._random.random() < chance

    def number(self, least: int, most: int) -> int:
        """A whole number between the two, both included."""
        return self._random.randint(least, most)

    def fraction(self) -> float:
        """A number from 0 to 1."""
        return self._random.random()

    def weighted(self, options: Mapping[str, float]) -> str:
        """One of the keys, as likely as its value says."""
        return self._random.choices(list(options), weights=list(options.values()))[0]

    def divisor(self, *numbers: int) -> int:
        """A number that divides all of these, the extremes (1 and the largest) more often."""
        common = [n for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers)]
        return self.one(common[0], common[-1], self.one(*common))

    def seed(self) -> int:
        """A seed for something else."""
        return self._random.getrandbits(32)
