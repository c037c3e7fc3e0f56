"""`pellucid top` against a server of a few lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import msgspec
import pytest
from tests.server.test_ops import BUSY, DECODE, MIXED, SUBJECT
from typer.testing import CliRunner

from pellucid.cli.app import build_app
from pellucid.cli.top import Lost, line, watch
from pellucid.server.ops.document import Percentiles, Rates, Tick

TICK = Tick(
    at=2.0,
    state="ready",
    reason="",
    late=0.0,
    running=7,
    waiting=2,
    rates=Rates(100.0, 300.0, 250.0, 9.0, 1.0),
    ttft=Percentiles(40, 0.12, 0.3, 1.5),
    itl=Percentiles(0),
    steps=SUBJECT.steps([DECODE, MIXED]),
    inside=SUBJECT.inside(BUSY),
)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer secret":
            body = b'{"error": {"message": "a valid API key is needed"}}'
            self.send_response(401)
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200 if self.path == "/v1/live" else 404)
        self.end_headers()
        if self.path != "/v1/live":
            return
        for name, document in (("hello", SUBJECT.hello()), ("tick", TICK), ("tick", TICK)):
            data = msgspec.json.encode(document)
            self.wfile.write(b"event: %b\ndata: %b\n\n" % (name.encode(), data))
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_one_screen(url):
    done = CliRunner().invoke(build_app(["top", "fetch"]), ["top", url, "--api-key", "secret", "--once"])
    assert done.exit_code == 0, done.output
    rows = {row[:19].strip(): row[19:].strip() for row in done.output.splitlines()}
    assert done.output.startswith("tiny  Pellucid 0  live")
    assert rows["output tokens/s"].startswith("250")
    assert rows["prompt tokens/s"].startswith("400")
    assert "300 from the cache" in rows["prompt tokens/s"]
    assert rows["running"].startswith("7")
    assert rows["waiting"] == "2         2 queue"
    assert "35.0 ms" in rows["step time"]
    assert "expected 30.0 ms  longest 50.0 ms" in rows["step time"]
    assert "p90 300.0 ms, p99 1.50 s, of 40" in rows["time to first token"]
    assert rows["time between tokens"].startswith("none")
    assert "active 3 (50%)" in done.output
    assert "free 2 (33%)" in done.output


def test_refusals_are_one_line(url):
    with pytest.raises(Lost, match=r"a valid API key is needed; pass --api-key"):
        watch(url, None)
    with pytest.raises(Lost, match="--ops-page off"):
        watch(url + "/elsewhere", "secret")
    with pytest.raises(Lost, match="refused"):
        watch("http://127.0.0.1:9", None)


def test_a_stream_that_ends_is_lost(url):
    _, ticks = watch(url, "secret")
    assert [tick.at for tick in deque((next(ticks), next(ticks)))] == [2.0, 2.0]
    with pytest.raises(Lost, match="ended the stream"):
        next(ticks)


def test_lines():
    assert line([0.0, None, 4.0, 8.0]) == "▁ ▅█"
    assert line([]) == ""
