"""What one choice was promised, used and took, told to all who keep count: metrics, its tenant's usage, the headers."""

from __future__ import annotations

import time
from collections.abc import MutableMapping

from pellucid.core.events import Queued, TokensGenerated
from pellucid.core.request import Request
from pellucid.server.usage import UsageLog
from pellucid.telemetry.prometheus import ServerMetrics

PREDICTED_TTFT_HEADER = "X-Pellucid-Predicted-TTFT-Ms"


class Meter:
    """Of one request to the engine; made when it is submitted. `headers` are those of the reply, whose head waits for
    the first token: of several choices, the first to be queued says what to expect."""

    def __init__(
        self, request: Request, metrics: ServerMetrics, usage: UsageLog | None, headers: MutableMapping[str, str]
    ) -> None:
        self._request, self._metrics, self._usage, self._headers = request, metrics, usage, headers
        self._times = metrics.choice(request.arrival)
        self._submitted = time.monotonic()
        self._predicted_ttft: float | None = None
        self._num_cached = 0
        self._num_output = 0

    def queued(self, event: Queued) -> None:
        """The engine accepted the request."""
        self._predicted_ttft = event.predicted_ttft
        if event.predicted_ttft is not None:
            self._headers.setdefault(PREDICTED_TTFT_HEADER, f"{1000 * event.predicted_ttft:.0f}")

    def tokens(self, event: TokensGenerated) -> None:
        """Tokens arrived."""
        now = time.monotonic()
        if self._num_output == 0 and self._predicted_ttft is not None:
            self._metrics.observe_prediction_error(now - self._submitted - self._predicted_ttft)
        self._num_cached = event.num_cached
        self._num_output += len(event.token_ids)
        self._times.tokens(len(event.token_ids), now)

    def end(self, reason: str) -> None:
        """The choice ended."""
        self._times.end(reason, time.monotonic())
        if self._usage is not None and self._num_output:
            self._usage.add(
                self._request.tenant,
                prompt_tokens=len(self._request.prompt) - self._num_cached,
                cached_tokens=self._num_cached,
                output_tokens=self._num_output,
            )
