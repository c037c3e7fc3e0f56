"""OpenTelemetry: one span a choice, with a child for each interval that its ledger names, sent to an OTLP collector.

    request chatcmpl-...     [arrival ................................................. end]
      queue                  [....]
      prefill                     [...............]
      decode                                       [......................................]

The parent is whatever the client's `traceparent` says, so a trace goes on from the caller through the engine's causes.
The intervals are the ledger's: none overlap, together they are the span. Sending is the SDK's business, in a thread of
its own with a bounded queue; a collector that is away loses spans, never requests.

The SDK is an optional extra (`pip install pellucid[otel]`); nothing here imports it before `connect` is called.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pellucid.core.errors import ConfigError
from pellucid.telemetry.choice_times import EndedChoice, OnEnd

SERVICE = "pellucid"
_FAILED = ("error", "deadline")


class Interval(NamedTuple):
    """A part of a span: nanoseconds since the epoch."""

    name: str
    start: int
    end: int


class RequestSpans:
    """Makes the spans of choices. `provider` is an OpenTelemetry SDK TracerProvider."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)
        self._extract = TraceContextTextMapPropagator().extract
        self._server, self._within = SpanKind.SERVER, set_span_in_context
        self._error = Status(StatusCode.ERROR)

    def for_request(self, headers: Mapping[str, str]) -> OnEnd:
        """What to call when a choice of a request with these headers has ended."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = self._extract(carrier)

        def ended(choice: EndedChoice) -> None:
            self._send(choice, parent)

        return ended

    def close(self) -> None:
        """Send what is waiting, then stop. May take seconds where the collector is away."""
        self._provider.shutdown()

    def _send(self, choice: EndedChoice, parent: Any) -> None:
        epoch = time.time_ns() - round(time.monotonic() * 1e9)  # of the clock that `arrival` is on

        def nanoseconds(at: float) -> int:
            return epoch + round(at * 1e9)

        span = self._tracer.start_span(
            "request", parent, self._server, _attributes(choice), start_time=nanoseconds(choice.arrival)
        )
        if choice.first_token is not None:
            span.add_event("first token", timestamp=nanoseconds(choice.first_token))
        if choice.reason in _FAILED:
            span.set_status(self._error)
        inside = self._within(span)
        for interval in intervals(choice, nanoseconds(choice.arrival)):
            child = self._tracer.start_span(interval.name, inside, start_time=interval.start)
            child.end(interval.end)
        span.end(nanoseconds(choice.ended))


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


def intervals(choice: EndedChoice, arrival: int) -> Iterator[Interval]:
    """The ledger's causes laid end to end from `arrival` (nanoseconds), in their order."""
    seconds = 0.0
    for name, more in choice.causes:
        start = arrival + round(seconds * 1e9)
        seconds += more
        yield Interval(name, start, arrival + round(seconds * 1e9))


def _attributes(choice: EndedChoice) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "pellucid.request_id": choice.request_id,
        "pellucid.tenant": choice.tenant,
        "pellucid.finish_reason": choice.reason,
        "gen_ai.usage.input_tokens": choice.num_prompt,
        "gen_ai.usage.output_tokens": choice.tokens["output"],
    }
    for source, count in choice.tokens.items():
        attributes[f"pellucid.tokens.{source}"] = count
    if choice.first_token is not None:
        attributes["pellucid.time_to_first_token_seconds"] = choice.first_token - choice.arrival
    return attributes
