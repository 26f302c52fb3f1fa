"""Counts how a served model answered calls, and reports each event to callbacks."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Literal

from ampopt.errors import InputError

logger = logging.getLogger("ampopt")

Kind = Literal["original", "capture", "refusal"]

MOST_REASONS = 32
"""Largest number of reasons counted separately; further reasons are counted together."""

OTHER_REASONS = "other reasons"


@dataclasses.dataclass(frozen=True)
class Event:
    """An event that a robot's supervisor needs to know.

    `kind`: "original": the original model answered a call instead of a program; "capture": a program was made
    during a call, which takes seconds; "refusal": a call raised InputError or StrictError. `call`: the call's
    tensors, such as `float32[1, 3, 480, 640] on cpu`.
    """

    kind: Kind
    reason: str
    call: str


Callback = Callable[[Event], object]


@dataclasses.dataclass(frozen=True)
class Health:
    """Counts of events since `since` (UTC); all are zero if every call was answered as planned.

    `served_by_original`: calls that the original answered, `reasons`: their number for each reason.
    `late_captures`: programs made during a call. `refusals`: calls that raised InputError or StrictError.
    `chose_original`: `optimize` found nothing faster, so that the original answers every call. This is not a
    failure, and no such call is counted.
    """

    since: datetime.datetime
    served_by_original: int
    late_captures: int
    refusals: int
    reasons: Mapping[str, int]
    chose_original: bool

    @property
    def is_good(self) -> bool:
        """Whether all calls were answered as planned."""
        return not (self.served_by_original or self.late_captures or self.refusals)

    def __add__(self, other: Health) -> Health:
        """The sum of the counts of two modules that serve together."""
        reasons = dict(self.reasons)
        for reason, count in other.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
        return Health(
            min(self.since, other.since),
            self.served_by_original + other.served_by_original,
            self.late_captures + other.late_captures,
            self.refusals + other.refusals,
            reasons,
            self.chose_original and other.chose_original,
        )


class Monitor:
    """Counts events and passes them to callbacks. Thread-safe; calls that a program answers are not recorded.

    Callbacks run in the thread of the call, outside of all locks; exceptions from them are logged.
    """

    def __init__(self, *, chose_original: bool = False) -> None:
        self._lock, self._chose_original = threading.Lock(), chose_original
        self._since = datetime.datetime.now(datetime.timezone.utc)
        self._counts: dict[Kind, int] = {"original": 0, "capture": 0, "refusal": 0}
        self._reasons: dict[str, int] = {}
        self._callbacks: tuple[Callback, ...] = ()

    def health(self) -> Health:
        """The current counts."""
        with self._lock:
            counts = self._counts
            return Health(
                self._since,
                counts["original"],
                counts["capture"],
                counts["refusal"],
                dict(self._reasons),
                self._chose_original,
            )

    def tell(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every event from now on; call the returned function to stop."""
        with self._lock:
            self._callbacks += (callback,)

        def stop() -> None:
            with self._lock:
                self._callbacks = tuple(each for each in self._callbacks if each is not callback)

        return stop

    def refusing(self, check: Callable[[], None], call: str) -> None:
        """Do a check of a call; an InputError that it raises is counted."""
        try:
            check()
        except InputError as error:
            self.note(Event("refusal", str(error), call))
            raise

    def note(self, event: Event) -> None:
        """Count an event and pass it to the callbacks."""
        with self._lock:
            self._counts[event.kind] += 1
            if event.kind == "original":
                known = event.reason in self._reasons or len(self._reasons) < MOST_REASONS
                reason = event.reason if known else OTHER_REASONS
                self._reasons[reason] = self._reasons.get(reason, 0) + 1
            callbacks = self._callbacks
        for callback in callbacks:
            try:
                callback(event)
            except Exception:  # a supervisor's mistake must not stop the robot's perception
                logger.exception("ampopt: a callback of on_health failed")
