"""The times of one choice, from arrival to its end, as the server sees them.

A choice is observed while it streams (first token, each next token) and reported once when it ends, however it ends.
`now` is on the clock of the request's `arrival`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pellucid.core.errors import RequestRejected
from pellucid.core.events import Finished
from pellucid.core.request import Request
from pellucid.telemetry.families import Histogram


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """What is known of a choice when it has ended. `reason`: stop, length, deadline, disconnect, rejected
    or error.

    `causes` are (ledger cause, seconds) in order; empty for a choice that the engine did not end by itself, as its
    ledger is lost with its stream. `tokens` are by source, and know of what had arrived by then.
    """

    request_id: str
    tenant: str
    reason: str
    arrival: float
    ended: float
    first_token: float | None
    seconds_per_token: float | None
    num_prompt: int
    tokens: Mapping[str, int]
    causes: tuple[tuple[str, float], ...] = ()


OnEnd = Callable[[EndedChoice], None]


class Listeners(NamedTuple):
    """Where the observations of every choice go."""

    ttft: Histogram
    itl: Histogram
    ttft_prediction: Histogram
    rejected: Callable[[RequestRejected], None]
    ended: OnEnd


class ChoiceTimes:
    """Observes one choice. Its owner calls `tokens` as they arrive, `finished` if the engine ends it, and `end` once;
    `on_end` hears of the end as well."""

    def __init__(self, request: Request, listeners: Listeners, on_end: OnEnd | None = None) -> None:
        self._request, self._listeners, self._on_end = request, listeners, on_end
        self._predicted = self._predicted_at = 0.0
        self._first: float | None = None
        self._last = request.arrival
        self._num_tokens = 0
        self._num_cached: int | None = None
        self._finished: Finished | None = None

    def predicted(self, ttft_seconds: float, now: float) -> None:
        """The engine accepted the request, and expects its first token this long from now."""
        self._predicted, self._predicted_at = ttft_seconds, now

    def tokens(self, num_tokens: int, num_cached: int, now: float) -> None:
        """That many tokens arrived; `num_cached` prompt tokens had come from the cache."""
        if self._first is None:
            self._first = now
            self._num_cached = num_cached
            self._listeners.ttft.observe(now - self._request.arrival)
            if self._predicted > 0.0:
                self._listeners.ttft_prediction.observe((now - self._predicted_at) / self._predicted)
        else:
            self._listeners.itl.observe((now - self._last) / num_tokens, num_tokens)
        self._last = now
        self._num_tokens += num_tokens

    def finished(self, event: Finished) -> None:
        """The engine ended the choice."""
        self._finished = event

    def rejected(self, error: RequestRejected) -> None:
        """The engine refused the request."""
        self._listeners.rejected(error)

    def end(self, reason: str, now: float) -> None:
        """The choice ended."""
        request, finished = self._request, self._finished
        per_token = None
        if self._first is not None and self._num_tokens > 1:
            per_token = (self._last - self._first) / (self._num_tokens - 1)
        ended = EndedChoice(
            request_id=request.id,
            tenant=request.tenant,
            reason=reason,
            arrival=request.arrival,
            ended=now,
            first_token=self._first,
            seconds_per_token=per_token,
            num_prompt=len(request.prompt),
            tokens=self._tokens_by_source(),
            causes=() if finished is None else finished.causes,
        )
        self._listeners.ended(ended)
        if self._on_end is not None:
            self._on_end(ended)

    def _tokens_by_source(self) -> dict[str, int]:
        """Of a choice that left before its first token only its output, nothing, is known."""
        tokens = {"output": self._num_tokens}
        if self._num_cached is not None:
            tokens |= {"computed": len(self._request.prompt) - self._num_cached, "cached_device": self._num_cached}
        return tokens
