"""The worked examples of the docs are what the program does: their plan lines are decided again here."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core.fakes import Run

from pellucid.core.config import SchedulerConfig
from pellucid.core.request import Request, SamplingParams

DOCS = Path(__file__).parent.parent / "docs"
EIGHT_BLOCKS = {"num_blocks": 8, "block_size": 4, "max_context": 32, "max_running": 3}


def request(name: str, prompt, max_tokens: int) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def kv_cache() -> tuple[Run, list[str]]:
    """A answers; B shares A's first two blocks; C needs more than is free, so the oldest leaf goes."""
    run = Run(SchedulerConfig(**EIGHT_BLOCKS, token_budget=16))
    states = []

    def note(when: str) -> None:
        pool = run.scheduler.kv.pool
        states.append(f"{when}: " + " ".join(f"{b}:{pool.state(b).value}" for b in range(pool.num_blocks)))

    run.add(request("A", range(1, 11), 3))
    run.step()
    note("A runs")
    run.finish()
    note("A has ended")
    run.add(request("B", [*range(1, 9), 21, 22, 23], 2))
    run.step()
    note("B runs")
    run.finish()
    note("B has ended")
    run.add(request("C", range(31, 52), 2))
    run.finish()
    note("C has ended")
    return run, states


def scheduling() -> tuple[Run, list[str]]:
    """A decodes, B's long prompt is cut around it, C squeezes in, and the pool runs out."""
    run = Run(SchedulerConfig(**EIGHT_BLOCKS, token_budget=6))
    run.add(request("A", range(1, 5), 9))
    run.step()
    run.add(request("B", range(11, 22), 6))
    run.add(request("C", range(31, 35), 6))
    run.finish()
    return run, []


@pytest.mark.parametrize("scenario", [kv_cache, scheduling])
def test_the_worked_example_is_what_happens(scenario):
    run, states = scenario()
    page = (DOCS / f"{scenario.__name__.replace('_', '-')}.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith("step ")] == [str(plan) for plan in run.plans]
    assert [line for line in page if ":free" in line or ":active" in line] == states
