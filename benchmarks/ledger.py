"""What the ledger costs, and whether it tells the truth about delays that are known because they were injected.

    python benchmarks/ledger.py            what it costs: blocks of steps with it and without it take turns in one run
    python benchmarks/ledger.py --live     what it says: a real server, an engine that is stopped, a reader that sleeps,
                                           and a proxy that notes when bytes pass

The first prints, for 32 and 256 decodes without a model and for 32 with it, the median time of a step in blocks with
and without the ledger and the median of the differences between neighbouring blocks. The second prints each injected
delay beside what the ledger charged for it, and the end-to-end time beside what the proxy saw.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from pellucid.assembly import build_engine
from pellucid.build import load_model, plan_engine
from pellucid.core.config import SchedulerConfig
from pellucid.core.plan import StepPlan, StepResult
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler
from pellucid.engine.engine import Engine
from pellucid.models.sources import DEFAULT_MODEL
from pellucid.settings import EngineSettings

BLOCK = 20  # steps with, then as many without


class NoLedger:
    """Takes every call of a LedgerBook and does nothing."""

    residue_seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    return None


class Instant:
    """An executor that takes no time."""

    def launch(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step_id, tuple((7,) if chunk.samples else () for chunk in plan.chunks), 1e-3)

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket


def instant_engine(num_running: int) -> Engine:
    config = SchedulerConfig(
        num_blocks=num_running * 128, max_context=2048, max_running=num_running, token_budget=max(512, num_running)
    )
    return Engine(Scheduler(config), Instant(), time.monotonic)


def real_engine(model: str) -> Engine:
    settings, loaded = EngineSettings(), load_model(model)
    return build_engine(settings, loaded.files.path, plan_engine(settings, loaded), lambda text: None)


def cost(name: str, engine: Engine, num_running: int, num_blocks: int) -> None:
    """Time steps of `num_running` decodes in blocks with and without the ledger, and print both."""
    for i in range(num_running):
        sampling = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
        engine.add(Request(f"r{i}", (i + 5, *range(10, 73)), sampling, time.monotonic()))
    scheduler = engine.scheduler
    books = (scheduler.ledgers, NoLedger())
    while any(sequence.num_due > 1 for sequence in scheduler.running.values()) or scheduler.num_waiting:
        engine.step()
    with_it: list[float] = []
    without: list[float] = []
    for number in range(2 * num_blocks):
        scheduler.ledgers = books[number % 2]  # type: ignore[assignment]
        (with_it, without)[number % 2].append(statistics.median(_timed(engine) for _ in range(BLOCK)))
    scheduler.ledgers = books[0]
    difference = statistics.median(a - b for a, b in zip(with_it, without, strict=True))
    base = statistics.median(without)
    print(
        f"{name:<28} step with {1e3 * statistics.median(with_it):8.3f} ms, without {1e3 * base:8.3f} ms, "
        f"difference {1e3 * difference:7.4f} ms = {difference / base:6.2%} of the step"
    )


def _timed(engine: Engine) -> float:
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


# -- what it says --------------------------------------------------------------------------------------------------


class Proxy:
    """Passes bytes on and notes when the last of a request and of its reply went through."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.asked = self.answered = 0.0
        self.port = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass(reader, downstream, "asked"), self._pass(upstream, writer, "answered"))

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, name: str) -> None:
        while data := await source.read(65536):
            setattr(self, name, time.monotonic())
            target.write(data)
            await target.drain()
        target.close()


async def live(model: str) -> None:
    """Run every case against a server of its own."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"XDG_STATE_HOME": directory}
        command = [sys.executable, "-m", "pellucid", "serve", model, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline().strip().rsplit(":", 1)[1])
            try:
                await _cases(port, server.pid)
            finally:
                server.send_signal(signal.SIGINT)
        explain = [sys.executable, "-m", "pellucid", "explain"]
        subprocess.run([*explain, "--slowest", "3"], env=environment, check=True)
        subprocess.run(explain, env=environment, check=True)


async def _cases(port: int, pid: int) -> None:
    engine = _largest_child(pid)
    prompt = [1000 + 7 * i % 30_000 for i in range(1500)]
    async with Proxy(port) as proxy:
        ask = _Asker(port, proxy)
        await ask("warm", prompt, 2)
        for _ in range(5):
            await ask("plain, 100 tokens", [9] * 40, 100)
        await ask("95 % cached, 800 tokens", [*prompt[:1425], *range(5, 80)], 800)
        document = asyncio.create_task(ask("6,000-token document", [100 + 37 * i % 29_000 for i in range(6000)], 2))
        await asyncio.sleep(0.3)
        await ask("cached, beside the document", prompt, 20)
        await document
        for _ in range(5):
            writing = asyncio.create_task(ask("engine stopped for 300 ms", [9] * 40, 150))
            await asyncio.sleep(0.25)
            os.kill(engine, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            os.kill(engine, signal.SIGCONT)
            await writing
        for _ in range(3):
            await _sleeping_reader(port)


class _Asker:
    """Sends a request over a new connection through the proxy and prints its ledger beside what the proxy saw."""

    def __init__(self, port: int, proxy: Proxy) -> None:
        self._port, self._proxy = port, proxy

    async def __call__(self, name: str, prompt: list[int], max_tokens: int) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        headers = {"Connection": "close"}
        # A request beside others goes straight to the server: the proxy notes one at a time.
        seen = "document" not in name
        url = f"http://127.0.0.1:{self._proxy.port if seen else self._port}/v1/completions"
        async with (
            httpx.AsyncClient(timeout=300) as client,
            client.stream("POST", url, json=body, headers=headers) as r,
        ):
            async for _ in r.aiter_bytes():
                pass
            request_id = r.headers["X-Request-Id"]
        outside = self._proxy.answered - self._proxy.asked
        ledger = await _ledger(self._port, request_id)
        difference = f", proxy {1e3 * (outside - ledger['e2e_seconds']):+.1f} ms" if seen else ""
        _print(name, ledger, difference)


async def _sleeping_reader(port: int) -> None:
    """Reads nothing for 2 s after the engine is done."""
    body = {"prompt": [[9, i] * 10 for i in range(16)], "max_tokens": 60, "ignore_eos": True, "stream": True}
    raw = json.dumps(body | {"return_token_ids": True}).encode()
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            head = (
                "POST /v1/completions HTTP/1.1",
                "Host: x",
                f"Content-Length: {len(raw)}",
                "Connection: close",
                "",
                "",
            )
            await loop.sock_sendall(connection, "\r\n".join(head).encode() + raw)
            await asyncio.sleep(0.2)
            while "pellucid_running 0.0" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
            await asyncio.sleep(2.0)
            received = b""
            while data := await loop.sock_recv(connection, 65536):
                received += data
    request_id = next(
        line[14:].strip() for line in received.decode().splitlines() if line.lower().startswith("x-request-id:")
    )
    _print("reader slept 2 s", await _ledger(port, f"{request_id}-0"), "")


async def _ledger(port: int, request_id: str) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        while True:
            reply = await client.get(f"http://127.0.0.1:{port}/v1/requests/{request_id}/ledger")
            if reply.status_code == 200:
                return reply.json()["ledger"]
            await asyncio.sleep(0.01)


def _print(name: str, ledger: dict[str, Any], note: str) -> None:
    causes = sorted(ledger["causes"].items(), key=lambda pair: -pair[1])[:5]
    parts = ", ".join(f"{cause} {1e3 * seconds:.0f}" for cause, seconds in causes)
    residue = ledger["e2e_seconds"] - sum(ledger["causes"].values())
    print(f"{name:<28} {1e3 * ledger['e2e_seconds']:8.1f} ms: {parts}; residue {residue:.1e} s{note}", flush=True)


def _largest_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(max(children, key=lambda child: int(Path(f"/proc/{child}/statm").read_text().split()[1])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--live", action="store_true")
    arguments = parser.parse_args()
    if arguments.live:
        asyncio.run(live(arguments.model))
    else:
        cost("no model, 32 decodes", instant_engine(32), 32, 20)
        cost("no model, 256 decodes", instant_engine(256), 256, 20)
        cost("decode32, the model", real_engine(arguments.model), 32, 12)
