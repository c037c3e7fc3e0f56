"""Both clients keep the same promises; the one with its own process also survives that process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from tests.core.fakes import generate
from tests.engine import builders

from pellucid.core.errors import EngineDead, RequestRejected
from pellucid.core.events import Finished, Queued, TokensGenerated
from pellucid.core.request import Request, SamplingParams
from pellucid.core.tenants import Tenant
from pellucid.engine.local import LocalClient
from pellucid.engine.process import EngineProcess
from pellucid.engine.remote import RemoteClient


def request(name: str, prompt=(1, 2, 3), max_tokens: int = 8) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


@pytest.fixture(params=["local", "remote"])
async def client(request):
    if request.param == "local":
        client = LocalClient(builders.fake_engine(lambda text: None))
    else:
        client = RemoteClient(builders.fake_engine)
        await client.wait_ready()
    yield client
    await client.close()


async def tokens(client, asked: Request) -> tuple[list[int], Finished]:
    out: list[int] = []
    async for event in client.submit(asked):
        if isinstance(event, TokensGenerated):
            out += event.token_ids
        elif isinstance(event, Finished):
            return out, event
    raise AssertionError("no Finished")


async def wait_until(condition, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_request_streams_its_tokens_and_ends(client):
    asked = request("a", max_tokens=20)
    got, end = await tokens(client, asked)
    assert got == generate(asked, 128)
    assert (end.reason, end.num_prompt, end.num_generated) == ("length", 3, 20)
    await wait_until(lambda: client.stats().num_finished == 1)
    assert client.stats().generated_tokens == 20


async def test_a_reader_that_lags_gets_its_tokens_in_larger_pieces(client):
    asked = request("a", max_tokens=40)
    stream = client.submit(asked)
    events = [await anext(stream)]
    await wait_until(lambda: client.stats().num_finished == 1)
    events += [event async for event in stream]
    assert [token for event in events[1:-1] for token in event.token_ids] == generate(asked, 128)
    assert len(events) <= 5


async def test_the_first_event_is_what_to_expect_and_the_last_is_the_end(client):
    events = [event async for event in client.submit(request("a"))]
    assert isinstance(events[0], Queued)
    assert 0 < events[0].predicted_ttft < 10
    assert all(isinstance(event, TokensGenerated) for event in events[1:-1])
    assert isinstance(events[-1], Finished)


async def test_new_tenants_take_effect_without_a_loss(client):
    """A request that runs meanwhile ends as it would have; a refusal says for how long and whose bound it was."""
    asked = Request("a", (1, 2, 3), SamplingParams(max_tokens=60, ignore_eos=True), tenant="acme")
    stream = client.submit(asked)
    first = await anext(stream)
    client.reconfigure([Tenant("acme", kv_share=0.01)])
    with pytest.raises(RequestRejected, match="may hold 1% of 64") as refusal:
        await tokens(client, dataclasses.replace(asked, id="b"))
    assert (refusal.value.code, refusal.value.retry_after, refusal.value.limit) == ("kv_share_exceeded", None, "tenant")
    events = [first] + [event async for event in stream]
    assert [token for event in events[1:-1] for token in event.token_ids] == generate(asked, 128)
    client.reconfigure([])
    assert (await tokens(client, dataclasses.replace(asked, id="c")))[1].reason == "length"


async def test_many_streams_do_not_mix(client):
    asked = [request(f"r{i}", [i % 5 + 1] * (i % 7 + 1), max_tokens=10 + i % 3) for i in range(40)]
    answers = await asyncio.gather(*(tokens(client, one) for one in asked))
    assert [got for got, _ in answers] == [generate(one, 128) for one in asked]


async def test_a_reader_that_leaves_frees_its_blocks(client):
    stream = client.submit(request("a", max_tokens=100))
    await anext(stream)
    await stream.aclose()
    await wait_until(lambda: client.stats().num_running == 0 and client.stats().blocks_active == 0)
    assert client.stats().generated_tokens < 100


async def test_a_cancelled_reader_aborts_while_it_waits(client):
    """Fills the running slots so that the ninth request is cancelled in the queue."""
    busy = [asyncio.create_task(tokens(client, request(f"b{i}", max_tokens=100))) for i in range(8)]
    await wait_until(lambda: client.stats().num_running == 8)
    waiting = asyncio.create_task(tokens(client, request("w")))
    await wait_until(lambda: client.stats().num_waiting == 1)
    waiting.cancel()
    await wait_until(lambda: client.stats().num_waiting == 0)
    await asyncio.gather(*busy)


async def test_what_cannot_fit_is_refused(client):
    with pytest.raises(RequestRejected, match="at most 127"):
        await tokens(client, request("a", range(200)))
    with contextlib.suppress(RequestRejected):
        await tokens(client, request("b"))  # and the engine goes on


async def test_every_step_is_told_once_and_the_last_ones_can_be_asked_for(client):
    told: list[int] = []
    client.on_steps(lambda summaries: told.extend(summary.step_id for summary in summaries))
    await asyncio.gather(*(tokens(client, request(f"r{i}", max_tokens=60)) for i in range(3)))
    num_steps = client.stats().num_steps
    await wait_until(lambda: len(told) >= num_steps)
    assert told == list(range(client.stats().num_steps))
    records = await client.last_steps(3)
    assert [record.summary.step_id for record in records] == told[-3:]
    assert {who.request_id for who in records[0].who} <= {"r0", "r1", "r2"}
    assert len(await client.last_steps(1000)) == 32, "what the recorder keeps"
    await client.close()
    with pytest.raises(EngineDead):
        await client.last_steps(1)


async def test_an_id_in_use_is_refused(client):
    first = client.submit(request("a", max_tokens=100))
    await anext(first)
    with pytest.raises(RequestRejected, match="already in use"):
        await tokens(client, request("a"))
    await first.aclose()


async def test_close_ends_open_requests_with_the_reason(client):
    stream = client.submit(request("a", max_tokens=100))
    await anext(stream)
    await client.close()
    with pytest.raises(EngineDead, match="the engine was"):
        async for _ in stream:
            pass
    assert client.state == "dead"
    with pytest.raises(EngineDead):
        await tokens(client, request("b"))


@pytest.mark.parametrize("kind", ["local", "remote"])
async def test_an_executor_that_fails_ends_every_request_with_the_reason(kind):
    if kind == "local":
        client = LocalClient(builders.failing_engine(lambda text: None))
    else:
        client = RemoteClient(builders.failing_engine)
        await client.wait_ready()
    asked = [request(f"r{i}", max_tokens=50) for i in range(3)]
    answers = await asyncio.gather(*(tokens(client, one) for one in asked), return_exceptions=True)
    assert all(isinstance(answer, EngineDead) and "fell off the bus" in str(answer) for answer in answers)
    assert client.state == "dead"
    assert "fell off the bus" in client.reason
    await client.close()


async def test_an_engine_process_that_fails_leaves_its_last_steps(tmp_path):
    client = RemoteClient(partial(builders.failing_recorded_engine, tmp_path))
    await client.wait_ready()
    with pytest.raises(EngineDead):
        await tokens(client, request("a", max_tokens=50))
    await client.close()
    (dump,) = tmp_path.glob("*-failure.jsonl")
    head, *rows = [json.loads(line) for line in dump.read_text().splitlines()]
    assert "fell off the bus" in head["reason"]
    assert [row["step_id"] for row in rows] == [0, 1, 2]


async def test_a_killed_engine_process_ends_every_request():
    client = RemoteClient(builders.fake_engine)
    await client.wait_ready()
    stream = client.submit(request("a", max_tokens=100))
    await anext(stream)
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        with pytest.raises(EngineDead, match="killed by signal 9"):
            [event async for event in stream]
    await client.close()


@pytest.mark.parametrize(
    ("build", "reason"), [(builders.broken_model, "17 bytes"), (builders.killed_at_start, "killed by signal 9")]
)
async def test_an_engine_that_cannot_start_says_why(build, reason):
    client = RemoteClient(build)
    with pytest.raises(EngineDead, match=reason):
        async with asyncio.timeout(20):
            await client.wait_ready()
    await client.close()


async def test_progress_is_reported_while_it_starts():
    seen: list[str] = []
    client = RemoteClient(partial(builders.fake_engine), on_progress=seen.append)
    await client.wait_ready()
    assert seen == ["warming up"]
    await client.close()


def test_an_engine_process_does_not_outlive_its_parent(tmp_path):
    """Kill the parent the hard way: nothing tells the child."""
    import subprocess
    import sys
    import time

    code = """
import asyncio, time
from pellucid.engine.remote import RemoteClient
from tests.engine import builders
async def main():
    client = RemoteClient(builders.fake_engine)
    await client.wait_ready()
    print(client.pid, flush=True)
    time.sleep(60)
if __name__ == "__main__":
    asyncio.run(main())
"""
    script = tmp_path / "parent.py"
    script.write_text(code)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the engine process lives on without its parent")


async def test_a_process_warms_up_before_it_knows_what_to_build():
    process = EngineProcess(builders.warm_up)
    client = RemoteClient(builders.warm_engine, process=process)
    await client.wait_ready()
    assert client.description == "warm"
    await client.close()


async def test_a_process_that_cannot_warm_up_says_why():
    client = RemoteClient(builders.fake_engine, process=EngineProcess(builders.broken_library))
    with pytest.raises(EngineDead, match="no such library"):
        async with asyncio.timeout(20):
            await client.wait_ready()
    await client.close()


@pytest.mark.parametrize("closed", [True, False])
def test_a_process_without_orders_ends_with_its_starter(closed):
    process = EngineProcess()
    if closed:
        process.close()
        process.close()
    else:
        process._orders.close()  # as when the starter is gone
    process.process.join(timeout=20)
    assert process.process.exitcode == (-signal.SIGKILL if closed else 0)
    process.close()
