"""What one choice was promised, used and took, told to all who keep count: metrics, its tenant's usage, the headers,
its ledger."""

from __future__ import annotations

import time
from collections.abc import MutableMapping

from pellucid.core.errors import RequestRejected
from pellucid.core.events import Finished, Queued, TokensGenerated
from pellucid.server.ledgers import OpenLedger
from pellucid.server.usage import UsageLog
from pellucid.telemetry.prometheus import ServerMetrics

PREDICTED_TTFT_HEADER = "X-Pellucid-Predicted-TTFT-Ms"


class Meter:
    """Of one request to the engine, whose `ledger` was opened when it was submitted. `headers` are those of the reply,
    whose head waits for the first token: of several choices, the first to be queued says what to expect."""

    def __init__(
        self, ledger: OpenLedger, metrics: ServerMetrics, usage: UsageLog | None, headers: MutableMapping[str, str]
    ) -> None:
        self._ledger, self._request = ledger, ledger.request
        self._usage, self._headers = usage, headers
        self._times = metrics.choice(ledger.arrival)
        self._num_cached = 0
        self._num_output = 0

    @property
    def arrival(self) -> float:
        """When the request came in, on the monotonic clock."""
        return self._ledger.arrival

    def queued(self, event: Queued) -> None:
        """The engine accepted the request."""
        if event.predicted_ttft is not None:
            self._times.predicted(event.predicted_ttft, self._request.arrival)
            self._headers.setdefault(PREDICTED_TTFT_HEADER, f"{1000 * event.predicted_ttft:.0f}")

    def tokens(self, event: TokensGenerated) -> None:
        """Tokens arrived."""
        now = time.monotonic()
        self._num_cached = event.num_cached
        self._num_output += len(event.token_ids)
        self._times.tokens(len(event.token_ids), now)
        self._ledger.tokens(event.token_ids)

    def finished(self, event: Finished) -> None:
        """The engine is done with the request."""
        self._ledger.finished(event.ledger)

    def rejected(self, error: RequestRejected) -> None:
        """The engine refused the request."""
        self._times.rejected(error)

    def end(self, reason: str) -> None:
        """The choice ended."""
        self._times.end(reason)
        self._ledger.ended(reason)
        if self._usage is not None and self._num_output:
            self._usage.add(
                self._request.tenant,
                prompt_tokens=len(self._request.prompt) - self._num_cached,
                cached_tokens=self._num_cached,
                output_tokens=self._num_output,
            )
