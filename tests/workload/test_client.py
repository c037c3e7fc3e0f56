"""The client against a server that knows the truth: its own stamps, what it was sent, how many it had open."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from tests.workload.fake_server import FakeServer

from pellucid.workload.client import BenchError, LoadClient, LoadItem, Target, server_tokenizer, single_token_words
from pellucid.workload.drive import run_closed, run_open
from pellucid.workload.metrics import SLO
from pellucid.workload.prompts import WORDS, PromptMaker, expected_cached
from pellucid.workload.run import RunOptions, run_workload
from pellucid.workload.trace import TraceRequest
from pellucid.workload.workloads import HeadOfLine, Pacing, Replay, named_workload

SLACK = 0.5
"""Seconds that a read may come after its write on a busy machine. Reads are never early."""


def item(index: int, due: float | None = None, output_len: int = 5, **more: object) -> LoadItem:
    return LoadItem(index=index, prompt="hello there", output_len=output_len, due=due, **more)  # type: ignore[arg-type]


async def test_stamps_agree_with_the_server() -> None:
    async with (
        FakeServer(tokens_per_chunk=2).running() as server,
        LoadClient(Target(url=server.url, model="fake")) as client,
    ):
        client.start_clock()
        origin = time.perf_counter() - client.now()
        record = await client.send(item(0, output_len=7))
    assert record.status == "ok"
    assert [chunk.num_tokens for chunk in record.chunks] == [2, 2, 2, 1]
    for chunk, written in zip(record.chunks, server.stamps[0], strict=True):
        assert 0.0 <= chunk.at - (written - origin) < SLACK
    assert 0.0 <= server.arrivals[0] - origin - record.sent < SLACK
    assert (record.received, record.prompt_tokens, record.finish_reason) == (7, 2, "length")
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("fake", 7, True, True)


async def test_chat_endpoint_and_extra_fields() -> None:
    target = {"model": "fake", "endpoint": "chat", "extra": {"top_k": 3}}
    async with FakeServer().running() as server, LoadClient(Target(url=server.url + "/v1/", **target)) as client:  # type: ignore[arg-type]
        record = await client.send(item(0))
    assert record.ok
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello there"}]
    assert server.bodies[0]["top_k"] == 3


@pytest.mark.parametrize(("fault", "status"), [("status", "http-503"), ("die", "connection"), ("hang", "timeout")])
async def test_faults_become_records(fault: str, status: str) -> None:
    async with (
        FakeServer(fail=fault).running() as server,
        LoadClient(Target(url=server.url, model="fake", timeout=1.0)) as client,
    ):
        record = await client.send(item(0))
    assert record.status == status
    assert record.detail
    assert len(record.chunks) == (0 if fault == "status" else 2)


async def test_nobody_listens() -> None:
    async with LoadClient(Target(url="http://127.0.0.1:9", model="fake")) as client:
        assert (await client.send(item(0))).status == "connection"
        with pytest.raises(BenchError, match="is the server running there"):
            await client.served_model()


async def test_connections_are_reused() -> None:
    async with FakeServer().running() as server, LoadClient(Target(url=server.url, model="fake")) as client:
        for index in range(4):
            await client.send(item(index))
        assert client.num_connects == 1
        await asyncio.gather(*(client.send(item(index)) for index in range(3)))
        assert client.num_connects == 3


async def test_a_kept_connection_that_breaks_is_not_a_failed_request() -> None:
    """The server answers the first request of each connection and closes when it reads a second one."""
    num_read = 0
    reply = b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_read
        for answers in (True, False):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            num_read += 1
            if answers:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(reply) + reply)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, LoadClient(Target(url=f"http://127.0.0.1:{port}")) as client:
        first = await client.send(LoadItem(index=0, prompt="x", output_len=1))
        second = await client.send(LoadItem(index=1, prompt="x", output_len=1))
    assert [first.status, second.status] == ["ok", "ok"]
    assert num_read == 3
    assert client.num_connects == 2


async def test_open_loop_does_not_wait_for_answers() -> None:
    """Each answer takes half a second, requests are due every 20 ms: all ten are open at once."""
    async with (
        FakeServer(first_delay=0.5).running() as server,
        LoadClient(Target(url=server.url, model="fake")) as client,
    ):
        client.start_clock()
        records = await run_open(client, [item(i, due=0.02 * i) for i in range(10)])
    assert server.max_open == 10
    assert [record.index for record in records] == list(range(10))
    for record in records:
        assert record.scheduled == pytest.approx(0.02 * record.index)
        assert record.sent >= record.scheduled


async def test_open_loop_keeps_the_load_up_until_the_cohort_is_answered() -> None:
    async with (
        FakeServer(first_delay=0.3).running() as server,
        LoadClient(Target(url=server.url, model="fake")) as client,
    ):
        client.start_clock()
        load = [item(i, due=0.02 * i, cohort=3 <= i < 6) for i in range(1000)]
        records = await run_open(client, load)
    assert [record.index for record in records] == [3, 4, 5]
    assert 6 < len(server.bodies) < 900, "arrivals go on while the cohort finishes, and stop then"


async def test_closed_loop_keeps_its_concurrency_and_its_sessions_in_order() -> None:
    async with FakeServer().running() as server, LoadClient(Target(url=server.url, model="fake")) as client:
        sessions = [[item(4 * s + t, session=f"s{s}", turn=t, output_len=2) for t in range(4)] for s in range(5)]
        records = await run_closed(client, sessions, concurrency=2)
    assert server.max_open == 2
    assert len(records) == 20
    for s in range(5):
        turns = [record for record in records if record.session == f"s{s}"]
        for before, after in itertools.pairwise(turns):
            assert before.last is not None
            assert after.sent >= before.last


async def test_a_failed_turn_ends_its_session() -> None:
    async with (
        FakeServer(fail="status").running() as server,
        LoadClient(Target(url=server.url, model="fake")) as client,
    ):
        records = await run_closed(client, [[item(0), item(1)], [item(2)]], concurrency=1)
    assert [record.status for record in records] == ["http-503", "not-sent", "http-503"]
    assert len(server.bodies) == 2


@pytest.mark.parametrize("mode", ["open", "closed", "hol"])
async def test_an_interrupted_run_keeps_what_it_has(mode: str) -> None:
    rows = [TraceRequest(arrival_time=0.0, input_len=4, output_len=3 if i < 2 else 5000) for i in range(4)]
    workload = (
        HeadOfLine() if mode == "hol" else Replay("t", rows, 0, Pacing(concurrency=4 if mode == "closed" else None))
    )
    async with FakeServer().running() as server, LoadClient(Target(url=server.url, model="fake")) as client:
        run = asyncio.create_task(run_workload(client, workload, RunOptions(warmup=False)))
        while server.num_answered < 2 or not server.num_open:
            await asyncio.sleep(0.01)
        for _ in range(20):  # the client, on the same loop, reads the ends of what was answered
            await asyncio.sleep(0.01)
        run.cancel()
        result = await run
        await asyncio.sleep(0)
    statuses = {record.status for record in result.records}
    assert statuses == {"ok", "unfinished"}
    assert result.document["interrupted"]
    assert not result.document["valid"]
    assert "the run was interrupted" in result.document["invalid_because"]


async def test_a_whole_replay_and_its_document() -> None:
    shared = (1, 2)
    rows = [
        TraceRequest(arrival_time=0.05 * i, input_len=40, output_len=4, prefix_block_hash=shared, tenant=f"t{i % 2}")
        for i in range(8)
    ]
    workload = Replay("made", rows, 16, Pacing(speed=2.0))
    async with FakeServer().running() as server, LoadClient(Target(url=server.url, model="fake")) as client:
        options = RunOptions(salt="s1", slo=SLO.parse("ttft=30s,itl=10s"), compat=True)
        document = (await run_workload(client, workload, options)).document
    assert (document["num_requests"], document["num_failed"], document["attainment"]) == (8, 0, 1.0)
    assert document["ttft"].n == document["tpot"].n == document["e2e"].n == 8
    assert document["itl"].n == 24
    assert document["cached"]["expected"] == pytest.approx(7 * 32 / 320)
    assert document["cached"]["observed"] is None, "the server does not tell"
    assert set(document["tenants"]) == {"t0", "t1"}
    assert set(document["compat"]) == {
        "vllm", "sglang", "aiperf", "guidellm", "inference-perf", "genai-bench", "llmperf",
    }  # fmt: skip
    assert document["schedule_sha256"] == Replay("made", rows, 16, Pacing(speed=2.0)).schedule_digest()
    assert document["schedule_sha256"] != Replay("made", rows, 16).schedule_digest()
    prompts = [body["prompt"].split() for body in server.bodies[-8:]]
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1, "the shared blocks are shared on the wire"
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 8, "the rest is not"


async def test_the_five_named_workloads_run() -> None:
    expected = {"single": 1, "decode32": 32, "prefill": 3, "prefix": 48}
    async with FakeServer(gap=0.0).running() as server, LoadClient(Target(url=server.url, model="fake")) as client:
        for name, count in expected.items():
            document = (await run_workload(client, named_workload(name), RunOptions(warmup=False))).document
            assert (document["num_requests"], document["num_failed"]) == (count, 0)
            assert document["output_tokens_per_second"] > 0
        assert server.max_open == 32
        prefix = server.bodies[-48:]
        assert len({tuple(body["prompt"].split()[:1500]) for body in prefix}) == 4
        assert {len(body["prompt"].split()) for body in prefix} == {1540}


async def test_head_of_line_groups() -> None:
    workload = HeadOfLine()
    workload.calm, workload.short_gap, workload.document_gap = 1.5, 0.1, 0.05  # type: ignore[misc]
    async with FakeServer(first_delay=0.1, gap=0.005).running() as server, LoadClient(Target(url=server.url)) as client:
        document = (await run_workload(client, workload, RunOptions(warmup=False))).document
    assert set(document["groups"]) == {"short", "chat", "document"}
    found = document["highlights"]
    assert found["document_ttft"].n == 3
    assert found["short_ttft_calm"].n > 0
    assert found["chat_gap_calm"].n > 0
    assert found["chat_gap_storm"].n > 0
    assert document["num_failed"] == 0
    assert sum(len(body["prompt"].split()) == 6000 for body in server.bodies) == 3


@pytest.mark.parametrize("dialect", ["prompt", "content"])
async def test_ids_from_the_servers_tokenizer(dialect: str) -> None:
    async with FakeServer(tokenize_field=dialect).running() as server, LoadClient(Target(url=server.url)) as client:
        pool = await single_token_words(WORDS, server_tokenizer(client))
        assert len(pool) >= 32
        prompt = PromptMaker("s", pool).fresh("x", 50)
        assert isinstance(prompt, list)
        record = await client.send(LoadItem(index=0, prompt=prompt, output_len=1))
    assert record.prompt_tokens == 50


async def test_a_tokenizer_that_splits_words_gives_no_pool() -> None:
    async def split(text: str) -> list[int]:
        return list(text.encode())

    with pytest.raises(BenchError, match="only 0 of"):
        await single_token_words(WORDS, split)


def test_prompts_share_what_the_rows_share_and_nothing_between_salts() -> None:
    rows = [
        TraceRequest(arrival_time=0, input_len=40, output_len=1, prefix_block_hash=(1, 2), tail_block_hash=9),
        TraceRequest(arrival_time=0, input_len=40, output_len=1, prefix_block_hash=(1, 2), tail_block_hash=9),
        TraceRequest(arrival_time=0, input_len=40, output_len=1, prefix_block_hash=(1, 3)),
    ]
    a, b, c = (str(PromptMaker("s").realise(row, 16, f"r{i}")).split() for i, row in enumerate(rows))
    assert a == b, "an equal tail is realised equally"
    assert a[:16] == c[:16]
    assert a[16:32] != c[16:32]
    other = str(PromptMaker("t").realise(rows[0], 16, "r0")).split()
    assert other[:16] != a[:16]
    assert len(a) == len(c) == 40
    assert expected_cached(rows, 16) == [0, 32, 16]
    assert expected_cached(
        [TraceRequest(arrival_time=0, input_len=32, output_len=1, prefix_block_hash=(1, 2))] * 2, 16
    ) == [0, 16]
