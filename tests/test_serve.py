"""`pellucid serve` as a user runs it: the real command, the real model, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from tests.default_model import REASON, default_model_path

from pellucid.core.input_log import replay
from pellucid.core.scheduler import Scheduler
from pellucid.core.tenants import Tenant
from pellucid.kernels.processors import native
from pellucid.server.tenants import TenantEntry, add_tenant, new_key
from pellucid.server.usage import read_usage

SOURCE = Path(__file__).parent.parent / "src"
KV_MIB = 128


@dataclass
class Server:
    process: psutil.Popen
    url: str
    input_log: Path
    name: str = ""

    def post(self, path: str, *, key: str = "", **body) -> dict:
        asked = {"model": self.name, "temperature": 0} | body
        reply = httpx.post(self.url + path, json=asked, timeout=120, headers=bearer(key))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics").text
        found = [line for line in text.splitlines() if line.startswith(name + " ")]
        assert found, f"no metric {name}"
        return float(found[0].rsplit(" ", 1)[1])

    def engine(self) -> psutil.Process:
        """The process that computes: the child that holds the most memory."""
        return max(self.process.children(recursive=True), key=lambda child: child.memory_info().rss)

    def wait_idle(self) -> None:
        for _ in range(400):
            if self.metric("pellucid_running") == self.metric('pellucid_blocks{state="active",tier="device"}') == 0:
                return
            time.sleep(0.05)
        raise AssertionError("blocks are still held:\n" + httpx.get(self.url + "/metrics").text)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def start(directory: Path, *flags: str, key: str = "") -> Server:
    path = default_model_path()
    if path is None:
        pytest.skip(REASON)
    log = directory / "input.jsonl"
    command = [sys.executable, "-m", "pellucid", "serve", str(path), "--port", "0", "--input-log", str(log), *flags]
    process = psutil.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=(directory / "stderr").open("w"),
        text=True,
        env=_environment() | {"XDG_STATE_HOME": str(directory)},
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://"), (directory / "stderr").read_text()
    server = Server(process, url, log)
    models = httpx.get(url + "/v1/models", headers=bearer(key))
    server.name = models.json()["data"][0]["id"]
    return server


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path])}


def stop(server: Server) -> int:
    if server.process.is_running():
        server.process.send_signal(signal.SIGINT)
    return server.process.wait(timeout=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    # bfloat16: with 8-bit activations the first word of one answer is a near tie, which a cached prefix can turn.
    # Plain PyTorch computes in it anyway.
    weights = () if native() is None else ("--weights", "bf16")
    server = start(tmp_path_factory.mktemp("serve"), "--kv-memory", f"{KV_MIB}MiB", *weights)
    yield server
    stop(server)


def test_the_capital_of_france(server):
    question = {"role": "user", "content": "What is the capital of France?"}
    reply = server.post("/v1/chat/completions", messages=[question])
    assert "Paris" in reply["choices"][0]["message"]["content"]
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_a_second_identical_prompt_comes_from_the_cache(server):
    prompt = [1000 + 7 * i % 30_000 for i in range(1500)]
    usages = [server.post("/v1/completions", prompt=prompt, max_tokens=2)["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 1488]
    assert usages[0]["prompt_tokens"] == 1500


def test_the_example_with_the_official_client(server):
    example = SOURCE.parent / "examples" / "openai_client.py"
    command = [sys.executable, str(example), server.url + "/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Paris" in done.stdout, done.stderr


def test_the_http_process_has_loaded_no_torch(server):
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{server.engine().pid}/maps").read_text()


def test_text_comes_whole_whatever_the_language(server):
    """Every chunk is valid UTF-8 by itself, and the chunks are the text."""
    prompt = "北京是中国的首都。🙂 é (e + ◌́): é. 北京是中国的首都。🙂 é"
    body = {"model": server.name, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/completions", prompt=prompt, max_tokens=24, ignore_eos=True)["choices"][0]["text"]
    pieces = []
    with httpx.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                pieces += [choice["text"] for choice in choices]
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_a_short_prompt_behind_a_long_one_knows_what_it_waited_for(server):
    """The prefix hit is whole and still the request waits: for the step that was under way, and for the long prompt."""
    short, long = [500 + i for i in range(200)], [7000 + 13 * i % 20_000 for i in range(3000)]
    server.post("/v1/completions", prompt=short, max_tokens=1)
    body = {"model": server.name, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(server.post, "/v1/completions", prompt=long, max_tokens=1)
        while server.metric("pellucid_running") == 0:
            time.sleep(0.01)
        reply = httpx.post(server.url + "/v1/completions", json=body | {"prompt": short, "max_tokens": 12}, timeout=120)
        document = reading.result()["id"]
    found = httpx.get(f"{server.url}/v1/requests/{reply.headers['X-Request-Id']}/ledger").json()
    ledger = found["ledger"]
    assert ledger["tokens"] | {"recomputed": 0} == {
        "prompt": 200, "cached": 192, "cached_host": 0, "recomputed": 0, "output": 12
    }  # fmt: skip
    assert ledger["causes"].keys() >= {"queue.step_in_flight", "prefill.own", "decode.own", "decode.stalled"}
    blocker = ledger["blockers"][0]
    assert (blocker["request_id"], blocker["num_prompt"]) == (document, 3000)
    assert sum(ledger["causes"].values()) == pytest.approx(ledger["e2e_seconds"], rel=1e-9)
    assert any("3,000-token prompt" in sentence for sentence in found["explanation"])


async def _stream(client: httpx.AsyncClient, server: Server, prompt, max_tokens: int, leave_after: int | None = None):
    """Read a stream, or hang up after some chunks (0: as soon as the request is sent)."""
    body = {"model": server.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    count = 0
    try:
        async with client.stream("POST", server.url + "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if chunk.get("usage"):
                        return chunk["usage"]["completion_tokens"]
                    count += 1
                    if leave_after is not None and count >= leave_after:
                        return None
    except httpx.ReadTimeout:
        assert leave_after == 0
    return None


async def test_64_streams_at_once(server):
    """All complete, memory grows by no more than the KV pool (touched when used), and all blocks return."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        await _stream(client, server, [5] * 30, 8)
        before = server.engine().memory_info().rss
        counts = await asyncio.gather(
            *(_stream(client, server, [100 + i] * (20 + i), 12) for i in range(64)), return_exceptions=True
        )
        after = server.engine().memory_info().rss
    assert counts == [12] * 64
    assert after - before < KV_MIB + 64 << 20, f"resident memory grew from {before >> 20} to {after >> 20} MiB"
    server.wait_idle()


async def test_clients_that_hang_up_leave_nothing_behind(server):
    """In the queue, while the prompt is read, and while tokens come."""
    long = [2000 + 3 * i % 20_000 for i in range(2000)]
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        brief = httpx.AsyncClient(timeout=httpx.Timeout(60, read=0.05), limits=httpx.Limits(max_connections=None))
        async with brief:
            decoding = [_stream(client, server, [300 + i] * 20, 400, leave_after=3) for i in range(6)]
            reading = [_stream(brief, server, [i, *long], 50, leave_after=0) for i in range(6)]
            waiting = [_stream(brief, server, [i, 7, *long], 50, leave_after=0) for i in range(6)]
            await asyncio.gather(*decoding, *reading, *waiting)
    server.wait_idle()


def test_a_run_replays_to_the_same_plans_without_torch(tmp_path):
    server = start(tmp_path, "--kv-memory", "16MiB", "--token-budget", "64")
    try:
        for i in range(3):
            server.post("/v1/completions", prompt=[[9, i] * 60, [9, i] * 60, [4] * 150], max_tokens=6, ignore_eos=True)
    finally:
        assert stop(server) == 130
    decisions = list(replay(map(json.loads, server.input_log.open()), Scheduler))
    assert len(decisions) > 20
    assert all(decision.recorded == decision.replayed for decision in decisions)
    assert not psutil.pid_exists(server.process.pid) or server.process.status() == psutil.STATUS_ZOMBIE
    command = [sys.executable, "-X", "importtime", "-m", "pellucid", "replay", str(server.input_log)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert "all as recorded" in done.stdout
    assert "| torch" not in done.stderr


def test_tenants_share_a_machine_and_nothing_else(tmp_path, monkeypatch):
    """Two tenants and one that comes while the server runs, with a real signal; what they used is there afterwards."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "tenants.toml"
    keys = {name: new_key() for name in ("acme", "lab", "late")}

    def add(name: str) -> None:
        add_tenant(file, TenantEntry(Tenant(name), (keys[name].digest,)))

    def cached(name: str) -> int:
        reply = server.post("/v1/completions", key=keys[name].key, prompt=list(range(1000, 1100)), max_tokens=2)
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    add("acme")
    add("lab")
    server = start(tmp_path, "--kv-memory", "16MiB", "--tenants", str(file), key=keys["acme"].key)
    try:
        assert [cached(name) for name in ("acme", "acme", "lab", "lab")] == [0, 96, 0, 96]
        late = bearer(keys["late"].key)
        assert httpx.get(server.url + "/v1/models", headers=late).status_code == 401
        add("late")
        server.process.send_signal(signal.SIGHUP)
        for _ in range(100):
            if httpx.get(server.url + "/v1/models", headers=late).status_code == 200:
                break
            time.sleep(0.05)
        assert cached("late") == 0
        assert cached("acme") == 96
    finally:
        assert stop(server) == 130
    assert "tenants read again: 3 tenants" in (tmp_path / "stderr").read_text()
    rows = read_usage(tmp_path / "pellucid" / "usage.sqlite")
    assert [(row.tenant, row.requests, row.cached_tokens) for row in rows] == [
        ("acme", 3, 192),
        ("lab", 2, 96),
        ("late", 1, 0),
    ]


def test_explain_works_when_the_server_is_gone(tmp_path):
    server = start(tmp_path, "--kv-memory", "16MiB")
    try:
        request_id = server.post("/v1/completions", prompt="Once upon a time", max_tokens=40, ignore_eos=True)["id"]
    finally:
        assert stop(server) == 130
    environment = _environment() | {"XDG_STATE_HOME": str(tmp_path), "LANG": "C"}
    command = [sys.executable, "-m", "pellucid", "explain", request_id]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Writing 40 tokens took" in done.stdout
    assert "which no cache can remove" in " ".join(done.stdout.split())
    done = subprocess.run([*command[:-1], "--json"], capture_output=True, text=True, env=environment, timeout=60)
    assert json.loads(done.stdout)["num_requests"] == 1


@pytest.mark.long
def test_an_engine_that_is_stopped_for_300_ms_is_a_gap_of_300_ms(tmp_path):
    """In a step or between two. On a machine whose steps vary as much as that, nobody could tell; so one of five."""
    server = start(tmp_path, "--kv-memory", "64MiB")
    try:
        body = {"prompt": [9] * 40, "ignore_eos": True, "include_ledger": True}
        server.post("/v1/completions", **body, max_tokens=100)
        found = []
        with ThreadPoolExecutor() as pool:
            for _ in range(5):
                reply = pool.submit(server.post, "/v1/completions", **body, max_tokens=200)
                while server.metric("pellucid_running") == 0:
                    time.sleep(0.005)
                server.engine().suspend()
                time.sleep(0.3)
                server.engine().resume()
                found.append(reply.result()["ledger"]["causes"]["engine.gap"])
        assert any(gap >= 0.27 for gap in found), found
    finally:
        stop(server)


def test_when_the_engine_dies_everyone_is_told(tmp_path):
    server = start(tmp_path, "--kv-memory", "16MiB")
    try:
        body = {"model": server.name, "prompt": "Once", "max_tokens": 500, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.engine().kill()
            rest = [line for line in lines if line]
        assert "killed by signal 9" in "".join(rest)
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503
        assert "killed by signal 9" in health.text
        assert httpx.get(server.url + "/health/live").status_code == 503
        reply = httpx.post(server.url + "/v1/completions", json=body | {"stream": False})
        assert reply.status_code == 503
    finally:
        stop(server)


def test_a_port_in_use_is_said_before_anything_is_loaded(server):
    port = server.url.rsplit(":", 1)[1]
    path = default_model_path()
    command = [sys.executable, "-m", "pellucid", "serve", str(path), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_ctrl_c_while_the_engine_loads(tmp_path, handler):
    """HTTP answers already, the engine does not yet: the server ends without a word too many, as a shell's background
    job, too, which was told to ignore the signal."""
    path = default_model_path()
    if path is None:
        pytest.skip(REASON)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A shell's background jobs, and what they start, ignore the signal until a server says otherwise.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from pellucid.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "serve", str(path), "--port", str(port)]
    environment = _environment() | {"XDG_STATE_HOME": str(tmp_path)}
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health/ready")
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
