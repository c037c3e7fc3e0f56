"""What lies between two steps: schedule and commit with many running sequences, and a prefix match of a long prompt.

    python benchmarks/scheduler.py

No model and no executor: results are made up, so only the core is timed. Prints medians and 99th percentiles.
"""

from __future__ import annotations

import statistics
import time

from pellucid.core.config import SchedulerConfig
from pellucid.core.plan import StepResult
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler


def time_steps(num_running: int, num_steps: int = 400) -> list[float]:
    """Seconds of schedule + commit per step, with `num_running` sequences that decode."""
    config = SchedulerConfig(
        num_blocks=num_running * 64, max_context=4096, max_running=num_running, token_budget=max(512, num_running)
    )
    scheduler = Scheduler(config)
    for i in range(num_running):
        scheduler.add(Request(f"r{i}", (i, *range(63)), SamplingParams(max_tokens=2000, ignore_eos=True)), 0.0)
    spent = []
    for _ in range(num_steps):
        began = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = StepResult(plan.step_id, tuple((7,) if chunk.samples else () for chunk in plan.chunks), 0.0)
        made = time.perf_counter()
        scheduler.commit(result, 0.0)
        spent.append(planned - began + time.perf_counter() - made)
    return spent[-num_steps // 2 :]


def time_match(num_tokens: int, repeats: int = 20) -> list[float]:
    """Seconds to find the cached prefix of a new request with a prompt of `num_tokens`, all of it cached."""
    num_blocks = num_tokens // 16 + 8
    scheduler = Scheduler(SchedulerConfig(num_blocks=num_blocks, max_context=2 * num_tokens, token_budget=num_tokens))
    prompt = tuple(i % 50_000 for i in range(num_tokens))
    spent = []
    for i in range(repeats):
        scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=1)), 0.0)
        (sequence,) = scheduler.waiting
        began = time.perf_counter()
        match = scheduler.kv.match(sequence)
        spent.append(time.perf_counter() - began)
        assert match.num_blocks == (0 if i == 0 else (num_tokens - 1) // 16)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.commit(StepResult(plan.step_id, ((7,),), 0.0), 0.0)
    return spent[1:]


def report(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    worst = ordered[int(0.99 * (len(ordered) - 1))]
    print(f"{name:<44} median {1e3 * statistics.median(ordered):8.3f} ms   p99 {1e3 * worst:8.3f} ms")


if __name__ == "__main__":
    for num_running in (1, 32, 256):
        report(f"schedule + commit, {num_running} running", time_steps(num_running))
    for num_tokens in (1_000, 10_000, 100_000):
        report(f"prefix match, {num_tokens:,} tokens", time_match(num_tokens))
