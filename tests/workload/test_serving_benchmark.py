"""`benchmarks/serving.py` as it is run: servers in turns, one table, and a refusal where a name is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.workload.fake_server import FakeServer

ROOT = Path(__file__).parents[2]


async def run(*arguments: object, started: list[asyncio.subprocess.Process] | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "benchmarks/serving.py",
        *map(str, arguments),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if started is not None:
        started.append(process)
    out, err = await process.communicate()
    return await process.wait(), out.decode(), err.decode()


async def test_a_slower_peer_shows_as_a_ratio(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    async with FakeServer(gap=0.002).running() as ours, FakeServer(gap=0.02).running() as slow:
        code, out, err = await run(
            "--pellucid", ours.url, "--peer", f"slow={slow.url}", "--which", "single", "--repeats", 1, "--json", path
        )
    assert code == 0, err
    head, _, row, *foot = out.splitlines()
    assert head == "| load | figure | Pellucid | slow | Pellucid : slow |"
    ratio = float(row.split("|")[5].strip().removesuffix(" x"))
    assert ratio > 1.5, row
    assert "Commit: " in foot[-1]
    assert "--which single" in foot[-1]
    runs = json.loads(path.read_text())["single"]
    assert [runs[name][0]["target"]["url"] for name in ("Pellucid", "slow")] == [ours.url, slow.url]
    assert 0.0 <= runs["slow"][0]["machine_busy_before"] <= 1.0


async def test_a_failing_peer_is_marked(tmp_path: Path) -> None:
    async with FakeServer(gap=0.001).running() as ours, FakeServer(fail="status").running() as broken:
        peer = f"broken={broken.url}"
        code, out, err = await run("--pellucid", ours.url, "--peer", peer, "--which", "single", "--repeats", 1)
    assert code == 0, err
    assert "1 failed" in out
    assert out.splitlines()[2].endswith("|  |"), "no ratio to a server that answered nothing"


async def test_a_name_given_twice_is_refused() -> None:
    code, _, err = await run("--pellucid", "http://127.0.0.1:9", "--peer", "Pellucid=http://127.0.0.1:9")
    assert code == 1
    assert err == "serving.py: Pellucid is the name of two servers\n"


async def test_ctrl_c_prints_what_was_measured() -> None:
    """A real signal, once the peer that never answers has been asked."""
    async with FakeServer(gap=0.001).running() as ours, FakeServer(fail="hang").running() as stuck:
        arguments = ("--pellucid", ours.url, "--peer", f"stuck={stuck.url}", "--which", "single", "--repeats", 1)
        started: list[asyncio.subprocess.Process] = []
        running = asyncio.create_task(run(*arguments, started=started))
        while not stuck.bodies:
            assert not running.done(), running.result()
            await asyncio.sleep(0.05)
        started[0].send_signal(signal.SIGINT)
        code, out, err = await running
    assert code == 0, err
    assert "interrupted" in err
    assert float(out.splitlines()[2].split("|")[3]) > 0
