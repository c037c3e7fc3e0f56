"""Long and short, loud and quiet, much and little memory: what requests do to each other, on a live server.

    python benchmarks/contention.py [--model MODEL] [--which hol,tenants,pressure,prefix,long]
        [--step-target 50ms]

Each part starts servers of its own, one after the other, with the mechanism and without it, sends the same load to
both, and prints a row. All figures of a row come from one run of this script, so compare inside a row. Prompts are
random common words; greedy tokens are compared where the answer must not depend on scheduling (with --deterministic).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import platform
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvloop

from pellucid.models.sources import DEFAULT_MODEL
from pellucid.workload.client import LoadClient, LoadItem, Target
from pellucid.workload.drive import run_closed
from pellucid.workload.metrics import RequestRecord
from pellucid.workload.prompts import WORDS
from pellucid.workload.run import RunOptions, run_workload
from pellucid.workload.workloads import HeadOfLine

START_SECONDS = 120
OUTPUT_WEIGHT = 2
HEAD_START = 3.0
"""Seconds that the loud tenant is ahead of the quiet one."""


@contextlib.contextmanager
def server(model: str, *flags: str, port: int) -> Iterator[str]:
    """`pellucid serve` with these flags; its address, once it is ready."""
    command = [sys.executable, "-m", "pellucid", "serve", model, "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(START_SECONDS * 4):
            if process.poll() is not None:
                assert process.stderr is not None
                sys.exit(f"the server did not start: {process.stderr.read().decode().strip()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url + "/health/ready").status_code == 200:
                    break
            time.sleep(0.25)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else float("nan")


async def closed(
    url: str,
    items: list[LoadItem],
    concurrency: int,
    key: str = "",
    on_record: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Send items, `concurrency` at a time, and wait for all."""
    async with LoadClient(Target(url=url, api_key=key)) as client:
        client.target = Target(url=url, api_key=key, model=await client.served_model())
        client.start_clock()
        return await run_closed(client, [[item] for item in items], concurrency=concurrency, on_record=on_record)


def first_tokens(records: list[RequestRecord]) -> list[float]:
    return [record.chunks[0].at - record.sent for record in records if record.ok]


# -- 1. a document beside chats ------------------------------------------------------------------------------


def head_of_line(model: str, target: str, port: int, load: HeadOfLine | None = None) -> list[list[str]]:
    load = load or HeadOfLine()
    rows = []
    for name, flags in (
        (f"step target {target}", ("--step-target", target)),
        ("token budget only", ("--step-target", "off")),
        ("whole prompts", ("--step-target", "off", "--chunked-prefill", "off")),
    ):
        with server(model, *flags, port=port) as url:
            figures = uvloop.run(_run(load, url))["highlights"]
        rows.append(
            [
                name,
                f"{1e3 * figures['short_ttft_calm'].p90:.0f} / {1e3 * figures['short_ttft_storm'].p90:.0f} ms",
                f"{1e3 * figures['chat_gap_storm'].p50:.0f} / {1e3 * figures['chat_gap_storm'].p99:.0f} / "
                f"{1e3 * figures['chat_gap_storm'].max:.0f} ms",
                f"{figures['document_ttft'].p50:.2f} s",
            ]
        )
    name = f"{load.num_documents} x {load.document_len:,} tokens"
    return [[name, "short TTFT p90, calm / storm", "chat gap p50 / p99 / max", "document TTFT p50"], *rows]


def long_document(model: str, target: str, port: int) -> list[list[str]]:
    """One document of 16,000 tokens, for a model that allows it (see `benchmarks/random_model.py`)."""
    load = HeadOfLine()
    load.num_documents, load.document_len = 1, 16_000
    return head_of_line(model, target, port, load)


async def _run(load: HeadOfLine, url: str) -> dict[str, Any]:
    async with LoadClient(Target(url=url)) as client:
        client.target = Target(url=url, model=await client.served_model())
        return (await run_workload(client, load, RunOptions())).document


# -- 2. a loud tenant beside a quiet one ---------------------------------------------------------------------


def tenants(model: str, target: str, port: int) -> list[list[str]]:
    """A light tenant that needs far less than its half, then a busy one that could use more than all of the machine."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tenants.toml"
        keys = {name: _new_tenant(name, file) for name in ("loud", "quiet")}
        for name, policy, load in (
            ("light, fair", "fair", LIGHT),
            ("light, fcfs", "fcfs", LIGHT),
            ("busy, fair", "fair", BUSY),
        ):
            flags = ("--step-target", target, "--tenants", str(file), "--policy", policy)
            with server(model, *flags, "--max-running", str(load.slots), port=port) as url:
                alone = uvloop.run(closed(url, _chats("quiet", load.count, 1), load.quiet_open, keys["quiet"]))
                quiet, loud = uvloop.run(_both(url, keys, load))
            together, before = percentile(first_tokens(quiet), 0.9), percentile(first_tokens(alone), 0.9)
            opened = f"{load.quiet_open} / {10 * load.quiet_open} / {load.slots}"
            times = f"{1e3 * before:.0f} ms", f"{1e3 * together:.0f} ms", f"{together / before:.2f} x"
            rows.append([name, opened, *times, f"{_share(quiet, loud):.0%}"])
    head = ["tenants", "open: quiet / loud / running at once", "quiet alone, TTFT p90", "beside the loud one", "ratio"]
    return [[*head, "quiet's share of service"], *rows]


class TenantLoad(NamedTuple):
    """`count` chats of the quiet tenant, so many open at once; ten times as many of the loud one."""

    count: int
    quiet_open: int
    slots: int


LIGHT, BUSY = TenantLoad(60, 6, 64), TenantLoad(150, 48, 8)


def _new_tenant(name: str, file: Path) -> str:
    command = [sys.executable, "-m", "pellucid", "tenant", "new", name, "--tenants", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


def _chats(name: str, count: int, seed: int) -> list[LoadItem]:
    rng = random.Random(f"{name}{seed}")
    return [LoadItem(index=i, prompt=words(rng, rng.randrange(40, 300)), output_len=48) for i in range(count)]


async def _both(url: str, keys: dict[str, str], load: TenantLoad) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """The loud tenant begins a little earlier and ends with the quiet one."""
    landed: list[RequestRecord] = []
    loud_chats = _chats("loud", 20 * load.count, 2)
    loud = asyncio.create_task(closed(url, loud_chats, 10 * load.quiet_open, keys["loud"], landed.append))
    await asyncio.sleep(HEAD_START)
    quiet = await closed(url, _chats("quiet", load.count, 3), load.quiet_open, keys["quiet"])
    loud.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await loud
    return quiet, landed


def _share(quiet: list[RequestRecord], loud: list[RequestRecord]) -> float:
    """The quiet tenant's part of weighted tokens until it sent its last request, that is, while it had work."""
    end = max(record.sent for record in quiet)

    def service(records: list[RequestRecord], low: float, high: float) -> float:
        outputs = sum(low <= chunk.at <= high for record in records for chunk in record.chunks)
        prompts = sum((r.prompt_tokens or 0) for r in records if r.chunks and low <= r.chunks[0].at <= high)
        return prompts + OUTPUT_WEIGHT * outputs

    mine, other = service(quiet, 0.0, end), service(loud, HEAD_START, end + HEAD_START)
    return mine / (mine + other)


# -- 3. a quarter of the memory ------------------------------------------------------------------------------


def pressure(model: str, target: str, port: int) -> list[list[str]]:
    rng = random.Random(7)
    items = [LoadItem(index=i, prompt=words(rng, 300), output_len=200) for i in range(32)]
    rows, answers, calm = [], [], 0.0
    common = ("--deterministic", "--step-target", target)
    for name, flags in (
        ("all of it", ("--kv-memory", "512MiB")),
        ("a quarter, auto", ("--kv-memory", "96MiB", "--swap-memory", "1GiB")),
        ("a quarter, recompute", ("--kv-memory", "96MiB", "--preemption", "recompute")),
    ):
        with server(model, *common, *flags, port=port) as url:
            began = time.perf_counter()
            records, texts = uvloop.run(_texts(url, items))
            seconds = time.perf_counter() - began
            preempted = _metric(url, "pellucid_preemptions_total")
        answers.append(texts)
        calm = calm or seconds
        worst = max((b.at - a.at for r in records for a, b in pairwise(r.chunks)), default=float("nan"))
        rows.append(
            [
                name,
                f"{sum(r.ok for r in records)} of {len(records)}",
                f"{preempted:.0f}",
                f"{calm / seconds:.0%}",
                f"{worst:.2f} s",
                "yes" if texts == answers[0] else "NO",
            ]
        )
    head = ["pressure", "answered", "preemptions", "speed against all of it", "worst gap", "same tokens"]
    return [head, *rows]


async def _texts(url: str, items: list[LoadItem]) -> tuple[list[RequestRecord], list[str]]:
    """Records with all requests at once, then what a plain request for the same prompts answers."""
    records = await closed(url, items, len(items))
    async with httpx.AsyncClient(timeout=600) as client:
        model = (await client.get(url + "/v1/models")).json()["data"][0]["id"]

        async def ask(item: LoadItem) -> str:
            asked = {"model": model, "prompt": item.prompt, "max_tokens": item.output_len}
            asked |= {"temperature": 0, "ignore_eos": True}
            return (await client.post(url + "/v1/completions", json=asked)).json()["choices"][0]["text"]

        return records, list(await asyncio.gather(*map(ask, items)))


def _metric(url: str, name: str) -> float:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((name + "{", name + " ")))


# -- 4. tenants with prefixes --------------------------------------------------------------------------------


def prefixes(model: str, target: str, port: int) -> list[list[str]]:
    """Four tenants with two long prefixes each, in a pool for half of them: hits under fair, under the order that looks
    at cached prefixes alone, and under fcfs. The second is what `fair` does inside a tenant, where a cached block is
    worth a place and a prefix here has more blocks than the queue has places: so all four send as one tenant."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tenants.toml"
        keys = [_new_tenant(f"t{i}", file) for i in range(4)]
        for name, policy, senders in (
            ("fair", "fair", keys),
            ("longest prefix first", "fair", keys[:1] * 4),
            ("fcfs", "fcfs", keys),
        ):
            flags = ("--step-target", target, "--tenants", str(file), "--policy", policy, "--kv-memory", "192MiB")
            with server(model, *flags, port=port) as url:
                records = uvloop.run(_prefixed(url, senders))
            cached = sum(record.cached_tokens or 0 for record in records)
            prompt = sum(record.prompt_tokens or 0 for record in records)
            rows.append([name, f"{cached / prompt:.1%}", f"{percentile(first_tokens(records), 0.9):.2f} s"])
    return [["prefix", "prompt tokens from the cache", "TTFT p90"], *rows]


async def _prefixed(url: str, keys: list[str]) -> list[RequestRecord]:
    async def one(tenant: int, key: str) -> list[RequestRecord]:
        rng = random.Random(tenant)
        heads = [words(rng, 1200) for _ in range(2)]
        items = [LoadItem(index=i, prompt=f"{rng.choice(heads)} {words(rng, 40)}", output_len=16) for i in range(24)]
        return await closed(url, items, 6, key)

    return [record for records in await asyncio.gather(*map(one, range(4), keys)) for record in records]


PARTS = {"hol": head_of_line, "tenants": tenants, "pressure": pressure, "prefix": prefixes, "long": long_document}


def main() -> None:
    """Run the parts and print a table each, with machine, commit and command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--which", default="hol,tenants,pressure,prefix")
    parser.add_argument("--step-target", default="50ms")
    parser.add_argument("--port", type=int, default=8177)
    asked = parser.parse_args()
    names = asked.which.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--which names {', '.join(unknown)}; known are {', '.join(PARTS)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print(f"{platform.processor() or platform.machine()}; commit {commit.strip()}; python {shlex.join(sys.argv)}\n")
    for name in names:
        for position, row in enumerate(PARTS[name](asked.model, asked.step_target, asked.port)):
            print("| " + " | ".join(row) + " |")
            if position == 0:
                print("|---" * len(row) + "|")
        print(flush=True)


if __name__ == "__main__":
    main()
