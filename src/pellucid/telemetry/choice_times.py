"""The times of one choice while it streams: its first token, each next one, its end.

What a request took as a whole is its ledger's business and counted when that closes; here is what can be told at once.
`now` is on the clock of `arrival`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pellucid.core.errors import RequestRejected
from pellucid.telemetry.families import Counters, Histogram
from pellucid.telemetry.recent import RecentTimes


class Listeners(NamedTuple):
    """Where the observations of every choice go."""

    ttft: Histogram
    itl: Histogram
    tpot: Histogram
    ttft_prediction: Histogram
    choices: Counters
    rejected: Callable[[RequestRejected], None]
    recent: RecentTimes


class ChoiceTimes:
    """Observes one choice. Its owner calls `tokens` as they arrive and `end` once."""

    __slots__ = ("_arrival", "_first", "_last", "_listeners", "_num_tokens", "_predicted", "_predicted_at")

    def __init__(self, arrival: float, listeners: Listeners) -> None:
        self._listeners = listeners
        self._arrival = self._last = arrival
        self._first: float | None = None
        self._num_tokens = 0
        self._predicted = self._predicted_at = 0.0

    def predicted(self, ttft_seconds: float, submitted: float) -> None:
        """The engine accepted the request, and expects its first token this long after it was submitted."""
        self._predicted, self._predicted_at = ttft_seconds, submitted

    def tokens(self, num_tokens: int, now: float) -> None:
        """That many tokens arrived."""
        if self._first is None:
            self._first = now
            self._listeners.ttft.observe(now - self._arrival)
            self._listeners.recent.ttft.add(now - self._arrival, now)
            if self._predicted > 0.0:
                self._listeners.ttft_prediction.observe((now - self._predicted_at) / self._predicted)
        else:
            self._listeners.itl.observe((now - self._last) / num_tokens, num_tokens)
            self._listeners.recent.itl.add((now - self._last) / num_tokens, now, num_tokens)
        self._last = now
        self._num_tokens += num_tokens

    def rejected(self, error: RequestRejected) -> None:
        """The engine refused the request."""
        self._listeners.rejected(error)

    def end(self, reason: str) -> None:
        """The choice ended: stop, length, deadline, disconnect, rejected or error."""
        self._listeners.choices.add(1, reason)
        if self._first is not None and self._num_tokens > 1:
            self._listeners.tpot.observe((self._last - self._first) / (self._num_tokens - 1))
