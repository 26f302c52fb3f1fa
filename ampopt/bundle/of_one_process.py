"""`OfOneProcess`: what a loaded bundle gives, which lives in the process that has loaded it."""

from __future__ import annotations

from typing import NoReturn

from ampopt.errors import InputError


class OfOneProcess:
    """A bundle's model in memory: its sessions, programs and state can be neither copied nor sent."""

    def __reduce__(self) -> NoReturn:
        """Called by `copy` and `pickle`; raises InputError."""
        raise InputError(
            "the model of a bundle can be neither copied nor pickled, because its sessions live in this "
            "process: load the bundle again, in each process that runs it"
        )
