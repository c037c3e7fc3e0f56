"""What `/metrics` shows, in Prometheus' text format.

Names are `pellucid_*` without colons, times in seconds. What the engine counts is read from its snapshot when asked for
(one copy of each number, no drift); what only the server can see, the times of a reply, is observed as it happens.

Invariant: one registry per `ServerMetrics`, so that several applications in one process do not share numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

_BLOCK_STATES = ("free", "active", "cached", "in_flight")
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "cached_tokens": "Prompt tokens that came from the prefix cache.",
    "generated_tokens": "Output tokens generated.",
    "num_preemptions": "Times a running request lost its blocks.",
    "num_finished": "Requests that ended in the engine, for whatever reason.",
}
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
_ERROR_BUCKETS = (-3.2, -1.6, -0.8, -0.4, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_E2E_BUCKETS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6)

CONTENT_TYPE = CONTENT_TYPE_LATEST


class ServerMetrics:
    """The numbers of one server. `snapshot` returns the engine's: `num_running`, `num_waiting`, `blocks_*`,
    `num_steps`, `step_seconds` and the counters above, by name."""

    def __init__(self, snapshot: Callable[[], Mapping[str, float]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineNumbers(snapshot))
        self._http = Counter(
            "pellucid_http_requests", "Replies, by route and HTTP status.", ["route", "status"], registry=self.registry
        )
        self._finished = Counter(
            "pellucid_choices_finished",
            "Choices that ended, by reason: stop, length, disconnect, rejected, deadline or error.",
            ["reason"],
            registry=self.registry,
        )
        self._ttft = self._histogram(
            "pellucid_time_to_first_token_seconds", "From arrival of a request to its first token.", _TTFT_BUCKETS
        )
        self._itl = self._histogram(
            "pellucid_inter_token_latency_seconds",
            "Time between tokens of a choice; tokens that arrive together share it equally.",
            _ITL_BUCKETS,
        )
        self._e2e = self._histogram(
            "pellucid_e2e_seconds", "From arrival of a request to the end of a choice.", _E2E_BUCKETS
        )

        self._prediction_error = self._histogram(
            "pellucid_ttft_prediction_error_seconds",
            "Time to first token, from submission, less what was predicted: above 0 it came late.",
            _ERROR_BUCKETS,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def count_reply(self, route: str, status: int) -> None:
        """One HTTP reply. `route` is the path as declared, never as asked, so that it has few values."""
        self._http.labels(route, str(status)).inc()

    def choice(self, arrival: float) -> ChoiceTimes:
        """A choice of a request that arrived at `arrival` (seconds, any clock) begins."""
        return ChoiceTimes(self._ttft, self._itl, self._e2e, self._finished, arrival)

    def observe_prediction_error(self, seconds: float) -> None:
        """A first token came that much later than predicted."""
        self._prediction_error.observe(seconds)

    def render(self) -> bytes:
        """The body of `/metrics`."""
        return generate_latest(self.registry)


class ChoiceTimes:
    """Observes the tokens of one choice; `now` is on the clock of its `arrival`."""

    __slots__ = ("_arrival", "_e2e", "_finished", "_itl", "_last", "_ttft")

    def __init__(self, ttft: Histogram, itl: Histogram, e2e: Histogram, finished: Counter, arrival: float) -> None:
        self._ttft, self._itl, self._e2e, self._finished = ttft, itl, e2e, finished
        self._arrival = arrival
        self._last: float | None = None

    def tokens(self, num_tokens: int, now: float) -> None:
        """That many tokens arrived."""
        if self._last is None:
            self._ttft.observe(now - self._arrival)
        else:
            share = (now - self._last) / num_tokens
            for _ in range(num_tokens):
                self._itl.observe(share)
        self._last = now

    def end(self, reason: str, now: float) -> None:
        """The choice ended."""
        self._finished.labels(reason).inc()
        self._e2e.observe(now - self._arrival)


class _EngineNumbers(Collector):
    """Turns the engine's snapshot into metrics when they are asked for."""

    def __init__(self, snapshot: Callable[[], Mapping[str, float]]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask an engine that may still be starting."""
        return ()

    def collect(self) -> Iterable[Metric]:
        numbers = self._snapshot()
        yield GaugeMetricFamily("pellucid_running", "Requests being computed.", numbers["num_running"])
        yield GaugeMetricFamily("pellucid_waiting", "Requests waiting to be admitted.", numbers["num_waiting"])
        blocks = GaugeMetricFamily("pellucid_blocks", "KV cache blocks, by state.", labels=["state"])
        for state in _BLOCK_STATES:
            blocks.add_metric([state], numbers[f"blocks_{state}"])
        yield blocks
        yield SummaryMetricFamily(
            "pellucid_step_seconds", "Wall time of steps.", int(numbers["num_steps"]), numbers["step_seconds"]
        )
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"pellucid_{name.removeprefix('num_')}", text, numbers[name])
