"""`/v1/steps` over HTTP, and requests that leave spans."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from tests.server.conftest import MakeApp, in_process, listening
from tests.server.fakes import FakeEngine
from tests.server.test_end_to_end import Stack
from tests.telemetry.steps import record

from pellucid.server.app import create_app
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.telemetry.spans import RequestSpans
from pellucid.text.tokenizer import Tokenizer


@pytest.fixture
async def stack(tokenizer: Tokenizer) -> AsyncIterator[Stack]:
    stack = Stack(tokenizer)
    async with listening(stack.app) as stack.url:
        yield stack


async def test_the_last_steps_of_a_real_engine(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as http:
        reply = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5})
        rows = (await http.get("/v1/steps", params={"last": "3"})).json()["data"]
    assert [row["step_id"] for row in rows] == [2, 3, 4]
    assert {s["request_id"] for row in rows for s in row["sequences"]} == {reply.json()["id"]}
    assert rows[-1]["num_running"] == 0


async def test_how_many_can_be_asked_for(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.records = [record(i) for i in range(300)]
    assert len((await client.get("/v1/steps")).json()["data"]) == 100
    assert (await client.get("/v1/steps?last=2")).json()["data"] == [record(298).to_json(), record(299).to_json()]
    for wrong in ("0", "-1", "x", "1e3", "100001", ""):
        reply = await client.get("/v1/steps", params={"last": wrong})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "last")


async def test_it_asks_for_the_key(make_app: MakeApp) -> None:
    async with in_process(make_app(api_key="secret")) as client:
        assert (await client.get("/v1/steps")).status_code == 401
        good = {"Authorization": "Bearer secret"}
        assert (await client.get("/v1/steps", headers=good)).status_code == 200


async def test_every_choice_leaves_a_span_under_the_callers(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    sdk = pytest.importorskip(
        "opentelemetry.sdk.trace", reason="the extra is not installed: pip install pellucid[otel]"
    )
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    served = ServedModel("tiny", tokenizer, Stack(tokenizer).limits)
    app = create_app(engine, served, ServerConfig(), spans=RequestSpans(provider))
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with in_process(app) as client:
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        await client.post("/v1/completions", json={"prompt": "hi", "n": 2, "best_of": 2}, headers=headers)
        await client.post("/v1/completions", json={"prompt": "hi", "stream": True})
    spans = [span for span in memory.get_finished_spans() if span.name == "request"]
    traces = [f"{span.context.trace_id:032x}" for span in spans]
    assert traces[:2] == [trace, trace]
    assert traces[2] != trace
    assert all(span.attributes["gen_ai.usage.output_tokens"] == 16 for span in spans)


async def test_vllms_names_on_demand(make_app: MakeApp) -> None:
    for compat, shown in (("none", False), ("vllm", True)):
        async with in_process(make_app(metrics_compat=compat)) as client:
            assert ("vllm:num_requests_running" in (await client.get("/metrics")).text) == shown
