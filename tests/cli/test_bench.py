"""`bench` and `report` as users run them, against a fake server in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from tests.workload.fake_server import FakeServer
from typer.testing import CliRunner

from pellucid.cli.bench import bench, report
from pellucid.core.errors import PellucidError
from pellucid.workload.capacity import CapacitySearch, sweep_rates
from pellucid.workload.compare import interval
from pellucid.workload.trace import TraceHeader, TraceRequest, write_trace

app = typer.Typer()
app.command("bench")(bench)
app.command("report")(report)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    fake, ready, done = FakeServer(first_delay=0.01, gap=0.002), threading.Event(), threading.Event()

    async def serve() -> None:
        async with fake.running():
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    yield fake
    done.set()
    thread.join()


SHORT = ("--duration", "0.5", "--rate", "30", "--output-len", "5", "--no-warmup")


def test_json_has_the_stable_names(server: FakeServer) -> None:
    found = json.loads(run("bench", server.url, *SHORT, "--slo", "ttft=30s,itl=10s", "--json").stdout)
    for name in ("ttft", "itl", "icl", "tpot", "e2e"):
        assert {"n", "mean", "p50", "p90", "p99", "max"} <= found[name].keys()
        assert found[name]["n"] > 0
    assert found["output_tokens_per_second"] > 0
    assert found["goodput"] > 0
    assert found["attainment"] == 1.0
    assert isinstance(found["valid"], bool)
    assert len(found["schedule_sha256"]) == 64
    assert len(found["salt"]) == 8


def test_the_golden_numbers_come_first(server: FakeServer) -> None:
    lines = run("bench", server.url, *SHORT, "--compat").stdout.splitlines()
    first = next(line for line in lines if line.startswith("TTFT"))
    assert "ITL" in first
    assert "as guidellm prints it" in "\n".join(lines)


def test_files_and_comparison(server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    for name in ("a", "b"):
        run("bench", server.url, *SHORT, "-o", tmp_path / name, "--html", tmp_path / f"{name}.html")
    rows = [json.loads(line) for line in (tmp_path / "a.requests.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "a.json").read_text())
    assert len(rows) == summary["num_requests"] > 5
    assert all(len(row["chunks"]) == 5 for row in rows)
    page = (tmp_path / "a.html").read_text()
    assert page.count("Plotly.newPlot") >= 4
    assert "<script src=" not in page
    found = json.loads(run("report", tmp_path / "a.json", tmp_path / "b.json", "--json").stdout)
    (comparison,) = found["comparisons"]
    assert comparison["paired"], "equal seeds give equal schedules"
    ratio = comparison["ratios"]["ttft"]["paired_median_ratio"]
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert "95 % interval" in run("report", tmp_path / "a.json", tmp_path / "b.json").stdout


def test_named_loads_and_their_files(server: FakeServer, tmp_path: Path) -> None:
    found = json.loads(
        run("bench", server.url, "-w", "single,prefill", "--no-warmup", "-o", tmp_path / "r", "--json").stdout
    )
    assert set(found["workloads"]) == {"single", "prefill"}
    assert found["workloads"]["prefill"]["highlights"]["prompt_tokens_per_second"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "r-single.json", "r-single.requests.jsonl", "r-prefill.json", "r-prefill.requests.jsonl",
    }  # fmt: skip


def test_runs_of_several_loads_compare_load_by_load(server: FakeServer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run("bench", server.url, "-w", "single,prefill", "--no-warmup", "-o", tmp_path / name)
    files = [tmp_path / f"{name}-{load}.json" for name in ("a", "b") for load in ("prefill", "single")]
    found = json.loads(run("report", *files, "--json").stdout)
    seen = [(c["workload"], Path(c["base"]).name, Path(c["other"]).name) for c in found["comparisons"]]
    assert seen == [("prefill", "a-prefill.json", "b-prefill.json"), ("single", "a-single.json", "b-single.json")]
    speed = found["comparisons"][0]["highlights"]["prompt_tokens_per_second"]
    assert speed["ratio"] == pytest.approx(speed["other"] / speed["base"])
    assert "prompt tokens per second" in run("report", *files).stdout


def test_runs_side_by_side_are_one_page_that_needs_nothing_else(server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    for name in ("first", "second<b>"):
        run("bench", server.url, "-w", "single,prefill", "--no-warmup", "-o", tmp_path / name)
    files = [tmp_path / f"{name}-{load}.json" for name in ("first", "second<b>") for load in ("prefill", "single")]
    run("report", *files, "--html", tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "<title>second&lt;b&gt; against first</title>" in page
    assert "<script src=" not in page
    assert page.count("Plotly.newPlot") == 2 * 2
    for load in ("prefill", "single"):
        assert f"<h2>{load}</h2>" in page
    assert page.count("<h3>second&lt;b&gt; against first: the same requests, paired</h3>") == 2
    assert "<td>prompt tokens per second</td>" in page
    with pytest.raises(PellucidError, match="cannot be written"):
        run("report", *files, "--html", tmp_path / "absent" / "page.html")


def test_the_page_shows_what_a_load_is_for_and_what_failed(server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    server.fail = "status"
    try:
        run("bench", server.url, "-w", "prefill", "--no-warmup", "--html", page)
    finally:
        server.fail = ""
    head = page.read_text().split("<body>")[1].split("<h2>Figures")[0]
    assert "3 failed (http-503)" in head
    assert "prompt tokens per second: 0.00" in head


def test_a_trace_in_closed_loop_with_ids(server: FakeServer, tmp_path: Path) -> None:
    rows = [
        TraceRequest(
            arrival_time=i * 0.1, input_len=20, output_len=3, prefix_block_hash=(7,), session=f"s{i % 2}", turn=i // 2
        )
        for i in range(6)
    ]
    write_trace(tmp_path / "t.jsonl", TraceHeader(16), rows)
    before = len(server.bodies)
    text = run(
        "bench",
        server.url,
        "--trace",
        tmp_path / "t.jsonl",
        "--concurrency",
        2,
        "--prompts",
        "ids",
        "--no-warmup",
        "--json",
    ).stdout
    found = json.loads(text)
    assert found["loop"] == "closed"
    assert len(found["trace"]["sha256"]) == 64
    sent = [body["prompt"] for body in server.bodies[before:]]
    assert [len(prompt) for prompt in sent] == [20] * 6
    assert len({tuple(prompt[:16]) for prompt in sent}) == 1
    assert found["cached"]["expected"] == pytest.approx(5 * 16 / 120)


def test_sweep(server: FakeServer) -> None:
    found = json.loads(run("bench", server.url, *SHORT[:2], "--sweep", "rate=20,40", "--repeats", 1, "--output-len", 2,
                           "--no-warmup", "--json").stdout)  # fmt: skip
    assert [point["rate"] for point in found["sweep"]] == [20.0, 40.0]
    assert all(point["runs"][0]["num_requests"] > 0 for point in found["sweep"])


async def test_the_capacity_search_finds_a_known_limit() -> None:
    asked: list[float] = []

    async def attainment(rate: float) -> tuple[float, bool]:
        asked.append(rate)
        return (1.0 if rate <= 13.0 else 0.5), True

    found = await CapacitySearch(repeats=1, precision=0.02).run(attainment)
    assert 13.0 / 1.02 <= found["capacity"] <= 13.0 < found["missed_at"] <= 13.0 * 1.02
    assert len(asked) == len(found["trials"]) < 15
    assert found["valid"]


async def test_the_capacity_search_goes_down_and_gives_up() -> None:
    async def slow(rate: float) -> tuple[float, bool]:
        return (1.0 if rate <= 0.3 else 0.0), True

    async def never(rate: float) -> tuple[float, bool]:
        return 0.0, True

    found = await CapacitySearch(repeats=1).run(slow)
    assert 0.28 <= found["capacity"] <= 0.3
    found = await CapacitySearch(repeats=1, lowest=0.25).run(never)
    assert found["capacity"] is None
    assert found["missed_at"] == 0.25


async def test_one_lucky_repeat_does_not_carry_a_rate() -> None:
    seen: dict[float, int] = {}

    async def attainment(rate: float) -> tuple[float, bool]:
        seen[rate] = seen.get(rate, 0) + 1
        return (1.0 if rate < 1.5 or seen[rate] == 1 else 0.9), True

    found = await CapacitySearch(repeats=3).run(attainment)
    assert found["capacity"] < 1.5


def test_find_capacity_against_a_server(server: FakeServer) -> None:
    """No rate keeps an impossible objective; the search ends at the lowest rate that can be told."""
    found: dict[str, Any] = json.loads(
        run("bench", server.url, "--find-capacity", "--slo", "ttft=1us", "--duration", 1, "--repeats", 1,
            "--output-len", 2, "--no-warmup", "--json").stdout
    )  # fmt: skip
    assert found["capacity"] is None
    assert found["trials"][0]["attainment"] == [0.0]
    assert found["slo"] == {"ttft": 1e-06}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_ctrl_c_still_reports_what_was_measured(server: FakeServer) -> None:
    """A real process and a real signal, sent once the load is seen to arrive."""
    # A shell's background jobs, and what they start, ignore the signal.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "import typer; from pellucid.cli.bench import bench; typer.run(bench)"
    before = len(server.bodies)
    command = [sys.executable, "-c", code, server.url, "--rate", "20", "--duration", "60", "--no-warmup", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment())
    while len(server.bodies) < before + 10:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    found = json.loads(process.communicate(timeout=60)[0])
    assert found["interrupted"]
    assert not found["valid"]
    assert found["num_requests"] >= 10
    assert found["num_requests"] < 1000


def test_sweep_rates() -> None:
    assert sweep_rates("rate=1:16:5") == pytest.approx([1, 2, 4, 8, 16])
    assert sweep_rates("rate=3,7") == [3.0, 7.0]
    assert len(sweep_rates("rate=1:20")) == 6
    for wrong in ("1:20", "rate=", "rate=0:5", "rate=a,b", "speed=1:2"):
        with pytest.raises(PellucidError, match="--sweep"):
            sweep_rates(wrong)


def test_intervals_cover_the_truth() -> None:
    import numpy as np

    values = np.random.default_rng(5).normal(1.2, 0.1, 400)
    found = interval(lambda table: np.median(table, axis=1), values)
    assert found["low"] < 1.2 < found["high"]
    assert found["high"] - found["low"] < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--find-capacity"], "--find-capacity needs --slo"),
        (["--find-capacity", "--slo", "ttft=1s", "--sweep", "rate=1,2"], "exclude each other"),
        (["-w", "single", "--rate", "3"], "--rate has no meaning for a named workload"),
        (["-w", "single", "--sweep", "rate=1,2"], "has its own schedule"),
        (["-w", "crowd"], "unknown workload 'crowd'; known: single"),
        (["--slo", "ttft"], "--slo 'ttft'"),
        (["--endpoint", "chats"], "--endpoint 'chats'"),
        (["--prompts", "pictures"], "--prompts 'pictures'"),
        (["--body", "[1]"], "--body is not a JSON object"),
        (["--timeout", "long"], "'long' is not a time"),
        (["--trace", "absent.jsonl"], "cannot read absent.jsonl"),
        (["--speed", "2"], "--speed has no meaning for a synthetic load"),
        (["-w", "single", "--input-len", "9"], "--input-len has no meaning for a named workload"),
        (["--trace", "t.jsonl", "--arrivals", "poisson"], "--arrivals has no meaning for a trace"),
        (["--think-time", "1s"], "--think-time needs --concurrency"),
        (["--repeats", "2"], "--repeats needs --find-capacity or --sweep"),
        (["--attain", "0.5"], "--attain needs --find-capacity"),
        (["--sweep", "rate=1,2", "--html", "x.html"], "--html is for single runs"),
        (["--concurrency", "2", "--ramp", "3"], "--ramp is for open loop"),
        (["--concurrency", "2"], "needs --requests"),
        ([], "is the server running there"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], message: str) -> None:
    with pytest.raises(PellucidError, match=message) as caught:
        run("bench", "http://127.0.0.1:9", *arguments)
    assert "\n" not in str(caught.value)


def test_report_refuses_what_does_not_compare(server: FakeServer, tmp_path: Path) -> None:
    run("bench", server.url, *SHORT, "-o", tmp_path / "open")
    run(
        "bench",
        server.url,
        "--concurrency",
        2,
        "--requests",
        6,
        "--output-len",
        2,
        "--no-warmup",
        "-o",
        tmp_path / "closed",
    )
    with pytest.raises(PellucidError, match="differ in loop"):
        run("report", tmp_path / "open.json", tmp_path / "closed.json")
    run("bench", server.url, "-w", "single", "--no-warmup", "-o", tmp_path / "single")
    with pytest.raises(PellucidError, match=r"only run of 'synthetic'"):
        run("report", tmp_path / "open.json", tmp_path / "single.json")
    with pytest.raises(PellucidError, match="two or more"):
        run("report", tmp_path / "open.json")
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "x.requests.jsonl").write_text("")
    with pytest.raises(PellucidError, match="is not a run"):
        run("report", tmp_path / "x.json", tmp_path / "open.json")
    with pytest.raises(PellucidError, match="cannot read"):
        run("report", tmp_path / "y.json", tmp_path / "open.json")
