"""Where a request's time went: every second between arrival and end stands under exactly one cause.

The first, coarse ledger: a clock that is always running under one cause and is switched when the cause changes, so the
causes sum to the end-to-end time by construction.
"""

from __future__ import annotations

QUEUE = "queue"
PREFILL = "prefill"
DECODE = "decode"
PREEMPTED = "preempted"


class Ledger:
    """Seconds per cause of one request, from `start` on. Causes keep the order in which they first appeared."""

    __slots__ = ("_since", "cause", "seconds")

    def __init__(self, cause: str, start: float) -> None:
        self.cause = cause
        self._since = start
        self.seconds: dict[str, float] = {}

    def switch(self, cause: str, now: float) -> None:
        """Charge the time since the last switch to the present cause; time runs under `cause` from `now` on."""
        self.seconds[self.cause] = self.seconds.get(self.cause, 0.0) + (now - self._since)
        self._since = now
        self.cause = cause

    def close(self, now: float) -> tuple[tuple[str, float], ...]:
        """Charge what is left and return (cause, seconds) pairs."""
        self.switch(self.cause, now)
        return tuple(self.seconds.items())
