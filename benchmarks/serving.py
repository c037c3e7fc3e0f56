"""Servers side by side on the five named loads of `pellucid bench`, as one table of ratios.

    python benchmarks/serving.py --pellucid http://127.0.0.1:8000 --peer llama.cpp=http://127.0.0.1:8080

The servers take turns, load by load and repeat by repeat, because a machine's speed drifts within minutes; each figure
is the median over repeats and each ratio the median of the ratios of neighbouring runs. All servers stay up; one at a
time is loaded. How busy the machine is before each run, when all of them are idle, is measured and printed too, because
a neighbour that computes spoils every figure. The table names machine, commit and command, so that it can be quoted.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from pellucid.core.errors import PellucidError
from pellucid.workload.client import LoadClient, Target
from pellucid.workload.run import RunOptions, run_workload
from pellucid.workload.workloads import NAMED, named_workload

OURS = "Pellucid"
IDLE_SECONDS = 1.0
"""How long the machine is watched before each run."""
PATIENCE_SECONDS = 60


class Figure(NamedTuple):
    """One line of the table: where it stands in a run's document, its unit, and whether more is better."""

    workload: str
    label: str
    read: Callable[[dict[str, Any]], float | None]
    more_is_better: bool


def _highlight(name: str, field: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda document: getattr(document["highlights"][name], field)


def _milliseconds(read: Callable[[dict[str, Any]], float | None]) -> Callable[[dict[str, Any]], float | None]:
    def scaled(document: dict[str, Any]) -> float | None:
        value = read(document)
        return None if value is None else 1e3 * value

    return scaled


FIGURES = (
    Figure("single", "output tok/s", lambda d: d["output_tokens_per_second"], True),
    Figure("decode32", "output tok/s", lambda d: d["output_tokens_per_second"], True),
    Figure("prefill", "prompt tok/s", lambda d: d["highlights"]["prompt_tokens_per_second"], True),
    Figure("prefix", "output tok/s", lambda d: d["output_tokens_per_second"], True),
    Figure("hol", "short TTFT p50 calm, ms", _milliseconds(_highlight("short_ttft_calm", "p50")), False),
    Figure("hol", "short TTFT p90 storm, ms", _milliseconds(_highlight("short_ttft_storm", "p90")), False),
    Figure("hol", "chat gap p50 storm, ms", _milliseconds(_highlight("chat_gap_storm", "p50")), False),
    Figure("hol", "chat gap p99 storm, ms", _milliseconds(_highlight("chat_gap_storm", "p99")), False),
    Figure("hol", "document TTFT p50, ms", _milliseconds(_highlight("document_ttft", "p50")), False),
)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pellucid", required=True, metavar="URL", help="the server that is compared")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="any OpenAI-compatible server; may be repeated"
    )
    parser.add_argument("--model", action="append", default=[], metavar="NAME=MODEL", help="default: the first listed")
    parser.add_argument("--which", default=",".join(NAMED), help="loads, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument(
        "--quiet",
        type=float,
        default=1.0,
        metavar="SHARE",
        help=f"before each run wait, at most {PATIENCE_SECONDS} s, until no more of the cores' time is taken",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all documents of all runs")
    return parser.parse_args()


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise PellucidError(f"{option} {text!r}: expected NAME=VALUE")
        if name in pairs:
            raise PellucidError(f"{option} {text!r}: {name} is named twice")
        pairs[name] = value
    return pairs


def _servers(pellucid: str, peers: list[str]) -> dict[str, str]:
    """Addresses by name, ours first."""
    named = _pairs(peers, "--peer")
    if OURS in named:
        raise PellucidError(f"{OURS} is the name of two servers")
    return {OURS: pellucid, **named}


Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""Documents by load and server, in the order measured."""


async def _all_runs(targets: dict[str, Target], loads: list[str], repeats: int, quiet: float) -> Runs:
    """Every load on every server, in turns. An interruption ends them all and keeps what was measured."""
    runs: Runs = {load: {name: [] for name in targets} for load in loads}
    for load, repeat, name in product(loads, range(repeats), targets):
        print(f"{load}, repeat {repeat + 1} of {repeats}: {name}", file=sys.stderr)
        try:
            document = await _measure(targets[name], load, quiet)
        except asyncio.CancelledError:  # between runs; inside one the run itself ends and says so
            document = {"interrupted": True}
        if document["interrupted"]:
            print("interrupted: what follows was measured before", file=sys.stderr)
            break
        runs[load][name].append(document)
        if document["num_failed"]:
            print(f"  {document['num_failed']} failed: {document['failures']}", file=sys.stderr)
        for reason in document["invalid_because"]:
            print(f"  invalid: {reason}", file=sys.stderr)
    return runs


async def _measure(target: Target, load: str, quiet: float) -> dict[str, Any]:
    """One run. Its document also tells how busy the machine was just before, under `machine_busy_before`."""
    given_up = time.monotonic() + PATIENCE_SECONDS
    while (busy := await _busy_share()) > quiet and time.monotonic() < given_up:
        pass
    async with LoadClient(target) as client:
        result = await run_workload(client, named_workload(load), RunOptions(about={"machine_busy_before": busy}))
    return result.document


async def _busy_share() -> float:
    """Share of all cores' time that anything took (or the host withheld) while nothing was sent."""
    before = _core_times()
    await asyncio.sleep(IDLE_SECONDS)
    total, idle = (after - start for after, start in zip(_core_times(), before))
    return 1.0 - idle / total if total else 0.0


def _core_times() -> tuple[int, int]:
    """Ticks of all cores since the start of the machine: in all, and idle or waiting for a disk (proc(5))."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


async def _with_models(servers: dict[str, str], models: dict[str, str], timeout: float) -> dict[str, Target]:
    targets = {}
    for name, url in servers.items():
        target = Target(url=url, model=models.get(name, ""), timeout=timeout)
        if not target.model:
            async with LoadClient(target) as client:
                target = msgspec.structs.replace(target, model=await client.served_model())
        targets[name] = target
    return targets


def print_table(runs: Runs, names: list[str]) -> None:
    """Markdown: a column for each server, and the first one's ratio to each other (above 1 is in its favour)."""
    first, others = names[0], names[1:]
    print("| load | figure | " + " | ".join(names) + "".join(f" | {first} : {name}" for name in others) + " |")
    print("|---" * (2 + len(names) + len(others)) + "|")
    for figure in FIGURES:
        if figure.workload not in runs:
            continue
        values = {name: [figure.read(d) for d in runs[figure.workload][name]] for name in names}
        cells = [_cell(values[name], runs[figure.workload][name]) for name in names]
        cells += [_ratio(values[first], values[name], figure.more_is_better) for name in others]
        print(f"| `{figure.workload}` | {figure.label} | " + " | ".join(cells) + " |")


def _cell(values: list[float | None], documents: list[dict[str, Any]]) -> str:
    known = [value for value in values if value is not None]
    failed = sum(document["num_failed"] for document in documents)
    invalid = sum(not document["valid"] for document in documents)
    marks = (f", {failed} failed" if failed else "") + (f", {invalid} invalid" if invalid else "")
    return (f"{median(known):,.1f}" if known else "none") + marks


def _ratio(ours: list[float | None], theirs: list[float | None], more_is_better: bool) -> str:
    ratios = [a / b if more_is_better else b / a for a, b in zip(ours, theirs) if a and b]
    return f"{median(ratios):.2f} x" if ratios else ""


def _mood(runs: Runs) -> str:
    """What else the machine did."""
    shares = [d["machine_busy_before"] for load in runs.values() for documents in load.values() for d in documents]
    if not shares:
        return "nothing was measured"
    return f"cores busy before each run, with all servers idle: median {median(shares):.0%}, at most {max(shares):.0%}"


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = f"{len(names)} x {names[0]}" if names else model
    return f"{model}, {platform.system()} {platform.release()}"


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    loads = arguments.which.split(",")
    for load in loads:
        named_workload(load)
    servers, models = _servers(arguments.pellucid, arguments.peer), _pairs(arguments.model, "--model")
    if unknown := models.keys() - servers.keys():
        raise PellucidError(f"--model names {', '.join(sorted(unknown))}; the servers are {', '.join(servers)}")
    targets = asyncio.run(_with_models(servers, models, arguments.timeout))
    runs = asyncio.run(_all_runs(targets, loads, arguments.repeats, arguments.quiet))
    print_table(runs, list(servers))
    print(f"\n{arguments.repeats} repeats in turns; {_mood(runs)}.")
    print(f"Machine: {_machine()}. Commit: {_commit()}. Command: `python {shlex.join(sys.argv)}`")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=2) + b"\n")


if __name__ == "__main__":
    try:
        main()
    except PellucidError as error:
        sys.exit(f"serving.py: {error}")
