"""OpenTelemetry: a span for each choice, one in it for each phase of its ledger, one in that for each cause.

    request                [arrival .............................................. last byte]
      receive              [.]
      queue                  [........]
        queue.memory         [.....]
        queue.fairness            [..]
      prefill                         [...]
      decode                               [...........................................]

The parent is whatever the client's `traceparent` says, so a trace goes on from the caller through the engine's causes.
Phases are moments: they tile the span. Causes are sums: inside their phase they are laid end to end, largest truth they
have. Sending is the SDK's business, in a thread of its own with a bounded queue; a collector that is away loses spans,
never requests.

The SDK is an optional extra (`pip install pellucid[otel]`); nothing here imports it before `connect` is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pellucid.core.errors import ConfigError
from pellucid.core.ledger import LedgerReport
from pellucid.telemetry.store import StoredRequest

SERVICE = "pellucid"
TRACE_HEADERS = ("traceparent", "tracestate")
_FAILED = ("error", "deadline")


class Interval(NamedTuple):
    """A part of a request: nanoseconds since the epoch, and what it is made of."""

    name: str
    start: int
    end: int
    parts: tuple[Interval, ...] = ()


class RequestSpans:
    """Makes the spans of requests. `provider` is an OpenTelemetry SDK TracerProvider."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)
        self._extract = TraceContextTextMapPropagator().extract
        self._server, self._within = SpanKind.SERVER, set_span_in_context
        self._error = Status(StatusCode.ERROR)

    def send(self, record: StoredRequest, trace: Mapping[str, str]) -> None:
        """Make the spans of a request that ended. `trace` has what `TRACE_HEADERS` its caller sent."""
        ledger = record.ledger
        end = round(record.finished_at * 1e9)
        start = end - round(ledger.e2e_seconds * 1e9)
        parent = self._extract(trace)
        span = self._tracer.start_span("request", parent, self._server, _attributes(record), start_time=start)
        if ledger.first_token_seconds is not None:
            span.add_event("first token", timestamp=start + round(ledger.first_token_seconds * 1e9))
        if record.reason in _FAILED:
            span.set_status(self._error)
        self._send_parts(span, intervals(ledger, start))
        span.end(end)

    def close(self) -> None:
        """Send what is waiting, then stop. May take seconds where the collector is away."""
        self._provider.shutdown()

    def _send_parts(self, span: Any, parts: Iterator[Interval] | tuple[Interval, ...]) -> None:
        inside = self._within(span)
        for part in parts:
            child = self._tracer.start_span(part.name, inside, start_time=part.start)
            self._send_parts(child, part.parts)
            child.end(part.end)


def connect(endpoint: str) -> RequestSpans:
    """Spans to the OTLP collector at `endpoint` (HTTP; `/v1/traces` is added where no path is given). Raises
    ConfigError without the SDK."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs OpenTelemetry ({error.name} is missing); pip install 'pellucid[otel]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
    return RequestSpans(provider)


def traces_url(endpoint: str) -> str:
    """The endpoint itself if it has a path, else that of OTLP's traces on it."""
    scheme, _, rest = endpoint.partition("://")
    host, _, path = rest.partition("/")
    return endpoint if path else f"{scheme}://{host}/v1/traces"


def intervals(ledger: LedgerReport, start: int) -> Iterator[Interval]:
    """The phases of a ledger that began at `start` (nanoseconds), each with its causes laid end to end."""
    for phase in ledger.phases:
        if phase.end > phase.start:
            causes = [(cause, seconds) for cause, seconds in phase.causes if seconds > 0.0]
            parts, at = [], phase.start
            for cause, seconds in causes:
                parts.append(Interval(cause, start + round(at * 1e9), start + round((at + seconds) * 1e9)))
                at += seconds
            yield Interval(phase.name, start + round(phase.start * 1e9), start + round(phase.end * 1e9), tuple(parts))


def _attributes(record: StoredRequest) -> dict[str, str | int | float]:
    ledger = record.ledger
    attributes: dict[str, str | int | float] = {
        "pellucid.request_id": record.id,
        "pellucid.tenant": record.tenant,
        "pellucid.finish_reason": record.reason,
        "gen_ai.usage.input_tokens": ledger.tokens.prompt,
        "gen_ai.usage.output_tokens": ledger.tokens.output,
        "pellucid.tokens.cached": ledger.tokens.cached,
        "pellucid.tokens.recomputed": ledger.tokens.recomputed,
        "pellucid.num_steps": ledger.num_steps,
        "pellucid.num_preemptions": ledger.num_preemptions,
    }
    if ledger.first_token_seconds is not None:
        attributes["pellucid.time_to_first_token_seconds"] = ledger.first_token_seconds
    return attributes
