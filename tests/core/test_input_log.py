"""Golden decision logs, and that a log alone is enough to decide the same again.

The golden files are the review of any change to scheduling: regenerate them with `make golden` and read the diff.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.core.fakes import Run

from pellucid.core.config import SchedulerConfig
from pellucid.core.input_log import InputLog, replay
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler

GOLDEN = Path(__file__).parent / "golden"


def _request(i: int, prompt, max_tokens: int, **fields) -> Request:
    return Request(f"r{i}", tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True), **fields)


def chats() -> tuple[SchedulerConfig, list[tuple[int, Request]]]:
    """Four conversations share a system prompt and arrive two steps apart."""
    system = tuple(range(1, 10))
    config = SchedulerConfig(num_blocks=64, block_size=4, max_context=64, max_running=4, token_budget=12)
    return config, [(2 * i, _request(i, (*system, 20 + i, 30 + i), 6)) for i in range(4)]


def document_and_chats() -> tuple[SchedulerConfig, list[tuple[int, Request]]]:
    """A long document arrives while two chats decode: they keep getting a token in every step."""
    config = SchedulerConfig(num_blocks=64, block_size=4, max_context=128, max_running=4, token_budget=8)
    arrivals = [(0, _request(0, [1, 2, 3], 12)), (0, _request(1, [4, 5, 6], 12)), (2, _request(2, range(10, 60), 2))]
    return config, arrivals


def pressure() -> tuple[SchedulerConfig, list[tuple[int, Request]]]:
    """Eight blocks, three sequences that need thirteen: preemption by recompute, twice."""
    config = SchedulerConfig(num_blocks=8, block_size=4, max_context=32, max_running=3, token_budget=16)
    return config, [(0, _request(i, [10 * i + j for j in range(1, 8)], 12)) for i in range(3)]


def samples() -> tuple[SchedulerConfig, list[tuple[int, Request]]]:
    """Four samples of one prompt at once: its blocks are computed by the first."""
    config = SchedulerConfig(num_blocks=32, block_size=4, max_context=32, max_running=4, token_budget=6)
    return config, [(0, _request(i, range(1, 14), 3)) for i in range(4)]


TRACES = {trace.__name__: trace for trace in (chats, document_and_chats, pressure, samples)}


def decide(name: str, depth: int = 1) -> tuple[list[str], list[dict]]:
    """Run a trace; returns its plan lines and its input log."""
    config, arrivals = TRACES[name]()
    log: list[dict] = []
    run = Run(config, depth=depth, input_log=InputLog(log.append))
    step = 0
    while arrivals or run.scheduler.has_work:
        while arrivals and arrivals[0][0] <= step:
            run.add(arrivals.pop(0)[1])
        run.step()
        step += 1
    return [str(plan) for plan in run.plans], log


@pytest.mark.parametrize("name", TRACES)
def test_decisions_are_the_golden_ones(name):
    assert decide(name)[0] == (GOLDEN / f"{name}.log").read_text().splitlines()


@pytest.mark.parametrize("seed", ["0", "1", "31337"])
def test_decisions_do_not_depend_on_the_hash_seed(seed):
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import json; from tests.core.test_input_log import *; print(json.dumps([decide(n)[0] for n in TRACES]))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [(GOLDEN / f"{n}.log").read_text().splitlines() for n in TRACES]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", TRACES)
def test_a_log_replays_to_the_same_plans(name, depth):
    lines, log = decide(name, depth)
    rows = [json.loads(json.dumps(row)) for row in log]
    decisions = list(replay(rows, Scheduler))
    assert [d.replayed for d in decisions if d.replayed is not None] == lines
    assert all(decision.recorded == decision.replayed for decision in decisions)


def test_replay_shows_a_change_of_mind():
    """The check can fail: a scheduler with another budget decides otherwise."""
    _, log = decide("document_and_chats")
    log[0]["config"]["token_budget"] = 16
    assert any(decision.recorded != decision.replayed for decision in replay(log[:20], Scheduler))


def test_a_log_of_another_format_is_refused():
    _, log = decide("samples")
    with pytest.raises(ValueError, match="format 99"):
        list(replay([dict(log[0], format=99)], Scheduler))
    with pytest.raises(ValueError, match="expected 'config'"):
        list(replay(log[1:], Scheduler))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for trace in TRACES:
        (GOLDEN / f"{trace}.log").write_text("\n".join(decide(trace)[0]) + "\n")
