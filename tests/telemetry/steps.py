"""Step records for tests, made by the engine itself or by hand."""

from __future__ import annotations

from typing import Any

from tests.core.fakes import EOS, FakeExecutor

from pellucid.core.config import SchedulerConfig
from pellucid.core.cost import StepFeatures
from pellucid.core.plan import BlockUpdate, Chunk
from pellucid.core.request import Request, SamplingParams
from pellucid.core.scheduler import Scheduler
from pellucid.core.step_record import BlockCounts, StepRecord, StepSummary, Who
from pellucid.engine.engine import Engine
from pellucid.engine.recording import Recorder

CONFIG = SchedulerConfig(
    num_blocks=16, block_size=4, max_context=64, max_running=4, token_budget=8, eos_token_ids=(EOS,)
)


class Clock:
    """Advances by a known amount with each reading."""

    def __init__(self, tick: float = 0.001) -> None:
        self.now = 100.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def engine(recorder: Recorder | None = None, config: SchedulerConfig = CONFIG, clock: Clock | None = None) -> Engine:
    executor = FakeExecutor(config.num_blocks, config.block_size, config.num_host_blocks)
    return Engine(Scheduler(config), executor, clock or Clock(), recorder=recorder)


def request(name: str, num_prompt: int, max_tokens: int = 4, tenant: str = "", first: int = 1) -> Request:
    """Its prompt counts up from `first`: prompts with the same one share a prefix."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tuple(range(first, first + num_prompt)), sampling, tenant=tenant)


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def summary(step_id: int = 0, **fields: Any) -> StepSummary:
    """A decode step of two sequences, 10 ms, unless told otherwise."""
    return StepSummary(
        **{
            "step_id": step_id,
            "started": 10.0 + step_id,
            "gap_seconds": 0.001,
            "schedule_seconds": 0.0005,
            "seconds": 0.01,
            "commit_seconds": 0.0005,
            "predicted_seconds": 0.008,
            "predicted_spread": 0.001,
            "phases": (("prepare", 0.001), ("forward", 0.008)),
            "features": StepFeatures(2, 20, 20, 2, 2),
            "num_prompt_tokens": 0,
            "num_waiting": 1,
            "num_running": 2,
            "num_swapped": 0,
            "num_preempted": 0,
            "device_blocks": BlockCounts(3, 4, 5, 0),
        }
        | fields
    )


def record(step_id: int = 0, **fields: Any) -> StepRecord:
    who = (Who(0, "req-a", "acme", 5), Who(1, "req-b", "", 9))
    chunks = (Chunk(0, 9, 10, True), Chunk(1, 9, 10, True))
    return StepRecord(summary(step_id, **fields), who, chunks, (), (BlockUpdate(0, 2, (7,)),), (), (), ())
