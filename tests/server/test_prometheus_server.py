"""A real Prometheus server scrapes a real server: what it stores is what happened, and the dashboard's queries run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.server.conftest import listening
from tests.server.test_end_to_end import Stack
from tests.telemetry.test_metrics_page import expressions

from pellucid.text.tokenizer import Tokenizer

pytestmark = pytest.mark.long


@contextlib.contextmanager
def prometheus(directory: Path, target: str) -> Iterator[str]:
    """A Prometheus server that scrapes `target` five times a second; yields its address."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    scrape = {"job_name": "pellucid", "static_configs": [{"targets": [target]}]}
    settings = {"global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"}, "scrape_configs": [scrape]}
    (directory / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=20)


async def ready(http: httpx.AsyncClient) -> None:
    for _ in range(150):
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/-/ready")).status_code == 200:
                return
        await asyncio.sleep(0.2)
    raise AssertionError("prometheus does not start")


async def query(http: httpx.AsyncClient, expression: str) -> list[dict]:
    reply = await http.get("/api/v1/query", params={"query": expression})
    assert reply.status_code == 200, f"{expression}: {reply.text}"
    return reply.json()["data"]["result"]


async def reaches(http: httpx.AsyncClient, expression: str, value: float) -> None:
    """Wait until a query gives one sample of this value."""
    found: list[dict] = []
    for _ in range(150):
        found = await query(http, expression)
        if [float(sample["value"][1]) for sample in found] == [value]:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"{expression} never reached {value}: {found}")


async def test_what_prometheus_stores_is_what_happened(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stack = Stack(tokenizer)
    async with listening(stack.app) as url, httpx.AsyncClient(base_url=url) as clients:
        with prometheus(tmp_path, url.removeprefix("http://")) as address:
            async with httpx.AsyncClient(base_url=address) as http:
                await ready(http)
                await reaches(http, "up", 1)
                for _ in range(2):
                    asked = {"prompt": "the theory of it is there", "max_tokens": 8}
                    await asyncio.gather(*(clients.post("/v1/completions", json=asked) for _ in range(5)))
                    await asyncio.sleep(1.0)
                await reaches(http, 'pellucid_choices_finished_total{reason="length"}', 10)
                await reaches(http, 'sum(pellucid_tokens_total{source="output"})', 80)
                await reaches(http, "pellucid_time_to_first_token_seconds_count", 10)
                await reaches(http, "pellucid_step_seconds_count", stack.engine.stats().num_steps)
                await reaches(http, "sum(pellucid_blocks)", stack.limits.num_blocks)
                gap = "abs(sum(pellucid_cause_seconds_total) - sum(pellucid_e2e_seconds_sum)) < bool 0.5"
                await reaches(http, gap, 1)
                for title, expression in expressions().items():
                    result = await query(http, expression.replace("$__rate_interval", "10s"))
                    assert isinstance(result, list), title
                median = await query(http, "histogram_quantile(0.5, rate(pellucid_e2e_seconds_bucket[10s]))")
                assert float(median[0]["value"][1]) > 0
