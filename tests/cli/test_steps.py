"""`pellucid steps` over a dump and over a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.telemetry.steps import engine, record, request, run
from typer.testing import CliRunner

from pellucid.cli.app import build_app
from pellucid.core.errors import ConfigError
from pellucid.telemetry.recorder import StepRecorder


def pellucid(*arguments: str):
    return CliRunner().invoke(build_app(["steps", "fetch"]), ["steps", *arguments])


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    recorder = StepRecorder(64, tmp_path)
    running = engine(recorder)
    running.add(request("a", 20, 5))
    run(running)
    recorder.failed("InvariantViolation: block 3 has 1 references")
    (path,) = tmp_path.glob("*.jsonl")
    return path


def test_a_dump_as_a_table_as_json_and_as_a_trace(dump: Path, tmp_path: Path):
    shown = pellucid(str(dump), "--last", "3")
    assert shown.exit_code == 0, shown.output
    assert "block 3 has 1 references" in shown.stderr
    lines = shown.stdout.splitlines()
    assert len(lines) == 4
    assert lines[-1].split()[0] == "6"
    assert lines[-1].rstrip().endswith("run 0:[23,24)*")
    rows = json.loads(pellucid(str(dump), "--json").stdout)
    assert [row["step_id"] for row in rows] == list(range(7))
    out = tmp_path / "trace.json"
    done = pellucid(str(dump), "--perfetto", str(out))
    assert (done.exit_code, done.stdout) == (0, "")
    assert json.loads(out.read_text())["traceEvents"]


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ok = self.headers["Authorization"] == "Bearer operator"
        rows = [record(i).to_json() for i in range(2)]
        body = {"data": rows} if ok else {"error": {"message": "a valid API key is needed"}}
        data = json.dumps(body | {"path": self.path}).encode()
        self.send_response(200 if ok else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server(url: str):
    rows = json.loads(pellucid("--url", url, "--api-key", "operator", "--json").stdout)
    assert rows == [record(i).to_json() for i in range(2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://127.0.0.1:1"), "did not answer with steps"),
        (("missing.jsonl",), "missing.jsonl: cannot be read"),
        ((__file__,), "not a dump of the step recorder"),
    ],
)
def test_what_cannot_be_read_is_one_line(arguments: tuple[str, ...], message: str):
    error = pellucid(*arguments).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_a_refusal_is_the_servers_own_words(url: str):
    assert "a valid API key is needed" in str(pellucid("--url", url).exception)
