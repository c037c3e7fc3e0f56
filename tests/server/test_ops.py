"""The ops page and its stream, over an engine that looks as it is told to."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.server.conftest import LIMITS, MakeApp, in_process, listening
from tests.server.fakes import QUIET, FakeEngine

from pellucid.core.cost import StepFeatures
from pellucid.core.step_record import BlockCounts, StepSummary
from pellucid.core.tenants import Tenant
from pellucid.engine.client import EngineStats
from pellucid.engine.lanes import Lane, Span
from pellucid.engine.memory_view import Branch, PoolView
from pellucid.engine.view import EngineView, TenantView
from pellucid.server.ops.document import MOST_CELLS, MOST_POINTS, Hello, Subject, Tick, rates
from pellucid.server.ops.live import MOST_BEHIND, LiveFeed
from pellucid.telemetry.machine_use import MachineLimits, MachineUse, StepWork
from pellucid.telemetry.recent import RecentTimes

PAGE = Path(__file__).parents[2] / "src" / "pellucid" / "server" / "ops" / "page"
MACHINE = MachineUse(StepWork(1e9, 1e3, 1e8, 1e9, 1e8, 1e4, 1e4, 1e5), MachineLimits(1e12, 1e10, "bf16", "A machine"))
SUBJECT = Subject("tiny", "0", LIMITS)
SPAN = Span(49.0, 50.0, (("prefill", 0.25), ("decode", 0.75)))
BUSY = EngineView(
    now=50.0,
    waiting={"queue": 2},
    num_swapped=1,
    pool=PoolView(bytes([1, 3, 7, 2, 0, 0]), bytes([1, 1, 2, 0, 0, 0]), 2, 3, 1, 0),
    host=PoolView(bytes([2, 0]), bytes([1, 0]), 1, 0, 1, 0),
    branches=(Branch(-1, 0, 2, 4, 3, 1, (5, 6)),),
    lanes=(Lane("cmpl-1", "a", "running", 49.0, 10, 4, 3, 0, (SPAN,), (5, 6)),),
    tenants=(TenantView(Tenant("a", weight=2.0, max_running=3), 1, {"queue": 2}, 2, 99.0, 12.0),),
)


def step(seconds: float, features: StepFeatures, num_prompt_tokens: int) -> StepSummary:
    return StepSummary(
        step_id=0,
        started=49.0,
        gap_seconds=0.0,
        schedule_seconds=0.0,
        seconds=seconds,
        commit_seconds=0.0,
        predicted_seconds=0.03,
        predicted_spread=0.0,
        phases=(),
        features=features,
        num_prompt_tokens=num_prompt_tokens,
        num_waiting=0,
        num_running=1,
        num_swapped=0,
        num_preempted=0,
        device_blocks=BlockCounts(64, 0, 0, 0),
    )


DECODE = step(0.02, StepFeatures(4, 400, 400, 4, 4), 0)
MIXED = step(0.05, StepFeatures(64, 3000, 99, 1, 0), 63)


@pytest.fixture
def feed(engine: FakeEngine) -> LiveFeed:
    return LiveFeed(engine, SUBJECT, RecentTimes(), period=0.01)


async def read(feed: LiveFeed) -> AsyncIterator[tuple[str, Any]]:
    """The stream's events as one watcher gets them."""
    inbox: asyncio.Queue[bytes] = asyncio.Queue()
    task = asyncio.create_task(feed.watch(inbox.put))
    try:
        while True:
            name, data, *_ = (await inbox.get()).decode().split("\n")
            yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def first_ticks(feed: LiveFeed, count: int) -> tuple[Hello, list[Tick]]:
    async with aclosing(read(feed)) as events, asyncio.timeout(10):
        name, hello = await anext(events)
        assert name == "hello"
        ticks = [await anext(events) for _ in range(count)]
    assert {name for name, _ in ticks} == {"tick"}
    return msgspec.convert(hello, Hello), [msgspec.convert(tick, Tick) for _, tick in ticks]


# -- the page ----------------------------------------------------------------------------------------------------------


async def test_the_page_and_its_parts(client: httpx.AsyncClient) -> None:
    reply = await client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    for path in PAGE.iterdir():
        part = await client.get(f"/ops/{path.name}")
        assert part.content == path.read_bytes()
        assert part.headers["x-content-type-options"] == "nosniff"
    assert (await client.head("/")).status_code == 200
    for name in ("nothing.js", "..%2f__init__.py", "document.py"):
        assert (await client.get(f"/ops/{name}")).status_code == 404


def test_the_page_names_only_its_own_files_and_every_script_finds_what_it_imports() -> None:
    html = (PAGE / "index.html").read_text()
    for address in re.findall(r'(?:src|href)="([^"#]+)"', html):
        assert (PAGE / address.removeprefix("ops/")).exists(), address
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for path in PAGE.glob("*.js"):
        text = path.read_text()
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "https://" not in text
        for wanted in re.findall(r'byId\("([^"$]+)"\)', text):
            assert wanted in ids, f"{path.name}: no element {wanted}"
        for names, module in re.findall(r'import \{([^}]*)\} from "\./([^"]+)"', text):
            exported = (PAGE / module).read_text()
            for name in (part.split(" as ")[0].strip() for part in names.split(",")):
                assert re.search(rf"export (async )?(function\*?|const|class) {name}\b", exported), (
                    f"{path.name}: {name}"
                )


async def test_it_can_be_turned_off(make_app: MakeApp) -> None:
    async with in_process(make_app(ops_page="off")) as client:
        for path in ("/", "/ops/page.js", "/v1/live"):
            assert (await client.get(path)).status_code == 404


async def test_the_data_needs_the_key_and_the_page_does_not(make_app: MakeApp) -> None:
    async with in_process(make_app(api_key="secret")) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/ops/page.js")).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            reply = await client.get("/v1/live", headers=headers)
            assert reply.status_code == 401
            assert "API key" in reply.json()["error"]["message"]


async def test_the_stream_over_http_and_an_open_page_does_not_hold_up_the_shutdown(make_app: MakeApp) -> None:
    app = make_app(api_key="secret")
    async with asyncio.timeout(4):  # a graceful shutdown waits 5 s for replies that do not end
        async with httpx.AsyncClient() as http, listening(app) as url:
            headers = {"Authorization": "Bearer secret"}
            async with http.stream("GET", url + "/v1/live", headers=headers) as reply:
                assert reply.headers["content-type"].startswith("text/event-stream")
                lines = reply.aiter_lines()
                assert await anext(lines) == "event: hello"
                hello = msgspec.json.decode((await anext(lines)).removeprefix("data: "), type=Hello)
                assert (hello.model, hello.num_blocks, hello.machine) == ("tiny", 64, None)
                assert "pellucid measure" in hello.advice
                assert [await anext(lines), await anext(lines)] == ["", "event: tick"]
                asyncio.get_running_loop().call_later(0.1, app.state.feed.close)
                assert [line async for line in lines][-2:] == ["data: [DONE]", ""]


# -- the stream --------------------------------------------------------------------------------------------------------


async def test_a_tick_says_what_the_engine_looks_like(engine: FakeEngine) -> None:
    engine.view = BUSY
    hello, (tick,) = await first_ticks(LiveFeed(engine, replace(SUBJECT, machine=MACHINE), RecentTimes()), 1)
    assert hello.machine is not None
    assert (hello.machine.flops, hello.machine.bandwidth, hello.machine.machine) == (1e12, 1e10, "A machine")
    assert hello.advice == ""
    assert (tick.state, tick.late, tick.running) == ("ready", 0.0, 0)
    inside = tick.inside
    assert inside is not None
    assert (inside.waiting, inside.swapped) == ({"queue": 2}, 1)
    assert b64decode(inside.blocks.flags) == BUSY.pool.flags
    assert b64decode(inside.blocks.owners) == BUSY.pool.owners
    assert (inside.blocks.free, inside.blocks.active, inside.blocks.cached) == (2, 3, 1)
    assert inside.host is not None
    assert (inside.host.total, inside.host.cached) == (2, 1)
    (lane,) = inside.lanes
    assert (lane.id, lane.arrival, lane.text) == ("cmpl-1", -1.0, "")
    assert lane.spans == [(-1.0, 0.0, [("prefill", 0.25), ("decode", 0.75)])]
    (tenant,) = inside.tenants
    assert (tenant.name, tenant.weight, tenant.max_running, tenant.received, tenant.lead) == ("a", 2.0, 3, 99.0, 12.0)
    assert inside.branches[0].text == ""


async def test_text_is_shown_only_where_the_operator_allows(engine: FakeEngine) -> None:
    engine.view = BUSY
    subject = replace(SUBJECT, decode=lambda ids: " ".join(map(str, ids)))
    hello, (tick,) = await first_ticks(LiveFeed(engine, subject, RecentTimes()), 1)
    assert hello.shows_text
    assert tick.inside is not None
    assert [row.text for row in (*tick.inside.lanes, *tick.inside.branches)] == ["5 6", "5 6"]
    assert engine.looks == [True]
    engine.looks.clear()
    hello, _ = await first_ticks(LiveFeed(engine, SUBJECT, RecentTimes()), 1)
    assert (hello.shows_text, engine.looks) == (False, [False])


async def test_one_producer_however_many_watch_and_none_when_nobody_does(engine: FakeEngine, feed: LiveFeed) -> None:
    assert engine.looks == []
    answers = await asyncio.gather(*(first_ticks(feed, 5) for _ in range(8)))
    assert len(engine.looks) < 20
    assert len({tuple(tick.at for tick in ticks) for _, ticks in answers}) == 1
    assert feed.num_watchers == 0
    looked = len(engine.looks)
    await asyncio.sleep(0.05)
    assert len(engine.looks) == looked
    await first_ticks(feed, 2)  # and it starts again
    assert len(engine.looks) > looked


async def test_a_slow_watcher_loses_documents_and_delays_nobody(engine: FakeEngine, feed: LiveFeed) -> None:
    gate, written = asyncio.Event(), []

    async def slow(document: bytes) -> None:
        written.append(document)
        if len(written) > 1:
            await gate.wait()

    task = asyncio.create_task(feed.watch(slow))
    _, ticks = await first_ticks(feed, 20)
    assert len(ticks) == 20
    assert len(written) == 2
    gate.set()
    feed.close()
    await asyncio.wait_for(task, 5)
    assert len(written) <= 2 + MOST_BEHIND
    assert json.loads(written[-1].split(b"data: ")[1])["at"] >= ticks[-1].at


async def test_a_long_step_and_an_engine_that_starts_or_is_dead_are_told(engine: FakeEngine, feed: LiveFeed) -> None:
    gate = asyncio.Event()

    async def look(*, tokens: bool = False) -> EngineView:
        await gate.wait()
        return QUIET

    engine.look = look  # type: ignore[method-assign]
    async with aclosing(read(feed)) as events, asyncio.timeout(10):
        await anext(events)
        late = [(await anext(events))[1] for _ in range(3)]
        assert all(tick["inside"] is None for tick in late)
        assert 0 < late[0]["late"] < late[2]["late"]
        gate.set()
        while (await anext(events))[1]["inside"] is None:
            pass
        engine.state, engine.reason = "dead", "the device fell off the bus"
        _, tick = await anext(events)
        while tick["state"] != "dead":
            _, tick = await anext(events)
        assert (tick["inside"], tick["reason"], tick["late"]) == (None, "the device fell off the bus", 0.0)


async def test_a_closed_feed_ends_at_once(feed: LiveFeed) -> None:
    feed.close()
    written: list[bytes] = []

    async def write(document: bytes) -> None:
        written.append(document)

    await asyncio.wait_for(feed.watch(write), 5)
    assert len(written) == 1


async def test_latencies_of_the_last_minute(client: httpx.AsyncClient, make_app: MakeApp) -> None:
    app = make_app()
    async with in_process(app) as http:
        await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5})
        _, (tick,) = await first_ticks(app.state.feed, 1)
    assert (tick.ttft.count, tick.itl.count) == (1, 4)
    assert tick.ttft.p50 is not None
    assert tick.ttft.p50 > 0


def test_rates_are_differences() -> None:
    before = EngineStats(prompt_tokens=100, cached_tokens=40, generated_tokens=7, num_steps=3, num_finished=1)
    after = EngineStats(prompt_tokens=300, cached_tokens=140, generated_tokens=27, num_steps=13, num_finished=2)
    found = rates(before, after, 2.0)
    assert (found.prompt, found.cached, found.output, found.steps, found.finished) == (50.0, 50.0, 10.0, 5.0, 0.5)


@pytest.mark.parametrize("num_blocks", [MOST_CELLS, MOST_CELLS + 1, 100_003])
def test_a_large_pool_is_drawn_in_groups(num_blocks: int) -> None:
    flags = bytes([1, 1, 3] * num_blocks)[:num_blocks]
    inside = SUBJECT.inside(BUSY._replace(pool=PoolView(flags, bytes(num_blocks), 0, num_blocks, 0, 0)))
    cells = b64decode(inside.blocks.flags)
    assert (inside.blocks.total, len(cells)) == (num_blocks, -(-num_blocks // inside.blocks.per_cell))
    assert num_blocks / 2 / MOST_CELLS < len(cells) / MOST_CELLS * inside.blocks.per_cell
    assert len(cells) <= MOST_CELLS
    if inside.blocks.per_cell >= 3:
        assert set(cells[:-1]) == {1}, "what most of a group's blocks are"


async def test_steps_are_told_once_with_their_place_on_the_roofline(engine: FakeEngine) -> None:
    feed = LiveFeed(engine, replace(SUBJECT, machine=MACHINE), RecentTimes(), period=0.01)
    (tell,) = engine.step_listeners
    tell([DECODE] * 9)  # nobody watches yet
    async with aclosing(read(feed)) as events, asyncio.timeout(10):
        assert [(await anext(events))[0] for _ in range(2)] == ["hello", "tick"]
        tell([DECODE, MIXED])
        ticks = [msgspec.convert((await anext(events))[1], Tick) for _ in range(3)]
    assert sum(tick.steps.count for tick in ticks) == 2
    steps = next(tick.steps for tick in ticks if tick.steps.count)
    assert (steps.count, steps.median, steps.longest, steps.predicted) == (2, 0.035, 0.05, 0.03)
    assert [point.decode for point in steps.points] == [True, False]
    work = MACHINE.work
    place = (steps.points[0].flops, steps.points[0].bytes, steps.points[0].seconds)
    assert place == (work.flops(DECODE.features), work.bytes(DECODE.features), 0.02)


def test_many_steps_become_a_bounded_number_of_points() -> None:
    assert 0 < len(replace(SUBJECT, machine=MACHINE).steps([DECODE, MIXED] * 200).points) <= MOST_POINTS
