"""Spans: the ledger's intervals under the caller's trace."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.telemetry.reports import report, stored

from pellucid.core.errors import ConfigError
from pellucid.core.ledger import CAUSES, TokenCounts
from pellucid.telemetry import spans
from pellucid.telemetry.spans import RequestSpans, intervals

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LEDGER = report(
    {"queue.memory": 0.25, "engine.gap": 0.0, "queue.fairness": 0.5},
    {"prefill.own": 0.5},
    {"decode.own": 0.5, "decode.stalled": 0.25},
    tokens=TokenCounts(7, 2, 0, 0, 3),
)


@pytest.fixture
def exported():
    """A RequestSpans, and a function that returns what it has exported."""
    sdk = pytest.importorskip(
        "opentelemetry.sdk.trace", reason="the extra is not installed: pip install pellucid[otel]"
    )
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    return RequestSpans(provider), memory.get_finished_spans


def children(spans, of):
    found = [span for span in spans if span.parent is not None and span.parent.span_id == of.context.span_id]
    return sorted(found, key=lambda span: span.start_time)


def test_a_span_a_cause_within_its_phase_within_the_callers_trace(exported):
    made, finished = exported
    made.send(stored("cmpl-1", LEDGER, tenant="acme", at=1e9), {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    spans = finished()
    (request,) = [span for span in spans if span.name == "request"]
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert (request.start_time, request.end_time) == (10**18 - 2 * 10**9, 10**18)
    phases = children(spans, request)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert [phase.start_time for phase in phases] == [request.start_time, *(p.end_time for p in phases[:-1])]
    assert phases[-1].end_time == request.end_time
    causes = {phase.name: [cause.name for cause in children(spans, phase)] for phase in phases}
    assert causes == {
        "queue": ["queue.memory", "queue.fairness"],
        "prefill": ["prefill.own"],
        "decode": ["decode.own", "decode.stalled"],
    }
    assert all(f"{span.context.trace_id:032x}" == TRACE for span in spans)
    assert request.events[0].timestamp == request.start_time + 1_250_000_000
    assert (request.attributes["pellucid.tokens.cached"], request.attributes["pellucid.tenant"]) == (2, "acme")
    assert request.status.is_ok


def test_without_a_parent_it_begins_a_trace_and_an_error_is_one(exported):
    made, finished = exported
    made.send(stored("cmpl-1", report(), reason="error"), {"traceparent": "nonsense"})
    (span,) = finished()
    assert span.parent is None
    assert not span.status.is_ok


SECONDS = st.dictionaries(st.sampled_from(sorted(CAUSES)), st.floats(0, 1e4), max_size=8)


@given(SECONDS, SECONDS, SECONDS)
def test_causes_tile_their_phase_and_phases_the_request(queue, prefill, decode):
    ledger = report(queue, prefill, decode)
    laid = list(intervals(ledger, 10**18))
    edges = [10**18, *(phase.end for phase in laid)]
    assert [phase.start for phase in laid] == edges[:-1]
    assert edges[-1] == 10**18 + round(ledger.e2e_seconds * 1e9)
    for phase in laid:
        inner = [phase.start, *(cause.end for cause in phase.parts)]
        assert [cause.start for cause in phase.parts] == pytest.approx(inner[:-1], abs=2, rel=0)
        assert inner[-1] == pytest.approx(phase.end, abs=2000, rel=0)


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'pellucid\[otel\]'"):
        spans.connect("http://127.0.0.1:4318")


def test_they_reach_a_collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install pellucid[otel] for this test")
    got: list[tuple[str, int]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, len(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    connected = spans.connect(f"http://127.0.0.1:{server.server_port}")
    connected.send(stored("cmpl-1", LEDGER), {})
    connected.close()
    server.shutdown()
    thread.join()
    server.server_close()
    assert [path for path, _ in got] == ["/v1/traces"]
    assert got[0][1] > 100


@pytest.mark.parametrize(
    ("given_url", "used"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("https://host", "https://host/v1/traces"),
        ("http://host:4318/", "http://host:4318/v1/traces"),
        ("http://host/custom/path", "http://host/custom/path"),
    ],
)
def test_the_endpoint(given_url, used):
    assert spans.traces_url(given_url) == used
