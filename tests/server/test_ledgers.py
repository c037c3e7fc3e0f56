"""Ledgers over HTTP: in replies, by their route, for whom; closed whole however a request ends; kept and recorded."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.server.conftest import LIMITS, TEMPLATE, MakeApp, in_process, listening
from tests.server.fakes import FakeEngine
from tests.server.test_api import error, events
from tests.server.test_end_to_end import Speller
from tests.server.test_tenancy import ACME, FILE, LAB, OPERATOR, bearer

from pellucid.cli.keeping import keep_ledgers
from pellucid.core.errors import ConfigError, EngineDead, RequestRejected
from pellucid.core.ledger import CAUSES, Floors, LedgerReport, Phase, TokenCounts
from pellucid.core.scheduler import Scheduler
from pellucid.engine.engine import Engine
from pellucid.engine.local import LocalClient
from pellucid.server.app import create_app
from pellucid.server.config import ServedModel, ServerConfig
from pellucid.server.tenancy import Tenancy
from pellucid.telemetry.store import StoredRequest, StoreReader
from pellucid.text.chat_template import ChatTemplate
from pellucid.text.tokenizer import Tokenizer
from pellucid.workload.formats import open_trace
from pellucid.workload.lint import lint
from pellucid.workload.record import TraceRecorder
from pellucid.workload.trace import TraceError, chain_hashes

LONG = [3 + i % 90 for i in range(200)]


class Kept:
    """An application over a real scheduler, and the ledgers that its desk has closed."""

    def __init__(self, app: FastAPI, client: LocalClient, executor: Speller) -> None:
        self.app, self.client, self.executor = app, client, executor
        self.closed: list[StoredRequest] = []
        app.state.ledgers.listeners.append(lambda ended: self.closed.append(ended.record))

    async def next(self) -> StoredRequest:
        async with asyncio.timeout(10):
            while not self.closed:
                await asyncio.sleep(0.005)
        return self.closed.pop(0)


@pytest.fixture
async def kept(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Kept]:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    executor = Speller(LIMITS, tokenizer.encode("the theory is there. "))
    client = LocalClient(Engine(Scheduler(LIMITS), executor, time.monotonic))
    served = ServedModel("tiny", tokenizer, LIMITS, ChatTemplate(TEMPLATE, tokenizer))
    tenancy = Tenancy.of_file(path, served, api_key=None, state_directory=tmp_path / "state")
    yield Kept(create_app(client, served, ServerConfig(tenants=path), tenancy), client, executor)
    await client.close()


@pytest.fixture
async def http(kept: Kept) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(kept.app) as client:
        client.headers.update(bearer(ACME.key))
        yield client


def check(ledger: dict[str, Any]) -> None:
    """Both ledgers of a reply add up and name known causes."""
    assert set(ledger) == {"e2e_seconds", "causes", "first_token", "tokens", "floor_seconds"}
    for part in (ledger, ledger["first_token"]):
        assert set(part["causes"]) <= set(CAUSES)
        assert min(part["causes"].values()) > 0.0
        assert sum(part["causes"].values()) == pytest.approx(part["e2e_seconds"], rel=1e-9)
    assert ledger["first_token"]["e2e_seconds"] <= ledger["e2e_seconds"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_has_its_ledger_where_it_was_asked_for(http: httpx.AsyncClient, stream: bool) -> None:
    asked = {"prompt": LONG, "max_tokens": 5, "ignore_eos": True, "stream": stream}
    began = time.monotonic()
    reply = await http.post("/v1/completions", json=asked | {"include_ledger": True})
    wall = time.monotonic() - began
    last = events(reply)[-1] if stream else reply.json()
    check(last["ledger"])
    assert last["ledger"]["e2e_seconds"] <= wall
    assert last["ledger"]["tokens"] == {"prompt": 200, "cached": 0, "cached_host": 0, "recomputed": 0, "output": 5}
    assert {"tokenize", "prefill.own", "decode.own", "deliver"} <= last["ledger"]["causes"].keys()
    if stream:
        assert last["choices"] == []
    assert "ledger" not in (await http.post("/v1/completions", json=asked)).text


async def test_the_ledger_comes_with_the_usage_where_both_are_asked_for(http: httpx.AsyncClient) -> None:
    asked = {"prompt": "the", "max_tokens": 3, "stream": True, "include_ledger": True}
    reply = await http.post("/v1/completions", json=asked | {"stream_options": {"include_usage": True}})
    last = events(reply)[-1]
    assert last["usage"]["completion_tokens"] == 3
    check(last["ledger"])


async def test_of_several_choices_the_reply_has_the_last_and_the_route_has_each(
    http: httpx.AsyncClient, kept: Kept
) -> None:
    reply = await http.post(
        "/v1/completions", json={"prompt": [LONG, LONG[:4]], "max_tokens": 4, "include_ledger": True}
    )
    check(reply.json()["ledger"])
    request_id = reply.headers["X-Request-Id"]
    records = [await kept.next(), await kept.next()]
    assert [record.id for record in records] == [f"{request_id}-0", f"{request_id}-1"]
    assert reply.json()["ledger"]["tokens"]["prompt"] == 200
    assert (await http.get(f"/v1/requests/{request_id}-1/ledger")).json()["ledger"]["tokens"]["prompt"] == 4


async def test_a_ledger_is_its_tenants_and_the_operators(http: httpx.AsyncClient, kept: Kept) -> None:
    """The lab's short request runs beside acme's long prompt: it may know that, and not whose or how long it was."""
    kept.executor.seconds = 0.01
    small = {"prompt": "is", "max_tokens": 30, "ignore_eos": True}
    short = asyncio.create_task(http.post("/v1/completions", json=small, headers=bearer(LAB.key)))
    await asyncio.sleep(0.03)
    long = asyncio.create_task(http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 2}))
    reply, other = await short, await long
    request_id, foreign_id = reply.headers["X-Request-Id"], other.headers["X-Request-Id"]
    path = f"/v1/requests/{request_id}/ledger"
    mine = await http.get(path, headers=bearer(LAB.key))
    assert mine.status_code == 200
    assert mine.json()["ledger"]["causes"]["decode.stalled"] > 0.0
    assert mine.json()["ledger"]["blockers"][0] | {"seconds": 0} == {
        "request_id": "", "tenant": "", "num_prompt": 0, "seconds": 0
    }  # fmt: skip
    for secret in ("acme", foreign_id, "200"):
        assert secret not in json.dumps(mine.json()["ledger"]["blockers"]) + json.dumps(mine.json()["explanation"])
    seen = (await http.get(path, headers=bearer(OPERATOR.key))).json()
    assert seen["tenant"] == "lab"
    assert seen["ledger"]["blockers"][0] | {"seconds": 0} == {
        "request_id": foreign_id, "tenant": "acme", "num_prompt": 200, "seconds": 0
    }  # fmt: skip
    refusal = error(await http.get(path), 404)
    assert refusal == error(await http.get("/v1/requests/nothing/ledger"), 404) | {"message": refusal["message"]}
    assert error(await http.get(path, headers={"Authorization": ""}), 401)["code"] == "invalid_api_key"


async def test_a_request_that_is_being_answered_has_no_ledger_yet(http: httpx.AsyncClient, kept: Kept) -> None:
    kept.executor.seconds = 0.01
    asked = {"prompt": "is", "max_tokens": 60, "ignore_eos": True, "stream": True}
    task = asyncio.create_task(http.post("/v1/completions", json=asked))
    async with asyncio.timeout(10):
        while not (open_ids := list(kept.app.state.ledgers._open)):
            await asyncio.sleep(0.005)
    path = f"/v1/requests/{open_ids[0]}/ledger"
    assert error(await http.get(path), 409)["code"] == "still_open"
    assert error(await http.get(path, headers=bearer(LAB.key)), 404)["code"] == "request_not_found"
    await task
    assert (await http.get(path)).json()["reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_seen_before_the_engine_hears_of_it(
    http: httpx.AsyncClient, kept: Kept, stream: bool
) -> None:
    kept.executor.seconds = 0.005
    asked = {"prompt": "is", "max_tokens": 50, "stop": ["theory"], "include_ledger": True, "stream": stream}
    reply = await http.post("/v1/completions", json=asked)
    last = events(reply)[-1] if stream else reply.json()
    check(last["ledger"])
    record = await kept.next()
    assert record.reason == "stop"
    assert record.ledger.e2e_seconds >= last["ledger"]["e2e_seconds"]
    assert sum(s for _, s in record.ledger.causes) == pytest.approx(record.ledger.e2e_seconds)


async def test_without_waiting_for_it_the_ledger_ends_with_the_last_byte(http: httpx.AsyncClient, kept: Kept) -> None:
    """The engine runs a step longer than the reply; that is nobody's waiting time."""
    kept.executor.seconds = 0.05
    await http.post("/v1/completions", json={"prompt": "is", "max_tokens": 50, "stop": ["the"]})
    ended = time.time()
    record = await kept.next()
    assert record.reason == "stop"
    assert record.finished_at <= ended + 0.01
    assert sum(s for _, s in record.ledger.causes) == pytest.approx(record.ledger.e2e_seconds)


async def test_a_client_that_hangs_up_leaves_a_whole_ledger(kept: Kept) -> None:
    kept.executor.seconds = 0.005
    async with listening(kept.app) as url, httpx.AsyncClient(headers=bearer(ACME.key)) as http:
        asked = {"prompt": "is", "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with http.stream("POST", url + "/v1/completions", json=asked) as reply:
            await anext(reply.aiter_lines())
        record = await kept.next()
    assert (record.id, record.reason, record.tenant) == (reply.headers["X-Request-Id"], "disconnect", "acme")
    assert 0 < record.ledger.tokens.output < 200
    assert sum(s for _, s in record.ledger.causes) == pytest.approx(record.ledger.e2e_seconds)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_leaves_the_whole_time_as_a_gap(
    make_app: MakeApp, engine: FakeEngine, stream: bool
) -> None:
    app, closed = make_app(), []
    app.state.ledgers.listeners.append(lambda ended: closed.append(ended.record))
    engine.fail_after, engine.failure = 3, EngineDead("killed by signal 9")
    async with in_process(app) as http:
        engine.hold_after = 3
        task = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "stream": stream}))
        await asyncio.sleep(0.05)
        engine.state = "dead"
        engine.gate.set()
        await task
    (record,) = closed
    assert record.reason == "error"
    causes = dict(record.ledger.causes)
    assert sum(causes.values()) == pytest.approx(record.ledger.e2e_seconds)
    assert causes["engine.gap"] > 0.0
    assert causes.keys() <= {"tokenize", "engine.gap", "deliver"}


async def test_what_was_refused_has_no_ledger(make_app: MakeApp, engine: FakeEngine) -> None:
    app, closed = make_app(), []
    app.state.ledgers.listeners.append(lambda ended: closed.append(ended.record))
    engine.fail_after, engine.failure = 0, RequestRejected("no", "not today")
    async with in_process(app) as http:
        error(await http.post("/v1/completions", json={"prompt": "a"}), 400)
    assert closed == []
    assert app.state.ledgers.oldest_arrival is None


async def test_a_reader_who_does_not_read_is_what_the_time_goes_to(make_app: MakeApp, engine: FakeEngine) -> None:
    """Through a real socket with a small receive buffer. The engine is done at once; the reader starts half a second
    later."""
    report = LedgerReport(
        0.001,
        (Phase("queue", 0.0, 0.001, (("engine.gap", 0.001),)),),
        None,
        TokenCounts(1, 0, 0, 0, 400),
        Floors(0, 0, 0),
    )
    engine.say, engine.ledger = (lambda request: [(5,)] * 400), report
    app, closed = make_app(), []
    app.state.ledgers.listeners.append(lambda ended: closed.append(ended.record))
    asked = {"prompt": ["a"] * 8, "max_tokens": 400, "stream": True, "return_token_ids": True}
    async with listening(app) as url:
        raw = json.dumps(asked).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", int(url.rsplit(":", 1)[1])))
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
            )
            await loop.sock_sendall(client, head.encode() + raw)
            await asyncio.sleep(0.5)
            while await loop.sock_recv(client, 65536):
                pass
    assert len(closed) == 8
    for record in closed:
        causes = dict(record.ledger.causes)
        assert causes["client"] >= 0.9 * 0.5
        assert sum(causes.values()) == pytest.approx(record.ledger.e2e_seconds)


# -- kept and recorded ---------------------------------------------------------------------------------------------


async def test_the_store_outlives_the_server_and_memory(kept: Kept, http: httpx.AsyncClient, tmp_path: Path) -> None:
    path = tmp_path / "kept.sqlite"
    desk, served = kept.app.state.ledgers, ServedModel("tiny", None, LIMITS)  # type: ignore[arg-type]
    with keep_ledgers(desk, ServerConfig(store=str(path)), served):
        reply = await http.post("/v1/completions", json={"prompt": "the", "max_tokens": 3})
        request_id = reply.headers["X-Request-Id"]
    record = StoreReader(path).get(request_id)
    assert record is not None
    assert record == await kept.next()
    desk._recent.clear()
    assert (await http.get(f"/v1/requests/{request_id}/ledger")).json()["id"] == request_id
    assert error(await http.get(f"/v1/requests/{request_id[:-3]}/ledger"), 404)


@pytest.mark.parametrize("with_text", [False, True])
async def test_a_recording_is_a_trace_in_order_of_arrival(
    kept: Kept, http: httpx.AsyncClient, tmp_path: Path, with_text: bool
) -> None:
    path = tmp_path / "run.jsonl"
    config = ServerConfig(store="off", record=path, record_text=with_text)
    kept.executor.seconds = 0.002
    with keep_ledgers(kept.app.state.ledgers, config, ServedModel("tiny", None, LIMITS)):  # type: ignore[arg-type]
        slow = asyncio.create_task(http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 40}))
        await asyncio.sleep(0.02)
        await http.post("/v1/completions", json={"prompt": LONG[:50], "max_tokens": 2, "temperature": 0})
        await slow
    trace = open_trace(path)
    rows = list(trace)
    assert [row.input_len for row in rows] == [200, 50]
    assert [row.output_len for row in rows] == [40, 2]
    assert rows[0].prefix_block_hash == chain_hashes(LONG, 16)
    assert rows[1].prefix_block_hash == rows[0].prefix_block_hash[:3]
    assert [row.tenant for row in rows] == ["acme", "acme"]
    assert (rows[0].sampling, rows[1].sampling) == ({"temperature": 1.0}, None)
    assert rows[0].outcome is not None
    check(rows[0].outcome["ledger"])
    assert not lint(trace).findings
    assert (rows[0].input_token_ids is not None) == with_text
    if with_text:
        assert rows[1].input_token_ids == tuple(LONG[:50])
        assert len(rows[1].output_token_ids or ()) == 2


def test_a_recording_overwrites_nothing_and_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("mine")
    for target, said in ((path, "exists already"), (tmp_path / "no" / "run.jsonl", "No such file")):
        with pytest.raises(TraceError, match=said):
            TraceRecorder(target, block_size=16, origin="", began=0.0)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="--record-text says what --record writes"):
        ServerConfig(record_text=True)


@pytest.mark.parametrize("shown", [False, True])
async def test_where_a_prompt_left_the_cache_has_texts_only_for_an_operator_who_shows_texts(
    kept: Kept, tokenizer: Tokenizer, tmp_path: Path, shown: bool
) -> None:
    served = ServedModel("tiny", tokenizer, LIMITS, ChatTemplate(TEMPLATE, tokenizer))
    app = create_app(kept.client, served, ServerConfig(show_text=shown))
    closed: list[StoredRequest] = []
    app.state.ledgers.listeners.append(lambda ended: closed.append(ended.record))
    first, second = [*LONG], [*LONG[:100], *reversed(LONG[100:])]
    async with in_process(app) as client:
        for prompt in (first, second):
            reply = await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 2})
            assert reply.status_code == 200, reply.text
    async with asyncio.timeout(10):
        while len(closed) < 2:
            await asyncio.sleep(0.005)
    (miss,) = [miss for miss in closed[1].ledger.misses if miss.why == "divergent"]
    assert miss.at == 100.0
    assert miss.there == (), "tokens are texts: they are not kept"
    if shown:
        assert miss.texts is not None
        here, there = miss.texts
        assert here == tokenizer.decode(second[100:108])[: len(here)]
        assert there == tokenizer.decode(first[100:108])[: len(there)]
        assert len(there) > 0
    else:
        assert miss.texts is None
