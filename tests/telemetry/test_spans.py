"""Spans: the ledger's intervals under the caller's trace."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core.errors import ConfigError
from pellucid.telemetry import spans
from pellucid.telemetry.choice_times import EndedChoice
from pellucid.telemetry.spans import RequestSpans, intervals

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CAUSES = (("queue.memory", 0.25), ("prefill.own", 0.5), ("decode.own", 1.25))


def choice(reason: str = "stop", causes=CAUSES) -> EndedChoice:
    return EndedChoice(
        request_id="cmpl-1",
        tenant="acme",
        reason=reason,
        arrival=100.0,
        ended=102.0,
        first_token=100.75,
        seconds_per_token=0.1,
        num_prompt=7,
        tokens={"output": 3, "computed": 5, "cached_device": 2},
        causes=causes,
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


def test_a_span_a_cause_within_the_request_within_the_callers_trace(exported):
    made, finished = exported
    made.for_request({"traceparent": f"00-{TRACE}-{PARENT}-01"})(choice())
    *children, span = finished()
    assert (span.name, [child.name for child in children]) == ("request", [name for name, _ in CAUSES])
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert all(child.parent.span_id == span.context.span_id for child in children)
    edges = [span.start_time, *(child.end_time for child in children)]
    assert [child.start_time for child in children] == edges[:-1], "end to end"
    assert (edges[-1], span.end_time) == (span.start_time + 2_000_000_000, span.start_time + 2_000_000_000)
    assert span.events[0].timestamp == span.start_time + 750_000_000
    assert span.attributes["pellucid.tokens.cached_device"] == 2
    assert span.attributes["pellucid.tenant"] == "acme"
    assert span.status.is_ok


def test_without_a_parent_it_begins_a_trace_and_an_error_is_one(exported):
    made, finished = exported
    made.for_request({"traceparent": "nonsense"})(choice("error", causes=()))
    (span,) = finished()
    assert span.parent is None
    assert not span.status.is_ok


@given(st.lists(st.floats(0, 1e4), max_size=20))
def test_intervals_touch_and_sum_up(seconds):
    laid = list(intervals(choice(causes=tuple(("c", s) for s in seconds)), arrival=10**18))
    ends = [10**18, *(interval.end for interval in laid)]
    assert [interval.start for interval in laid] == ends[:-1]
    assert ends[-1] - 10**18 == pytest.approx(sum(seconds) * 1e9, abs=len(seconds) + 1, rel=1e-9)


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'pellucid\[otel\]'"):
        spans.connect("http://127.0.0.1:4318")


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
